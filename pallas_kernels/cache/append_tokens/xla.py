"""append_tokens for any backend, by scatters. Each page that may have filled is read once, whether it has filled or
not."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from pallas_kernels.cache.append_tokens.api import Call
from pallas_kernels.cache.pack_pages.pool import put_pages
from pallas_kernels.core.pages import physical
from pallas_kernels.selection.page_index import page_index

NOWHERE = jnp.iinfo(jnp.int32).max
"""A page id and frame beyond every pool: writes to it are dropped."""


@functools.partial(jax.jit, static_argnames="call")
def append_tokens(call: Call, pages, indexes, k, v, positions, valid, table, frames):
    """See `pallas_kernels.append_tokens`; takes no config."""
    page_size, logical, offset = pages.page_size, positions // pages.page_size, positions % pages.page_size
    frame = page = physical(table, logical, valid, NOWHERE)
    if frames is not None:
        frame = physical(frames, logical, page < NOWHERE, NOWHERE)
    tile = frame
    if pages.packed:  # tokens go to the open pages
        tile = pages.open.row_of.at[frame].get(mode="fill", fill_value=-1)
        tile = jnp.where(tile >= 0, tile, NOWHERE)
    page, frame = (jnp.where(tile < NOWHERE, x, NOWHERE) for x in (page, frame))
    pools = pages.open if pages.packed else pages
    pools = pools.replace(k=pools.k.at[tile, :, offset].set(k.astype(pools.k.dtype), mode="drop"))
    if v is not None:
        pools = pools.replace(v=pools.v.at[tile, :, offset].set(v.astype(pools.v.dtype), mode="drop"))
    # XLA may fuse the write into its readers. These then read the pool as it was before, which needs a copy of all of
    # it.
    pools = jax.lax.optimization_barrier(pools)
    written = pages.replace(open=pools) if pages.packed else pools
    if not call.kinds and not pages.packed:
        return written, indexes
    last = offset == page_size - 1
    # At most `span` pages of a row can fill in one call. Each filled page gets a slot, in the order of the row.
    span = (positions.shape[1] - 1) // page_size + 1
    slot = jnp.where(last, logical - logical[:, :1], span)
    rows = jnp.arange(page.shape[0])[:, None]

    def of_filled(numbers):
        return jnp.full((page.shape[0], span), NOWHERE, page.dtype).at[rows, slot].set(numbers, mode="drop").reshape(-1)

    def whole(pool):
        return pool.at[of_filled(tile)].get(mode="fill", fill_value=0)

    keys, sealed = whole(pools.k), of_filled(page)
    if pages.packed:
        written, keys = put_pages(written, keys, None if v is None else whole(pools.v), of_filled(frame))
    built = dict(indexes)
    for name, kind, block_size in call.kinds:
        rows = page_index(keys, kind=kind, block_size=block_size)
        built[name] = indexes[name].at[sealed].set(rows, mode="drop")
    return written, built
