"""Dense prefill: exact causal attention."""

from __future__ import annotations

import dataclasses

from jaxtyping import Array, Float, Float32

from kvjax.cache.arrays import PagedKV
from kvjax.policies.prefill.base import PrefillContext
from pallas_kernels.attention.flash_attention import flash_attention


@dataclasses.dataclass(frozen=True)
class DensePrefill:
    """Every query attends to every earlier key."""

    queries_stand_alone = True
    query_tile = 1
    reads_packed = True

    def attend(self, query, layer, ctx):
        """Causal attention over all pages of the sequence."""
        return self.attend_with_lse(query, layer, ctx)[0]

    def attend_with_lse(
        self, query: Float[Array, "B T H D"], layer: PagedKV, ctx: PrefillContext
    ) -> tuple[Float[Array, "B T H D"], Float32[Array, "B T H"]]:
        """The same, and the log-sum-exp of each query's scaled logits, natural log."""
        return flash_attention(query, layer.pages, ctx.frames, ctx.starts, ctx.lengths, fresh=ctx.fresh, sm_scale=ctx.sm_scale)

    def __str__(self) -> str:
        return "dense"

    def describe(self) -> str:
        """For reports."""
        return "dense prefill"


def named(text: str) -> DensePrefill | None:
    """The policy of a name, None for other names."""
    return DensePrefill() if text == "dense" else None
