"""place_tiles for any backend, by gathers and scatters."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from pallas_kernels.cache.place_tiles.api import WAYS, Call, Placed

NOWHERE = jnp.iinfo(jnp.int32).max
"""A set beyond every buffer: writes to it are dropped."""


@functools.partial(jax.jit, static_argnames="call")
def place_tiles(call: Call, blocks, page_table, frames, lengths, tags, ages, now):
    """See `pallas_kernels.place_tiles`; takes no config."""
    batch, kv_heads, width = blocks.shape
    there = (blocks >= 0) & (blocks < page_table.shape[1])
    at = jnp.where(there, blocks, 0).reshape(batch, -1)
    pages, of_list = (jnp.where(there, jnp.take_along_axis(x, at, axis=1).reshape(blocks.shape), -1) for x in (page_table, frames))
    full = (blocks + 1) * call.page_size <= lengths[:, None, None] - call.num_queries

    def by_head(x):
        return x.swapaxes(0, 1).reshape(kv_heads, batch * width)

    asked, ids = by_head((of_list >= call.border) & (pages >= 0) & full), by_head(pages)
    heads, sets = jnp.arange(kv_heads)[:, None], jnp.maximum(ids, 0) % tags.shape[1]
    same = (tags[heads, sets] == ids[..., None]) & asked[..., None]
    found, way = same.any(axis=-1), same.argmax(axis=-1)
    # First the tiles that are found become young, so that none of them has to go.
    ages = ages.at[heads, jnp.where(found, sets, NOWHERE), way].set(now, mode="drop")
    way = jnp.where(found, way, ages[heads, sets].argmin(axis=-1))
    missing = asked & ~found
    tags = tags.at[heads, jnp.where(missing, sets, NOWHERE), way].set(ids, mode="drop")
    held = asked & (tags[heads, sets, way] == ids)
    copied = held & missing
    ages = ages.at[heads, jnp.where(copied, sets, NOWHERE), way].set(now, mode="drop")
    places = (call.first + sets * WAYS + way).astype(jnp.int32)
    sources, targets = (jnp.where(copied, x, -1).T for x in (by_head(of_list), places))
    block_frames = jnp.where(held, places, by_head(of_list)).reshape(kv_heads, batch, width).swapaxes(0, 1)
    return Placed(block_frames, sources, targets, tags, ages)
