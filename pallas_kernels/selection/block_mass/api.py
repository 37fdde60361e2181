"""block_mass: signature, validation, dispatch."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int

from pallas_kernels.core import dispatch
from pallas_kernels.core.pages import Pages, check, check_scale
from pallas_kernels.core.soft_cap import Scale


@dataclasses.dataclass(frozen=True)
class Call:
    """The static arguments of a call, as `block_mass` explains them."""

    block_size: int
    sm_scale: Scale
    config: Any

    def __post_init__(self):
        check_scale(self.sm_scale)


def block_mass(
    q: Float[Array, "B T H D"],
    pages: Pages,
    table: Int[Array, "B M"],
    starts: Int[Array, "B"],
    lengths: Int[Array, "B"],
    lse: Float32[Array, "B T H"],
    first_query: Int[Array, "B"],
    *,
    block_size: int,
    sm_scale: Scale,
    config: Any = None,
    implementation: str | None = None,
) -> Float32[Array, "B H nb"]:
    """Attention that the queries of a chunk pay to each block of keys, summed over the queries. Policies learn it from
    prefill.

    Args:
        q, pages, table, starts, lengths: as for `flash_attention`: T consecutive tokens of each sequence from position
            starts[b] on, heads of one KV head adjacent, over pages that hold `lengths` tokens, the chunk's own
            included. Only keys are read. Pages that no table names, tokens past `lengths`, and queries at or past
            `lengths` (padding), with their lse, may hold anything, NaN too.
        lse: float32, log-sum-exp of each query's scaled logits, natural log, as `flash_attention` returns it. A query
            whose lse is -inf read nothing and adds nothing.
        first_query: int32, position of the first query that counts: 0 for all of the chunk's (H2O), lengths - n for the
            last n (SnapKV).
        block_size: tokens per block, divides P.
        sm_scale: multiplies the logits, or a `pallas_kernels.core.soft_cap.SoftCap`, positive or not.
        config: settings of the implementation; "xla" takes `pallas_kernels.selection.block_mass.xla.Config`.
        implementation: see `pallas_kernels.core.dispatch`.

    Returns mass `[B, H, M * P // block_size]` float32. For each query head it is the sum, over queries at positions p =
    starts[b] + t with first_query[b] <= p < lengths[b], of exp(sm_scale * q.k - lse) over the block's keys at or before
    p that are written and have a page. If lse covers exactly these keys, the mass of one query adds up to 1. Blocks
    that no query sees get 0. The same call gives the same bits.

    Memory: the result, a copy of q and lse, and a tile; never T x S. Traffic: keys once per query head (a CTA keeps its
    tile of them), and queries once per tile of keys, from the last-level cache.

    Raises ValueError for arguments that do not fit together; NotImplementedError for an implementation that cannot run
    here.

    Source: H2O (arXiv 2306.14048), accumulated attention; SnapKV (arXiv 2404.14469), attention of a window of the last
    queries.
    """
    check(q, pages, table, starts=starts, lengths=lengths, first_query=first_query)
    arrays = dispatch.signature(q=q, k=pages.k, table=table, lse=lse)
    if isinstance(block_size, bool) or not isinstance(block_size, int) or block_size <= 0 or pages.page_size % block_size:
        raise ValueError(f"block_size {block_size} does not divide the page size {pages.page_size}; got {arrays}")
    if lse.shape != q.shape[:3] or lse.dtype != jnp.float32:
        raise ValueError(f"lse must be float32 [B={q.shape[0]}, T={q.shape[1]}, H={q.shape[2]}]; got {arrays}")
    call, signature = Call(block_size, sm_scale, config), f"{arrays} block_size {block_size}"
    return dispatch.run("block_mass", implementation, signature, call, q, pages, table, starts, lengths, lse, first_query)
