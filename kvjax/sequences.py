"""A sequence in an engine's cache, as the host knows it."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from jaxtyping import Array, Float

if TYPE_CHECKING:
    from kvjax.learning import OpenChunk
    from kvjax.policies.decode import DecodePolicy


@dataclasses.dataclass(eq=False)
class CachedSequence:
    """A sequence whose keys and values lie in an engine's pages.

    tokens: what was written so far, as far as the host knows it. length: tokens written. pages: by layer group, the page ids in order,
    reserved ones included, -1 for those that a window gave back. logits: next-token logits `[V]` float32 after the last prefill or extend;
    None after anything else. states: of learning policies, per layer. open_chunk: what prefill goes on with so that they learn the same
    however a prompt is cut; None after decoding.
    """

    tokens: list[int]
    length: int = 0
    pages: dict[str, list[int]] = dataclasses.field(default_factory=dict)
    logits: Float[Array, " V"] | None = None
    states: dict[DecodePolicy, tuple[Any, ...]] = dataclasses.field(default_factory=dict)
    open_chunk: OpenChunk | None = None

    def __repr__(self) -> str:
        return f"CachedSequence(length={self.length}, pages={max(map(len, self.pages.values()), default=0)})"
