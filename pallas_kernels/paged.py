"""What the attention ops share about paged keys and values: which arguments are valid, reading a tile, and what a query may see."""

from __future__ import annotations

import numbers

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels import dispatch

DTYPES = ("float32", "bfloat16", "float16")


def check(q: Array, k: Array, v: Array | None, page_table: Array, sm_scale: float, window: tuple[int, int] | None, **of_row: Array) -> None:
    """Raise ValueError, with every shape, unless the arguments that the attention ops share fit together.

    v: None for an op that reads keys only. of_row: int32 arrays `[B]` by name (lengths, starts).
    """
    pool = "k" if v is None else "k and v"
    arrays = dispatch.signature(q=q, k=k, v=v, page_table=page_table, **of_row)
    if q.ndim != 4 or k.ndim != 4 or page_table.ndim != 2 or any(x.ndim != 1 for x in of_row.values()):
        raise ValueError(f"needs q [B,T,H,D], {pool} [N,K,P,D], page_table [B,M], {' and '.join(of_row)} [B]; got {arrays}")
    if v is not None and (k.shape != v.shape or k.dtype != v.dtype):
        raise ValueError(f"k and v must have one shape and dtype; got {arrays}")
    if 0 in (*q.shape, *k.shape, *page_table.shape):
        raise ValueError(f"no axis of q, {pool} and page_table may be empty; got {arrays}")
    if q.shape[3] != k.shape[3] or q.shape[2] % k.shape[1]:
        raise ValueError(f"q heads must be a multiple of KV heads, and the head dims equal; got {arrays}")
    if any(x.shape[0] != q.shape[0] for x in (page_table, *of_row.values())):
        raise ValueError(f"q, page_table, {' and '.join(of_row)} must have the same batch; got {arrays}")
    if any(x.dtype != jnp.int32 for x in (page_table, *of_row.values())):
        raise ValueError(f"page_table, {' and '.join(of_row)} must be int32; got {arrays}")
    if q.dtype.name not in DTYPES or k.dtype.name not in DTYPES:
        raise ValueError(f"q, {pool} must be one of {', '.join(DTYPES)}; got {arrays}")
    if not isinstance(sm_scale, numbers.Real):
        raise ValueError(f"sm_scale must be a number known when compiling, got {sm_scale!r}")
    if window is not None:
        check_window(window)


def check_window(window: tuple[int, int]) -> None:
    """Raise ValueError unless window is a pair of ints, (sink_tokens >= 0, window_tokens >= 1)."""
    pair = isinstance(window, tuple) and len(window) == 2 and all(isinstance(n, int) for n in window)
    if not pair or window[0] < 0 or window[1] < 1:
        raise ValueError(f"window must be a tuple (sink_tokens >= 0, window_tokens >= 1), got {window!r}")


def physical(page_table: Int[Array, "B M"], logical: Int[Array, "B T"], valid: Bool[Array, "B T"], num_pages: int) -> Int[Array, "B T"]:
    """Physical page of each token, or `num_pages` (outside the pool, so that writes drop) where there is none."""
    page = jnp.take_along_axis(page_table, jnp.clip(logical, 0, page_table.shape[1] - 1), axis=1)
    there = valid & (logical >= 0) & (logical < page_table.shape[1]) & (page >= 0)
    return jnp.where(there, page, num_pages)


def read_tile(pool: Float[Array, "N K P D"], pages: Int[Array, "K n"], tokens: Int[Array, "K n"], size: int) -> Float[Array, "K n*size D"]:
    """For each KV head, `size` tokens of each of n pages, from the given token on; where pages is -1, whatever page 0 holds.

    Page, head and token are separate axes of one gather: no flat offset is formed, which could pass 2^31, and the pool is not
    reshaped, which can make XLA copy it.
    """
    num_kv_heads, head_dim = pool.shape[1], pool.shape[3]

    def one(head, page, token):
        return jax.lax.dynamic_slice(pool, (page, head, token, 0), (1, 1, size, head_dim))[0, 0]

    heads = jnp.arange(num_kv_heads, dtype=jnp.int32)
    blocks = jax.vmap(jax.vmap(one, in_axes=(None, 0, 0)))(heads, jnp.maximum(pages, 0), tokens)
    return blocks.reshape(num_kv_heads, -1, head_dim)


def visible(pos: Int[Array, "..."], query_pos: Int[Array, "..."], window: tuple[int, int] | None) -> Bool[Array, "..."]:
    """Whether a query may attend to a key: the key exists (pos >= 0), lies at or before the query, and inside the window."""
    seen = (pos >= 0) & (pos <= query_pos)
    if window is not None:
        seen &= (pos < window[0]) | (pos > query_pos - window[1])
    return seen
