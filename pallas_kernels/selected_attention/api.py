"""selected_attention: signature, validation, dispatch."""

from __future__ import annotations

from typing import Any

from jaxtyping import Array, Float, Int

from pallas_kernels import dispatch, paged
from pallas_kernels.select_blocks.api import check as check_selection


def selected_attention(
    q: Float[Array, "B T H D"],
    k: Float[Array, "N K P D"],
    v: Float[Array, "N K P D"],
    index: Float[Array, "N K P/bs R D"],
    page_table: Int[Array, "B M"],
    lengths: Int[Array, "B"],
    *,
    kind: str,
    block_size: int,
    budget: int,
    sink: int,
    local: int,
    sm_scale: float,
    config: Any = None,
    implementation: str | None = None,
) -> tuple[Float[Array, "B T H D"], Float[Array, "B T H"], Int[Array, "B K W"]]:
    """Attention of a few queries per sequence over the blocks that suit them best.

    The same as `blocks = select_blocks(q, index, page_table, lengths, kind=kind, k=budget, ...)` and
    `gather_attention(q, k, v, page_table, lengths, blocks=blocks, ...)`, up to the order of additions; arguments as there. What falls
    away between the two is a launch, and the way of the list through memory.

    Returns out, lse as `gather_attention` does, and the list.

    Raises ValueError for arguments that do not fit together; NotImplementedError for an implementation that cannot run here.

    Source: gather-decode and its keep-set, "Attention Pays Its Bill" (BRL-2026-07); bounds scoring, Quest (ICML 2024).
    """
    paged.check(q, k, v, page_table, sm_scale, None, lengths=lengths)
    sizes = {"page_size": k.shape[2], "block_size": block_size, "k": budget, "sink": sink, "local": local}
    check_selection(q, index, page_table, lengths, kind, **sizes)
    if index.shape[:2] != k.shape[:2]:
        raise ValueError(f"index and k must have the same pages and KV heads; got {dispatch.signature(k=k, index=index)}")
    static = {
        "kind": kind,
        "block_size": block_size,
        "budget": budget,
        "sink": sink,
        "local": local,
        "sm_scale": sm_scale,
        "config": config,
    }
    signature = f"{kind} {sizes} {dispatch.signature(q=q, k=k, index=index, page_table=page_table)}"
    name = dispatch.choose("selected_attention", implementation, signature, (q, k, v, index, page_table, lengths), static)
    return dispatch.load("selected_attention", name)(q, k, v, index, page_table, lengths, **static)
