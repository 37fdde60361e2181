"""indexer_scores: signature, validation, dispatch."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int

from pallas_kernels.core import dispatch
from pallas_kernels.core.pages import CODES

FP8 = "float8_e4m3fn"


@dataclasses.dataclass(frozen=True)
class Call:
    """The static arguments of a call, as `indexer_scores` explains them."""

    config: Any


def indexer_scores(
    q: Float[Array, "B T H D"],
    weights: Float32[Array, "B T H"],
    keys: Float[Array, "N P D"],
    table: Int[Array, "B M"],
    lengths: Int[Array, "B"],
    *,
    scales: Float32[Array, "N P"] | None = None,
    config: Any = None,
    implementation: str | None = None,
) -> Float32[Array, "B T M*P"]:
    """Score of every token of a sequence for each of its T queries: sum over heads h of weights_h * max(0, q_h . key).

    Query t of row b stands at position lengths[b]-T+t. A token after it, past the row's length, or without a page
    scores -inf, so that top-k never prefers it to a token that is there.

    Args:
        q: the indexer's queries, float32, bfloat16 or float16.
        weights: float32, of either sign; factors that do not depend on the key (1/sqrt(D), 1/sqrt(H)) belong here.
        keys: the pool of indexer keys, one head of D; q's dtypes, or float8_e4m3fn with `scales`. Pages that no table
            names may hold anything.
        table: int32, logical page -> page id below N, -1 where there is none.
        lengths: int32, tokens written, those of the T queries included.
        scales: one per token, positive: key = code * scale (`quantize_keys`).
        config: settings of the implementation; "xla" takes `pallas_kernels.selection.indexer_scores.xla.Config`.
        implementation: see `pallas_kernels.core.dispatch`.

    Returns float32 scores `[B, T, M*P]`, position s of the sequence at index s. Products and sums are float32. Memory:
    the scores, and a tile of keys with its `B * T * H` dot products per key. Reads every key of the sequences once: 2 D
    bytes per token, D + 4 with float8.

    Raises ValueError for arguments that do not fit together; NotImplementedError for an implementation that cannot run
    here.

    Source: DeepSeek-V3.2-Exp technical report (DeepSeek-AI, 2025), section 1, equation (1).
    """
    arrays = dispatch.signature(q=q, weights=weights, keys=keys, scales=scales, table=table, lengths=lengths)
    if (q.ndim, weights.ndim, keys.ndim, table.ndim, lengths.ndim) != (4, 3, 3, 2, 1):
        raise ValueError(f"needs q [B,T,H,D], weights [B,T,H], keys [N,P,D], table [B,M], lengths [B]; got {arrays}")
    if 0 in (*q.shape, *keys.shape, *table.shape):
        raise ValueError(f"no axis of q, keys and table may be empty; got {arrays}")
    if weights.shape != q.shape[:3] or keys.shape[2] != q.shape[3]:
        raise ValueError(f"weights must be [B,T,H] of q, and the dims of q and keys equal; got {arrays}")
    if not q.shape[0] == table.shape[0] == lengths.shape[0]:
        raise ValueError(f"q, table and lengths must have the same batch; got {arrays}")
    if table.dtype != jnp.int32 or lengths.dtype != jnp.int32 or weights.dtype != jnp.float32:
        raise ValueError(f"table and lengths must be int32, weights float32; got {arrays}")
    if q.dtype.name not in CODES or keys.dtype.name not in (*CODES, FP8):
        raise ValueError(f"q must be one of {', '.join(CODES)}, keys one of those or {FP8}; got {arrays}")
    if (keys.dtype.name == FP8) != (scales is not None):
        raise ValueError(f"keys of {FP8} need scales, others take none; got {arrays}")
    if scales is not None and (scales.shape != keys.shape[:2] or scales.dtype != jnp.float32):
        raise ValueError(f"scales must be float32 [N,P] of keys; got {arrays}")
    return dispatch.run("indexer_scores", implementation, arrays, Call(config), q, weights, keys, table, lengths, scales)
