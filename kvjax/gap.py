"""How much prefill fits between two decode steps whose time between tokens is bounded (`Scheduler(max_gap_ms=...)`)."""

from __future__ import annotations

import time


class Gap:
    """How many slices of layers fit between two decode steps, from measured times of both. seconds: the bound of the gap."""

    SHARE = 0.85
    """The share of the bound that is planned for."""

    def __init__(self, seconds: float):
        self.seconds = seconds
        self._step: float | None = None
        self._slice: float | None = None
        self._last: float | None = None

    def slices(self) -> int:
        """Slices to run after the next step; at least 1."""
        if self._slice is None:
            return 1
        return max(1, int((self.SHARE * self.seconds - (self._step or 0)) / self._slice))

    def steps_read(self, slices: int) -> None:
        """A step was read. slices: how many slices ran between it and the step before."""
        now = time.monotonic()
        if self._last is not None:
            gap = now - self._last
            if not slices:
                self._step = gap if self._step is None else 0.7 * self._step + 0.3 * gap
            else:
                each = max(gap - (self._step or 0), 0.1 * gap) / slices
                self._slice = each if self._slice is None else max(each, 0.7 * self._slice + 0.3 * each)
        self._last = now

    def idle(self) -> None:
        """Nothing is being decoded, so no request waits for a token."""
        self._last = None
