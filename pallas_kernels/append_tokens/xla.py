"""append_tokens for any backend: scatters. Reads each page that may have filled once, whether it did or not."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from pallas_kernels import paged
from pallas_kernels.page_index import page_index


@functools.partial(jax.jit, static_argnames=("kinds", "config"))
def append_tokens(k_pages, v_pages, indexes, k, v, positions, valid, page_table, *, kinds, config):
    """See `pallas_kernels.append_tokens.append_tokens`; takes no config."""
    if config is not None:
        raise ValueError(f"implementation 'xla' of append_tokens takes no config, got {config!r}")
    num_pages, _, page_size, _ = k_pages.shape
    page = paged.physical(page_table, positions // page_size, valid, num_pages)
    offset = positions % page_size
    k_pages = k_pages.at[page, :, offset].set(k.astype(k_pages.dtype), mode="drop")
    v_pages = v_pages.at[page, :, offset].set(v.astype(v_pages.dtype), mode="drop")
    # XLA may fuse the write into readers, which then read the pool from before it and so need a copy of all of it.
    k_pages, v_pages = jax.lax.optimization_barrier((k_pages, v_pages))
    if not kinds:
        return k_pages, v_pages, indexes
    last = offset == page_size - 1
    # At most this many pages of a row can fill in one call: keep the filled ones, one slot each, by their order in the row.
    span = (positions.shape[1] - 1) // page_size + 1
    slot = positions // page_size - (positions[:, :1] // page_size)
    sealed = jnp.full((page.shape[0], span), num_pages, page.dtype)
    rows = jnp.arange(page.shape[0])[:, None]
    sealed = sealed.at[rows, jnp.where(last, slot, span)].set(page, mode="drop").reshape(-1)
    keys = k_pages.at[sealed].get(mode="fill", fill_value=0)
    built = dict(indexes)
    for name, kind, block_size in kinds:
        rows = page_index(keys, kind=kind, block_size=block_size)
        built[name] = indexes[name].at[sealed].set(rows, mode="drop")
    return k_pages, v_pages, built
