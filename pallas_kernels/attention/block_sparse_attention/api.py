"""block_sparse_attention: signature, validation, dispatch."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.core import dispatch
from pallas_kernels.core.pages import Pages, check, check_scale, check_window
from pallas_kernels.core.soft_cap import Scale


@dataclasses.dataclass(frozen=True)
class Call:
    """The static arguments of a call, as `block_sparse_attention` explains them."""

    block_size: int
    query_tile: int
    window: tuple[int, int] | None
    sm_scale: Scale
    config: Any

    def __post_init__(self):
        check_scale(self.sm_scale)
        check_window(self.window)
        if not isinstance(self.query_tile, int):
            raise ValueError(f"query_tile must be an int, got {self.query_tile!r}")
        if self.query_tile <= 0:
            raise ValueError(f"query_tile must be at least 1 query, got {self.query_tile}")


def block_sparse_attention(
    q: Float[Array, "B T H D"],
    pages: Pages,
    table: Int[Array, "B M"],
    starts: Int[Array, "B"],
    lengths: Int[Array, "B"],
    *,
    blocks: Int[Array, "B C H W"],
    block_size: int,
    query_tile: int,
    window: tuple[int, int] | None = None,
    sm_scale: Scale,
    config: Any = None,
    implementation: str | None = None,
) -> tuple[Float[Array, "B T H Dv"], Float[Array, "B T H"]]:
    """Causal attention of a chunk of queries per sequence, each tile of queries over its own list of key blocks.

    Args:
        q, pages, table, starts, lengths: as for `flash_attention`: T consecutive tokens of each sequence from position
            starts[b] on, over pages that hold `lengths` tokens, the chunk's own included. Pages that no table names and
            tokens that nothing wrote may hold anything, NaN too.
        blocks: int32, the logical blocks to read, per tile of `query_tile` consecutive queries (C = ceil(T /
            query_tile); the last tile may be shorter) and per query head. Each block is listed at most once, in any
            order; -1 anywhere = none. Blocks that do not exist, have no page or lie after the queries are skipped. A
            list ends at its last entry that is not -1: trailing -1 cost nothing.
        block_size: tokens per block, divides P.
        query_tile: queries per tile, at least 1.
        window: (sink_tokens, window_tokens). Keys at positions < sink_tokens or > query position - window_tokens are
            read too, whether listed or not, and once only. None adds none.
        sm_scale: multiplies the logits, or a `pallas_kernels.core.soft_cap.SoftCap`.
        config: settings of the implementation; "xla" and "mosaic_tpu" take the `Config` of
            `pallas_kernels.attention.block_sparse_attention.xla` and `.mosaic_tpu`.
        implementation: see `pallas_kernels.core.dispatch`.

    Returns out `[B, T, H, Dv]` in q's dtype and lse `[B, T, H]` float32 (log-sum-exp of the scaled logits that were
    read, natural log). A query with nothing to read gives 0 and -inf. Queries at or past `lengths` (padding) give
    finite values that mean nothing.

    Memory: that of q and out, and a tile; never T x S. Over packed pages, "mosaic_gpu" may take up to 2^28 bytes for
    their numbers.

    Raises ValueError for arguments that do not fit together; NotImplementedError for an implementation that cannot run
    here.

    Source: "Measure Once, Mask Once: Delta Refined Block Sparse Attention", Algorithm 1, step 3.
    """
    check(q, pages, table, starts=starts, lengths=lengths)
    call = Call(block_size, query_tile, window, sm_scale, config)
    arrays = dispatch.signature(q=q, **pages.arrays, table=table, blocks=blocks)
    if block_size <= 0 or pages.page_size % block_size:
        raise ValueError(f"block_size {block_size} does not divide the page size {pages.page_size}; got {arrays}")
    tiles = -(-q.shape[1] // query_tile)
    if blocks.ndim != 4 or blocks.shape[:3] != (q.shape[0], tiles, q.shape[2]) or blocks.shape[3] == 0:
        raise ValueError(f"blocks must be [B={q.shape[0]}, C={tiles} tiles of {query_tile} queries, H={q.shape[2]}, W >= 1]; got {arrays}")
    if blocks.dtype != jnp.int32:
        raise ValueError(f"blocks must be int32; got {arrays}")
    signature = f"{arrays} block_size {block_size} query_tile {query_tile} window {window}"
    return dispatch.run("block_sparse_attention", implementation, signature, call, q, pages, table, starts, lengths, blocks)
