"""append_tokens for any backend: scatters. Reads each page that may have filled once, whether it did or not."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from pallas_kernels.append_tokens.api import Call
from pallas_kernels.page_index import page_index
from pallas_kernels.pages import physical


@functools.partial(jax.jit, static_argnames="call")
def append_tokens(call: Call, pages, indexes, k, v, positions, valid, table):
    """See `pallas_kernels.append_tokens.append_tokens`; takes no config."""
    num_pages, page_size = pages.num_pages, pages.page_size
    page = physical(table, positions // page_size, valid, num_pages)
    offset = positions % page_size
    written = pages.replace(k=pages.k.at[page, :, offset].set(k.astype(pages.k.dtype), mode="drop"))
    if v is not None:
        written = written.replace(v=pages.v.at[page, :, offset].set(v.astype(pages.v.dtype), mode="drop"))
    # XLA may fuse the write into readers, which then read the pool from before it and so need a copy of all of it.
    written = jax.lax.optimization_barrier(written)
    if not call.kinds:
        return written, indexes
    last = offset == page_size - 1
    # At most this many pages of a row can fill in one call: keep the filled ones, one slot each, by their order in the row.
    span = (positions.shape[1] - 1) // page_size + 1
    slot = positions // page_size - (positions[:, :1] // page_size)
    sealed = jnp.full((page.shape[0], span), num_pages, page.dtype)
    rows = jnp.arange(page.shape[0])[:, None]
    sealed = sealed.at[rows, jnp.where(last, slot, span)].set(page, mode="drop").reshape(-1)
    keys = written.k.at[sealed].get(mode="fill", fill_value=0)
    built = dict(indexes)
    for name, kind, block_size in call.kinds:
        rows = page_index(keys, kind=kind, block_size=block_size)
        built[name] = indexes[name].at[sealed].set(rows, mode="drop")
    return written, built
