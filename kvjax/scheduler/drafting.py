"""Whether the next launch of a batch is a round of drafting (`Scheduler(draft=...)`)."""

from __future__ import annotations

import logging
import time

import jax

from kvjax.engine.engine import Engine
from kvjax.engine.policy_state import state_specs
from kvjax.engine.step_plan import Launch
from kvjax.engine.steps import Draft
from kvjax.policies.choice import ChoosesDecode
from kvjax.policies.decode import DecodePolicy
from kvjax.policies.decode.base import is_watched

logger = logging.getLogger(__name__)

TOKENS, LAUNCH = 8, 4
"""Tokens of a sequence in a round: as many as kernels verify together. Rounds in a launch: between two launches the
device waits for the host."""

PLAIN, ROUNDS = 8, 2
"""Launches of each kind that are timed before they are compared."""

REST, MAX_REST = 64, 2048
"""Launches without drafts after rounds that took longer: at first, and at most. It doubles each time."""


def draft_of(engine: Engine, name: str | DecodePolicy) -> Draft:
    """How rounds draft by a policy of the engine. ValueError for a policy that cannot draft, and for a mesh."""
    policy = engine.declared(name)
    if engine.mesh is not None:
        raise ValueError(f"draft {policy} is for one device, and this engine runs on {engine.mesh.size}: leave draft out")
    specs = state_specs(engine.config, engine.page_size, 1)
    if isinstance(policy, ChoosesDecode) or is_watched(policy) or jax.tree.leaves([policy.init(spec, 1) for spec in specs]):
        raise ValueError(
            f"draft {policy} keeps a state or chooses another policy, and dropped drafts must leave nothing: name another policy"
        )
    return Draft(policy, TOKENS)


class Drafting:
    """Of the batch of one policy: rounds by `draft` where they are faster, by the clock, than steps.

    The answer is the same either way. First some steps are timed, then some rounds, each by the time between the ends
    of two launches. If the rounds took longer for a token, steps follow for a while, and then rounds are tried again.
    """

    def __init__(self, draft: Draft, page_size: int):
        # A launch writes to as many pages as any: a page's end may lie within it, but not two.
        rounds = max(1, min(LAUNCH, (page_size + 1) // draft.tokens))
        self.draft, self._launch = draft, Launch(rounds, None, rounds * draft.tokens, draft)
        self._round, self._count, self._seconds = False, 0, 0.0
        self._plain: float | None = None  # seconds of a token
        self._last: float | None = None
        self._rest, self._resting = REST, 0

    def next(self) -> Launch | None:
        """The next launch, but for its `ends`; None: it is of steps."""
        return self._launch if self._round else None

    def ended(self, tokens: float, *, drafted: bool) -> None:
        """A launch has ended. tokens: of each sequence, the mean. drafted: whether it was a round."""
        now, last = time.perf_counter(), self._last
        self._last = now
        if last is None or drafted != self._round:
            return
        self._resting -= 1
        self._count += 1
        self._seconds += (now - last) / tokens
        if self._count < (ROUNDS if drafted else PLAIN):
            return
        mean, self._count, self._seconds = self._seconds / self._count, 0, 0.0
        if not drafted:
            self._plain = mean
            if self._resting <= 0:
                self._turn(to_rounds=True)
        elif mean >= self._plain:
            said = "drafts by %s take %.2f ms a token, and steps %.2f ms: none for %d launches"
            logger.info(said, self.draft.policy, 1e3 * mean, 1e3 * self._plain, self._rest)
            self._resting, self._rest = self._rest, min(2 * self._rest, MAX_REST)
            self._turn(to_rounds=False)
        else:
            self._rest = REST

    def interrupted(self) -> None:
        """Something else runs before the next launch ends."""
        self._last = None

    def _turn(self, *, to_rounds: bool) -> None:
        self._round, self._last = to_rounds, None
