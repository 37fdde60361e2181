"""append_tokens by definition: tokens are written one after the other, and a page is sealed after its last token."""

from __future__ import annotations

import jax

from pallas_kernels.cache.append_tokens.api import Call
from pallas_kernels.cache.pack_pages import pack_pages
from pallas_kernels.core.page_format import unpack
from pallas_kernels.selection.page_index import page_index


def append_tokens(call: Call, pages, indexes, k, v, positions, valid, table, frames):
    """See `pallas_kernels.append_tokens`; takes no config."""
    num_tokens, page_size, width = positions.shape[1], pages.page_size, table.shape[1]
    frames = table if frames is None else frames

    def append(i, state):
        row, t = i // num_tokens, i % num_tokens
        position = positions[row, t]
        inside = valid[row, t] & (position >= 0) & (position < width * page_size)
        offset, logical = position % page_size, position // page_size
        page, frame = table[row, logical], frames[row, logical]
        tile = pages.open.row_of[frame] if pages.packed else frame

        def write(state):
            pages, indexes = state
            pools = pages.open if pages.packed else pages
            pools = pools.replace(k=pools.k.at[tile, :, offset].set(k[row, t].astype(pools.k.dtype)))
            if v is not None:
                pools = pools.replace(v=pools.v.at[tile, :, offset].set(v[row, t].astype(pools.v.dtype)))
            pages = pages.replace(open=pools) if pages.packed else pools
            return _when(offset == page_size - 1, seal, (pages, indexes))

        def seal(state):
            pages, indexes = state
            keys = pages.k[frame]
            if pages.packed:
                pages, keys = _packed(pages, frame, tile)
            built = dict(indexes)
            for name, kind, block_size in call.kinds:
                rows = page_index(keys, kind=kind, block_size=block_size, implementation="reference")
                built[name] = indexes[name].at[page].set(rows)
            return pages, built

        return _when(inside & (page >= 0) & (frame >= 0) & (tile >= 0), write, state)

    return jax.lax.fori_loop(0, positions.size, append, (pages, dict(indexes)))


def _packed(pages, frame, tile):
    """The pages with an open one packed to its frame; and its keys as they are read from then on."""
    changed = {}
    for name, format in (("k", pages.k_packed), ("v", pages.v_packed)):
        numbers = getattr(pages.open, name)
        if numbers is None:
            continue
        put = {name: numbers[tile]}
        if format is not None:
            codes, scales = pack_pages(numbers[tile], format=format, implementation="reference")
            put = {name: codes} if scales is None else {name: codes, f"{name}_scales": scales}
        changed |= {field: getattr(pages, field).at[frame].set(new.astype(getattr(pages, field).dtype)) for field, new in put.items()}
    pages = pages.replace(**changed)
    scales = None if pages.k_scales is None else pages.k_scales[frame]
    return pages, pages.k[frame] if pages.k_packed is None else unpack(pages.k_packed, pages.k[frame], scales)


def _when(condition, change, state):
    return jax.lax.cond(condition, change, lambda state: state, state)
