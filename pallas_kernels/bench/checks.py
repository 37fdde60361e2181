"""Checks of timed results: errors against float32 references that stream over spans, so that a million tokens fit in
memory."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from pallas_kernels.core.page_format import PageFormat, unpack
from pallas_kernels.core.pages import Pages

SPAN = 4096
"""Tokens of every row and KV head that are converted to float32 at a time."""


@functools.partial(jax.jit, static_argnames=("block_size", "sm_scale"))
def streamed_attention(
    q: Float[Array, "B 1 H D"],
    pages: Pages,
    page_table: Int[Array, "B M"],
    lengths: Int[Array, "B"],
    blocks: Int[Array, "B K W"],
    *,
    block_size: int,
    sm_scale: float,
) -> tuple[Float[Array, "B 1 H D"], Float[Array, "B 1 H"]]:
    """Attention of one query per row over listed blocks and its LSE, in float32 throughout: two passes over spans of
    the list.

    The first pass finds each row's largest logit, the second sums. Written independently of the ops that it checks. -1
    lists no block.
    """
    batch, _, heads, head_dim = q.shape
    kv_heads, page_size, width = pages.kv_heads, pages.page_size, blocks.shape[2]
    per_span = min(width, max(1, SPAN // block_size))
    spans = -(-width // per_span)
    listed = jnp.pad(blocks, ((0, 0), (0, 0), (0, spans * per_span - width)), constant_values=-1)
    q = q.reshape(batch, kv_heads, heads // kv_heads, head_dim).astype(jnp.float32)
    own = ((lengths - 1) // page_size * page_size)[:, None, None, None]

    def read(i):
        ids = jax.lax.dynamic_slice_in_dim(listed, i * per_span, per_span, axis=2)
        pos = ids[..., None] * block_size + jnp.arange(block_size)
        there = (ids[..., None] >= 0) & (pos < lengths[:, None, None, None])
        page_ids = jnp.take_along_axis(page_table[:, None], jnp.maximum(ids, 0) * block_size // page_size, axis=2)[..., None]
        head = jnp.arange(kv_heads)[None, :, None, None]
        at = (jnp.maximum(page_ids, 0), head, jnp.maximum(pos, 0) % page_size)
        keys, values = (jnp.where(there[..., None], x, 0) for x in _numbers(pages, at, pos >= own))
        logits = jnp.einsum("bkgd,bkwsd->bkgws", q, keys, precision="highest") * sm_scale
        return jnp.where(there[:, :, None], logits, -jnp.inf), values

    def highest(i, most):
        return jnp.maximum(most, read(i)[0].max((-1, -2)))

    def add(i, sums):
        logits, values = read(i)
        weights = jnp.exp(logits - most[..., None, None])
        weighted = jnp.einsum("bkgws,bkwsd->bkgd", weights, values, precision="highest")
        return sums[0] + weights.sum((-1, -2)), sums[1] + weighted

    most = jax.lax.fori_loop(0, spans, highest, jnp.full(q.shape[:3], -jnp.inf))
    total, weighted = jax.lax.fori_loop(0, spans, add, (jnp.zeros(q.shape[:3]), jnp.zeros(q.shape)))
    out, lse = weighted / total[..., None], most + jnp.log(total)
    return out.reshape(batch, 1, heads, head_dim), lse.reshape(batch, 1, heads)


def _numbers(pages: Pages, at: tuple[Array, Array, Array], own: Array) -> list[Array]:
    """Keys and values at (page, head, token) in float32, not rounded on the way from codes. own: where they are of the
    query's own page."""
    found = []
    for codes, scales, format in ((pages.k, pages.k_scales, pages.k_packed), (pages.v, pages.v_scales, pages.v_packed)):
        if format is None:
            found.append(codes[at].astype(jnp.float32))
            continue
        exact = dataclasses.replace(format, read_as="float32")
        of_token = None if scales is None else scales[(*at[:2], at[2] if _per_token(format) else 0)]
        found.append(unpack(exact, codes[at], of_token))
    if pages.open is not None:
        rows = (jnp.maximum(pages.open.row_of[at[0]], 0), *at[1:])
        pools = pages.open.k, pages.open.v
        found = [jnp.where(own[..., None], pool[rows].astype(jnp.float32), x) for pool, x in zip(pools, found, strict=True)]
    return found


def _per_token(format: PageFormat) -> bool:
    return format.scale not in ("channel", "page")


def every_block(batch: int, kv_heads: int, count: int) -> Int[Array, "B K W"]:
    """The list of all blocks."""
    return jnp.broadcast_to(jnp.arange(count, dtype=jnp.int32), (batch, kv_heads, count))


def row_error(out: Array, ref: Array) -> float:
    """The largest ||out - ref|| / ||ref|| of a row (last axis); infinite where anything is not finite."""
    out, ref = np.asarray(out, np.float64), np.asarray(ref, np.float64)
    if out.shape != ref.shape or not np.isfinite(out).all():
        return float("inf")
    return float((np.linalg.norm(out - ref, axis=-1) / np.linalg.norm(ref, axis=-1)).max())


def largest_difference(a: Array, b: Array) -> float:
    """max |a - b|."""
    return float(np.abs(np.asarray(a, np.float64) - np.asarray(b, np.float64)).max())


def same_bits(a: Any, b: Any) -> bool:
    """Whether two results are equal bit for bit."""
    return all(np.asarray(x).tobytes() == np.asarray(y).tobytes() for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True))


def shared_entries(blocks: Int[Array, "B K W"], other: Int[Array, "B K W"]) -> float:
    """Share of the blocks listed in `other` that are in the same row and head of `blocks`; 0 where one of them lists
    more."""
    blocks, other = np.asarray(blocks), np.asarray(other)
    pairs = list(zip(blocks.reshape(-1, blocks.shape[-1]), other.reshape(-1, other.shape[-1]), strict=True))
    shared = [len(set(a[a >= 0]) & set(b[b >= 0])) / max((a >= 0).sum(), (b >= 0).sum(), 1) for a, b in pairs]
    return float(np.mean(shared))
