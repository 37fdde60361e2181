"""select_tiles for any backend: two walks over the sequence's bounds, a tile of blocks at a time, then the k best of
each tile's scores.

The first walk finds every query's log-sum-exp of its bounds; the second finds what each tile of queries pays each
block. Memory traffic: the bounds of a sequence twice per span of queries. Memory needed: the bounds that the tables
name, the bounds of `QUERY_SPAN` queries against `BLOCK_TILE` blocks in every head, float32, and the tiles' scores.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.selection.select_tiles.api import Call
from pallas_kernels.xla import online_softmax

BLOCK_TILE = 256
QUERY_SPAN = 1024
_NONE = jnp.iinfo(jnp.int32).max  # sorts behind every block


@functools.partial(jax.jit, static_argnames="call")
def select_tiles(call: Call, q, bounds, table, starts, lengths):
    """See `pallas_kernels.select_tiles`."""
    (num_queries, num_heads, head_dim), num_kv_heads = q.shape[1:], bounds.shape[1]
    block_size, query_tile = call.block_size, call.query_tile
    per_tile = max(1, BLOCK_TILE // bounds.shape[2]) * bounds.shape[2]
    there = sealed_blocks(table, lengths, bounds, block_size)
    rows = table_bounds(bounds, table, there, -there.shape[1] % per_tile)
    span = max(1, QUERY_SPAN // query_tile) * query_tile
    q = jnp.pad(q, ((0, 0), (0, -num_queries % span), (0, 0), (0, 0)))

    def of_span(args):
        q, rows, position, length = args
        grouped = q.reshape(span, num_kv_heads, -1, head_dim).transpose(1, 2, 0, 3).reshape(num_kv_heads, -1, head_dim)
        query_pos = jnp.where(position + jnp.arange(span) < length, position + jnp.arange(span), -1)
        paid = _paid(grouped, rows, jnp.tile(query_pos, num_heads // num_kv_heads), per_tile, call)
        return paid.reshape(num_heads, span // query_tile, -1).swapaxes(0, 1)

    def of_row(args):
        q, rows, start, length = args
        positions = start + jnp.arange(0, q.shape[0], span, dtype=jnp.int32)
        spans = q.reshape(-1, span, num_heads, head_dim)
        paid = jax.lax.map(lambda args: of_span((args[0], rows, args[1], length)), (spans, positions))
        return paid.reshape(-1, num_heads, rows.shape[1])[: -(-num_queries // query_tile)]

    scores = jax.lax.map(of_row, (q, rows, starts, lengths))
    first, end = candidates(starts, lengths, num_queries, block_size, query_tile, call.window)
    return best_candidates(scores[..., : there.shape[1]], there, first, end, call.k, call.ranked)


def table_bounds(bounds, table, there: Bool[Array, "B S"], more: int) -> Float[Array, "B K S+more 2*D"]:
    """The bounds of each table's blocks, in order, maxima beside minima. Blocks that are not there, and `more` blocks
    after them, get a maximum so low and a minimum so high that only a query of 0 can pay them anything."""
    batch, head_dim = table.shape[0], bounds.shape[4]
    rows = bounds[jnp.maximum(table, 0)].swapaxes(1, 2).reshape(batch, bounds.shape[1], -1, 2 * head_dim)
    far = jnp.asarray(jnp.finfo(bounds.dtype).max / 4, bounds.dtype)
    nothing = jnp.concatenate([jnp.full(head_dim, -far), jnp.full(head_dim, far)])
    rows = jnp.where(there[:, None, :, None], rows, nothing)
    return jnp.concatenate([rows, jnp.broadcast_to(nothing, (*rows.shape[:2], more, 2 * head_dim))], axis=2)


def sealed_blocks(table, lengths, bounds, block_size: int):
    """Whether a block of the tables `[B, M * nb]` has a page that is full."""
    page_size = block_size * bounds.shape[2]
    pages = jnp.arange(1, table.shape[1] + 1, dtype=jnp.int32)
    return jnp.repeat((table >= 0) & (pages <= lengths[:, None] // page_size), bounds.shape[2], axis=1)


def candidates(starts, lengths, num_queries: int, block_size: int, query_tile: int, window: tuple[int, int]):
    """The first candidate, and for each tile `[B, C]` the block after its last one."""
    begins = jnp.arange(0, num_queries, query_tile, dtype=jnp.int32)
    last = jnp.minimum(starts[:, None] + jnp.minimum(begins + query_tile, num_queries), lengths[:, None]) - 1
    there = starts[:, None] + begins < lengths[:, None]
    return window[0] // block_size, jnp.where(there, (last - window[1]) // block_size + 1, 0)


def best_candidates(
    scores: Float[Array, "B C H S"], there, first: int, end: Int[Array, "B C"], k: int, ranked: bool
) -> Int[Array, "B C H W"]:
    """The k candidates that score highest, ascending or best first, -1 at the end."""
    block = jnp.arange(scores.shape[-1], dtype=jnp.int32)
    candidate = there[:, None] & (block >= first) & (block < end[..., None])
    best, ids = jax.lax.top_k(jnp.where(candidate[:, :, None], scores, -1.0), min(k, scores.shape[-1]))  # of equal scores the lower block
    return listed(best, ids, ranked)


def listed(best: Float[Array, "*rows W"], ids: Int[Array, "*rows W"], ranked: bool) -> Int[Array, "*rows W"]:
    """The ids whose score is not negative: ascending, or in the order given (best first) if `ranked`; -1 at the end."""
    if ranked:
        return jnp.where(best < 0, -1, ids).astype(jnp.int32)
    ids = jnp.sort(jnp.where(best < 0, _NONE, ids), axis=-1)
    return jnp.where(ids == _NONE, -1, ids).astype(jnp.int32)


def _paid(q, rows, query_pos, per_tile: int, call: Call) -> Float[Array, "K G*C S"]:
    """What the tiles of q `[K, G * T, D]` pay the blocks of rows `[K, S, 2 * D]`; query_pos `[G * T]` is -1 for
    padding."""
    split = jnp.concatenate([jnp.maximum(q, 0), jnp.minimum(q, 0)], axis=-1)
    steps = jnp.minimum(-(-(query_pos.max() // call.block_size + 1) // per_tile), rows.shape[1] // per_tile)

    def logits(i):
        here = jax.lax.dynamic_slice_in_dim(rows, i * per_tile, per_tile, axis=1)
        begins = (i * per_tile + jnp.arange(per_tile)) * call.block_size
        return jnp.where(begins <= query_pos[:, None], online_softmax.scaled_logits(split, here, call.sm_scale), -jnp.inf)

    def measure(i, state):
        top, total = state
        x = logits(i)
        new = jnp.maximum(top, x.max(-1))
        shift = jnp.where(new == -jnp.inf, 0.0, new)
        return new, total * jnp.exp(top - shift) + jnp.exp(x - shift[..., None]).sum(-1)

    none = jnp.full(q.shape[:2], -jnp.inf, jnp.float32)
    top, total = jax.lax.fori_loop(0, steps, measure, (none, jnp.zeros(q.shape[:2], jnp.float32)))
    lse = jnp.where(top == -jnp.inf, 0.0, top + jnp.log(jnp.where(total == 0, 1.0, total)))

    def pay(i, paid):
        of_queries = jnp.exp(logits(i) - lse[..., None]).reshape(q.shape[0], -1, call.query_tile, per_tile)
        of_tiles = of_queries.sum(2) if call.pooling == "sum" else of_queries.max(2)
        return jax.lax.dynamic_update_slice_in_dim(paid, of_tiles, i * per_tile, axis=2)

    nothing = jnp.zeros((q.shape[0], q.shape[1] // call.query_tile, rows.shape[1]), jnp.float32)
    return jax.lax.fori_loop(0, steps, pay, nothing)
