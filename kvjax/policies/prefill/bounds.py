"""Blocks chosen by bounds: every query is scored against the index that decode uses."""

from __future__ import annotations

import dataclasses
import re

from jaxtyping import Array, Int

from kvjax.cache.index_spec import IndexSpec
from kvjax.policies.prefill.lists import TileLists, check_sizes, covered_tokens
from pallas_kernels.selection.select_tiles import select_tiles
from pallas_kernels.selection.select_tiles.api import POOLINGS


class ByBounds(TileLists):
    """Policies that choose blocks by bounds, the best of every tile and query head; they define `pooling` too."""

    reads_packed = True

    def indexes(self) -> tuple[IndexSpec, ...]:
        """Bounds of its blocks."""
        return (IndexSpec("bounds", self.key_block),)

    def check_pages(self, page_size: int) -> None:
        """ValueError unless pages of `page_size` tokens are whole blocks, no longer than the window."""
        super().check_pages(page_size)
        if page_size > self.window_tokens:
            raise ValueError(
                f"prefill {self} has a window of {self.window_tokens} tokens, shorter than a page of {page_size}: a block of the open "
                "page, which has no bounds, would be a candidate; choose a smaller page_size or a longer window"
            )

    def best(self, query, layer, ctx, k: int, *, ranked: bool = False) -> Int[Array, "B C H W"]:
        """The k best distant blocks of every tile and query head, ascending or the best first, -1 at the end."""
        return select_tiles(
            *(query, layer.index[self.indexes()[0].name], ctx.page_table, ctx.starts, ctx.lengths),
            k=k,
            block_size=self.key_block,
            query_tile=self.chi,
            window=(self.sink_tokens, self.window_tokens),
            pooling=self.pooling,
            ranked=ranked,
            sm_scale=ctx.sm_scale,
        )


@dataclasses.dataclass(frozen=True)
class BoundsBlocks(ByBounds):
    """Per tile of `chi` queries and query head, sinks, window and the `k` distant blocks that its queries may pay the
    most attention.

    The attention that a query may pay a block is estimated by a softmax, over all earlier blocks, of the upper bounds
    of its logits there. The bounds come from elementwise maxima and minima of the block's keys, the index that `top:K`
    scans in decoding. So every query counts, and no key is read. pooling: "sum" or "max" over a tile's queries. Blocks
    that sinks or window hold anyway are not listed. dense_below: sequences up to this many tokens are dense. None:
    twice what lists, sinks and window hold, because up to there dense attention was as fast on an H200
    (docs/measured/prefill.md). 0: only sequences are dense whose lists would hold everything.

    Source: bounds of Quest (Tang et al., ICML 2024), of every query of a tile.
    """

    k: int = 32
    chi: int = 128
    key_block: int = 128
    sink_tokens: int = 128
    window_tokens: int = 1024
    pooling: str = "sum"
    dense_below: int | None = None

    def __post_init__(self):
        check_sizes(self, k=1, chi=1, key_block=1, sink_tokens=0, window_tokens=1)
        if self.dense_below is not None:
            check_sizes(self, dense_below=0)
        if self.pooling not in POOLINGS:
            raise ValueError(f"pooling must be one of {', '.join(POOLINGS)}; got {self.pooling!r}")

    @property
    def dense_tokens(self) -> int:
        """Up to here the lists would hold everything, or dense attention is no slower."""
        covered = covered_tokens(self.k, self.key_block, self.sink_tokens, self.window_tokens)
        return max(covered, 2 * covered if self.dense_below is None else self.dense_below)

    @property
    def query_tile(self) -> int:
        """Queries that share a list."""
        return self.chi

    def lists(self, query, layer, ctx):
        """The k best distant blocks of every tile and query head, `[B, C, H, W]`."""
        return self.best(query, layer, ctx, self.k)

    def __str__(self) -> str:
        names = {BoundsBlocks(self.k): f"bounds:{self.k}", BoundsBlocks(self.k, dense_below=0): f"bounds:{self.k}+sparse"}
        return names.get(self) or repr(self)

    def describe(self) -> str:
        """For reports."""
        return (
            f"{self} prefill (per {self.chi} queries {self.k} blocks of {self.key_block} by bounds, {self.sink_tokens} sink + "
            f"{self.window_tokens} latest keys; dense up to {self.dense_tokens:,} tokens)"
        )


def named(text: str) -> BoundsBlocks | None:
    """The policy of a name, None for other names; ValueError for numbers that it cannot have."""
    match = re.fullmatch(r"bounds:(\d+)(\+sparse)?", text)
    return None if match is None else BoundsBlocks(int(match[1]), dense_below=0 if match[2] else None)
