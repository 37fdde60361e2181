"""append_tokens: signature, validation, dispatch."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels import dispatch
from pallas_kernels.page_index import INDEX_ROWS

Kinds = tuple[tuple[str, str, int], ...]
"""The indexes to build: (key of `indexes`, kind of `page_index`, block size in tokens)."""

Written = tuple[Float[Array, "N K P D"], Float[Array, "N K P D"], dict[str, Float[Array, "N K nb R D"]]]


def append_tokens(
    k_pages: Float[Array, "N K P D"],
    v_pages: Float[Array, "N K P D"],
    indexes: dict[str, Float[Array, "N K nb R D"]],
    k: Float[Array, "B T K D"],
    v: Float[Array, "B T K D"],
    positions: Int[Array, "B T"],
    valid: Bool[Array, "B T"],
    page_table: Int[Array, "B M"],
    *,
    kinds: Kinds,
    config: Any = None,
    implementation: str | None = None,
) -> Written:
    """Write the valid tokens at their positions, then seal each page whose last token is among them: build its indexes from its keys.

    k_pages, v_pages: the pool, one dtype. indexes: of every page of the pool, in the pool's dtype; those that `kinds` does not name stay
    as they are. k, v: the new tokens, rounded to the pool's dtype. positions: int32, tokens from the start of the sequence; those of one
    row are consecutive. valid: tokens to write. page_table: int32, logical page -> physical page below N, -1 where there is none. A
    valid token whose page does not exist is dropped, not written elsewhere. No two rows may write to the same page.
    kinds: the indexes to build. config: the implementation's own; there is none so far. implementation: see `pallas_kernels.dispatch`.

    Returns the pool and the indexes as they are after. Under jit with the three donated the update is in place: what is read and
    written is the tokens, and the keys of the pages that fill, at most (T - 1) // P + 1 per row.

    Raises ValueError for arguments that do not fit together; NotImplementedError for an implementation that cannot run here.
    """
    _check(k_pages, v_pages, indexes, k, v, positions, valid, page_table, kinds)
    static = {"kinds": kinds, "config": config}
    arrays = (k_pages, v_pages, indexes, k, v, positions, valid, page_table)
    signature = f"{kinds} {dispatch.signature(k_pages=k_pages, k=k, page_table=page_table)}"
    name = dispatch.choose("append_tokens", implementation, signature, arrays, static)
    return dispatch.load("append_tokens", name)(*arrays, **static)


def _check(
    k_pages: jax.Array,
    v_pages: jax.Array,
    indexes: dict[str, jax.Array],
    k: jax.Array,
    v: jax.Array,
    positions: jax.Array,
    valid: jax.Array,
    page_table: jax.Array,
    kinds: Kinds,
) -> None:
    arrays = dispatch.signature(k_pages=k_pages, v_pages=v_pages, k=k, v=v, positions=positions, valid=valid, page_table=page_table)
    if k_pages.ndim != 4 or k.ndim != 4 or page_table.ndim != 2:
        raise ValueError(f"append_tokens takes k_pages, v_pages [N,K,P,D], k, v [B,T,K,D], page_table [B,M]; got {arrays}")
    if k_pages.shape != v_pages.shape or k_pages.dtype != v_pages.dtype or k.shape != v.shape:
        raise ValueError(f"k_pages and v_pages must have one shape and dtype, k and v one shape; got {arrays}")
    if not all(jnp.issubdtype(x.dtype, jnp.floating) for x in (k_pages, k, v)):
        raise ValueError(f"pages and tokens must be floating point; got {arrays}")
    if k.shape[2] != k_pages.shape[1] or k.shape[3] != k_pages.shape[3]:
        raise ValueError(f"tokens and pages must have the same KV heads and head dim; got {arrays}")
    if 0 in (*k_pages.shape, *k.shape, *page_table.shape):
        raise ValueError(f"no axis may be empty; got {arrays}")
    if not positions.shape == valid.shape == k.shape[:2] or page_table.shape[0] != k.shape[0]:
        raise ValueError(f"positions and valid must be [B,T], page_table [B,M] with the B and T of k; got {arrays}")
    if positions.dtype != jnp.int32 or page_table.dtype != jnp.int32 or valid.dtype != jnp.bool_:
        raise ValueError(f"positions and page_table must be int32, valid bool; got {arrays}")
    num_pages, num_kv_heads, page_size, head_dim = k_pages.shape
    for name, kind, block_size in kinds:
        if kind not in INDEX_ROWS:
            raise ValueError(f"index kind {kind!r} is unknown; there are {', '.join(sorted(INDEX_ROWS))}")
        if block_size <= 0 or page_size % block_size:
            raise ValueError(f"block_size {block_size} of index {name!r} does not divide the page size {page_size}")
        if name not in indexes:
            raise ValueError(f"there is no index {name!r}; there are {', '.join(sorted(indexes)) or 'none'}")
        shape, found = (num_pages, num_kv_heads, page_size // block_size, INDEX_ROWS[kind], head_dim), indexes[name]
        if found.shape != shape or found.dtype != k_pages.dtype:
            raise ValueError(f"index {name!r} must be {k_pages.dtype}{list(shape)}, got {found.dtype}{list(found.shape)}")
