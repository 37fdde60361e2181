"""Sinks and a sliding window, with or without delta correction."""

from __future__ import annotations

import dataclasses

from kvjax.policies.prefill.delta import delta_correction
from kvjax.policies.prefill.lists import DenseWhereCovered, check_sizes
from pallas_kernels.flash_attention import flash_attention
from pallas_kernels.query_sparse_attention import query_sparse_attention


@dataclasses.dataclass(frozen=True)
class SinkWindow(DenseWhereCovered):
    """The first `sink_tokens` and the last `window_tokens` up to each query (StreamingLLM, arXiv 2309.17453).

    gamma: None: no correction. Else every gamma-th query attends to everything and corrects those after it (equation 3). Delta Attention
    (arXiv 2505.11254) corrects another sparse attention in the same way.
    """

    sink_tokens: int = 64
    window_tokens: int = 1024
    gamma: int | None = None

    def __post_init__(self):
        check_sizes(self, sink_tokens=0, window_tokens=1, **({} if self.gamma is None else {"gamma": 1}))

    @property
    def queries_stand_alone(self) -> bool:
        """True without delta correction."""
        return self.gamma is None

    @property
    def dense_tokens(self) -> int:
        """Up to here sinks and window hold everything."""
        return self.sink_tokens + self.window_tokens

    def attend_sparse(self, query, layer, ctx):
        """Attention within sinks and window, corrected if gamma is given."""
        pages = (layer.pages, ctx.frames, ctx.starts, ctx.lengths)
        sparse, _ = flash_attention(query, *pages, window=(self.sink_tokens, self.window_tokens), sm_scale=ctx.sm_scale)
        if self.gamma is None:
            return sparse
        # The op lists blocks too, and needs at least one exact slot. The list is not used.
        exact, *_ = query_sparse_attention(
            query, *pages, gamma=self.gamma, block_size=layer.pages.page_size, k_blocks=1, k_exact=1, sm_scale=ctx.sm_scale
        )
        return delta_correction(sparse, exact, self.gamma)

    def __str__(self) -> str:
        tokens = f"{self.sink_tokens}+{self.window_tokens}"
        return f"window:{tokens}" if self.gamma is None else f"delta:{tokens}/{self.gamma}"

    def describe(self) -> str:
        """For reports."""
        corrected = "" if self.gamma is None else f", corrected in full from every {self.gamma}th query"
        return f"{self} prefill ({self.dense_tokens:,} keys: {self.sink_tokens} sink + {self.window_tokens} latest{corrected})"
