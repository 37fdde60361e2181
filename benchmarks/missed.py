"""What lists miss, by sampling: the exact attention of a few random queries, and the share of it that no list, sink or
window holds.

Queries are drawn by position and seed: one of every `every` consecutive ones. So draws do not depend on how a prompt is
cut into chunks, or on the batch. Each query is equally likely, so the mean over the drawn ones has no bias.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kvjax.cache.arrays import PagedKV
from kvjax.evaluation.key_walk import padded_tokens, tile_tokens, walk_keys
from kvjax.policies.prefill.base import PrefillContext
from kvjax.policies.prefill.lists import TileLists
from pallas_kernels.core.pages import visible
from pallas_kernels.xla import online_softmax

COST = 0.05
"""The most that sampling may cost, as a share of the floating-point operations of the list attention that it
measures."""


class Sampled(NamedTuple):
    """Exact attention of drawn queries. R = the runs of `every` positions that a chunk can touch.

    positions: those of the drawn queries. counts: whether a query is in the chunk and not padding; figures of others
    are meaningless. near: LSE over the keys in sinks and the query's window. far: LSE over each block's other keys;
    -inf where there are none. Float32.
    """

    positions: Int[Array, "B R"]
    counts: Bool[Array, "B R"]
    near: Float[Array, "B R H"]
    far: Float[Array, "B R H S"]


def sample_every(tokens: int, read: int) -> int:
    """One query of so many is drawn: the smallest power of two that keeps the cost within `COST`, if each query attends
    to `read` keys of `tokens`.

    A drawn query scores tokens / 2 keys on average and reads no values, half the operations of attention per key: T /
    every queries cost tokens / (4 * every * read) of what T queries cost that attend to `read` keys. ValueError for
    fewer than 1 of either.
    """
    if min(tokens, read) < 1:
        raise ValueError(f"tokens and keys read must be at least 1, got {tokens} and {read}")
    return 1 << max(0, int(-(-tokens // (4 * COST * read))) - 1).bit_length()


def drawn_positions(starts: Int[Array, "B"], num_queries: int, every: int, seed: int) -> Int[Array, "B R"]:
    """One position of each run [i * every, (i + 1) * every) that queries starts to starts + num_queries - 1 can touch;
    ValueError for an `every` below 1. It depends only on seed, `every` and i."""
    if every < 1:
        raise ValueError(f"every must be at least 1 query, got {every}")
    runs = starts[:, None] // every + jnp.arange((num_queries + every - 2) // every + 1, dtype=jnp.int32)

    def offset(run):
        return jax.random.randint(jax.random.fold_in(jax.random.key(seed), run), (), 0, every)

    return runs * every + jax.vmap(jax.vmap(offset))(runs)


def sample(
    query: Float[Array, "B T H D"],
    layer: PagedKV,
    ctx: PrefillContext,
    *,
    every: int,
    seed: int,
    key_block: int,
    window: tuple[int, int],
) -> Sampled:
    """Exact attention of the drawn queries of a chunk, by blocks of `key_block` keys (S = M * P / key_block); window:
    (sink_tokens, window_tokens), whose keys are counted in `near`. Memory: the result, and the drawn queries' logits
    for a tile of keys."""
    num_queries, num_heads, head_dim = query.shape[1:]
    num_kv_heads, page_size = layer.pages.kv_heads, layer.pages.page_size
    per_tile = tile_tokens(page_size) // key_block
    positions = drawn_positions(ctx.starts, num_queries, every, seed)
    index = positions - ctx.starts[:, None]
    counts = (index >= 0) & (index < num_queries) & (positions < ctx.lengths[:, None])

    def of_row(args):
        q, table, length, index, position = args
        rows = q[jnp.clip(index, 0, num_queries - 1)].reshape(-1, num_kv_heads, num_heads // num_kv_heads, head_dim)
        rows = rows.transpose(1, 2, 0, 3).reshape(num_kv_heads, -1, head_dim)

        def step(state, i, keys, pos):
            near, far = state
            logits = online_softmax.scaled_logits(rows, keys, ctx.sm_scale).reshape(num_heads, -1, pos.shape[0])
            seen = visible(pos, position[:, None], None)
            inside = visible(pos, position[:, None], window)
            near = jnp.logaddexp(near, jax.nn.logsumexp(jnp.where(inside, logits, -jnp.inf), axis=-1))
            outside = jnp.where(seen & ~inside, logits, -jnp.inf).reshape(*near.shape, per_tile, key_block)
            return near, jax.lax.dynamic_update_slice_in_dim(far, jax.nn.logsumexp(outside, axis=-1), i * per_tile, axis=2)

        shape = (num_heads, index.shape[0])
        room = padded_tokens(table.shape[0], page_size) // key_block
        state = jnp.full(shape, -jnp.inf, jnp.float32), jnp.full((*shape, room), -jnp.inf, jnp.float32)
        near, far = walk_keys(layer.pages.k, table, length, state, step)
        return near.T, far.swapaxes(0, 1)[..., : table.shape[0] * page_size // key_block]

    return Sampled(positions, counts, *jax.lax.map(of_row, (query, ctx.frames, ctx.lengths, index, positions)))


def missed_share(found: Sampled, blocks: Int[Array, "B C H W"], starts: Int[Array, "B"], chi: int) -> Float[Array, "B R H"]:
    """The share of each drawn query's attention, 0 to 1, on keys outside its tile's list, its sinks and its window.
    Values of queries that do not count are meaningless."""
    tile = jnp.clip((found.positions - starts[:, None]) // chi, 0, blocks.shape[1] - 1)
    lists = jnp.take_along_axis(blocks, tile[..., None, None], axis=1)
    num_blocks = found.far.shape[-1]

    def unlisted(far, ids):
        return far.at[jnp.where(ids < 0, num_blocks, ids)].set(-jnp.inf, mode="drop")

    rest = jax.vmap(jax.vmap(jax.vmap(unlisted)))(found.far, lists)
    whole = jnp.logaddexp(found.near, jax.nn.logsumexp(found.far, axis=-1))
    return jnp.exp(jax.nn.logsumexp(rest, axis=-1) - whole)


def sampled_miss(
    policy: TileLists, query: Float[Array, "B T H D"], layer: PagedKV, ctx: PrefillContext, *, every: int, seed: int = 0, blocks=None
) -> tuple[Float[Array, "B R H"], Int[Array, "B R"], Bool[Array, "B R"]]:
    """What a policy's lists miss of the attention of one random query in `every`: shares, positions, and which of them
    count.

    blocks: the lists, if they are known already, `[B, C, H, W]`.
    """
    window = (policy.sink_tokens, policy.window_tokens)
    found = sample(query, layer, ctx, every=every, seed=seed, key_block=policy.key_block, window=window)
    blocks = policy.lists(query, layer, ctx) if blocks is None else blocks
    return missed_share(found, blocks, ctx.starts, policy.chi), found.positions, found.counts
