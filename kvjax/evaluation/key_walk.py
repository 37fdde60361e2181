"""Walks over all keys of a sequence, tile by tile, to score its blocks. Memory: a tile of keys, its logits, and the
scores."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.core.pages import read_tile, visible
from pallas_kernels.core.soft_cap import Scale
from pallas_kernels.xla import online_softmax

KEY_TILE = 512
"""Keys per step, in tokens, rounded down to whole pages, at least one."""


def tile_tokens(page_size: int) -> int:
    """Keys per step."""
    return max(1, KEY_TILE // page_size) * page_size


def padded_tokens(table_pages: int, page_size: int) -> int:
    """Tokens of a table of this width, rounded up to whole steps: the size of arrays that steps write scores to."""
    tile = tile_tokens(page_size)
    return -(-table_pages * page_size // tile) * tile


def walk_keys(
    keys: Float[Array, "N K P D"],
    table: Int[Array, "M"],
    length: Int[Array, ""],
    state: Any,
    step: Callable[[Any, Int[Array, ""], Float[Array, "K S D"], Int[Array, "S"]], Any],
) -> Any:
    """Fold one sequence's keys into `state`: step(state, number of the tile, keys, positions) per tile, in order.

    Where no token is written, positions are -1 and keys are 0.
    """
    num_kv_heads, page_size = keys.shape[1:3]
    tile = tile_tokens(page_size)
    per_tile = tile // page_size
    table = jnp.pad(table, (0, -table.shape[0] % per_tile), constant_values=-1)

    def body(i, state):
        page_ids = jax.lax.dynamic_slice_in_dim(table, i * per_tile, per_tile)
        pos = i * tile + jnp.arange(tile, dtype=jnp.int32)
        pos = jnp.where((jnp.repeat(page_ids, page_size) >= 0) & (pos < length), pos, -1)
        page = jnp.broadcast_to(page_ids, (num_kv_heads, per_tile))
        read = read_tile(keys, page, jnp.zeros_like(page), page_size)
        return step(state, i, jnp.where((pos >= 0)[:, None], read, 0), pos)

    return jax.lax.fori_loop(0, -(-length // tile), body, state)


def probabilities(
    q: Float[Array, "T H D"],
    lse: Float[Array, "T H"],
    query_pos: Int[Array, "T"],
    length: Int[Array, ""],
    keys: Float[Array, "K S D"],
    pos: Int[Array, "S"],
    sm_scale: Scale,
) -> Float[Array, "H T S"]:
    """The attention that each query pays to each of these keys, given the log-sum-exp of all of its logits; 0 for
    padding."""
    num_queries, num_heads, head_dim = q.shape
    rows = q.reshape(num_queries, keys.shape[0], -1, head_dim).transpose(1, 2, 0, 3).reshape(keys.shape[0], -1, head_dim)
    logits = online_softmax.scaled_logits(rows, keys, sm_scale).reshape(num_heads, num_queries, -1)
    seen = visible(pos, query_pos[:, None], None) & (query_pos < length)[:, None]
    return jnp.where(seen, jnp.exp(logits - jnp.where(jnp.isfinite(lse), lse, 0).T[..., None]), 0)
