"""copy_tiles for any backend: a gather and a scatter."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.cache.copy_tiles.api import Call

NOWHERE = jnp.iinfo(jnp.int32).max
"""A frame beyond every pool: writes to it are dropped."""


@jax.jit
def _copy(pages, sources, targets):
    heads = jnp.arange(sources.shape[1])
    targets = jnp.where((sources >= 0) & (targets >= 0), targets, NOWHERE)
    sources = jnp.maximum(sources, 0)
    # Without the barrier XLA may fuse the write into later readers, which then need a copy of the whole pool.
    return jax.lax.optimization_barrier(jax.tree.map(lambda pool: pool.at[targets, heads].set(pool[sources, heads], mode="drop"), pages))


def copy_tiles(call: Call, pages, sources, targets):
    """See `pallas_kernels.copy_tiles`; takes no config."""
    return _copy(pages, sources, targets)
