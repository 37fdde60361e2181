"""The host's record of a sequence in an engine's cache."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence, Set
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jaxtyping import Array, Bool, Float

from kvjax.axes import on_host
from pallas_kernels.core.messages import shown

if TYPE_CHECKING:
    from kvjax.cache.page_manager import Reach
    from kvjax.cache.prefix_cache import Chain
    from kvjax.policies.decode import DecodePolicy


class Growth:
    """How many tokens some sequences have grown by together, in one batch of decode steps
    (`kvjax.engine.decode_batch.DecodeBatch`). The steps count here, and not in each sequence, so that their host time
    does not depend on the number of rows.

    whole: False once a sequence has left, because it changed in another way than by these steps, or went to another
    batch.
    """

    __slots__ = ("tokens", "whole")

    def __init__(self):
        self.tokens, self.whole = 0, True


@dataclasses.dataclass
class Keeping:
    """What a sequence keeps, once a policy that gives pages back decodes it (`kvjax.engine.page_eviction`).

    policy: that policy. reach: the sinks and window beside which all pages go by themselves; None where the policy
    chooses pages by mass. Then: distant: the pages that it has chosen. decided: the first page that no choice has
    weighed. asked: the page of the next token at the latest choice that the host has asked for.
    """

    policy: DecodePolicy
    reach: Reach | None
    distant: list[int] = dataclasses.field(default_factory=list)
    decided: int = 0
    asked: int = -1

    def copy(self) -> Keeping:
        return dataclasses.replace(self, distant=list(self.distant))


class CachedSequence:
    """A sequence whose keys and values lie in an engine's pages.

    tokens: the written tokens that the host has read. length: how many tokens were written. pages: by layer group, the
    page ids in order, including reserved ones, -1 for those that were given back. logits: next-token logits `[V]`
    float32 after the last prefill or extend; None after anything else. states: those of learning policies, per layer.
    open_chunk: what prefill needs to continue, so that policies learn the same however a prompt is cut; None after
    decoding. suspended: which logical pages `Engine.suspend` moved to host memory, by layer group; None: it is on the
    device. keeping: which policy gives pages of it back, and what stays; None: everything. prefix: what prefix it
    begins with, where the engine reuses pages. failed: the error that stopped a chunk of it half-way, when rows of its
    state had moved to the chunk's end: it can only be freed. growth: the batch in which it has been decoded since
    `length` and `pages` were last set; None before the next decode step. alarms: what the host knows of its heads, by
    watched policy.
    """

    __slots__ = ("_growth", "_length", "_pages", "alarms", "failed", "keeping")
    __slots__ += ("logits", "open_chunk", "prefix", "states", "suspended", "tokens")

    def __init__(
        self,
        tokens: list[int],
        length: int = 0,
        pages: dict[str, list[int]] | None = None,
        logits: Float[Array, " V"] | None = None,
        states: dict[DecodePolicy, tuple[Any, ...]] | None = None,
        open_chunk: OpenChunk | None = None,
        keeping: Keeping | None = None,
    ):
        self._growth: Growth | None = None
        self._length, self._pages = length, {} if pages is None else pages
        self.tokens, self.logits, self.open_chunk = tokens, logits, open_chunk
        self.states = {} if states is None else states
        self.suspended: dict[str, list[int]] | None = None
        self.keeping = keeping
        self.prefix: Chain | None = None
        self.failed: Exception | None = None
        self.alarms: dict[DecodePolicy, Alarm] = {}

    @property
    def length(self) -> int:
        return self._length if self._growth is None else self._length + self._growth.tokens

    @length.setter
    def length(self, length: int) -> None:
        self._leave()
        self._length = length

    @property
    def pages(self) -> dict[str, list[int]]:
        return self._pages

    @pages.setter
    def pages(self, pages: dict[str, list[int]]) -> None:
        self._leave()
        self._pages = pages

    @property
    def reach(self) -> Reach | None:
        """Sinks and window that it keeps in layer groups without a window of their own; None: no page goes by
        itself."""
        return None if self.keeping is None else self.keeping.reach

    @property
    def firsts(self) -> dict[str, int]:
        """On which device of a mesh its first page is to lie (`kvjax.cache.page_manager.Holder`)."""
        return {} if self.prefix is None else self.prefix.firsts

    @property
    def growth(self) -> Growth | None:
        return self._growth

    def grow_with(self, growth: Growth) -> None:
        """Grow with a batch from here on."""
        self._leave()
        self._length, self._growth = self._length - growth.tokens, growth

    def grow(self, tokens: int) -> None:
        """Grow by more tokens than the rest of the batch."""
        self._length += tokens

    def fail(self, error: Exception) -> None:
        """Note that a chunk failed half-way, and leave the batch."""
        self._leave()
        self.failed, self.logits = error, None

    def _leave(self) -> None:
        if self._growth is not None:
            self._length, self._growth.whole, self._growth = self.length, False, None

    def __repr__(self) -> str:
        held = max((sum(page >= 0 for page in pages) for pages in self.pages.values()), default=0)
        return f"CachedSequence(length={self.length}, pages={held})"

    def keep_on_host(self, held: dict[str, list[int]]) -> None:
        """Move states and logits to host memory, and note that its logical pages `held` are there. Waits for the
        device."""

        def moved(states: Mapping[DecodePolicy, tuple[Any, ...]]) -> dict[DecodePolicy, tuple[Any, ...]]:
            return {policy: on_host(each) for policy, each in states.items()}  # policies have no order, which a pytree needs

        logits, states = jax.device_get(self.logits), moved(self.states)
        opened = None if self.open_chunk is None else dataclasses.replace(self.open_chunk, states=moved(self.open_chunk.states))
        # Nothing can fail from here on.
        self.logits, self.states, self.open_chunk, self.suspended = logits, states, opened, held

    def twin(self, pages: dict[str, list[int]]) -> CachedSequence:
        """A second sequence of the same tokens, states and logits, with pages of its own."""
        other = CachedSequence(list(self.tokens), self.length, pages, self.logits, dict(self.states), self.open_chunk)
        other.prefix = None if self.prefix is None else self.prefix.copy()
        other.alarms = dict(self.alarms)
        other.keeping = None if self.keeping is None else self.keeping.copy()
        return other

    def page_counts(self) -> dict[str, int]:
        """Pages in its page tables, by layer group. Pages that are reserved or were given back are included."""
        return {name: len(pages) for name, pages in self.pages.items()}


def check_usable(sequences: Sequence[CachedSequence], live: Set[CachedSequence], in_chunks: Set[CachedSequence] | None) -> None:
    """ValueError for sequences that are not among the engine's `live` ones, or appear twice, and for what is no list of
    sequences.

    in_chunks: sequences in the middle of a chunk of prefill. ValueError also for these and for suspended ones, and
    RuntimeError for those that are lost (`CachedSequence.failed`); None: allow all of them.
    """
    try:
        given = set(sequences) if isinstance(sequences, list | tuple) else None
    except TypeError:
        given = None
    if given is None:
        raise ValueError(
            f"a list stands where one sequence is needed, or one sequence where a list is needed: got {shown(sequences)}; "
            "prefill returns a list"
        )
    if not live >= given:
        raise ValueError("the sequence was freed, or belongs to another engine; prefill it here")
    if len(given) < len(sequences):
        raise ValueError("a sequence appears twice in one batch; fork it to decode it twice")
    if in_chunks is None:
        return
    if any([each.failed is not None for each in sequences]):  # noqa: C419 - a list is faster, and this is done in every step
        error = next(each.failed for each in sequences if each.failed is not None)
        said = f"{type(error).__name__}: {str(error).strip().partition('\n')[0]:.200}"
        raise RuntimeError(f"the sequence was lost when a chunk of it failed half-way ({said}): free it, and prefill again") from error
    if any([each.suspended is not None for each in sequences]):  # noqa: C419 - as above
        raise ValueError("the sequence is suspended; engine.resume(sequence) brings its pages back")
    if in_chunks and not in_chunks.isdisjoint(given):
        raise ValueError("the sequence is in the middle of a chunk of prefill: continue the chunk (Engine.step), or free it")


States = tuple[Any, ...]
"""A policy's states, one per layer."""


@dataclasses.dataclass(frozen=True)
class OpenChunk:
    """A sequence's last chunk while it is not full: the policies' states before `position`, and the tokens prefilled
    from there on.

    The next call computes these tokens' queries again, so every cut of a prompt gives the same bits. This costs
    nothing, because a chunk always computes all of its rows. Where pages are packed, position begins a page, because
    the tokens of that page before it may be known only as packed when the queries run again. So queries of a page that
    steps began are not observed by prefill.
    """

    position: int
    tokens: tuple[int, ...]
    states: Mapping[DecodePolicy, States]


@dataclasses.dataclass(eq=False, slots=True)
class Alarm:
    """Whether a head of a sequence reads more than the policy's list, after the latest launch that measured the
    sequence.

    flags: of the batch of that launch, on their way to the host. row: the sequence's. unread: for how many launches the
    host still takes an alarm for granted, so that it need not wait.
    """

    flags: Bool[Array, "B"]
    row: int
    unread: int

    def raised(self, *, waits: bool) -> bool:
        """Whether the next launch has to take it that a head reads more. waits: read the flag now, and wait for the
        device."""
        if self.unread and not waits:
            self.unread -= 1
            return True
        self.unread = 0
        return bool(np.asarray(self.flags)[self.row])
