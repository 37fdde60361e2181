"""select_blocks for any backend.

Scores are one matrix product per KV head: sum_d max(q_d max_d, q_d min_d) = relu(q) . max - relu(-q) . min, so the two rows of the bounds
lie side by side against the two halves of the query. Memory traffic: the index of the B * M pages that the tables name, read once.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.select_blocks.api import selection_width

_NONE = jnp.iinfo(jnp.int32).max  # sorts behind every block


@functools.partial(jax.jit, static_argnames=("kind",))
def score_blocks(
    q: Float[Array, "B T H D"], index: Float[Array, "N K nb R D"], page_table: Int[Array, "B M"], *, kind: str
) -> Float[Array, "B K M*nb"]:
    """Score of every block of the tables for every KV head, float32, the maximum over the T queries; see `select_blocks`.

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
    read = index[jnp.maximum(page_table, 0)[:, None, :], heads]
    read = read.reshape(batch, num_kv_heads, -1, q.shape[-1])  # the rows of the index side by side
    dtype = jnp.promote_types(q.dtype, read.dtype)
    scores = jnp.einsum(
        "btkgd,bksd->bktgs",
        q.astype(dtype),
        read.astype(dtype),
        precision=jax.lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    )
    return scores.max(axis=(2, 3))


@functools.partial(jax.jit, static_argnames=("kind", "page_size", "block_size", "k", "sink", "local", "top_k"))
def select_blocks(
    q: Float[Array, "B T H D"],
    index: Float[Array, "N K P/bs R D"],
    page_table: Int[Array, "B M"],
    lengths: Int[Array, "B"],
    *,
    kind: str,
    page_size: int,
    block_size: int,
    k: int,
    sink: int,
    local: int,
    top_k: Callable = jax.lax.top_k,
) -> Int[Array, "B K W"]:
    """See `pallas_kernels.select_blocks.select_blocks`."""
    num_queries, per_page = q.shape[1], page_size // block_size
    lengths = lengths[:, None]
    last = jnp.where(lengths > 0, (lengths - 1) // block_size, -1)
    open_page = (lengths - num_queries) // page_size * per_page
    first_local = jnp.clip(jnp.minimum(last - local + 1, open_page), 0)

    written = (lengths - num_queries + jnp.arange(num_queries) >= 0)[..., None, None]
    scores = score_blocks(jnp.where(written, q, q[:, -1:]), index, page_table, kind=kind)
    block = jnp.arange(scores.shape[-1], dtype=jnp.int32)
    candidate = (block >= sink) & (block < first_local) & (jnp.repeat(page_table, per_page, axis=1) >= 0)
    distant = _best(scores, candidate[:, None, :], k, top_k)

    at_start = jnp.arange(sink, dtype=jnp.int32)
    at_start = jnp.where(at_start < first_local, at_start, _NONE)
    width = selection_width(num_queries, page_size=page_size, block_size=block_size, k=k, sink=sink, local=local)
    at_end = first_local + jnp.arange(width - sink - k, dtype=jnp.int32)
    at_end = jnp.where(at_end <= last, at_end, _NONE)
    always = jnp.concatenate([at_start, at_end], axis=1)[:, None, :]
    always = jnp.broadcast_to(always, (*distant.shape[:2], always.shape[-1]))
    ids = jnp.sort(jnp.concatenate([always, distant], axis=-1), axis=-1)
    return jnp.where(ids == _NONE, -1, ids)


def _best(scores: Float[Array, "B K S"], candidate: Array, k: int, top_k: Callable) -> Int[Array, "B K k"]:
    """The k best candidates, in no order that matters; `_NONE` where there are fewer. top_k: as `jax.lax.top_k`."""
    lowest = jnp.finfo(jnp.float32).min
    scores = jnp.where(scores >= lowest, scores, lowest)  # NaN and -inf
    scores = jnp.where(scores == 0, 0.0, scores)  # -0.0 and 0.0 are a tie
    kept = min(k, scores.shape[-1])
    scores = jnp.where(candidate, scores, -jnp.inf)
    best, ids = top_k(scores.reshape(-1, scores.shape[-1]), kept)
    ids = jnp.where(best == -jnp.inf, _NONE, ids).reshape(*scores.shape[:-1], kept)
    return jnp.pad(ids, ((0, 0), (0, 0), (0, k - kept)), constant_values=_NONE)
