"""gather_attention: signature, validation, dispatch."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.core import dispatch
from pallas_kernels.core.pages import Pages, as_rows, check, check_scale, check_window
from pallas_kernels.core.soft_cap import Scale


@dataclasses.dataclass(frozen=True)
class Call:
    """The static arguments of a call, as `gather_attention` explains them."""

    block_size: int
    window: tuple[int, int] | None
    sm_scale: Scale
    return_block_lse: bool
    config: Any

    def __post_init__(self):
        check_scale(self.sm_scale)
        check_window(self.window)


def gather_attention(
    q: Float[Array, "B T H D"],
    pages: Pages,
    table: Int[Array, "B M"],
    lengths: Int[Array, "B"],
    *,
    blocks: Int[Array, "B *T K W"] | None = None,
    block_frames: Int[Array, "B K W"] | None = None,
    block_size: int | None = None,
    window: tuple[int, int] | None = None,
    sm_scale: Scale,
    return_block_lse: bool = False,
    config: Any = None,
    implementation: str | None = None,
) -> tuple[Array, ...]:
    """Attention of a few queries per sequence over a list of blocks of its keys.

    Query t of row b stands at position lengths[b]-T+t. It attends to the keys at or before that position, so drafts are
    causal among themselves.

    Args:
        q: T queries per sequence (1, or a few drafted tokens), float32, bfloat16 or float16, heads of one KV head
            adjacent.
        pages: the pool; frames that no table names may hold anything, NaN too.
        table: int32, logical page -> frame below N, -1 where there is none.
        lengths: int32, tokens written, those of the T queries included.
        blocks: int32, the logical blocks that each KV head reads, each at most once, in any order, -1 anywhere = none.
            Blocks that do not exist or have no frame are not read; `pallas_kernels.core.pages.missing` counts them.
            `[B, K, W]` is one list for all T queries. `[B, T, K, W]` is one list per query: each query is then a row of
            its own, which shares the page table and reads its own list. None reads every block (dense).
        block_frames: int32, the frame of each listed block's page, -1 where there is none; the table is then not read.
            Only with one list for all T queries.
        block_size: tokens per block, divides P (default P). The block LSE has one value per block of this size.
        window: (sink_tokens, window_tokens). Of the listed keys, only those at positions < sink_tokens or > query
            position - window_tokens are attended.
        sm_scale: multiplies the logits, or a `pallas_kernels.core.soft_cap.SoftCap`.
        return_block_lse: return the third result.
        config: settings of the implementation, a `Config` of its module; give `implementation` with it.
        implementation: see `pallas_kernels.core.dispatch`.

    Returns out `[B, T, H, Dv]` in q's dtype, lse `[B, T, H]` float32 (log-sum-exp of the scaled logits, natural log)
    and, if asked for, the same per listed block `[B, T, H, W]` (W = M * P / block_size when blocks is None). A query
    with nothing to read gives 0 and -inf. Memory: bounded by a tile of keys, see the implementation.

    Raises ValueError for arguments that do not fit together; NotImplementedError for an implementation that cannot run
    here.

    Source: "Attention Pays Its Bill" (BRL-2026-07) for gather-decode; StreamingLLM (arXiv 2309.17453) for sinks and
    window; DeepSeek-V2 (arXiv 2405.04434, section 2.1) for attention over latents.
    """
    check(q, pages, table, lengths=lengths)
    arrays = dispatch.signature(q=q, **pages.arrays, table=table, blocks=blocks)
    block_size = pages.page_size if block_size is None else block_size
    if block_size <= 0 or pages.page_size % block_size:
        raise ValueError(f"block_size {block_size} does not divide the page size {pages.page_size}; got {arrays}")
    batch, num_queries, heads = *q.shape[:2], pages.kv_heads
    shapes = None if blocks is None else ((batch, heads, blocks.shape[-1]), (batch, num_queries, heads, blocks.shape[-1]))
    if blocks is not None and (blocks.shape not in shapes or blocks.shape[-1] == 0):
        raise ValueError(
            f"blocks must be [B={batch}, K={heads}, W >= 1], or per query [B={batch}, T={num_queries}, K={heads}, W]; got {arrays}"
        )
    if blocks is not None and blocks.dtype != jnp.int32:
        raise ValueError(f"blocks must be int32; got {arrays}")
    if block_frames is not None and (blocks is None or blocks.ndim != 3 or block_frames.shape != blocks.shape):
        arrays = dispatch.signature(blocks=blocks, block_frames=block_frames)
        raise ValueError(f"block_frames must have the shape of blocks [B, K, W], one list for all queries; got {arrays}")
    if block_frames is not None and block_frames.dtype != jnp.int32:
        raise ValueError(f"block_frames must be int32; got {block_frames.dtype}")
    call = Call(block_size, window, sm_scale, return_block_lse, config)
    signature = f"{arrays} block_size {block_size} window {window}" + (f" value_dim {pages.value_dim}" if pages.v is None else "")
    signature += "" if block_frames is None else " block_frames"
    if blocks is None or blocks.ndim == 3:
        return dispatch.run("gather_attention", implementation, signature, call, q, pages, table, lengths, blocks, block_frames)
    rows, tables, ends = as_rows(q, table, lengths, 1)
    lists = blocks.reshape(-1, *blocks.shape[2:])
    results = dispatch.run("gather_attention", implementation, signature, call, rows, pages, tables, ends, lists, None)
    return tuple(x.reshape(batch, num_queries, *x.shape[2:]) for x in results)
