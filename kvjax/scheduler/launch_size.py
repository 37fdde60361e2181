"""How many decode steps the next launch has (`Scheduler(steps_per_launch=...)`)."""

from __future__ import annotations

import time
from typing import Literal

from kvjax.cache import MAX_STEP_TOKENS
from kvjax.checks import whole_number

StepsPerLaunch = int | Literal["auto"]

SEVERAL = 4
"""Steps of a launch that "auto" makes where the host is the slower part. On an H200 eight gained nothing more
(docs/scheduling.md)."""

LONG_PROMPT, LONG_ANSWER = 32_768, 256
"""Tokens of a prompt that were prefilled, and of its answer, from which on the program of several steps is compiled
while the rest of the prompt is prefilled."""

SIGNS = 4
"""Launches in a row that must say the same before the number changes."""


class LaunchSize:
    """steps: a number, or "auto": one step while the device is slower than the host, else `SEVERAL`. single: "auto" is
    one step, as where the host computes the steps itself, and several gain nothing.

    The host launches a step while the device runs the one before, and then waits for it. If it hardly waits, the
    device has waited for the host. With several steps in a launch, the host's part is known from before, and the
    device's is the time between two launches: if a step of the device takes longer than the host needs to launch one,
    several gain nothing.
    """

    def __init__(self, steps: StepsPerLaunch, *, single: bool = False):
        left_to_us = steps == "auto" and isinstance(steps, str)
        if not left_to_us and isinstance(steps, str):
            raise ValueError(f"steps_per_launch must be a whole number from 1 to {MAX_STEP_TOKENS}, or 'auto', got {steps!r}")
        self.auto = left_to_us and not single  # whether the number may change
        if left_to_us:
            self.most = 1 if single else SEVERAL
        else:
            self.most = whole_number("steps_per_launch", steps, 1, MAX_STEP_TOKENS + 1)
        self.steps = 1 if self.auto else self.most
        self._host: float | None = None
        self._last: float | None = None
        self._signs = 0

    def sizes(self, prefilled: int, tokens: int) -> tuple[int, ...]:
        """How many steps launches may have while so many tokens are made, the first launch's first. prefilled: tokens
        of the prompt so far. "auto" compiles a second program only for a long prompt and a long answer."""
        if self.auto:
            return (1, self.most) if prefilled >= LONG_PROMPT and tokens >= LONG_ANSWER else (1,)
        return (self.most, 1) if self.most > 1 else (1,)

    def read(self, steps: int, waited: float) -> None:
        """A launch of so many steps was read. waited: how long the host waited for it, in seconds."""
        now, last = time.perf_counter(), self._last
        self._last = now
        if not self.auto or last is None or steps != self.steps:
            return
        period = now - last
        if steps == 1:
            host = period - waited
            self._host = host if self._host is None else 0.8 * self._host + 0.2 * host
            change = waited < 0.1 * period
        else:
            change = period / steps > 1.2 * self._host
        self._signs = self._signs + 1 if change else 0
        if self._signs == SIGNS:
            self.steps, self._signs = SEVERAL + 1 - self.steps, 0

    def interrupted(self) -> None:
        """Something else than decode steps runs before the next one is read."""
        self._last = None
