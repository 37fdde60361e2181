"""Lists of ids: those that are always read, and the best of candidates, such as those that several devices found in
their own pages."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Int32

from kvjax.policies.decode.base import Blocks, SelectContext

_NONE = jnp.iinfo(jnp.int32).max  # sorts behind every id
FEW = 512
"""So many entries are put in order by comparing all pairs, which XLA fuses into a few small kernels; more are
sorted."""


def ascending(ids: Int[Array, "... n"]) -> Int32[Array, "... n"]:
    """Ids in order, and -1 at the end."""
    ids = jnp.where(ids < 0, _NONE, ids).astype(jnp.int32)
    if ids.shape[-1] > FEW:
        ids = jnp.sort(ids, axis=-1)
        return jnp.where(ids == _NONE, -1, ids)
    earlier = jnp.tri(ids.shape[-1], k=-1, dtype=bool)  # of equal ids the first comes first
    before = (ids[..., None, :] < ids[..., None]) | ((ids[..., None, :] == ids[..., None]) & earlier)
    return _placed(jnp.where(ids == _NONE, -1, ids), before.sum(axis=-1), ids.shape[-1], -1)


def _placed(values: Array, places: Int[Array, "... n"], width: int, none: float) -> Array:
    """`[..., width]`: at each place its value; `none`, which no value is below, where there is none. No two values have
    the same place."""
    there = places[..., None, :] == jnp.arange(width, dtype=places.dtype)[:, None]
    return jnp.max(jnp.where(there, values[..., None, :], none), axis=-1, initial=none)


def always_read(
    ctx: SelectContext, num_queries: int, *, block_size: int, sink: int, local: int
) -> tuple[Int32[Array, "B T 1 A"], Int32[Array, "B T 1 1"]]:
    """Sink and local blocks of each query, -1 where there is none, and its first local block, as
    `pallas_kernels.select_blocks` defines them. A = sink + the most local blocks that there can be."""
    per_page = ctx.page_size // block_size
    positions = (ctx.lengths[:, None] - num_queries + jnp.arange(num_queries, dtype=jnp.int32))[..., None, None]
    newest = jnp.where(positions >= 0, positions // block_size, -1)
    first_local = jnp.clip(jnp.minimum(newest - local + 1, positions // ctx.page_size * per_page), 0)
    return _ends(first_local, newest, sink, max(local, per_page)), first_local


def _ends(first_local: Int[Array, "*B 1"], newest: Int[Array, "*B 1"], sink: int, room: int) -> Int32[Array, "*B A"]:
    """`sink` ids from 0 on, before `first_local`, and those from there up to `newest`, at most `room`; -1 for
    others."""
    sinks, ends = jnp.arange(sink, dtype=jnp.int32), first_local + jnp.arange(room, dtype=jnp.int32)
    return jnp.concatenate([jnp.where(sinks < first_local, sinks, -1), jnp.where(ends <= newest, ends, -1)], axis=-1)


def ranked(scores: Float[Array, "... n"], ids: Int[Array, "... n"], k: int) -> tuple[Float[Array, "... k"], Int32[Array, "... k"]]:
    """The k best scores, best first, and their ids; -inf and -1 where there are fewer. Of equal scores the lower id
    comes first.

    ids: each at most once, -1 for none. NaN and -inf count as the lowest finite score, 0.0 and -0.0 are equal, as in
    `pallas_kernels.select_blocks`.
    """
    width, lowest = min(k, scores.shape[-1]), jnp.finfo(scores.dtype).min
    scores = jnp.where(scores >= lowest, scores, lowest)
    scores = jnp.where(ids >= 0, jnp.where(scores == 0, 0.0, scores), -jnp.inf)
    if scores.shape[-1] > FEW:
        order = jnp.argsort(jnp.where(ids < 0, _NONE, ids), axis=-1)
        scores, ids = (jnp.take_along_axis(x, order, axis=-1) for x in (scores, ids))
        best, places = jax.lax.top_k(scores, width)  # of equal scores the first, which has the lower id
        return best, jnp.where(best > -jnp.inf, jnp.take_along_axis(ids, places, axis=-1), -1)
    score, other = scores[..., None], scores[..., None, :]
    places = ((other > score) | ((other == score) & (ids[..., None, :] < ids[..., None]))).sum(axis=-1)
    places = jnp.where(ids >= 0, places, width)  # nowhere
    return _placed(scores, places, width, -jnp.inf), _placed(ids.astype(jnp.int32), places, width, -1)


def best_candidates(scores: Float[Array, "... n"], ids: Int[Array, "... n"], k: int) -> Int32[Array, "... k"]:
    """The ids of the k best scores, as `ranked` finds them, in no order that matters."""
    return ranked(scores, ids, k)[1]


def rows_of_blocks(page_table: Int[Array, "B M"], ids: Int[Array, "B T K n"], per_page: int) -> Int32[Array, "B T K n"]:
    """Places of blocks in an index whose pages have `per_page` blocks: page * per_page + block within the page; -1
    where there is none, or where its page is on another device."""
    at = jnp.maximum(ids, 0)
    pages = jnp.take_along_axis(page_table[:, None, None], at // per_page, axis=3)
    return jnp.where((ids >= 0) & (pages >= 0), pages * per_page + at % per_page, -1)


def largest_blocks(scores: Float[Array, "B K S"], ctx: SelectContext, *, k: int, sink: int, local: int, block_size: int) -> Blocks:
    """Sink, local and the `k` distant blocks of the largest scores, per KV head, for a step of one token, as
    `pallas_kernels.select_blocks` lists them. The last `local` blocks always include those of the open page."""
    if scores.ndim != 3:
        raise ValueError(f"scores must be [B, K, S], got {list(scores.shape)}")
    always, first_local = (x[:, 0] for x in always_read(ctx, 1, block_size=block_size, sink=sink, local=local))
    block = jnp.arange(scores.shape[2], dtype=jnp.int32)
    return Blocks(_joined(largest(scores, (block >= sink) & (block < first_local), k), always), block_size)


def largest(scores: Float[Array, "*B S"], candidates: Bool[Array, "*#B S"], k: int) -> Int32[Array, "*B k"]:
    """The `k` candidates of the largest scores, in no order that matters, -1 where there are fewer. Of equal scores the
    lower one wins. NaN and -inf count as the lowest finite score."""
    lowest = jnp.finfo(scores.dtype).min
    weighed = jnp.where(candidates, jnp.maximum(jnp.nan_to_num(scores, nan=lowest), lowest), -jnp.inf)
    best, chosen = jax.lax.top_k(weighed, min(k, scores.shape[-1]))
    return jnp.where(best > -jnp.inf, chosen, -1)


def with_ends(
    distant: Int[Array, "*B k"], first_local: Int[Array, "*#B 1"], newest: Int[Array, "*#B 1"], *, sink: int, room: int
) -> Int32[Array, "*B W"]:
    """A list: `sink` ids from 0 on and `distant` ones, all before `first_local`, and those from there up to `newest`,
    at most `room`."""
    return _joined(distant, _ends(first_local, newest, sink, room))


def _joined(distant: Int[Array, "*B k"], always: Int[Array, "*#B A"]) -> Int32[Array, "*B W"]:
    return ascending(jnp.concatenate([jnp.broadcast_to(always, (*distant.shape[:-1], always.shape[-1])), distant], axis=-1))
