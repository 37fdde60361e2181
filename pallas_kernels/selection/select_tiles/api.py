"""select_tiles: signature, validation, dispatch."""

from __future__ import annotations

import dataclasses
import numbers

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.core import dispatch
from pallas_kernels.core.pages import CODES, check_window
from pallas_kernels.core.soft_cap import Scale, SoftCap

POOLINGS = ("sum", "max")
"""How the weights of a tile's queries are combined."""


@dataclasses.dataclass(frozen=True)
class Call:
    """The static arguments of a call, as `select_tiles` explains them."""

    k: int
    block_size: int
    query_tile: int
    window: tuple[int, int]
    pooling: str
    ranked: bool
    sm_scale: Scale

    def __post_init__(self):
        for name in ("k", "block_size", "query_tile"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{name} must be a positive int, got {value!r}")
        if self.window is None:
            raise ValueError("select_tiles needs a window, (sink_tokens, window_tokens): what lies in it is no candidate")
        check_window(self.window)
        if self.pooling not in POOLINGS:
            raise ValueError(f"pooling must be one of {', '.join(POOLINGS)}, got {self.pooling!r}")
        if not isinstance(self.ranked, bool):
            raise ValueError(f"ranked must be True or False, got {self.ranked!r}")
        if not isinstance(self.sm_scale, SoftCap) and not (isinstance(self.sm_scale, numbers.Real) and self.sm_scale > 0):
            raise ValueError(f"sm_scale must be a positive number known when compiling, because bounds need one; got {self.sm_scale!r}")


def select_tiles(
    q: Float[Array, "B T H D"],
    bounds: Float[Array, "N K nb 2 D"],
    table: Int[Array, "B M"],
    starts: Int[Array, "B"],
    lengths: Int[Array, "B"],
    *,
    k: int,
    block_size: int,
    query_tile: int,
    window: tuple[int, int],
    pooling: str = "sum",
    ranked: bool = False,
    sm_scale: Scale,
    implementation: str | None = None,
) -> Int[Array, "B C H W"]:
    """Per tile of queries and query head, the k distant blocks that its queries may pay the most attention to.

    Query t at position p bounds its logit with any key of a block that begins at or before p by sm_scale * (max(q, 0) .
    max_keys + min(q, 0) . min_keys). The softmax over these blocks is what the query may pay each of them. A tile of
    `query_tile` queries pays a block the sum of that over its queries (pooling "sum"), or their maximum ("max").

    Candidates of a tile are blocks that hold a key which its last query may see, except those that lie wholly in the
    first window[0] tokens (sinks) or in that query's last window[1] tokens: `block_sparse_attention` reads those
    anyway.

    Args:
        q: T consecutive tokens of each sequence, the first at position starts[b]; those at or past lengths[b] are
            padding.
        bounds: the elementwise max and min of the keys of each block, per page (`page_index`, kind "bounds"), the
            chunk's own pages included. Only blocks of sealed pages count: pages that `lengths` tokens fill whole and
            that the table names. The rows of other pages may hold anything, NaN too.
        table, starts, lengths: int32, as for `flash_attention`.
        k: blocks to list, at least 1.
        block_size: tokens, divides the page.
        query_tile: queries per tile.
        window: (sink_tokens, window_tokens), at least a page of window_tokens, so that no candidate is unsealed.
        pooling, ranked: as explained above and below.
        sm_scale: positive, multiplies logits; or a `pallas_kernels.core.soft_cap.SoftCap`.
        implementation: see `pallas_kernels.core.dispatch`.

    Returns blocks int32 `[B, C, H, W]`, C = ceil(T / query_tile), W = min(k, M * nb): logical block numbers, -1 at the
    end where there are fewer candidates; of equal scores the lower block is kept. Blocks ascend. If `ranked`, the best
    stands first, of equal ones the lower, so that the first n of a list are the list for k = n. Scores are float32, so
    implementations may differ where two blocks differ by rounding. Each implementation gives the same bits every time.
    Memory: the bounds that a sequence's table names, and C x H x M * nb float32: the scores per tile, never per query.

    Raises ValueError for arguments that do not fit together; NotImplementedError for an implementation that cannot run
    here.

    Source: bounds of Quest (Tang et al., ICML 2024), for every query of a tile rather than for one.
    """
    arrays = dispatch.signature(q=q, bounds=bounds, table=table, starts=starts, lengths=lengths)
    if q.ndim != 4 or bounds.ndim != 5 or bounds.shape[3] != 2 or table.ndim != 2 or starts.ndim != 1 or lengths.ndim != 1:
        raise ValueError(f"needs q [B,T,H,D], bounds [N,K,nb,2,D], table [B,M], starts and lengths [B]; got {arrays}")
    if 0 in (*q.shape, *bounds.shape, *table.shape):
        raise ValueError(f"no axis of q, bounds and table may be empty; got {arrays}")
    if q.shape[3] != bounds.shape[4] or q.shape[2] % bounds.shape[1]:
        raise ValueError(f"q heads must be a multiple of KV heads, and the head dims equal; got {arrays}")
    if any(x.shape[0] != q.shape[0] for x in (table, starts, lengths)):
        raise ValueError(f"q, table, starts and lengths must have the same batch; got {arrays}")
    if any(x.dtype != jnp.int32 for x in (table, starts, lengths)):
        raise ValueError(f"table, starts and lengths must be int32; got {arrays}")
    if q.dtype.name not in CODES or bounds.dtype.name not in CODES:
        raise ValueError(f"q and bounds must be one of {', '.join(CODES)}; got {arrays}")
    call = Call(k, block_size, query_tile, window, pooling, ranked, sm_scale)
    if window[1] < block_size * bounds.shape[2]:
        raise ValueError(
            f"the window of {window[1]} tokens is shorter than a page of {block_size * bounds.shape[2]}: a block of the open page, which "
            "has no bounds, would be a candidate; use a window of at least a page"
        )
    return dispatch.run("select_tiles", implementation, f"{arrays} {call}", call, q, bounds, table, starts, lengths)
