"""indexer_scores for any backend: one tile of whole pages at a time, for all rows together.

Tiles are fixed spans of absolute positions. So a row's bits depend neither on the width of its page table nor on the
lengths of other rows. Tiles that no row reaches are not read. The scale of an 8-bit key is positive, so it multiplies
the key's finished score instead of its D elements; the elements are then exact in bfloat16. Memory traffic: every key
once, and its copy, a tile at a time. Memory: that copy and `B * T * H * tile_tokens` dot products in float32.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp

from pallas_kernels.selection.indexer_scores.api import FP8, Call
from pallas_kernels.xla import key_tiles


@dataclasses.dataclass(frozen=True)
class Config:
    """tile_tokens: keys per tile and row, rounded down to whole pages, at least one."""

    tile_tokens: int = 1024

    def __post_init__(self):
        if not isinstance(self.tile_tokens, int) or self.tile_tokens < 1:
            raise ValueError(f"tile_tokens must be a positive int, got {self.tile_tokens!r}")


def default_config() -> Config:
    """Tiles that fit a CPU's caches; on other devices, fewer and larger tiles, because each costs several launches."""
    return Config() if key_tiles.on_cpu() else Config(tile_tokens=8192)


def indexer_scores(call: Call, q, weights, keys, table, lengths, scales):
    """See `pallas_kernels.indexer_scores`. config: a `Config`, or None for `default_config()`."""
    return _score(call.config or default_config(), q, weights, keys, table, lengths, scales)


@functools.partial(jax.jit, static_argnames="config")
def _score(config: Config, q, weights, keys, table, lengths, scales):
    (batch, num_queries, _, _), page_size, width = q.shape, keys.shape[1], table.shape[1]
    per_tile = max(1, config.tile_tokens // page_size)
    table = jnp.pad(table, ((0, 0), (0, -width % per_tile)), constant_values=-1)
    dtype = jnp.promote_types(q.dtype, jnp.bfloat16 if keys.dtype.name == FP8 else keys.dtype)
    at = lengths[:, None] - num_queries + jnp.arange(num_queries, dtype=jnp.int32)
    size = per_tile * page_size

    def read(number):
        page_ids = jax.lax.dynamic_slice_in_dim(table, number * per_tile, per_tile, axis=1)
        tile = keys[jnp.maximum(page_ids, 0)].reshape(batch, size, -1).astype(dtype)
        # Accelerators multiply float32 with fewer bits by default; products of shorter types are exact in float32
        # anyway.
        precision = jax.lax.Precision.HIGHEST if dtype == jnp.float32 else jax.lax.Precision.DEFAULT
        dots = jnp.einsum("bthd,bsd->bths", q.astype(dtype), tile, precision=precision, preferred_element_type=jnp.float32)
        scores = jnp.einsum("bths,bth->bts", jnp.maximum(dots, 0), weights, precision=jax.lax.Precision.HIGHEST)
        if scales is not None:
            scores = scores * scales[jnp.maximum(page_ids, 0)].reshape(batch, 1, size)
        position = number * size + jnp.arange(size, dtype=jnp.int32)
        seen = jnp.repeat(page_ids >= 0, page_size, axis=1)[:, None] & (position <= at[..., None])
        return jnp.where(seen, scores, -jnp.inf)  # unwritten keys may score NaN

    def step(number):
        nothing = jnp.full((batch, num_queries, size), -jnp.inf, jnp.float32)
        return jax.lax.cond(jnp.any(number * size < lengths), read, lambda number: nothing, number)

    tiles = jax.lax.map(step, jnp.arange(table.shape[1] // per_tile, dtype=jnp.int32))
    return jnp.moveaxis(tiles, 0, 2).reshape(batch, num_queries, -1)[..., : width * page_size]
