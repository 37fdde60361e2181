"""Giving pages back that a sequence's policy never reads again, and who may read the sequence afterwards.

A policy says what it keeps (`kvjax.policies.decode.GivesPagesBack`). With its first step on a sequence the pages
outside are given back. Where they are shared with other sequences, those keep them. From then on the sequence can be
read only within what was kept.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import weakref
from collections.abc import Iterable, Sequence

import jax
import numpy as np

from kvjax.cache.page_manager import PageManager, Reach
from kvjax.engine.sequence import CachedSequence, Keeping
from kvjax.policies.decode import DecodePolicy, KeepsByMass
from kvjax.policies.prefill import PrefillPolicy

LAG = 2
"""Launches after which the host reads a choice that the device has made. A scheduler has then read the tokens of that
launch, so the choice is there, and nobody waits."""


def reach_of(policy: DecodePolicy | PrefillPolicy, page_size: int) -> Reach | None:
    """The sinks and window outside which a policy reads no key; None if it may read any."""
    return policy.reach(page_size) if hasattr(policy, "reach") else None


def kept_by(policy: DecodePolicy, page_size: int) -> Reach | None:
    """The sinks and window that a policy keeps of its sequences, beside pages that it chooses; None if it keeps
    everything."""
    return policy.keeps(page_size) if hasattr(policy, "keeps") else None


def within(inner: Reach | None, outer: Reach | None) -> bool:
    """Whether a policy of reach `inner` reads nothing outside `outer`. None: any key, or all keys."""
    return outer is None or (inner is not None and inner[0] <= outer[0] and inner[1] <= outer[1])


def kept_from_the_start(policies: Sequence[DecodePolicy], prefill: PrefillPolicy, page_size: int) -> Reach | None:
    """What every sequence of an engine keeps while its prompt is still being prefilled: what the first of its policies
    keeps, if neither the others nor prefill read more. None: everything, until the first step of a policy that gives
    pages back."""
    first, *others = policies
    kept = None if isinstance(first, KeepsByMass) else kept_by(first, page_size)
    if kept is None or not all(within(reach_of(each, page_size), kept) for each in (*others, prefill)):
        return None
    return kept


@dataclasses.dataclass(frozen=True)
class _Choice:
    """A choice of distant pages that the device makes: those of `kept` stay, of all before `first_local`. due: the
    launch after which the host reads it."""

    due: int
    sequence: CachedSequence
    kept: jax.Array
    first_local: int


class PageEviction:
    """Gives pages of an engine's sequences back. reach: `kept_from_the_start`."""

    def __init__(self, groups: PageManager, page_size: int, policy: DecodePolicy, reach: Reach | None):
        self.reach = reach
        self._page_manager, self._page_size, self._policy = groups, page_size, policy
        self._step = 0
        self._choices: collections.deque[_Choice] = collections.deque()
        # Weakly, so that an engine that nobody holds any more goes at once.
        groups.on_short = functools.partial(_settle, weakref.ref(self))

    def new_sequence(self) -> CachedSequence:
        """A sequence without tokens."""
        keeping = None if self.reach is None else Keeping(self._policy, self.reach)
        return CachedSequence([], pages=self._page_manager.new(), keeping=keeping)

    def check(self, policy: DecodePolicy | PrefillPolicy, sequences: Iterable[CachedSequence | None], what: str = "policy") -> None:
        """ValueError if a policy may read pages that a sequence has given back. what: how messages call the policy."""
        for sequence in sequences:
            keeping = None if sequence is None else sequence.keeping
            if keeping is None or policy == keeping.policy:
                continue
            kept = kept_by(keeping.policy, self._page_size)
            if not within(reach_of(policy, self._page_size), kept):
                raise ValueError(
                    f"{what} {policy} may read tokens that a sequence of {sequence.length:,} tokens does not keep: policy "
                    f"{keeping.policy} gives its pages back outside the first {kept[0]:,} and the last {kept[1]:,} tokens, from its first "
                    f"step on. Decode it with that policy, name a window within, or prefill the text again"
                )

    def gives_back(self, policy: DecodePolicy) -> bool:
        """Whether a policy gives pages of its sequences back."""
        return kept_by(policy, self._page_size) is not None

    def after_step(self, policy: DecodePolicy, sequences: Sequence[CachedSequence], written: Sequence[int]) -> None:
        """A step of a policy that gives pages back, or a launch of several, is done. written: how many tokens of each
        sequence its last step wrote."""
        kept = kept_by(policy, self._page_size)
        self._step += 1
        by_mass = isinstance(policy, KeepsByMass)
        for sequence, count in zip(sequences, written, strict=True):
            if sequence.keeping is None or sequence.keeping.policy != policy:
                self._page_manager.release(sequence, [] if sequence.keeping is None else sequence.keeping.distant)
                sequence.keeping = Keeping(policy, None if by_mass else kept)
                self._page_manager.give_back(sequence, narrowed=True)
            if by_mass:
                self._note(policy, sequence, sequence.length - count, kept)
        while self._choices and self._choices[0].due <= self._step:
            self._apply(self._choices.popleft())

    def settle(self) -> None:
        """Give back what was chosen so far. Waits for the device."""
        while self._choices:
            self._apply(self._choices.popleft())

    def _note(self, policy: DecodePolicy, sequence: CachedSequence, before: int, kept: Reach) -> None:
        """Read the choice of a step later, if it was a new one. before: tokens before the step, the last of its
        launch."""
        page, keeping = before // self._page_size, sequence.keeping
        if keeping.asked == page:
            return
        keeping.asked = page
        chosen = policy.chosen(sequence.states[policy])
        if hasattr(chosen, "copy_to_host_async"):
            chosen.copy_to_host_async()
        first_local = max(before - kept[1] + 1, 0) // self._page_size
        self._choices.append(_Choice(self._step + LAG, sequence, chosen, first_local))

    def _apply(self, choice: _Choice) -> None:
        keeping = choice.sequence.keeping
        if keeping is None or not isinstance(keeping.policy, KeepsByMass):
            return  # the step only warmed up, or a narrower window has taken the sequence over
        stay = set(np.asarray(choice.kept).reshape(-1).tolist())
        sinks = -(-kept_by(keeping.policy, self._page_size)[0] // self._page_size)
        held = [*keeping.distant, *range(max(keeping.decided, sinks), choice.first_local)]
        self._page_manager.release(choice.sequence, [page for page in held if page not in stay])
        keeping.distant, keeping.decided = [page for page in held if page in stay], max(keeping.decided, choice.first_local)


def _settle(release: weakref.ref[PageEviction]) -> None:
    if (alive := release()) is not None:
        alive.settle()
