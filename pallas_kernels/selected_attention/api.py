"""selected_attention: signature, validation, dispatch."""

from __future__ import annotations

import dataclasses
from typing import Any

from jaxtyping import Array, Float, Int

from pallas_kernels import dispatch
from pallas_kernels.pages import Pages, check, check_frames, check_scale
from pallas_kernels.select_blocks import api as select_blocks


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

    def selection(self, page_size: int) -> select_blocks.Call:
        """The call of `select_blocks` that lists the blocks."""
        return select_blocks.Call(self.kind, page_size, self.block_size, self.budget, self.sink, self.local)


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
    frames: Int[Array, "B M"] | None = None,
    config: Any = None,
    implementation: str | None = None,
) -> tuple[Float[Array, "B T H D"], Float[Array, "B T H"], Int[Array, "B T K W"]]:
    """Attention of a few queries per sequence, each over the blocks that score best for it.

    The same as `blocks = select_blocks(q, index, table, lengths, kind=kind, k=budget, ...)` and
    `gather_attention(q, pages, frames, lengths, blocks=blocks, ...)`, up to the order of additions. Arguments are as there. It saves a
    launch, and a write and a read of the list. table: logical page -> page id, which finds the index rows. frames: logical page -> frame,
    which finds keys and values; None: the frame of a page is its id. config: settings of the implementation; "mosaic_tpu" takes
    `pallas_kernels.selected_attention.mosaic_tpu.Config`.

    Returns out and lse as `gather_attention` does, and the lists. Query t of T lists and sees what it would as the only query of a step at
    its position. Bits are the same for equal B and T.

    Raises ValueError for arguments that do not fit together; NotImplementedError for an implementation that cannot run here.

    Source: gather-decode and its keep-set, "Attention Pays Its Bill" (BRL-2026-07); bounds scoring, Quest (ICML 2024).
    """
    check(q, pages, table, lengths=lengths)
    call = Call(kind, block_size, budget, sink, local, sm_scale, config)
    select_blocks.check(call.selection(pages.page_size), q, index, table, lengths)
    check_frames(table, frames)
    alike = index.shape[:2] == pages.k.shape[:2] if frames is None else index.shape[1] == pages.kv_heads
    if not alike:
        arrays = dispatch.signature(k=pages.k, index=index, frames=frames)
        raise ValueError(f"index and k must have the same pages (unless there are frames) and KV heads; got {arrays}")
    signature = f"{call} {dispatch.signature(q=q, **pages.arrays, index=index, table=table, frames=frames)}"
    return dispatch.run("selected_attention", implementation, signature, call, q, pages, index, table, lengths, frames)
