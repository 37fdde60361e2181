"""append_tokens by definition: one token after the other is written, and its page sealed if it is the last of it."""

from __future__ import annotations

import jax

from pallas_kernels.page_index import page_index


def append_tokens(k_pages, v_pages, indexes, k, v, positions, valid, page_table, *, kinds, config):
    """See `pallas_kernels.append_tokens.append_tokens`; takes no config."""
    if config is not None:
        raise ValueError(f"implementation 'reference' of append_tokens takes no config, got {config!r}")
    num_tokens, page_size, width = positions.shape[1], k_pages.shape[2], page_table.shape[1]

    def append(i, state):
        row, t = i // num_tokens, i % num_tokens
        position = positions[row, t]
        inside = valid[row, t] & (position >= 0) & (position < width * page_size)
        page, offset = page_table[row, position // page_size], position % page_size

        def write(state):
            k_pages, v_pages, indexes = state
            k_pages = k_pages.at[page, :, offset].set(k[row, t].astype(k_pages.dtype))
            v_pages = v_pages.at[page, :, offset].set(v[row, t].astype(v_pages.dtype))
            return _when(offset == page_size - 1, seal, (k_pages, v_pages, indexes))

        def seal(state):
            k_pages, v_pages, indexes = state
            built = dict(indexes)
            for name, kind, block_size in kinds:
                rows = page_index(k_pages[page], kind=kind, block_size=block_size, implementation="reference")
                built[name] = indexes[name].at[page].set(rows)
            return k_pages, v_pages, built

        return _when(inside & (page >= 0), write, state)

    return jax.lax.fori_loop(0, positions.size, append, (k_pages, v_pages, dict(indexes)))


def _when(condition, change, state):
    return jax.lax.cond(condition, change, lambda state: state, state)
