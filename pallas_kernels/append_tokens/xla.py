"""append_tokens for any backend, by scatters. Each page that may have filled is read once, whether it has filled or not."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from pallas_kernels.append_tokens.api import Call
from pallas_kernels.page_index import page_index
from pallas_kernels.pages import physical

NOWHERE = jnp.iinfo(jnp.int32).max
"""A page id and frame beyond every pool: writes to it are dropped."""


@functools.partial(jax.jit, static_argnames="call")
def append_tokens(call: Call, pages, indexes, k, v, positions, valid, table, frames):
    """See `pallas_kernels.append_tokens.append_tokens`; takes no config."""
    page_size, logical, offset = pages.page_size, positions // pages.page_size, positions % pages.page_size
    frame = page = physical(table, logical, valid, NOWHERE)
    if frames is not None:
        frame = physical(frames, logical, page < NOWHERE, NOWHERE)
        page = jnp.where(frame < NOWHERE, page, NOWHERE)
    written = pages.replace(k=pages.k.at[frame, :, offset].set(k.astype(pages.k.dtype), mode="drop"))
    if v is not None:
        written = written.replace(v=pages.v.at[frame, :, offset].set(v.astype(pages.v.dtype), mode="drop"))
    # XLA may fuse the write into its readers. These then read the pool as it was before, which needs a copy of all of it.
    written = jax.lax.optimization_barrier(written)
    if not call.kinds:
        return written, indexes
    last = offset == page_size - 1
    # At most `span` pages of a row can fill in one call. Each filled page gets a slot, in the order of the row.
    span = (positions.shape[1] - 1) // page_size + 1
    slot = jnp.where(last, logical - logical[:, :1], span)
    rows = jnp.arange(page.shape[0])[:, None]

    def of_filled(numbers):
        return jnp.full((page.shape[0], span), NOWHERE, page.dtype).at[rows, slot].set(numbers, mode="drop").reshape(-1)

    sealed = of_filled(page)
    keys = written.k.at[sealed if frames is None else of_filled(frame)].get(mode="fill", fill_value=0)
    built = dict(indexes)
    for name, kind, block_size in call.kinds:
        rows = page_index(keys, kind=kind, block_size=block_size)
        built[name] = indexes[name].at[sealed].set(rows, mode="drop")
    return written, built
