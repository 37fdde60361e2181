"""append_tokens by definition: tokens are written one after the other, and a page is sealed after its last token."""

from __future__ import annotations

import jax

from pallas_kernels.append_tokens.api import Call
from pallas_kernels.page_index import page_index


def append_tokens(call: Call, pages, indexes, k, v, positions, valid, table, frames):
    """See `pallas_kernels.append_tokens.append_tokens`; takes no config."""
    num_tokens, page_size, width = positions.shape[1], pages.page_size, table.shape[1]
    frames = table if frames is None else frames

    def append(i, state):
        row, t = i // num_tokens, i % num_tokens
        position = positions[row, t]
        inside = valid[row, t] & (position >= 0) & (position < width * page_size)
        offset, logical = position % page_size, position // page_size
        page, frame = table[row, logical], frames[row, logical]

        def write(state):
            pages, indexes = state
            pages = pages.replace(k=pages.k.at[frame, :, offset].set(k[row, t].astype(pages.k.dtype)))
            if v is not None:
                pages = pages.replace(v=pages.v.at[frame, :, offset].set(v[row, t].astype(pages.v.dtype)))
            return _when(offset == page_size - 1, seal, (pages, indexes))

        def seal(state):
            pages, indexes = state
            built = dict(indexes)
            for name, kind, block_size in call.kinds:
                rows = page_index(pages.k[frame], kind=kind, block_size=block_size, implementation="reference")
                built[name] = indexes[name].at[page].set(rows)
            return pages, built

        return _when(inside & (page >= 0) & (frame >= 0), write, state)

    return jax.lax.fori_loop(0, positions.size, append, (pages, dict(indexes)))


def _when(condition, change, state):
    return jax.lax.cond(condition, change, lambda state: state, state)
