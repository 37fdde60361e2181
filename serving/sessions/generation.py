"""One generation of a session: the tokens as they come, for the thread that asked for them."""

from __future__ import annotations

import dataclasses
import queue
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import TYPE_CHECKING

from kvjax.client import arguments
from kvjax.client.errors import Cancelled, DeadlineExceeded

if TYPE_CHECKING:
    from kvjax.engine.sampling import Sampling
    from kvjax.scheduler.scheduler import Handle
    from kvjax.serving.sessions.throttle import Throttle

SPREAD_S = 0.0125
"""The most seconds between two tokens of one launch."""


@dataclasses.dataclass(eq=False)
class Run:
    """What the runtime knows of a generation. The runtime's thread adds tokens; one other thread waits for them.

    awaited: whether that thread waits for the next token. Only then does a token wake it, because a wake-up costs the
    runtime's thread far more than a token. turn: what the generation's turn is told by; cancelled when nobody waits for
    it any more. wakes: an entry for each wake-up. admitted: when the step began in which the scheduler turned to it.
    latest: when its latest tokens came; spread: the number of their first, that time, and the time between two of them.
    ended: when its last token had come. told: whether the log says that nobody takes them.
    """

    session_id: str
    sampling: Sampling
    at: int | None
    tokens: list[int] = dataclasses.field(default_factory=list)
    awaited: bool = False
    wakes: queue.SimpleQueue = dataclasses.field(default_factory=queue.SimpleQueue)
    handle: Handle | None = None
    finish_reason: str | None = None
    error: BaseException | None = None
    prefill_tokens: int = 0
    dropped_tokens: int = 0
    asked: float = dataclasses.field(default_factory=time.monotonic)
    admitted: float = 0.0
    latest: float | None = None
    spread: tuple[int, float, float] = (0, 0.0, 0.0)
    turn: Future | None = None
    over: bool = False
    ended: float = 0.0
    told: bool = False

    def end(self, reason: str | None, error: BaseException | None = None) -> None:
        """No more tokens come."""
        if not self.over:
            self.finish_reason, self.error, self.ended, self.over = reason, error, time.monotonic(), True
            self.wakes.put(None)

    def add(self, *tokens: int) -> None:
        """Tokens have come, several from one launch. Called in the runtime's thread."""
        now = time.monotonic()
        gap = 0.0 if self.latest is None else min((now - self.latest) / len(tokens), SPREAD_S)
        self.spread, self.latest = (len(self.tokens), now, gap), now
        self.tokens += tokens
        if self.awaited:
            self.awaited = False
            self.wakes.put(None)

    def wait(self, taken: int, timeout: float | None = None) -> bool:
        """Wait for more than `taken` tokens, or the end. Returns False if neither came within `timeout` seconds."""
        until = None if timeout is None else time.monotonic() + timeout
        while True:
            self.awaited = True  # before the look at the tokens: one that comes after the look then wakes this thread
            if len(self.tokens) > taken or self.over:
                self.awaited = False
                return True
            if not self._woken(until):
                self.awaited = False
                return False

    def due(self, taken: int) -> float:
        """When the next token after so many should be sent on, by `time.monotonic`. Tokens of one launch are spread
        over the time that the launch took, as the next launch is expected to take as long."""
        first, began, gap = self.spread
        return began + gap * (taken - first) if taken > first else 0.0

    def wait_for_end(self, until: float) -> bool:
        """Wait for the end until this time of `time.monotonic`. Returns whether it has come. Tokens do not wake this
        thread."""
        while not self.over:
            if not self._woken(until):
                return self.over
        return True

    def _woken(self, until: float | None) -> bool:
        timeout = None if until is None else min(max(0.0, until - time.monotonic()), threading.TIMEOUT_MAX)  # beyond it, Python refuses
        try:
            self.wakes.get(timeout=timeout)
        except queue.Empty:
            return False
        return True


class Generation:
    """The tokens of one `Session.generate`, as an iterator of ids.

    A token that was iterated over joins the session's history: all of them at the end; where the caller stops early, by
    `break` or `cancel`, those so far. history_tokens: length of the history, once it has ended.
    """

    def __init__(self, run: Run, conclude: Callable[[Run, int, bool], int]):
        self._run, self._conclude = run, conclude
        self.kept_if_broken: int | None = None
        """How many tokens join the history if it does not end by itself; None: those that were iterated over. 0 for a
        caller who does not know which of them arrived."""
        self.stopped = False
        """Whether `stop` with a number of tokens has ended it."""
        self._stop_keep: int | None = None
        self._taken = self.history_tokens = 0
        self._closed, self._reading = False, threading.Lock()

    @property
    def finish_reason(self) -> str | None:
        """ "stop" (the last token is a stop token), "length", or "cancelled"; None until it has ended."""
        if not self._closed:
            return None
        return "cancelled" if self.stopped else self._run.finish_reason

    @property
    def prefill_tokens(self) -> int:
        """Tokens that had to be prefilled before the first; known with the first token."""
        return self._run.prefill_tokens

    @property
    def dropped_tokens(self) -> int:
        """How many tokens of the history the window dropped at this call; known with the first token."""
        return self._run.dropped_tokens

    def __iter__(self) -> Iterator[int]:
        try:
            while (token := self.token()) is not None:
                yield token
        finally:
            self.cancel()

    def __next__(self) -> int:
        token = self.token()
        if token is None:
            raise StopIteration
        return token

    def __del__(self):
        try:
            if not self._closed:
                self._conclude(self._run, self._so_far, False)
        except Exception:  # when the interpreter ends, contextlib and others may be gone
            pass

    def token(self, timeout: float | None = None) -> int | None:
        """Wait for the next token; None at the end, when all of them have joined the history. Threads that share the
        generation take turns: each token goes to one of them.

        Raises what the generation ended with, and DeadlineExceeded after `timeout` seconds, which does not end it.
        """
        timeout = arguments.seconds("timeout", timeout)
        until = None if timeout is None else time.monotonic() + timeout
        if self._reading.acquire(timeout=-1 if timeout is None else min(timeout, threading.TIMEOUT_MAX)):
            try:
                if self._closed:
                    return None
                if self._run.wait(self._taken, None if until is None else max(0.0, until - time.monotonic())):
                    return self._next()
            finally:
                self._reading.release()
        raise DeadlineExceeded(f"no token came within {timeout:g} s")

    def _next(self) -> int | None:
        """The next token, where one has come, or the end."""
        run = self._run
        if len(run.tokens) > self._taken:
            self._taken += 1
            return run.tokens[self._taken - 1]
        keep = self._stop_keep  # read once: another thread may stop it now
        self.stopped = keep is not None and (isinstance(run.error, Cancelled) or (run.error is None and keep < self._taken))
        self.cancel(keep if self.stopped else self._taken if run.error is None else self._so_far)
        if run.error is not None:
            raise run.error
        return None

    def cancel(self, keep: int | None = None) -> None:
        """End it within a step, and free what it holds. keep: how many tokens stay in the history; None: those that
        were iterated over."""
        keep = keep if keep is None else arguments.whole("keep", keep)
        if not self._closed:
            self._closed = True
            self.history_tokens = self._conclude(self._run, self._so_far if keep is None else keep, True)

    @property
    def _so_far(self) -> int:
        return self._taken if self.kept_if_broken is None else self.kept_if_broken

    def ready(self, throttle: Throttle | None = None) -> list[int]:
        """Wait for the next token, and return it with those that have come meanwhile; [] at the end. Raises as `token`.

        throttle: where tokens are sent on: the first is returned at once, later ones when the next message is due and
        they are themselves, and all at the end.
        """
        if self._closed:
            return []
        run = self._run
        if throttle is not None and self._taken and run.wait_for_end(throttle.reserve()):
            throttle.release()  # the generation has ended, so there is no next message
        run.wait(self._taken)
        end = len(run.tokens)
        if throttle is not None and not run.wait_for_end(run.due(self._taken)):
            now = time.monotonic()
            end = next((number for number in range(self._taken + 1, end) if run.due(number) > now), end)
        found = run.tokens[self._taken : max(end, len(run.tokens) if run.over else 0)]
        self._taken += len(found)
        if not found:
            self.token()
        return found

    def stop(self, keep: int | None = None) -> None:
        """Let it end within a step, from any thread. Who waits for a token then gets the error Cancelled.

        keep: how many of its tokens join the history, even where it has ended by itself, but its reader does not know
        of that yet.
        """
        if keep is not None:
            self._stop_keep = arguments.whole("keep", keep)
        if not self._closed:
            self._conclude(self._run, -1, False)
