"""selected_attention: signature, validation, dispatch."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt8

from pallas_kernels.core import dispatch
from pallas_kernels.core.pages import Pages, check, check_frames, check_scale
from pallas_kernels.core.soft_cap import Scale
from pallas_kernels.selection.page_index import CODED, index_shape
from pallas_kernels.selection.select_blocks import api as select_blocks


@dataclasses.dataclass(frozen=True)
class Call:
    """The static arguments of a call, as `selected_attention` explains them."""

    kind: str
    block_size: int
    budget: int
    sink: int
    local: int
    sm_scale: Scale
    config: Any
    shortlist: int | None = None
    codes_kind: str | None = None

    def __post_init__(self):
        check_scale(self.sm_scale)
        if self.shortlist is not None and self.shortlist < max(self.budget, 1):
            raise ValueError(f"shortlist must be at least budget {self.budget} and 1, got {self.shortlist}")
        if self.codes_kind is not None and self.codes_kind not in CODED:
            raise ValueError(f"codes_kind {self.codes_kind!r} is unknown; there are {', '.join(CODED)}")

    @property
    def refines(self) -> bool:
        """Whether the list is chosen from a shortlist."""
        return self.shortlist is not None

    def selection(self, page_size: int) -> select_blocks.Call:
        """The call of `select_blocks` that lists the blocks, or the shortlist between sink and local blocks."""
        kept = self.budget if self.shortlist is None else self.shortlist
        return select_blocks.Call(self.kind, page_size, self.block_size, kept, self.sink, self.local)

    def width(self, page_size: int) -> int:
        """W of the list that is attended to."""
        return dataclasses.replace(self.selection(page_size), k=self.budget).width


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
    sm_scale: Scale,
    frames: Int[Array, "B M"] | None = None,
    shortlist: int | None = None,
    codes: UInt8[Array, "N K P/bs R W"] | None = None,
    codes_kind: str | None = None,
    config: Any = None,
    implementation: str | None = None,
) -> tuple[Float[Array, "B T H D"], Float[Array, "B T H"], Int[Array, "B T K W"]]:
    """Attention of a few queries per sequence, each over the blocks that score best for it.

    The same as `blocks = select_blocks(q, index, table, lengths, kind=kind, k=budget, ...)` and
    `gather_attention(q, pages, frames, lengths, blocks=blocks, ...)`, up to the order of additions. Arguments are as
    there. It saves a launch, and a write and a read of the list. table: logical page -> page id, which finds the index
    rows. frames: logical page -> frame, which finds keys and values; None: the frame of a page is its id. config:
    settings of the implementation; "mosaic_tpu" takes `pallas_kernels.attention.selected_attention.mosaic_tpu.Config`.

    With `shortlist` the choice has two stages. Candidates are the `shortlist` distant blocks with the best scores. Each
    query head estimates its attention to each of them: the softmax over the logits of the sink and local keys, from
    `pages`, and of the candidates' keys. These are from `codes`, the `page_index` of kind `codes_kind` ("keys1",
    "keys2", "keys4"), found by page id; or, without codes, from `pages`, packed or not, and then the choice is exact
    but for what packing took away. The `budget` candidates with the largest sums over the query heads of a KV head are
    listed; of equal sums the lower block. Sums are float32 and compared as logarithms; NaN counts as the lowest. The
    list is that of the definition, but for the rounding of these sums.

    Returns out and lse as `gather_attention` does, and the lists. Query t of T lists and sees what it would as the only
    query of a step at its position. Bits are the same for equal B and T.

    Raises ValueError for arguments that do not fit together; NotImplementedError for an implementation that cannot run
    here.

    Source: gather-decode and its keep-set, "Attention Pays Its Bill" (BRL-2026-07); bounds scoring, Quest (ICML 2024);
    a shortlist, then keys in few bits, Twilight (arXiv 2502.02770), HISA (arXiv 2603.28458).
    """
    check(q, pages, table, lengths=lengths)
    call = Call(kind, block_size, budget, sink, local, sm_scale, config, shortlist, codes_kind)
    select_blocks.check(call.selection(pages.page_size), q, index, table, lengths)
    check_frames(table, frames)
    alike = index.shape[:2] == pages.k.shape[:2] if frames is None else index.shape[1] == pages.kv_heads
    if not alike:
        arrays = dispatch.signature(k=pages.k, index=index, frames=frames)
        raise ValueError(f"index and k must have the same pages (unless there are frames) and KV heads; got {arrays}")
    _check_codes(call, q, index, codes)
    signature = f"{call} {dispatch.signature(q=q, **pages.arrays, index=index, table=table, frames=frames, codes=codes)}"
    return dispatch.run("selected_attention", implementation, signature, call, q, pages, index, table, lengths, frames, codes)


def _check_codes(call: Call, q, index, codes) -> None:
    """Raise ValueError unless the arguments of a choice in two stages fit together."""
    given = {"shortlist": call.shortlist, "codes": codes, "codes_kind": call.codes_kind}
    absent = [name for name, x in given.items() if x is None]
    if codes is None and call.codes_kind is None:
        return
    if absent:
        raise ValueError(f"codes and codes_kind go together, with a shortlist; missing: {', '.join(absent)}")
    wanted = (*index.shape[:3], *index_shape(call.codes_kind, call.block_size, q.shape[3]))
    if codes.shape != wanted or codes.dtype != jnp.uint8:
        arrays = dispatch.signature(codes=codes, index=index)
        raise ValueError(f"codes of kind {call.codes_kind!r} must be uint8 {list(wanted)}, the index of the same pages; got {arrays}")
