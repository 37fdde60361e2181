"""Whether the next launch of a batch is a round of drafting (`Scheduler(draft=...)`)."""

from __future__ import annotations

import logging
import math
import time

import jax

from kvjax.engine.drafts import tokens_alike
from kvjax.engine.engine import Engine
from kvjax.engine.policy_state import state_specs
from kvjax.engine.step_plan import Launch
from kvjax.engine.steps import Draft
from kvjax.policies.choice import ChoosesDecode
from kvjax.policies.decode import DecodePolicy
from kvjax.policies.decode.base import is_watched
from kvjax.policies.decode.naming import LOOKUP

logger = logging.getLogger(__name__)

BY_POLICY, BY_LOOKUP = (8, 4), (16, 8)
"""Most tokens of a sequence in a round, fewer if kernels could not verify those of all rows together; and most rounds
of a launch. Between two launches the device waits for the host. A round of tokens that are looked up is one step."""

PLAIN, ROUNDS = 8, 4
"""Launches of each kind that are timed before they are compared."""

TOO_SLOW = 1.25
"""Rounds that take so many times as long as steps end after one launch."""

LOSS, REST = 0.02, 64
"""After rounds that took longer, there are steps until what was lost is at most this share of the time; at least so
many launches of them."""


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
    """Of the batch of one policy: rounds by `draft` where they are faster, by the clock, than steps.

    The answer is the same either way. First some steps are timed, then rounds, each by the time between the ends of two
    launches. If the rounds took longer for their tokens, steps follow for so long that the loss is small, and then
    rounds are tried again.
    """

    def __init__(self, draft: Draft, page_size: int):
        # A launch writes to as many pages as any: a page's end may lie within it, but not two.
        _, most = BY_LOOKUP if draft.policy is None else BY_POLICY
        rounds = max(1, min(most, (page_size + 1) // draft.tokens))
        self.draft, self._launch = draft, Launch(rounds, None, rounds * draft.tokens, draft)
        self._round, self._first, self._last, self._resting = False, True, None, 0  # first: no launch of rounds has ended
        self._plain, self._told = 0.0, False  # seconds of a token; whether the log knows that rounds are faster
        self._begin()

    def _begin(self) -> None:
        self._count, self._tokens, self._seconds = 0, 0.0, 0.0

    def next(self) -> Launch | None:
        """The next launch, but for its `ends`; None: it is of steps."""
        return self._launch if self._round else None

    def ended(self, tokens: float, *, drafted: bool) -> None:
        """A launch has ended. tokens: of each sequence, the mean. drafted: whether it was of rounds."""
        now, last = time.perf_counter(), self._last
        first, self._last = drafted and self._first, now
        self._first = self._first and not drafted
        if last is None or drafted != self._round or first:
            return  # rounds wait for their program, or for a request that starts; their first call takes longer than others
        self._count, self._tokens, self._seconds = self._count + 1, self._tokens + tokens, self._seconds + now - last
        if drafted:
            self._judge()
        elif self._count >= PLAIN:
            self._plain, self._resting = self._seconds / self._tokens, self._resting - self._count
            self._turn(to_rounds=self._resting <= 0)

    def _judge(self) -> None:
        """Compare rounds with steps."""
        steps = self._tokens * self._plain
        if self._seconds > TOO_SLOW * steps or (self._count >= ROUNDS and self._seconds > steps):
            lost = self._seconds - steps
            self._resting = max(REST, math.ceil(lost / (LOSS * self._plain)))
            said = "drafts by %s take %.2f ms a token, and steps %.2f ms: none for %d launches"
            logger.info(said, self.draft.policy or LOOKUP, 1e3 * self._seconds / self._tokens, 1e3 * self._plain, self._resting)
            self._told = False
            self._turn(to_rounds=False)
        elif self._count >= ROUNDS:
            if not self._told:
                said = "drafts by %s take %.2f ms a token, and steps %.2f ms: rounds go on"
                logger.info(said, self.draft.policy or LOOKUP, 1e3 * self._seconds / self._tokens, 1e3 * self._plain)
            self._told = True
            self._begin()

    def interrupted(self) -> None:
        """Something else runs before the next launch ends."""
        self._last = None

    def _turn(self, *, to_rounds: bool) -> None:
        self._round = to_rounds
        self._begin()
