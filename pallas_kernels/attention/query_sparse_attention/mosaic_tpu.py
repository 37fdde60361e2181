"""query_sparse_attention for TPU: `pallas_kernels.tpu.prefill_fold` over all keys, the selectors beside it.

A tile of measured queries has all heads of a KV head. The logits of a tile of keys give its block scores; each is
offered to the slots of all rows at once. Slots are lanes: a row's list is one row of 128 lanes (or more). Reductions
over the lanes find the worst slot, and a mask replaces it. The tournament's slots are those of the linear search. Of
the scores, only the lists' are written: neither R x S logits nor R x S / block_size scores.

Memory traffic: the measured rows of q, out and the lists once; keys and values of a sequence once per tile of queries
and KV head, `2 * P * D * itemsize` bytes a page, up to the tile's last measured query.

Source: "Measure Once, Mask Once", appendix A; FlashAttention-2 (arXiv 2307.08691); buckets, TPU-KNN (arXiv 2206.14286).
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.lax import div

from pallas_kernels.attention.query_sparse_attention.api import Call
from pallas_kernels.tpu import prefill_fold
from pallas_kernels.tpu.memory import LANES, padded
from pallas_kernels.tpu.prefill_fold import Config

__all__ = ["Config", "query_sparse_attention", "unsupported"]
_EMPTY = jnp.iinfo(jnp.int32).max  # as a block id: of equal scores it is replaced first


def _shape(call: Call, q, pages, table) -> prefill_fold.Shape:
    """q: the measured rows."""
    sizes = {"group": q.shape[2] // pages.kv_heads, "piece": pages.page_size, "sm_scale": call.sm_scale, "stride": call.gamma}
    return prefill_fold.shape_of(q, pages, table, **sizes, config=call.config or Config(rows=256))


def unsupported(call: Call, q, pages, table, starts, lengths) -> str | None:
    """Why this kernel cannot take this valid input, with the values, or None if it can. Uses only shapes and dtypes."""
    if call.estimate == "quantile" and call.k_exact < call.k_blocks:
        return f"it estimates by buckets, not by the quantile, which {call.k_blocks - call.k_exact} of {call.k_blocks} slots ask for"
    measured = jax.ShapeDtypeStruct((q.shape[0], -(-q.shape[1] // call.gamma), *q.shape[2:]), q.dtype)
    s = _shape(call, measured, pages, table)
    slots = 2 * 4 * s.rows * padded(call.k_blocks, LANES)  # ids and scores: as carried, twice as results, and as temporaries
    return prefill_fold.unsupported(s, measured, pages, table, more_vmem=4 * slots)


def query_sparse_attention(call: Call, q, pages, table, starts, lengths, *, interpret=False):
    """See `pallas_kernels.query_sparse_attention`. config: a `Config`, or None for `Config(rows=256)`.

    interpret: False, or `pltpu.InterpretParams(...)` to run on a CPU; for tests.

    Raises NotImplementedError, with the sentence of `unsupported`, for input that this kernel cannot take.
    """
    reason = unsupported(call, q, pages, table, starts, lengths)
    if reason is not None:
        raise NotImplementedError(f"implementation 'mosaic_tpu' of query_sparse_attention: {reason}")
    return _measure(call, q, pages, table, starts, lengths, interpret=interpret)


@functools.partial(jax.jit, static_argnames=("call", "interpret"))
def _measure(call: Call, q, pages, table, starts, lengths, *, interpret):
    q = q[:, :: call.gamma]
    s = _shape(call, q, pages, table)
    width = padded(call.k_blocks, LANES)
    results = ((width, "int32"), (width, "float32"))
    aside = prefill_fold.Aside(results, functools.partial(_empty, s, call), functools.partial(_offer_tile, s, call), _lists)
    found = prefill_fold.launch(
        *(s, "query_sparse_attention", functools.partial(_walk, s), q, pages, table, starts, lengths), aside=aside, interpret=interpret
    )
    out, lse, *lists = found
    return out, lse, *(x[..., : call.k_blocks] for x in lists)


def _walk(s: prefill_fold.Shape, tile: prefill_fold.Tile, _) -> prefill_fold.Walk:
    """Every tile of keys up to the last measured query. Rows in the padding see nothing."""

    def first(step, piece):
        return step * s.key_tile + piece * s.piece

    def seen(_, pos, query_pos):
        return (pos >= 0) & (pos <= query_pos) & (query_pos < tile.length)

    return prefill_fold.Walk(div(tile.end + (s.key_tile - 1), s.key_tile), first, seen)


class _Slots(NamedTuple):
    """The state of rows: ids and scores by lane, `[rows, lanes]` (lanes that are no slot are empty and never taken),
    and which bucket's turn it is, `[rows, 1]`. Empty slots: `_EMPTY` and -inf."""

    ids: jax.Array
    scores: jax.Array
    turn: jax.Array


def _empty(s: prefill_fold.Shape, call: Call) -> _Slots:
    shape = (s.rows, padded(call.k_blocks, LANES))
    return _Slots(jnp.full(shape, _EMPTY, jnp.int32), jnp.full(shape, -jnp.inf, jnp.float32), jnp.zeros((s.rows, 1), jnp.int32))


def _lists(slots: _Slots):
    return jnp.where(slots.ids == _EMPTY, -1, slots.ids), slots.scores


def _offer_tile(s: prefill_fold.Shape, call: Call, step, logits, query_pos, slots: _Slots) -> _Slots:
    """Offer the blocks of a tile of keys, in order."""
    size, begin, end = call.block_size, 0, div(query_pos, call.block_size) + 1
    if call.window is not None:
        begin, outside = call.window[0] // size, query_pos - call.window[1]
        end = jnp.where(outside >= 0, div(jnp.maximum(outside, 0), size) + 1, 0)
    for i in range(s.key_tile // size):
        block, score = step * (s.key_tile // size) + i, _block_score(logits, i * size, size)
        slots = _offer(call, slots, score, block, (block >= begin) & (block < end) & (score > -jnp.inf))
    return slots


def _block_score(logits, start: int, size: int):
    """Log-sum-exp of the columns from start on, `[rows, 1]`."""
    aligned = start // LANES * LANES
    near = logits[
        :, aligned : min(padded(start + size, LANES), logits.shape[1])
    ]  # whole tiles of lanes, because slicing inside one would move data
    if near.shape[1] != size:
        at = aligned + jax.lax.broadcasted_iota(jnp.int32, (1, near.shape[1]), 1)
        near = jnp.where((at >= start) & (at < start + size), near, -jnp.inf)
    top = near.max(1, keepdims=True)
    shift = jnp.where(top == -jnp.inf, 0.0, top)  # -inf minus -inf would be NaN
    return top + jnp.log(jnp.where(top == -jnp.inf, 1.0, jnp.exp(near - shift).sum(1, keepdims=True)))


def _offer(call: Call, slots: _Slots, score, block, offered) -> _Slots:
    """Offer one block to every row: to the exact slots, then what they lose to the buckets."""
    lane = jax.lax.broadcasted_iota(jnp.int32, (1, slots.ids.shape[1]), 1)
    ids, scores, turn = slots
    block = jnp.full(score.shape, block, jnp.int32)
    if call.k_exact:
        exact = lane < call.k_exact
        worst_score = jnp.where(exact, scores, jnp.inf).min(1, keepdims=True)
        lowest = exact & (scores == worst_score)
        worst_id = jnp.where(lowest, ids, -2).max(1, keepdims=True)
        worst = jnp.where(lowest & (ids == worst_id), lane, ids.shape[1]).min(1, keepdims=True)
        take = offered & (score > worst_score)
        here = take & (lane == worst)
        ids, scores = jnp.where(here, block, ids), jnp.where(here, score, scores)
        score, block = jnp.where(take, worst_score, score), jnp.where(take, worst_id, block)
        offered &= block != _EMPTY
    buckets = call.k_blocks - call.k_exact
    if buckets:
        is_turn = lane == call.k_exact + turn
        held = jnp.where(is_turn, scores, -jnp.inf).max(1, keepdims=True)
        here = is_turn & offered & (score > held)
        ids, scores = jnp.where(here, block, ids), jnp.where(here, score, scores)
        following = jnp.where(turn + 1 == buckets, 0, turn + 1)
        turn = jnp.where(offered, following, turn)
    return _Slots(ids, scores, turn)
