"""append_tokens: signature, validation, dispatch."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.core import dispatch
from pallas_kernels.core.pages import Pages, check_frames, check_pages
from pallas_kernels.selection.page_index import INDEX_KINDS, index_dtype, index_shape

Kinds = tuple[tuple[str, str, int], ...]
"""The indexes to build: (key of `indexes`, kind of `page_index`, block size in tokens)."""

Indexes = dict[str, Float[Array, "N K nb R D"]]
"""Indexes of every page of a pool, by name."""


@dataclasses.dataclass(frozen=True)
class Call:
    """The static arguments of a call, as `append_tokens` explains them."""

    kinds: Kinds
    config: Any


def append_tokens(
    pages: Pages,
    indexes: Indexes,
    k: Float[Array, "B T K D"],
    v: Float[Array, "B T K Dv"] | None,
    positions: Int[Array, "B T"],
    valid: Bool[Array, "B T"],
    table: Int[Array, "B M"],
    *,
    kinds: Kinds,
    frames: Int[Array, "B M"] | None = None,
    config: Any = None,
    implementation: str | None = None,
) -> tuple[Pages, Indexes]:
    """Write the valid tokens at their positions. Then seal each page whose last token is among them: pack it, where
    pages are packed, and build its indexes from its keys, as they are read from then on.

    Args:
        pages: the pool. Packed ones need `open`: there tokens are written, each to the row of its page (`row_of`). From
            these rows a page that fills is packed to its frame, as `pack_pages` says. The rows stay as they are.
        indexes: rows of every page, by page id, in the dtype of the keys as they are read. Those that `kinds` does not
            name are returned unchanged.
        k, v: the new tokens, rounded to the pool's dtypes. v is None where V is a view of K.
        positions: int32, tokens from the start of the sequence; those of one row are consecutive.
        valid: tokens to write.
        table: int32, logical page -> page id, -1 where there is none. The page id says where the page's index rows are.
        kinds: the indexes to build.
        frames: int32, logical page -> frame below N, -1 where there is none. The frame says where the page's keys and
            values are. None: the frame of a page is its id.
        config: settings of the implementation; "mosaic_tpu" takes
            `pallas_kernels.cache.append_tokens.mosaic_tpu.Config`.
        implementation: see `pallas_kernels.core.dispatch`.

    A valid token whose page is missing in one of the tables, or has no row, is dropped, not written elsewhere. No two
    rows may write to the same page. Drafted tokens that fill a page seal it too: queries of the same step past the
    page's end read its index, and queries before its end read no index of it. If such tokens are dropped later, the
    page is open again, and its index rows, and what is packed of it, mean nothing until it fills again.

    Returns the updated pool and indexes. Under jit with both donated, the update is in place. It reads and writes only
    the tokens and the keys (and packed pages' values) of the pages that fill, at most (T - 1) // P + 1 per row.

    Raises ValueError for arguments that do not fit together; NotImplementedError for an implementation that cannot run
    here.
    """
    _check(pages, indexes, k, v, positions, valid, table, kinds, frames)
    signature = f"{kinds} {dispatch.signature(k_pages=pages.k, v_pages=pages.v, k=k, table=table, frames=frames)}"
    if pages.packed:
        signature += f" keys {pages.k_format} values {pages.v_format}"
    operands = (pages, indexes, k, v, positions, valid, table, frames)
    return dispatch.run("append_tokens", implementation, signature, Call(kinds, config), *operands)


def _check(
    pages: Pages,
    indexes: Indexes,
    k: jax.Array,
    v: jax.Array | None,
    positions: jax.Array,
    valid: jax.Array,
    table: jax.Array,
    kinds: Kinds,
    frames: jax.Array | None,
) -> None:
    check_pages(pages)
    if pages.packed and pages.open is None:
        raise ValueError("append_tokens writes to the open rows of packed pages: give pages with `open`, or pack whole pages by pack_pages")
    check_frames(table, frames)
    pools = {"k_pages": pages.k, "v_pages": pages.v}
    arrays = dispatch.signature(**pools, k=k, v=v, positions=positions, valid=valid, table=table)
    if (pages.v is None) != (v is None):
        raise ValueError(f"give v where the pages have one, and None where V is a view of K; got {arrays}")
    written = pages.open if pages.packed else pages
    tokens = [(k, written.k)] if v is None else [(k, written.k), (v, written.v)]
    if table.ndim != 2 or any(x.ndim != 4 for x, _ in tokens):
        raise ValueError(f"append_tokens takes pages, k [B,T,K,D], v [B,T,K,Dv], table [B,M]; got {arrays}")
    if any(x.shape[:2] != k.shape[:2] for x, _ in tokens):
        raise ValueError(f"k and v must have the same batch and tokens; got {arrays}")
    if not all(jnp.issubdtype(x.dtype, jnp.floating) for x, _ in tokens):
        raise ValueError(f"tokens must be floating point; got {arrays}")
    if any((x.shape[2], x.shape[3]) != (pool.shape[1], pool.shape[3]) for x, pool in tokens):
        raise ValueError(f"tokens and pages must have the same KV heads and head dim; got {arrays}")
    if 0 in (*k.shape, *table.shape):
        raise ValueError(f"no axis may be empty; got {arrays}")
    if not positions.shape == valid.shape == k.shape[:2] or table.shape[0] != k.shape[0]:
        raise ValueError(f"positions and valid must be [B,T], table [B,M] with the B and T of k; got {arrays}")
    if positions.dtype != jnp.int32 or table.dtype != jnp.int32 or valid.dtype != jnp.bool_:
        raise ValueError(f"positions and table must be int32, valid bool; got {arrays}")
    (num_pages, num_kv_heads, page_size, _), head_dim, dtype = pages.k.shape, pages.head_dim, pages.k_format.dtype
    for name, kind, block_size in kinds:
        if kind not in INDEX_KINDS:
            raise ValueError(f"index kind {kind!r} is unknown; there are {', '.join(sorted(INDEX_KINDS))}")
        if block_size <= 0 or page_size % block_size:
            raise ValueError(f"block_size {block_size} of index {name!r} does not divide the page size {page_size}")
        if name not in indexes:
            raise ValueError(f"there is no index {name!r}; there are {', '.join(sorted(indexes)) or 'none'}")
        found = indexes[name]
        count = num_pages if frames is None or not found.ndim else len(found)  # with `frames`, page ids have a number of their own
        shape = (count, num_kv_heads, page_size // block_size, *index_shape(kind, block_size, head_dim))
        if found.shape != shape or found.dtype != index_dtype(kind, dtype):
            raise ValueError(f"index {name!r} must be {index_dtype(kind, dtype)}{list(shape)}, got {found.dtype}{list(found.shape)}")
