"""gather_attention for any backend: online softmax over tiles of the list, a few rows of the batch at a time.

Dense attention uses the list of all blocks. A tile is a fixed number of list entries, so for dense attention a fixed span of absolute
positions. Each row walks its own tiles in order and stops after its last readable one. So its bits depend neither on the width of the page
table nor on the other rows. Memory traffic: each listed block is read once and copied once, a tile at a time. Memory needed: that copy
(`rows * K * tile_tokens * D` elements for keys, and as many for values unless V is a view of K) and its logits.
"""

from __future__ import annotations

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from pallas_kernels import online_softmax
from pallas_kernels.gather_attention.api import Call
from pallas_kernels.pages import read, visible


@dataclasses.dataclass(frozen=True)
class Config:
    """tile_tokens: keys per tile, rounded down to whole blocks, at least one. rows: rows of the batch computed together."""

    tile_tokens: int = 512
    rows: int = 4

    def __post_init__(self):
        for name in ("tile_tokens", "rows"):
            if not isinstance(getattr(self, name), int) or getattr(self, name) < 1:
                raise ValueError(f"{name} must be a positive int, got {getattr(self, name)!r}")


def default_config() -> Config:
    """Tiles that fit a CPU's caches; on other devices, tiles large enough to occupy the device."""
    return Config() if jax.default_backend() == "cpu" else Config(tile_tokens=2048, rows=64)


def gather_attention(call: Call, q, pages, table, lengths, blocks):
    """See `pallas_kernels.gather_attention.gather_attention`. config: a `Config`, or None for `default_config()`."""
    return _attend(dataclasses.replace(call, config=call.config or default_config()), q, pages, table, lengths, blocks)


@functools.partial(jax.jit, static_argnames="call")
def _attend(call: Call, q, pages, table, lengths, blocks):
    block_size, num_kv_heads, page_size = call.block_size, pages.kv_heads, pages.page_size

    def row(args):
        q, table, length, ids = args
        num_queries, num_heads, head_dim = q.shape
        q = q.reshape(num_queries, num_kv_heads, -1, head_dim).swapaxes(0, 1).reshape(num_kv_heads, -1, head_dim)
        query_pos = length - num_queries + jnp.arange(num_queries, dtype=jnp.int32)
        query_pos = jnp.repeat(query_pos, num_heads // num_kv_heads)
        ids, frames, per_tile = _list(ids, table, length, num_kv_heads, page_size, block_size, call.config.tile_tokens)
        tiles = jnp.max(jnp.where(ids >= 0, jnp.arange(ids.shape[1], dtype=jnp.int32) // per_tile + 1, 0))

        def step(i, carry):
            partial, block_lse = carry
            block, frame = (jax.lax.dynamic_slice_in_dim(x, i * per_tile, per_tile, axis=1) for x in (ids, frames))
            pos = (block[..., None] * block_size + jnp.arange(block_size, dtype=jnp.int32)).reshape(num_kv_heads, -1)
            keys, values = read(pages, frame, block * block_size % page_size, block_size)
            seen = visible(pos[:, None, :], query_pos[:, None], call.window)
            logits = jnp.where(seen, online_softmax.scaled_logits(q, keys, call.sm_scale), -jnp.inf)
            values = jnp.where(((pos >= 0) & (pos < length))[..., None], values, 0)  # unwritten values may be NaN
            if call.return_block_lse:
                of_tile = jax.nn.logsumexp(logits.reshape(*logits.shape[:2], per_tile, block_size), axis=-1)
                block_lse = jax.lax.dynamic_update_slice_in_dim(block_lse, of_tile, i * per_tile, axis=2)
            return online_softmax.fold(partial, logits, values), block_lse

        block_lse = jnp.full((*q.shape[:2], ids.shape[1]), -jnp.inf, jnp.float32) if call.return_block_lse else None
        partial, block_lse = jax.lax.fori_loop(0, tiles, step, (online_softmax.empty(q.shape[:2], pages.v_head_dim), block_lse))
        out, lse = online_softmax.finish(partial)
        found = (out.astype(q.dtype), lse, block_lse) if call.return_block_lse else (out.astype(q.dtype), lse)
        heads_last = (x.reshape(num_kv_heads, num_queries, -1, *x.shape[2:]).swapaxes(0, 1) for x in found)
        return tuple(x.reshape(num_queries, num_heads, *x.shape[3:]) for x in heads_last)

    out, lse, *block_lse = jax.lax.map(row, (q, table, lengths, blocks), batch_size=math.gcd(q.shape[0], call.config.rows))
    width = table.shape[1] * (page_size // block_size) if blocks is None else blocks.shape[2]
    return (out, lse, *(x[..., :width] for x in block_lse))


def _list(
    ids: Int[Array, "K W"] | None, table: Int[Array, "M"], length: Array, num_kv_heads: int, page_size: int, block_size: int, tokens: int
) -> tuple[Array, Array, int]:
    """Block ids to walk through and the frames of their pages, `[K, tiles * per_tile]`, and blocks per tile.

    Both are -1 where the block does not exist, has no page, or has no written token.
    """
    per_page, per_tile = page_size // block_size, max(1, tokens // block_size)
    if ids is None:
        ids = jnp.broadcast_to(jnp.arange(table.shape[0] * per_page, dtype=jnp.int32), (num_kv_heads, table.shape[0] * per_page))
    else:
        per_tile = min(per_tile, ids.shape[1])
    frames = table.at[jnp.maximum(ids, 0) // per_page].get(mode="fill", fill_value=-1)
    there = (ids >= 0) & (frames >= 0) & (ids * block_size < length)
    padding = ((0, 0), (0, -ids.shape[1] % per_tile))
    return *(jnp.pad(jnp.where(there, x, -1), padding, constant_values=-1) for x in (ids, frames)), per_tile
