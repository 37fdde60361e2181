"""Sinks and a sliding window."""

from __future__ import annotations

import dataclasses
import re

import jax.numpy as jnp

from kvjax.checks import check_flag
from kvjax.model.rope import turned
from kvjax.policies.decode.base import cache_positions
from kvjax.policies.decode.window import check_sinks
from kvjax.policies.prefill.lists import DenseWhereCovered, check_sizes
from pallas_kernels.attention.flash_attention import flash_attention
from pallas_kernels.core.merge import merge_attention


@dataclasses.dataclass(frozen=True)
class SinkWindow(DenseWhereCovered):
    """The first `sink_tokens` and the last `window_tokens` up to each query (StreamingLLM, arXiv 2309.17453).

    remap: read sinks as if they stood right before the window of each query, as `kvjax.policies.decode.Window` does.
    """

    reads_packed = True
    queries_stand_alone = True
    query_tile = 1

    sink_tokens: int = 64
    window_tokens: int = 1024
    remap: bool = dataclasses.field(default=False, kw_only=True)

    def __post_init__(self):
        check_sizes(self, sink_tokens=0, window_tokens=1)
        check_flag("remap", self.remap)

    @property
    def counts_in_cache(self) -> bool:
        """Whether positions are those in the cache, which never exceed sinks and window."""
        return self.remap

    def reach(self, page_size: int) -> tuple[int, int] | None:
        """Sinks and window, outside which no query reads a key; None in a subclass that attends in another way."""
        own = type(self).attend_sparse is SinkWindow.attend_sparse
        return (self.sink_tokens, self.window_tokens) if own else None

    def check_pages(self, page_size: int) -> None:
        """ValueError for sinks that are not whole pages, where they are remapped."""
        if self.remap:
            check_sinks(f"prefill {self}", self.sink_tokens, page_size)

    @property
    def dense_tokens(self) -> int:
        """Up to here sinks and window hold everything."""
        return self.sink_tokens + self.window_tokens

    def attend_sparse(self, query, layer, ctx):
        """Attention within sinks and window."""
        pages = (layer.pages, ctx.frames, ctx.starts, ctx.lengths)
        if self.remap:
            return self._attend_remapped(query, layer, ctx)
        return flash_attention(query, *pages, window=(self.sink_tokens, self.window_tokens), sm_scale=ctx.sm_scale)[0]

    def _attend_remapped(self, query, layer, ctx):
        """Attention to the sinks with turned queries, and to the window as it is."""
        self.check_pages(layer.pages.page_size)
        if ctx.rope is None:
            raise ValueError(f"prefill {self} turns rotated queries, which layers of latent attention do not have: leave out +remap")
        window = self.sink_tokens, self.window_tokens
        positions = ctx.starts[:, None] + jnp.arange(query.shape[1], dtype=jnp.int32)
        near = turned(query, ctx.rope, cache_positions(positions, window) - positions)
        in_sinks = jnp.arange(ctx.frames.shape[1]) < self.sink_tokens // layer.pages.page_size
        parts = [
            flash_attention(
                asked, layer.pages, jnp.where(own, ctx.frames, -1), ctx.starts, ctx.lengths, window=window, sm_scale=ctx.sm_scale
            )
            for asked, own in ((near, in_sinks), (query, ~in_sinks))
        ]
        return merge_attention(*zip(*parts, strict=True))[0]

    def __str__(self) -> str:
        return f"window:{self.sink_tokens}+{self.window_tokens}" + "+remap" * self.remap

    def describe(self) -> str:
        """For reports."""
        placed = ", positions in the cache" * self.remap
        return f"{self} prefill ({self.dense_tokens:,} keys: {self.sink_tokens} sink + {self.window_tokens} latest{placed})"


def named(text: str) -> SinkWindow | None:
    """The policy of a name, None for other names."""
    match = re.fullmatch(r"window:(\d+)\+(\d+)(\+remap)?", text)
    return None if match is None else SinkWindow(int(match[1]), int(match[2]), remap=match[3] is not None)
