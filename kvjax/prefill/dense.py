"""Dense prefill: exact causal attention."""

from __future__ import annotations

import dataclasses

from pallas_kernels.flash_attention import flash_attention


@dataclasses.dataclass(frozen=True)
class DensePrefill:
    """Every query attends to every earlier key."""

    queries_stand_alone = True

    def attend(self, query, layer, ctx):
        """Causal attention over all pages of the sequence."""
        out, _ = flash_attention(query, layer.k, layer.v, ctx.page_table, ctx.starts, ctx.lengths, sm_scale=ctx.sm_scale)
        return out

    def __str__(self) -> str:
        return "dense"

    def describe(self) -> str:
        """For reports."""
        return "dense prefill"
