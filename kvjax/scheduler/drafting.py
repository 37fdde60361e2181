"""Whether the next launch of a batch is of rounds of drafting, and of which (`Scheduler(draft=...)`)."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

import jax
import numpy as np

from kvjax.engine.drafts import tokens_alike
from kvjax.engine.engine import Engine
from kvjax.engine.policy_state import state_specs
from kvjax.engine.step_plan import Launch
from kvjax.engine.steps import Draft
from kvjax.policies.choice import ChoosesDecode
from kvjax.policies.decode import DecodePolicy
from kvjax.policies.decode.base import is_watched
from kvjax.policies.decode.naming import LOOKUP, drafts_named

logger = logging.getLogger(__name__)

BY_POLICY, BY_LOOKUP = (8, 4), (16, 4)
"""Most tokens of a sequence in a round, fewer if kernels could not verify those of all rows together; and most rounds
of a launch. Two launches are in flight."""

SHORT, GAIN = 4, 0.95
"""Tokens of a shorter round by a policy, which is tried where it should take at most this share of the best time: where
many drafts are wrong, the later ones of a long round mostly are for nothing."""

PLAIN, ROUNDS = 8, 128
"""Launches of steps, and tokens of rounds, that are timed before they are compared. Right drafts come in runs."""

TOO_SLOW = 8
"""Rounds are compared at once when they have lost the time of so many tokens against what is known to be faster."""

LOSS, REST = 0.02, 64
"""After rounds that took longer, what is faster runs until what was lost is at most this share of the time; at least
for so many tokens."""


def drafts_of(engine: Engine, draft: str | DecodePolicy, rows: int) -> tuple[Draft, ...]:
    """How rounds of a batch of so many rows may draft: by each name of `draft`. ValueError as `draft_of`."""
    return tuple(draft_of(engine, each, rows) for each in drafts_named(draft))


def draft_of(engine: Engine, name: str | DecodePolicy, rows: int) -> Draft:
    """How rounds of a batch of so many rows draft: by a policy of the engine, or by lookup. ValueError for a policy
    that cannot draft, and for a mesh."""
    if engine.mesh is not None:
        raise ValueError(f"draft {name} is for one device, and this engine runs on {engine.mesh.size}: leave draft out")
    most, _ = BY_LOOKUP if name == LOOKUP else BY_POLICY
    tokens = max(2, min(most, tokens_alike(engine.config, engine.model.params, rows)))
    if name == LOOKUP:
        return Draft(None, tokens)
    policy = engine.declared(name)
    specs = state_specs(engine.config, engine.page_size, 1)
    if isinstance(policy, ChoosesDecode) or is_watched(policy) or jax.tree.leaves([policy.init(spec, 1) for spec in specs]):
        raise ValueError(
            f"draft {policy} keeps a state or chooses another policy, and dropped drafts must leave nothing: name another policy"
        )
    return Draft(policy, tokens)


class Drafting:
    """Of the batch of one policy: steps, or rounds by one of several `drafts`, whichever is fastest by the clock.

    The answer is the same either way. First some steps are timed, then rounds of each draft, by the time between the
    ends of two launches. What took least for its tokens goes on. If others took longer, they are tried again when what
    was lost is a small share of the time; but steps only if rounds become slower than steps were. Shorter rounds of a
    policy are among those that are tried when the tokens that stay in long ones, and their time, promise more of them.
    """

    def __init__(self, drafts: Sequence[Draft], page_size: int):
        self._launches: list[Launch | None] = [None]  # of steps first
        self._long: dict[int, int] = {}  # of shorter rounds: which long ones they may take the place of
        self._launches += [_launch(each, page_size) for each in drafts]
        for long, draft in enumerate(drafts, 1):
            if draft.policy is not None and draft.tokens > SHORT:
                self._long[len(self._launches)] = long
                self._launches.append(_launch(draft._replace(tokens=SHORT), page_size))
        self._best = self._now = self._running = 0  # what is fastest, what is timed, and what the latest launch was
        self._pace: dict[int, float] = {}  # seconds of a token
        self._round: dict[int, tuple[float, float]] = {}  # tokens that stay in a round, and its seconds
        self._called: set[int] = set()  # rounds of which a launch has ended: the first call takes longer than others
        self._last: float | None = None
        self._tried, self._rest = 0, 0.0  # the rounds tried last; seconds of the fastest before others are tried again
        self._begin()

    def _begin(self) -> None:
        self._count, self._tokens, self._seconds = 0, 0.0, 0.0

    def next(self, ready: Callable[[Launch], bool]) -> Launch | None:
        """The next launch of rounds, but for its `ends`; None: it is of steps. ready: whether a launch can run now.
        What is tried waits for its program while the fastest goes on."""
        wanted = dict.fromkeys((self._now, self._best))
        self._running = next((each for each in wanted if each and ready(self._launches[each])), 0)
        return self._launches[self._running]

    def ended(self, tokens: float, *, drafted: bool) -> None:
        """A launch has ended. tokens: of each sequence, the mean. drafted: whether it was of rounds."""
        now, last, which = time.perf_counter(), self._last, self._running if drafted else 0
        first, self._last = drafted and which not in self._called, now
        if drafted:
            self._called.add(which)
        if last is None or which != self._now or first:
            return  # rounds wait for their program, or for a request that starts
        self._count, self._tokens, self._seconds = self._count + 1, self._tokens + tokens, self._seconds + now - last
        if not which:
            known = self._count >= PLAIN
        else:
            known = self._tokens >= ROUNDS or self._seconds > (self._tokens + TOO_SLOW) * self._least
        if known:
            self._judge(which)

    @property
    def _least(self) -> float:
        """Seconds of a token of the fastest that is known, but for what is timed now."""
        return min(pace for each, pace in self._pace.items() if each != self._now)

    def _judge(self, which: int) -> None:
        """Compare what was timed with the others, and choose what is timed next."""
        pace, seconds, lost = self._seconds / self._tokens, self._seconds, 0.0
        if which == self._best:
            self._rest -= seconds
        if which and which == self._best and pace > self._pace[0]:  # steps are known from before the rounds
            lost, self._best = seconds - self._tokens * self._pace[0], 0
        elif which != self._best:
            lost = seconds - self._tokens * self._pace[self._best]
        self._pace[which] = pace
        if which:
            rounds = self._count * self._launches[which].steps
            self._round[which] = self._tokens / rounds, seconds / rounds
        if which and lost > 0:
            lost *= 1 + 1 / self._count  # one more launch is in flight
            self._rest = max(REST * self._pace[self._best], lost / LOSS)
            self._say(which, f"none for {self._rest:.0f} s")
        elif which != self._best:
            self._best, self._rest = which, REST * pace
            self._say(which, "rounds go on")
        self._begin()
        self._now = self._best if self._rest > 0 and all(each in self._pace for each in self._candidates) else self._following()

    @property
    def _candidates(self) -> list[int]:
        """The rounds that are worth a trial."""
        return [each for each in range(1, len(self._launches)) if each not in self._long or self._promise(each) or each == self._best]

    def _promise(self, short: int) -> bool:
        """Whether shorter rounds should be faster than everything known, as far as long ones tell: each draft is right
        with the same probability, and a round takes the time of a step and of each draft."""
        if (long := self._long[short]) not in self._round:
            return False
        (stay, seconds), step = self._round[long], self._pace[0]
        most, fewer = self._launches[long].draft.tokens, self._launches[short].draft.tokens
        shares = np.linspace(0.0, 1.0, 101)
        right = float(np.interp(stay, np.power.outer(shares, np.arange(most)).sum(axis=1), shares))
        expected = (step + (fewer - 1) * max(0.0, seconds - step) / (most - 1)) / np.power(right, np.arange(fewer)).sum()
        return expected < GAIN * min(self._pace.values())

    def _following(self) -> int:
        """Which rounds are tried next: those that never were, then in turn; the fastest if there are no others."""
        others = [each for each in self._candidates if each != self._best]
        untried = [each for each in others if each not in self._pace]
        later = [each for each in others if each > self._tried]
        self._tried = next(iter(untried or later or others), self._best)
        return self._tried

    def _say(self, which: int, what: str) -> None:
        draft, times = self._launches[which].draft, (1e3 * self._pace[which], 1e3 * self._pace[0])
        kind = draft.tokens, draft.policy or LOOKUP
        logger.info("rounds of %d tokens by %s take %.2f ms a token, and steps %.2f ms: %s", *kind, *times, what)

    def interrupted(self) -> None:
        """Something else runs before the next launch ends."""
        self._last = None


def _launch(draft: Draft, page_size: int) -> Launch:
    """A launch of rounds, but for its `ends`. Two in flight write to as many pages as one launch of steps: a page's end
    may lie within them, but not two."""
    _, most = BY_LOOKUP if draft.policy is None else BY_POLICY
    rounds = max(1, min(most, (page_size + 1) // (2 * draft.tokens)))
    return Launch(rounds, None, rounds * draft.tokens, draft)
