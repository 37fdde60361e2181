"""selected_attention: signature, validation, dispatch."""

from __future__ import annotations

import dataclasses
from typing import Any

from jaxtyping import Array, Float, Int

from pallas_kernels import dispatch
from pallas_kernels.pages import Pages, check, check_scale
from pallas_kernels.select_blocks.api import check as check_selection


@dataclasses.dataclass(frozen=True)
class Call:
    """The static arguments of a call, as `selected_attention` explains them."""

    kind: str
    block_size: int
    budget: int
    sink: int
    local: int
    sm_scale: float
    config: Any

    def __post_init__(self):
        check_scale(self.sm_scale)

    def selection(self, page_size: int) -> dict[str, Any]:
        """The keywords of `select_blocks`."""
        sizes = {"block_size": self.block_size, "k": self.budget, "sink": self.sink, "local": self.local}
        return {"kind": self.kind, "page_size": page_size} | sizes


def selected_attention(
    q: Float[Array, "B T H D"],
    pages: Pages,
    index: Float[Array, "N K P/bs R D"],
    table: Int[Array, "B M"],
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

    The same as `blocks = select_blocks(q, index, table, lengths, kind=kind, k=budget, ...)` and
    `gather_attention(q, pages, table, lengths, blocks=blocks, ...)`, up to the order of additions; arguments as there. It saves a launch,
    and a write and a read of the list.

    Returns out, lse as `gather_attention` does, and the list.

    Raises ValueError for arguments that do not fit together; NotImplementedError for an implementation that cannot run here.

    Source: gather-decode and its keep-set, "Attention Pays Its Bill" (BRL-2026-07); bounds scoring, Quest (ICML 2024).
    """
    check(q, pages, table, lengths=lengths)
    call = Call(kind, block_size, budget, sink, local, sm_scale, config)
    sizes = call.selection(pages.page_size)
    check_selection(q, index, table, lengths, **sizes)
    if index.shape[:2] != pages.k.shape[:2]:
        raise ValueError(f"index and k must have the same pages and KV heads; got {dispatch.signature(k=pages.k, index=index)}")
    signature = f"{sizes} {dispatch.signature(q=q, **pages.arrays, index=index, table=table)}"
    return dispatch.run("selected_attention", implementation, signature, call, q, pages, index, table, lengths)
