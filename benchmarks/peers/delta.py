"""Sinks and a sliding window, corrected in full by the exact attention of every gamma-th query."""

from __future__ import annotations

import dataclasses

from kvjax.policies.prefill import SinkWindow, delta_correction
from kvjax.policies.prefill.lists import DenseWhereCovered, check_sizes
from pallas_kernels.attention.query_sparse_attention import query_sparse_attention


@dataclasses.dataclass(frozen=True)
class DeltaWindow(DenseWhereCovered):
    """`SinkWindow`, whose output every `gamma`-th query corrects: it attends to everything, and those after it lack
    what it lacks.

    Source: equation 3 of "Measure Once, Mask Once". Delta Attention (arXiv 2505.11254) corrects another sparse
    attention in the same way.
    """

    reads_packed = True

    sink_tokens: int = 64
    window_tokens: int = 1024
    gamma: int = 16

    def __post_init__(self):
        check_sizes(self, sink_tokens=0, window_tokens=1, gamma=1)

    @property
    def query_tile(self) -> int:
        """Queries that one exact query corrects."""
        return self.gamma

    @property
    def uncorrected(self) -> SinkWindow:
        """The policy whose output is corrected."""
        return SinkWindow(self.sink_tokens, self.window_tokens)

    @property
    def dense_tokens(self) -> int:
        """Up to here sinks and window hold everything."""
        return self.uncorrected.dense_tokens

    def attend_sparse(self, query, layer, ctx):
        """Attention within sinks and window, corrected."""
        # The op lists blocks too, and needs at least one exact slot. The list is not used.
        exact, *_ = query_sparse_attention(
            *(query, layer.pages, ctx.frames, ctx.starts, ctx.lengths),
            gamma=self.gamma,
            block_size=layer.pages.page_size,
            k_blocks=1,
            k_exact=1,
            sm_scale=ctx.sm_scale,
        )
        return delta_correction(self.uncorrected.attend_sparse(query, layer, ctx), exact, self.gamma)

    def __str__(self) -> str:
        return f"delta:{self.sink_tokens}+{self.window_tokens}/{self.gamma}"

    def describe(self) -> str:
        """For reports."""
        return (
            f"{self} prefill ({self.dense_tokens:,} keys: {self.sink_tokens} sink + {self.window_tokens} latest, corrected in full from "
            f"every {self.gamma}th query)"
        )
