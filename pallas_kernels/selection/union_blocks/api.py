"""union_blocks: signature, validation, dispatch."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.core import dispatch


@dataclasses.dataclass(frozen=True)
class Call:
    """The static arguments of a call, as `union_blocks` explains them."""

    rows: int
    k_trim: int
    rank: str
    num_blocks: int | None

    def __post_init__(self):
        if self.rank not in ("mean", "sum"):
            raise ValueError(f"rank must be 'mean' or 'sum', got {self.rank!r}")
        for name in ("rows", "k_trim", "num_blocks"):
            value = getattr(self, name)
            if (name, value) != ("num_blocks", None) and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise ValueError(f"{name} must be a positive int, got {value!r}")


def union_blocks(
    ids: Int[Array, "B R H k"],
    scores: Float[Array, "B R H k"],
    *,
    rows: int,
    k_trim: int,
    rank: str = "mean",
    num_blocks: int | None = None,
    implementation: str | None = None,
) -> Int[Array, "B U H W"]:
    """Per tile of `rows` consecutive rows: of the blocks that any of them chose, the k_trim best by mean score or by
    sum.

    Args:
        ids: int32, the blocks that each row chose, in any order, each at most once a row, -1 where there is none, as
            `query_sparse_attention` returns them.
        scores: float32, one per entry of ids. Scores beside -1 are not read.
        rows: rows per tile, chi / gamma in the paper. The last tile may have fewer, U = ceil(R / rows).
        k_trim: W, blocks that a tile may keep; rows * k keeps the whole union.
        rank: "mean" (Algorithm 2) or "sum", as below.
        num_blocks: all blocks are below this number. The kernel for GPUs needs it; None: unknown.
        implementation: see `pallas_kernels.core.dispatch`.

    A block's score, in float32, is summed over the rows that chose it in the order of the rows, and under "mean"
    divided by their number. A mean of logarithms does not show how many rows want a block, nor how much. The sum of
    exp(score - lse), the shares of attention that the rows pay it, does. Of equal scores the lower block is kept. NaN
    and -inf count as the lowest finite float32: they rank last, but before an empty entry.

    Returns blocks `[B, U, H, W]` int32: ascending, each once, -1 at the end. The bits are the same every time, whatever
    the order of a row's list. Memory: a few times that of the arguments.

    Raises ValueError for arguments that do not fit together; NotImplementedError for an implementation that cannot run
    here.

    Source: "Measure Once, Mask Once", section 3 (block mask union and trimming) and Algorithm 2.
    """
    arrays = dispatch.signature(ids=ids, scores=scores)
    if ids.ndim != 4 or ids.shape != scores.shape or 0 in ids.shape:
        raise ValueError(f"union_blocks takes ids and scores [B,R,H,k] of one shape, no axis empty; got {arrays}")
    if ids.dtype != jnp.int32 or scores.dtype != jnp.float32:
        raise ValueError(f"ids must be int32 and scores float32; got {arrays}")
    call = Call(rows, k_trim, rank, num_blocks)
    return dispatch.run("union_blocks", implementation, f"{arrays} {call}", call, ids, scores)
