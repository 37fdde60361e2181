"""gather_attention: signature, validation, dispatch."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels import dispatch, paged


def gather_attention(
    q: Float[Array, "B T H D"],
    k: Float[Array, "N K P D"],
    v: Float[Array, "N K P D"] | None,
    page_table: Int[Array, "B M"],
    lengths: Int[Array, "B"],
    *,
    blocks: Int[Array, "B K W"] | None = None,
    block_size: int | None = None,
    window: tuple[int, int] | None = None,
    value_dim: int | None = None,
    sm_scale: float,
    return_block_lse: bool = False,
    config: Any = None,
    implementation: str | None = None,
) -> tuple[Array, ...]:
    """Attention of a few queries per sequence over a list of blocks of its keys.

    q: T queries per sequence (1, or a few drafted tokens), heads of one KV head adjacent. k, v: the pool, one dtype; pages that no table
    names may hold anything, NaN too. page_table: int32, logical page -> physical page below N, -1 where there is none. lengths: int32,
    tokens written, those of the T queries included. All of q, k, v float32, bfloat16 or float16.

    Query t of row b stands at position lengths[b]-T+t and attends to the keys at or before it, so drafts are causal among themselves.

    blocks: int32, the logical blocks each KV head reads, each at most once, in any order, -1 anywhere = none; blocks that do not exist or
    have no page are skipped. None reads every block (dense). block_size: tokens per block, divides P (default P); it also sets the
    grain of the block LSE. window: (sink_tokens, window_tokens), of the keys listed only those at positions < sink_tokens or
    > query position - window_tokens are attended. value_dim: given with v=None, and only then: V is a view of K, the first value_dim of its
    D columns, which are read once (latent pages: D = latent + rotated part, K = 1). sm_scale: multiplies the logits. return_block_lse:
    return the third result.
    config: the implementation's own; "xla" takes `pallas_kernels.gather_attention.xla.Config`. implementation: see
    `pallas_kernels.dispatch`.

    Returns out `[B, T, H, D]` (`[B, T, H, value_dim]` where that is given) in q's dtype, lse `[B, T, H]` float32 (log-sum-exp of the scaled
    logits, natural log) and, if asked for, the same per listed block `[B, T, H, W]` (W = M * P / block_size when blocks is None). A query
    with nothing to read gives 0 and -inf.
    Memory: bounded by a tile of keys, see the implementation.

    Raises ValueError for arguments that do not fit together; NotImplementedError for an implementation that cannot run here.

    Source: "Attention Pays Its Bill" (BRL-2026-07) for gather-decode; StreamingLLM (arXiv 2309.17453) for sinks and window;
    DeepSeek-V2 (arXiv 2405.04434, section 2.1) for attention over latents.
    """
    paged.check(q, k, k if v is None else v, page_table, sm_scale, window, lengths=lengths)
    arrays = dispatch.signature(q=q, k=k, page_table=page_table, blocks=blocks)
    if (v is None) != (value_dim is not None):
        raise ValueError(f"give v, or v=None and value_dim (V is the first value_dim columns of K); got value_dim {value_dim!r}, {arrays}")
    if value_dim is not None and not (isinstance(value_dim, int) and 1 <= value_dim <= k.shape[3]):
        raise ValueError(f"value_dim must be an int from 1 to the head dim {k.shape[3]}, got {value_dim!r}; {arrays}")
    page_size = k.shape[2]
    block_size = page_size if block_size is None else block_size
    if block_size <= 0 or page_size % block_size:
        raise ValueError(f"block_size {block_size} does not divide the page size {page_size}; got {arrays}")
    if blocks is not None and (blocks.ndim != 3 or blocks.shape[:2] != (q.shape[0], k.shape[1]) or blocks.shape[2] == 0):
        raise ValueError(f"blocks must be [B={q.shape[0]}, K={k.shape[1]}, W >= 1]; got {arrays}")
    if blocks is not None and blocks.dtype != jnp.int32:
        raise ValueError(f"blocks must be int32; got {arrays}")
    static = {"block_size": block_size, "window": window, "sm_scale": sm_scale, "return_block_lse": return_block_lse, "config": config}
    static |= {"blocks": blocks, "value_dim": value_dim}
    signature = f"{arrays} block_size {block_size} window {window}" + (f" value_dim {value_dim}" if v is None else "")
    name = dispatch.choose("gather_attention", implementation, signature, (q, k, v, page_table, lengths), static)
    return dispatch.load("gather_attention", name)(q, k, v, page_table, lengths, **static)
