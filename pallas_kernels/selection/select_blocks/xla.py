"""select_blocks for any backend.

Scores are one matrix product per KV head. Since sum_d max(q_d max_d, q_d min_d) = relu(q) . max - relu(-q) . min, the
two rows of the bounds side by side are multiplied by the two halves of the query. Memory traffic: the index of the B *
M pages that the tables name, read once.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.selection.select_blocks.api import Call

_NONE = jnp.iinfo(jnp.int32).max  # sorts behind every block


@functools.partial(jax.jit, static_argnames=("kind",))
def score_blocks(
    q: Float[Array, "B T H D"], index: Float[Array, "N K nb R D"], table: Int[Array, "B M"], *, kind: str
) -> Float[Array, "B T K M*nb"]:
    """Score of every block of the tables for every query and KV head, float32; see `select_blocks`.

    Scores of blocks whose page is -1 mean nothing.
    """
    batch, num_queries, num_heads, head_dim = q.shape
    num_kv_heads = index.shape[1]
    q = q.reshape(batch, num_queries, num_kv_heads, num_heads // num_kv_heads, head_dim)
    if kind == "mean":
        q = q.mean(axis=3, keepdims=True, dtype=jnp.float32)
    else:
        q = jnp.concatenate([jnp.maximum(q, 0), jnp.minimum(q, 0)], axis=-1)
    heads = jnp.arange(num_kv_heads)[None, :, None]
    read = index[jnp.maximum(table, 0)[:, None, :], heads]
    read = read.reshape(batch, num_kv_heads, -1, q.shape[-1])  # the rows of the index side by side
    dtype = jnp.promote_types(q.dtype, read.dtype)
    scores = jnp.einsum(
        "btkgd,bksd->btkgs",
        q.astype(dtype),
        read.astype(dtype),
        precision=jax.lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    )
    return scores.max(axis=3)


@functools.partial(jax.jit, static_argnames=("kind",))
def score_listed(
    q: Float[Array, "B T H D"], index: Float[Array, "N K nb R D"], places: Int[Array, "B T K W"], *, kind: str
) -> Float[Array, "B T K W"]:
    """Score of listed blocks, as `score_blocks` scores them. places: page * nb + block within the page; scores of -1
    mean nothing."""
    batch, num_queries, num_kv_heads, width = places.shape
    at, per_page = jnp.maximum(places, 0), index.shape[2]
    read = index[at // per_page, jnp.arange(num_kv_heads)[:, None], at % per_page].reshape(-1, 1, 1, *index.shape[3:])
    alone = q.reshape(batch * num_queries * num_kv_heads, 1, -1, q.shape[3])
    table = jnp.arange(places.size, dtype=jnp.int32).reshape(len(alone), width)
    return score_blocks(alone, read, table, kind=kind).reshape(places.shape)


@functools.partial(jax.jit, static_argnames=("call", "top_k"))
def select_blocks(
    call: Call,
    q: Float[Array, "B T H D"],
    index: Float[Array, "N K P/bs R D"],
    table: Int[Array, "B M"],
    lengths: Int[Array, "B"],
    *,
    top_k: Callable = jax.lax.top_k,
) -> Int[Array, "B T K W"]:
    """See `pallas_kernels.select_blocks`."""
    num_queries, page_size, block_size, sink, k = q.shape[1], call.page_size, call.block_size, call.sink, call.k
    per_page = page_size // block_size
    position = (lengths[:, None] - num_queries + jnp.arange(num_queries, dtype=jnp.int32))[..., None]  # [B, T, 1]
    last = jnp.where(position >= 0, position // block_size, -1)
    open_page = position // page_size * per_page
    first_local = jnp.clip(jnp.minimum(last - call.local + 1, open_page), 0)

    scores = score_blocks(q, index, table, kind=call.kind)
    block = jnp.arange(scores.shape[-1], dtype=jnp.int32)
    candidate = (block >= sink) & (block < first_local) & (jnp.repeat(table, per_page, axis=1) >= 0)[:, None]
    distant = _best(scores, candidate[:, :, None], k, top_k)

    at_start = jnp.arange(sink, dtype=jnp.int32)
    at_start = jnp.where(at_start < first_local, at_start, _NONE)
    at_end = first_local + jnp.arange(call.width - sink - k, dtype=jnp.int32)
    at_end = jnp.where(at_end <= last, at_end, _NONE)
    always = jnp.concatenate([at_start, at_end], axis=-1)[:, :, None]
    always = jnp.broadcast_to(always, (*distant.shape[:3], always.shape[-1]))
    ids = jnp.sort(jnp.concatenate([always, distant], axis=-1), axis=-1)
    return jnp.where(ids == _NONE, -1, ids)


def _best(scores: Float[Array, "B T K S"], candidate: Array, k: int, top_k: Callable) -> Int[Array, "B T K k"]:
    """The k best candidates, in no order that matters; `_NONE` where there are fewer. top_k: as `jax.lax.top_k`."""
    lowest = jnp.finfo(jnp.float32).min
    scores = jnp.where(scores >= lowest, scores, lowest)  # NaN and -inf
    scores = jnp.where(scores == 0, 0.0, scores)  # -0.0 and 0.0 are a tie
    kept = min(k, scores.shape[-1])
    scores = jnp.where(candidate, scores, -jnp.inf)
    best, ids = top_k(scores.reshape(-1, scores.shape[-1]), kept)
    ids = jnp.where(best == -jnp.inf, _NONE, ids).reshape(*scores.shape[:-1], kept)
    return jnp.pad(ids, ((0, 0), (0, 0), (0, 0), (0, k - kept)), constant_values=_NONE)
