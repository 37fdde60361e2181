"""How much prefill fits between two decode steps whose time between tokens is bounded (`Scheduler(max_gap_ms=...)`)."""

from __future__ import annotations

import numbers
import time


class PrefillBudget:
    """How many slices of layers fit between two decode steps, from measured times of both. max_gap_ms: the bound of the
    gap, in milliseconds; ValueError unless it is a positive number."""

    SHARE = 0.85
    """The share of the bound that is planned for."""

    def __init__(self, max_gap_ms: float):
        if not (isinstance(max_gap_ms, numbers.Real) and not isinstance(max_gap_ms, bool) and 0 < max_gap_ms < float("inf")):
            raise ValueError(f"max_gap_ms must be a positive number of milliseconds, or None for no bound, got {max_gap_ms!r}")
        self.seconds = max_gap_ms / 1e3
        self._step: float | None = None
        self._slice: float | None = None
        self._last: float | None = None

    def slices(self) -> int:
        """Slices to run after the next step; at least 1."""
        if self._slice is None:
            return 1
        return max(1, int((self.SHARE * self.seconds - (self._step or 0)) / self._slice))

    def steps_read(self, slices: int, steps: int = 1) -> None:
        """A step was read, or so many of one launch. slices: how many slices ran between it and the step before."""
        now = time.monotonic()
        if self._last is not None:
            gap = now - self._last
            if not slices:
                each = gap / steps
                self._step = each if self._step is None else 0.7 * self._step + 0.3 * each
            else:
                each = max(gap - (self._step or 0), 0.1 * gap) / slices
                self._slice = each if self._slice is None else max(each, 0.7 * self._slice + 0.3 * each)
        self._last = now

    def idle(self) -> None:
        """Nothing is being decoded, so no request waits for a token."""
        self._last = None
