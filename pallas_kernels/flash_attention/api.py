"""flash_attention: signature, validation, dispatch."""

from __future__ import annotations

from typing import Any

from jaxtyping import Array, Float, Int

from pallas_kernels import dispatch, paged


def flash_attention(
    q: Float[Array, "B T H D"],
    k: Float[Array, "N K P D"],
    v: Float[Array, "N K P D"],
    page_table: Int[Array, "B M"],
    starts: Int[Array, "B"],
    lengths: Int[Array, "B"],
    *,
    window: tuple[int, int] | None = None,
    sm_scale: float,
    config: Any = None,
    implementation: str | None = None,
) -> tuple[Float[Array, "B T H D"], Float[Array, "B T H"]]:
    """Causal attention of a chunk of queries per sequence over all of its keys, those of the chunk included.

    q: T consecutive tokens of each sequence, heads of one KV head adjacent. k, v: the pool, one dtype, the chunk already written; pages
    that no table names, and tokens past `lengths`, may hold anything, NaN too. page_table: int32, logical page -> physical page below N, -1
    where there is none (those tokens are not attended). starts: int32, position of the chunk's first token, any token. lengths: int32,
    tokens written, the chunk's own included. All of q, k, v float32, bfloat16 or float16.

    Query t of row b stands at position starts[b]+t and attends to keys at or before it that are written. window: (sink_tokens,
    window_tokens), of these only keys at positions < sink_tokens or > query position - window_tokens. sm_scale: multiplies the logits.
    config: the implementation's own; "xla" takes `pallas_kernels.flash_attention.xla.Config`. implementation: see
    `pallas_kernels.dispatch`.

    Returns out `[B, T, H, D]` in q's dtype and lse `[B, T, H]` float32 (log-sum-exp of the scaled logits, natural log). A query with
    nothing to read gives 0 and -inf; queries at or past `lengths` (padding) give finite values that mean nothing. Memory: that of q and
    out, and a tile; never T x S.

    Raises ValueError for arguments that do not fit together; NotImplementedError for an implementation that cannot run here.

    Source: FlashAttention-2 (arXiv 2307.08691); StreamingLLM (arXiv 2309.17453) for sinks and window.
    """
    paged.check(q, k, v, page_table, sm_scale, window, starts=starts, lengths=lengths)
    signature = f"{dispatch.signature(q=q, k=k, page_table=page_table)} window {window}"
    operands, static = (q, k, v, page_table, starts, lengths), {"window": window, "sm_scale": sm_scale, "config": config}
    name = dispatch.choose("flash_attention", implementation, signature, operands, static)
    return dispatch.load("flash_attention", name)(*operands, **static)
