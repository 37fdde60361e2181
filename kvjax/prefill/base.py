"""The prefill-policy protocol: the chunk's keys and values are written first, then the policy attends to pages."""

from __future__ import annotations

from typing import Protocol

import flax.struct
from jaxtyping import Array, Float, Int

from kvjax.cache.types import PagedKV


@flax.struct.dataclass
class PrefillContext:
    """Where the chunk stands: query t of row b is token starts[b] + t; lengths count the chunk's tokens. sm_scale multiplies logits."""

    page_table: Int[Array, "B M"]
    starts: Int[Array, "B"]
    lengths: Int[Array, "B"]
    layer: int = flax.struct.field(pytree_node=False)
    sm_scale: float = flax.struct.field(pytree_node=False)


class PrefillPolicy(Protocol):
    """A frozen dataclass: static, hashable, holds no arrays."""

    def attend(self, query: Float[Array, "B T H D"], layer: PagedKV, ctx: PrefillContext) -> Float[Array, "B T H D"]:
        """Attention of a chunk of queries over the pages, the chunk's own included."""
        ...
