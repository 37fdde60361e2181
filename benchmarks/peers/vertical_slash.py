"""Vertical lines and diagonals, estimated from the last queries."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp

from benchmarks.estimates import blocks_and_bands
from kvjax.policies.prefill.lists import TileLists, best_blocks, check_sizes, covered_tokens, distant_blocks, sorted_lists


@dataclasses.dataclass(frozen=True)
class VerticalSlash(TileLists):
    """MInference's pattern (arXiv 2407.02490, section 3), by whole blocks: every tile of `chi` queries reads sinks,
    window, the same `vertical` blocks of keys, and the blocks that `slash` diagonal bands cross.

    Band o holds the pairs whose distance, query position - key position, is in [o * key_block, (o + 1) * key_block).
    Verticals and bands are those that the last `last_queries` queries of the chunk pay most attention to, per query
    head, among blocks and bands outside sinks and window; of equal ones the lower. A tile lists at most `vertical +
    slash * (blocks a band crosses)` blocks: with `chi` 128 and blocks of 64, three per band. (The published form picks
    single columns and diagonals, for the whole prompt at once.)
    """

    vertical: int = 64
    slash: int = 21
    last_queries: int = 64
    chi: int = 128
    key_block: int = 64
    sink_tokens: int = 64
    window_tokens: int = 1024

    def __post_init__(self):
        check_sizes(self, vertical=1, slash=1, last_queries=1, chi=1, key_block=1, sink_tokens=0, window_tokens=1)

    @property
    def dense_tokens(self) -> int:
        """Up to here the vertical blocks alone would hold everything."""
        return covered_tokens(self.vertical, self.key_block, self.sink_tokens, self.window_tokens)

    def lists(self, query, layer, ctx):
        """The blocks of the best verticals and bands for every tile and query head, `[B, C, H, W]`, those that the tile
        has to read."""
        batch, num_queries, num_heads = query.shape[:3]
        sizes = {"key_block": self.key_block, "sink_tokens": self.sink_tokens, "window_tokens": self.window_tokens}
        distant = distant_blocks(ctx, layer.pages.page_size, num_queries, chi=self.chi, **sizes)
        of_blocks, of_bands = blocks_and_bands(query, layer, ctx, self.last_queries, self.key_block)
        at_end = distant_blocks(ctx, layer.pages.page_size, num_queries, chi=num_queries, **sizes)
        vertical = best_blocks(of_blocks, at_end, self.vertical)
        beyond_window = (jnp.arange(of_bands.shape[2]) + 1) * self.key_block > self.window_tokens
        slash = best_blocks(of_bands, beyond_window & (of_bands > 0), self.slash)

        first = ctx.starts[:, None] + jnp.arange(0, num_queries, self.chi, dtype=jnp.int32)
        last = jnp.minimum(first + self.chi, ctx.starts[:, None] + num_queries) - 1
        first, last, slash = first[:, :, None, None], last[:, :, None, None], slash[:, None]
        lowest = jnp.maximum((first - (slash + 1) * self.key_block + 1) // self.key_block, 0)
        crossed = (self.chi + 2 * self.key_block - 3) // self.key_block + 1  # blocks that chi + key_block - 1 tokens touch at most
        ids = lowest[..., None] + jnp.arange(crossed, dtype=jnp.int32)
        ids = jnp.where((slash[..., None] >= 0) & (ids * self.key_block <= last[..., None] - slash[..., None] * self.key_block), ids, -1)
        shape = (batch, distant.shape[1], num_heads, -1)
        ids = jnp.concatenate([ids.reshape(shape), jnp.broadcast_to(vertical[:, None], (*shape[:3], vertical.shape[2]))], axis=-1)
        kept = jnp.take_along_axis(distant[:, :, None], jnp.clip(ids, 0, distant.shape[2] - 1), axis=3) & (ids >= 0)
        return sorted_lists(jnp.where(kept, ids, -1))

    def __str__(self) -> str:
        return f"vertical-slash:{self.vertical}+{self.slash}" if self == VerticalSlash(self.vertical, self.slash) else repr(self)

    def describe(self) -> str:
        """For reports."""
        return (
            f"{self} prefill ({self.vertical} vertical blocks of {self.key_block} and {self.slash} diagonal bands from the last "
            f"{self.last_queries} queries, {self.sink_tokens} sink + {self.window_tokens} latest keys; dense up to "
            f"{self.dense_tokens:,} tokens)"
        )
