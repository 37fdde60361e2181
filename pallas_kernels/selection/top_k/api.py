"""top_k: signature, validation, dispatch."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from pallas_kernels.core import dispatch


@dataclasses.dataclass(frozen=True)
class Call:
    """The static arguments of a call, as `top_k` explains them."""

    k: int
    sort: bool
    return_counts: bool
    config: Any


def top_k(
    scores: Float[Array, "B N"],
    k: int,
    *,
    hint: Int[Array, "B k"] | None = None,
    lengths: Int[Array, "B"] | None = None,
    sort: bool = False,
    return_counts: bool = False,
    config: Any = None,
    implementation: str | None = None,
) -> tuple[Array, ...]:
    """The k best of the first lengths[b] scores of each row b: by value, of equal values the lower index. Exact for
    every input.

    NaN ranks below every number, -inf included. NaNs are equal among themselves; -0 equals +0.

    Args:
        scores: float32, bfloat16 or float16. Scores at or past a row's length are not read.
        k: at least 1, may exceed N.
        hint: int32, indices that may be good, such as those of the step before. They may be stale, random, repeated, -1
            or out of range. They may change how long the op takes, never its result. "mosaic_gpu" reads them with
            `Config(start="hint")`, and starts from a sample of the row otherwise, which was the faster start. The other
            implementations never read them.
        lengths: int32, each from 0 to N (None: all of N). Other lengths are the caller's error, and that row's results
            then mean nothing. A compiled program cannot raise this error; it is raised where lengths are a numpy array.
        sort: False returns each row in ascending order of index, which is what a gather wants. True returns the best
            first, of equal values the lower index first.
        return_counts: return the third result, which only "mosaic_gpu" has.
        config: "mosaic_gpu" takes a `pallas_kernels.selection.top_k.plan.Config`, the others take none.
        implementation: see `pallas_kernels.core.dispatch`.

    Returns values `[B, k]` in the dtype of scores, with the bits of the row (a NaN keeps its bits, -0 stays -0), and
    indices `[B, k]` int32. Where a row has fewer than k entries, the last ones are value -inf, index -1, in either
    order. counts `[B, 7]` int32: passes over the row, candidates, rounds of refinement, then the clock cycles of four
    phases, as `pallas_kernels.selection.top_k.mosaic_gpu.COUNTS` names them. All results have the same bits every time,
    except the cycles. Memory: "xla" and "reference" take a few times that of scores, int32.

    Raises ValueError for arguments that do not fit together; NotImplementedError for what an implementation cannot do.

    Source: "Guess-Verify-Refine: Data-Aware Top-K for Sparse-Attention Decoding": the same set of values, but here ties
    go to the lower index.
    """
    arrays = dispatch.signature(scores=scores, hint=hint, lengths=lengths)
    if scores.ndim != 2 or 0 in scores.shape:
        raise ValueError(f"top_k takes scores [B, N], no axis empty; got {arrays}")
    if scores.dtype.name not in ("float32", "bfloat16", "float16"):
        raise ValueError(f"scores must be float32, bfloat16 or float16; got {arrays}")
    if isinstance(k, bool) or not isinstance(k, int | np.integer) or k < 1:
        raise ValueError(f"k must be a positive int, got {k!r}")
    batch, row = scores.shape
    if hint is not None and (hint.shape != (batch, k) or hint.dtype != jnp.int32):
        raise ValueError(f"hint must be int32 [{batch}, {k}], a place for each of the k results; got {arrays}")
    if lengths is not None and (lengths.shape != (batch,) or lengths.dtype != jnp.int32):
        raise ValueError(f"lengths must be int32 [{batch}], one per row of scores; got {arrays}")
    if isinstance(lengths, np.ndarray) and (lengths.min() < 0 or lengths.max() > row):
        raise ValueError(f"lengths must lie between 0 and {row}, the scores of a row; got {lengths.min()} to {lengths.max()}")
    call = Call(int(k), sort, return_counts, config)
    return dispatch.run("top_k", implementation, f"{arrays} {call}", call, scores, hint, lengths)
