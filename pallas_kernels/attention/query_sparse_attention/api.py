"""query_sparse_attention: signature, validation, dispatch."""

from __future__ import annotations

import dataclasses
from typing import Any

from jaxtyping import Array, Float, Int

from pallas_kernels.core import dispatch
from pallas_kernels.core.pages import Pages, check, check_scale, check_window
from pallas_kernels.core.soft_cap import Scale

ESTIMATES = ("quantile", "buckets")
"""How the slots after the exact ones are filled."""


@dataclasses.dataclass(frozen=True)
class Call:
    """The static arguments of a call, as `query_sparse_attention` explains them."""

    gamma: int
    block_size: int
    k_blocks: int
    k_exact: int
    window: tuple[int, int] | None
    tournament: bool
    estimate: str
    sm_scale: Scale
    config: Any

    def __post_init__(self):
        check_scale(self.sm_scale)
        check_window(self.window)

    @property
    def selection(self) -> dict[str, Any]:
        """The arguments that decide which candidates a row lists."""
        return {name: getattr(self, name) for name in ("k_blocks", "k_exact", "tournament", "estimate")}


def query_sparse_attention(
    q: Float[Array, "B T H D"],
    pages: Pages,
    table: Int[Array, "B M"],
    starts: Int[Array, "B"],
    lengths: Int[Array, "B"],
    *,
    gamma: int,
    block_size: int,
    k_blocks: int,
    k_exact: int,
    window: tuple[int, int] | None = None,
    tournament: bool = False,
    estimate: str = "quantile",
    sm_scale: Scale,
    config: Any = None,
    implementation: str | None = None,
) -> tuple[Float[Array, "B R H Dv"], Float[Array, "B R H"], Int[Array, "B R H k"], Float[Array, "B R H k"]]:
    """Exact causal attention of every gamma-th query of a chunk. The same pass lists, per query head, the key blocks
    that score best.

    Args:
        q, pages, table, starts, lengths, sm_scale: as `flash_attention` takes them (chunk written, query t of row b at
            position starts[b] + t, int32, -1 = no page).
        gamma: queries per measured query. There are R = ceil(T / gamma) rows: row r is query t = r * gamma of the
            chunk, so query t belongs to row t // gamma. This is the paper's grid where starts are multiples of gamma.
        block_size: tokens, divides P.
        k_blocks: slots of a list, at least 1.
        k_exact: slots of stage 1 below, 0 to k_blocks.
        window: (sink_tokens, window_tokens) that the reader of the lists reads anyway. A block that lies in the sink or
            begins in the row's window, (j + 1) * block_size <= sink_tokens or j * block_size > position -
            window_tokens, is then no candidate. The window does not change out, lse or scores.
        tournament, estimate: see stages 1 and 2 below.
        config: settings of the implementation; "xla" and "mosaic_tpu" take the `Config` of
            `pallas_kernels.attention.query_sparse_attention.xla` and `.mosaic_tpu`.
        implementation: see `pallas_kernels.core.dispatch`.

    Score of block j, float32: S(j) = log sum exp(sm_scale * q.k) over the keys of j that the row attends to (natural
    log). Candidates are the blocks up to and including the one that the row stands in.

    Selection walks the candidates once, in ascending order, in float32. A block that scores -inf (nothing there to
    attend to) or NaN is skipped. There are two stages, and each of them may have no slot:

    1. Slots 0 to k_exact - 1 hold the best so far. The worst slot is the one with the lowest score. Of equal scores it
       is an empty one (the first), else the one with the higher block. A block that scores more than the worst slot
       takes its place, else the block is passed on. A block that loses its slot is passed on too. So of equal scores
       the lower block stays, and a full list is the exact top k_exact. tournament=False searches all slots for the
       worst (O(k_exact) an update), True keeps it in a winner tree (O(log k_exact)); both give the same slots.
    2. Slots k_exact to k_blocks - 1 are offered the blocks that stage 1 passed on, of score s, at O(1) a block.

       estimate="quantile", as published: slots are filled one after another and never replaced. Each score S of the
       walk first updates the running mean and squares: n += 1, d = S - m, m += d / n, squares += d * (S - m) (Welford).
       Then the block is taken where s - m >= z * sqrt(squares / n), with Pr(X > z) = slots left / candidates left for a
       standard normal X (equations 6 and 7; candidates from the present position of the walk to the last). It is always
       taken where as many slots as candidates are left. Each operation on m rounds to float32, so the left side is the
       same everywhere, and among equal scores the lower blocks are taken. The right side may differ in its last bits
       between implementations unless it is 0.

       estimate="buckets": of m slots, the first block passed on is offered to the first, the next to the second, and so
       on in turn. It takes the slot if that is empty or holds a lower score; of equal scores, the block that was
       offered first stays. So a slot ends up with the best of every m-th block passed on. Neighbouring blocks, which
       tend to be good together, seldom compete for one slot. There is no rounding: where scores are the same, so are
       lists.

    The default is the published one. `kvjax.policies.prefill.MeasureOnceMaskOnce` uses buckets, whose lists are better
    (docs/measured/prefill.md).

    Names of the paper: k_exact = k_blocks is the exact (or tournament tree) selector, k_exact = 0 the estimated one,
    else the hybrid.

    Returns out `[B, R, H, Dv]` in q's dtype; lse `[B, R, H]` float32, natural log; ids `[B, R, H, k_blocks]` int32,
    logical blocks, each once, in the order of slots (not ascending), -1 in empty slots; scores `[B, R, H, k_blocks]`
    float32, -inf in empty slots. A row at or past its length (padding) gives 0, -inf, -1, -inf, like one with nothing
    to read. Memory: the results and a tile. Neither the R x S logits nor the R x S / block_size scores are written.

    Raises ValueError for arguments that do not fit together; NotImplementedError for an implementation that cannot run
    here.

    Source: "Measure Once, Mask Once", section 3, equations 4 to 8 and appendix A. Unlike its Algorithm 1, scores are
    scaled, and the block on the diagonal is attended to (and is a candidate). Buckets: the partial reduction of
    "TPU-KNN: K Nearest Neighbor Search at Peak FLOP/s" (arXiv 2206.14286), with as many bins as results, after the
    exact slots.
    """
    check(q, pages, table, starts=starts, lengths=lengths)
    sizes = {"gamma": gamma, "block_size": block_size, "k_blocks": k_blocks, "k_exact": k_exact}
    how = {"tournament": tournament, "estimate": estimate}
    check_selection(pages.page_size, **sizes, **how)
    call = Call(**sizes, window=window, **how, sm_scale=sm_scale, config=config)
    signature = f"{dispatch.signature(q=q, **pages.arrays, table=table)} {sizes | {'window': window} | how}"
    return dispatch.run("query_sparse_attention", implementation, signature, call, q, pages, table, starts, lengths)


def check_selection(page_size: int, *, gamma: int, block_size: int, k_blocks: int, k_exact: int, tournament: bool, estimate: str) -> None:
    """Raise ValueError unless the sizes of a selection fit together."""
    for name, value, least in (("gamma", gamma, 1), ("block_size", block_size, 1), ("k_blocks", k_blocks, 1), ("k_exact", k_exact, 0)):
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ValueError(f"{name} must be an int, at least {least}; got {value!r}")
    if page_size % block_size:
        raise ValueError(f"block_size {block_size} does not divide page_size {page_size}")
    if k_exact > k_blocks:
        raise ValueError(f"k_exact {k_exact} is more than k_blocks {k_blocks}: exact slots are part of the list")
    if not isinstance(tournament, bool):
        raise ValueError(f"tournament must be True or False, got {tournament!r}")
    if estimate not in ESTIMATES:
        raise ValueError(f"estimate must be one of {', '.join(ESTIMATES)}; got {estimate!r}")
