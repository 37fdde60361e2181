"""When the streams of a server may send, so that messages leave the thread that drives the engine its time."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

MESSAGES_PER_SECOND = 400.0
"""One message costs the server's process 0.1 to 0.3 ms of CPU time, part of it under Python's global lock, which the
thread that drives the engine needs, too. So messages take about a tenth of one core, and 64 streams get one each every
160 ms, which reads as a steady flow."""


class Throttle:
    """Tells each stream when its next message is due, so that all of them together send at most `rate` messages a
    second, in turn.

    The first message of a stream and those at its end do not wait. While all streams have fewer than `rate` tokens a
    second, every token is sent at once. Beyond that, a message holds the tokens that have come since the one before.
    Source: the generic cell rate algorithm in the form of virtual scheduling, ITU-T I.371, without its tolerance of
    bursts. clock: seconds, as `time.monotonic`. ValueError unless `rate` is above 0.
    """

    def __init__(self, rate: float = MESSAGES_PER_SECOND, clock: Callable[[], float] = time.monotonic):
        if not rate > 0:
            raise ValueError(f"messages per second must be above 0, got {rate}")
        self._gap, self._clock = 1 / rate, clock
        self._free = 0.0  # from when on nothing is reserved
        self._lock = threading.Lock()

    def reserve(self) -> float:
        """The time of the caller's next message: now, or when all who asked before have sent theirs."""
        with self._lock:
            due = max(self._clock(), self._free)
            self._free = due + self._gap
        return due

    def release(self) -> None:
        """A reserved time is not needed, so that others come sooner. Many short generations would otherwise reserve
        without end."""
        with self._lock:
            self._free -= self._gap
