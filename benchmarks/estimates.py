"""What several policies of benchmarks/peers share: estimates of where queries attend, and the fewest blocks that hold a
share of them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from kvjax.cache.arrays import PagedKV
from kvjax.evaluation.key_walk import padded_tokens, probabilities, tile_tokens, walk_keys
from kvjax.policies.prefill.base import PrefillContext
from pallas_kernels.attention.flash_attention import flash_attention


def mean_queries(q: Float[Array, "T H D"], start: Int[Array, ""], length: Int[Array, ""], chi: int) -> Float[Array, "C H D"]:
    """The mean of each tile's written queries, float32; 0 where there are none."""
    q = jnp.pad(q, ((0, -q.shape[0] % chi), (0, 0), (0, 0))).astype(jnp.float32)
    written = (start + jnp.arange(q.shape[0], dtype=jnp.int32) < length).reshape(-1, chi)
    total = jnp.where(written[..., None, None], q.reshape(-1, chi, *q.shape[1:]), 0).sum(1)
    return total / jnp.maximum(written.sum(1), 1)[:, None, None]


def mean_keys(pool: Float[Array, "N K P D"], table: Int[Array, "M"], length: Int[Array, ""], key_block: int) -> Float[Array, "K S D"]:
    """The mean of each block's written keys, float32; 0 where there are none."""
    num_kv_heads, page_size, head_dim = pool.shape[1:]
    per_tile = tile_tokens(page_size) // key_block

    def step(means, i, keys, pos):
        total = keys.astype(jnp.float32).reshape(num_kv_heads, per_tile, key_block, head_dim).sum(2)
        count = (pos >= 0).reshape(per_tile, key_block).sum(1)
        return jax.lax.dynamic_update_slice_in_dim(means, total / jnp.maximum(count, 1)[:, None], i * per_tile, axis=1)

    means = jnp.zeros((num_kv_heads, padded_tokens(table.shape[0], page_size) // key_block, head_dim), jnp.float32)
    return walk_keys(pool, table, length, means, step)


def blocks_and_bands(
    query: Float[Array, "B T H D"], layer: PagedKV, ctx: PrefillContext, last_queries: int, key_block: int
) -> tuple[Float[Array, "B H S"], Float[Array, "B H S"]]:
    """The attention that the chunk's last queries pay to every block of keys, and to every diagonal band, float32.

    Band o holds the pairs whose distance, query position - key position, is in [o * key_block, (o + 1) * key_block).
    """
    rows, page_size = min(last_queries, query.shape[1]), layer.pages.page_size
    offset = jnp.clip(ctx.lengths - ctx.starts - rows, 0, query.shape[1] - rows)
    last = jax.vmap(lambda q, at: jax.lax.dynamic_slice_in_dim(q, at, rows))(query, offset)
    starts = ctx.starts + offset
    _, lse = flash_attention(last, layer.pages, ctx.frames, starts, ctx.lengths, sm_scale=ctx.sm_scale)
    tile = tile_tokens(page_size)
    per_tile, touched = tile // key_block, (tile + rows) // key_block + 2

    def of_row(args):
        q, lse, table, start, length = args
        query_pos = start + jnp.arange(rows, dtype=jnp.int32)

        def step(state, i, keys, pos):
            of_blocks, of_bands = state
            paid = probabilities(q, lse, query_pos, length, keys, pos, ctx.sm_scale)
            columns = paid.sum(1).reshape(paid.shape[0], per_tile, key_block).sum(2)
            of_blocks = jax.lax.dynamic_update_slice_in_dim(of_blocks, columns, i * per_tile, axis=1)
            band = (query_pos[:, None] - (i * tile + jnp.arange(tile, dtype=jnp.int32))) // key_block
            nearest = jnp.maximum(band[0, -1], 0)
            # A product with a table of ones, not a scatter: the same bits every time on every backend.
            member = jax.nn.one_hot(band - nearest, touched, dtype=jnp.float32)
            bands = jnp.einsum("hrs,rsn->hn", paid, member, precision=jax.lax.Precision.HIGHEST)
            old = jax.lax.dynamic_slice_in_dim(of_bands, nearest, touched, axis=1)
            return of_blocks, jax.lax.dynamic_update_slice_in_dim(of_bands, old + bands, nearest, axis=1)

        room = padded_tokens(table.shape[0], page_size) // key_block
        empty = (jnp.zeros((q.shape[1], room), jnp.float32), jnp.zeros((q.shape[1], room + touched), jnp.float32))
        of_blocks, of_bands = walk_keys(layer.pages.k, table, length, empty, step)
        num_blocks = table.shape[0] * page_size // key_block
        return of_blocks[:, :num_blocks], of_bands[:, :num_blocks]

    return jax.lax.map(of_row, (last, lse, ctx.frames, starts, ctx.lengths))


def ranked_until(worth: Float[Array, "*tiles S"], candidates: Bool[Array, "*tiles S"], threshold: float) -> Int[Array, "*tiles S"]:
    """The fewest candidates, best first and of equal ones the lower, that hold `threshold` of a row's worth together
    with all blocks that are not candidates; then -1. A threshold of 1 lists every candidate, however their sum
    rounds."""
    whole, beside = worth.sum(-1, keepdims=True), jnp.where(candidates, 0, worth).sum(-1, keepdims=True)
    best, ids = jax.lax.top_k(jnp.where(candidates, worth, -1.0), worth.shape[-1])
    before = jnp.cumsum(jnp.maximum(best, 0), axis=-1) - jnp.maximum(best, 0)
    needed = (beside + before < threshold * whole) | (threshold == 1)
    return jnp.where((best >= 0) & needed, ids, -1).astype(jnp.int32)


def fewest_that_hold(worth: Float[Array, "*rows S"], share: float) -> Bool[Array, "*rows S"]:
    """The fewest entries of each row that hold `share` of its sum; of equal ones the lower. All entries for a share of
    1."""
    best = ranked_until(worth, jnp.ones(worth.shape, bool), share)
    return jnp.put_along_axis(jnp.zeros((*worth.shape[:-1], worth.shape[-1] + 1), bool), best, True, axis=-1, inplace=False)[..., :-1]


def share_text(share: float) -> str:
    """A share of attention, written with all of its digits as in names: 0.01, 0.00001, 1.0."""
    return np.format_float_positional(share, trim="0")
