"""The host's record of a sequence in an engine's cache."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence, Set
from typing import TYPE_CHECKING, Any

import jax
from jaxtyping import Array, Float

if TYPE_CHECKING:
    from kvjax.cache.transfer import Stored
    from kvjax.learning import OpenChunk
    from kvjax.policies.decode import DecodePolicy


@dataclasses.dataclass(eq=False, slots=True)
class CachedSequence:
    """A sequence whose keys and values lie in an engine's pages.

    tokens: the written tokens that the host has read. length: how many tokens were written. pages: by layer group, the page ids in order,
    including reserved ones, -1 for those that a window gave back. logits: next-token logits `[V]` float32 after the last prefill or extend;
    None after anything else. states: those of learning policies, per layer. open_chunk: what prefill needs to continue, so that policies
    learn the same however a prompt is cut; None after decoding. suspended: its pages in host memory, after `Engine.suspend`; else None.
    """

    tokens: list[int]
    length: int = 0
    pages: dict[str, list[int]] = dataclasses.field(default_factory=dict)
    logits: Float[Array, " V"] | None = None
    states: dict[DecodePolicy, tuple[Any, ...]] = dataclasses.field(default_factory=dict)
    open_chunk: OpenChunk | None = None
    suspended: Stored | None = None

    def __repr__(self) -> str:
        return f"CachedSequence(length={self.length}, pages={max(map(len, self.pages.values()), default=0)})"

    def keep_on_host(self, stored: Stored) -> None:
        """Move states and logits to host memory, and note that its pages are there. Waits for the device."""

        def moved(states: Mapping[DecodePolicy, tuple[Any, ...]]) -> dict[DecodePolicy, tuple[Any, ...]]:
            return {policy: jax.device_get(each) for policy, each in states.items()}  # policies have no order, which a pytree needs

        logits, states = jax.device_get(self.logits), moved(self.states)
        opened = None if self.open_chunk is None else dataclasses.replace(self.open_chunk, states=moved(self.open_chunk.states))
        # Nothing can fail from here on.
        self.logits, self.states, self.open_chunk, self.suspended = logits, states, opened, stored

    def page_counts(self) -> dict[str, int]:
        """Pages in its page tables, by layer group. Pages that are reserved or were given back are included."""
        return {name: len(pages) for name, pages in self.pages.items()}


def check_usable(sequences: Sequence[CachedSequence], live: Set[CachedSequence], in_chunks: Set[CachedSequence] | None) -> None:
    """ValueError for sequences that are not among the engine's `live` ones, or appear twice, and for what is no list of sequences.

    in_chunks: sequences in the middle of a chunk of prefill. ValueError also for these and for suspended ones; None: allow both.
    """
    try:
        given = set(sequences)
    except TypeError as error:
        raise ValueError(
            f"a list stands where one sequence is needed, or one sequence where a list is needed: got {sequences!r:.60}; "
            "prefill returns a list"
        ) from error
    if not live >= given:
        raise ValueError("the sequence was freed, or belongs to another engine; prefill it here")
    if len(given) < len(sequences):
        raise ValueError("a sequence appears twice in one batch; fork it to decode it twice")
    if in_chunks is None:
        return
    if any([each.suspended is not None for each in sequences]):  # noqa: C419 - a list is faster, and this is done in every step
        raise ValueError("the sequence is suspended; engine.resume(sequence) brings its pages back")
    if in_chunks and not in_chunks.isdisjoint(given):
        raise ValueError("the sequence is in the middle of a chunk of prefill: continue the chunk (Engine.step), or free it")
