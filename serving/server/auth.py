"""Who may call the gRPC server and the HTTP server, and how often; logs without prompt text, and metrics."""

from __future__ import annotations

import contextlib
import datetime
import hmac
import json
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence

from kvjax.client.errors import Cancelled, ResourceExhausted, SessionError, Unauthenticated, Unavailable
from kvjax.serving.server.metrics import Metrics
from kvjax.serving.server.options import ServerOptions
from kvjax.serving.sessions.runtime import SessionRuntime
from kvjax.serving.sessions.throttle import Throttle

logger = logging.getLogger("kvjax.server")

HURRY_S = 0.2
"""How often a server that drains looks whether it is to hurry."""
ASKING, ASKING_S = 8, 5.0
"""How many calls of health's `Check`, which need no token, may wait for their message, and for how long."""
MAKE_ROOM_S = 1.0
"""How long a call waits for the place of a stream that is cut off for it."""


def only_authorization(values: Sequence[str]) -> str:
    """The value of a call's `authorization`; "" if it has none. Unauthenticated if it has several: a proxy in front of
    the server may have looked at another one than we do."""
    if len(values) > 1:
        raise Unauthenticated(f"the call carries {len(values)} authorization entries: send one")
    return values[0] if values else ""


class RateLimiter:
    """How many calls each bearer token may still make: a bucket that fills at `rate` calls per second, up to ten
    seconds' worth."""

    def __init__(self, rate: float):
        self._rate, self._most = rate, max(1.0, 10 * rate)
        self._left: dict[str, tuple[float, float]] = {}
        self._lock = threading.Lock()

    def try_acquire(self, token: str) -> bool:
        """Count one call of this token. Returns whether it may be made."""
        with self._lock:
            now = time.monotonic()
            left, then = self._left.get(token, (self._most, now))
            left = min(self._most, left + (now - then) * self._rate)
            self._left[token] = (left - 1 if left >= 1 else left), now
            return left >= 1


class Admission:
    """Who may call, how often, and what is noted of each call. started: seconds since 1970. ending: whether the server
    is draining. throttle: of all its streams."""

    def __init__(self, runtime: SessionRuntime, metrics: Metrics, options: ServerOptions):
        self.runtime, self.metrics, self.options = runtime, metrics, options
        self.started, self.ending = int(time.time()), False
        self.throttle = Throttle(options.messages_per_second)
        self._limiter = None if options.calls_per_second is None else RateLimiter(options.calls_per_second)
        self._under_way: set[Call] = set()
        self._changed = threading.Condition()
        self._limited: dict[object, tuple[float, Callable[[], object]]] = {}
        self._silent: dict[object, tuple[float, Callable[[], object]]] = {}
        self._asking: dict[object, Callable[[], object]] = {}
        self._places = options.max_calls
        self._ended = threading.Event()
        threading.Thread(target=self._cut_stalled, name="kvjax stalled", daemon=True).start()

    def caller(self, authorization: str) -> str:
        """The token that the value of the header `authorization` names; "" where none is needed. Unauthenticated if
        there is none."""
        scheme, _, given = authorization.partition(" ")
        given, found = given.encode(), ""
        for token in self.options.tokens:  # all of them, so that the time says nothing
            if hmac.compare_digest(given, token.encode()) and scheme.lower() == "bearer":  # in any case (RFC 9110, section 11.1)
                found = token
        if self.options.tokens and not found:
            raise Unauthenticated("the call needs a bearer token of the server: authorization: Bearer TOKEN")
        return found

    def enter(self, authorization: str, *, while_ending: bool = False) -> str:
        """The caller. Raises as `caller` and `spend`; Unavailable while the server is draining, unless
        `while_ending`."""
        found = self.caller(authorization)
        if self.ending and not while_ending:
            raise Unavailable("the server is ending, and takes no new call", reason="ending")
        self.spend(found)
        return found

    def spend(self, caller: str) -> None:
        """Count a call. ResourceExhausted if the caller calls too often."""
        if self._limiter is not None and not self._limiter.try_acquire(caller):
            raise ResourceExhausted("too many calls per second: try again later", reason="rate")

    @contextlib.contextmanager
    def sending(self, call: Call, cut: Callable[[], object]) -> Iterator[None]:
        """While a call's message waits for its reader. cut: called from another thread if that takes too long."""

        def stalled() -> None:
            call.end(Cancelled("the client takes nothing of what is sent to it", reason="stalled"))
            cut()

        with self._within(self.options.stall_s, stalled):
            yield

    @contextlib.contextmanager
    def coming(self, call: Call | None, cut: Callable[[], object]) -> Iterator[None]:
        """While the first message of a call is awaited. call: None for one that is not noted. cut: as in `sending`."""

        def stalled() -> None:
            if call is not None:
                call.end(Cancelled("the client sends no message", reason="stalled"))
            cut()

        with self._within(self.options.stall_s, stalled):
            yield

    @contextlib.contextmanager
    def asking(self, cut: Callable[[], object]) -> Iterator[None]:
        """While the message of a call of health's `Check` is awaited. The one that has waited longest is cut off where
        there are too many, so that silent ones keep nobody out."""
        key, oldest = object(), None
        with self._changed:
            if len(self._asking) >= ASKING:
                oldest = self._asking.pop(next(iter(self._asking)))
            self._asking[key] = cut
        if oldest is not None:
            oldest()
        try:
            with self._within(min(ASKING_S, self.options.stall_s), cut):
                yield
        finally:
            with self._changed:
                self._asking.pop(key, None)

    @contextlib.contextmanager
    def place(self) -> Iterator[None]:
        """One of the places of calls over gRPC. ResourceExhausted where all are taken, and no silent stream can be cut
        off."""
        with self._changed:
            if not self._places:
                self._changed.wait_for(lambda: self._places, MAKE_ROOM_S if self._cut_silent() else 0)
            if not self._places:
                most = self.options.max_calls
                raise ResourceExhausted(f"{most} calls are under way, the server's limit (--max-calls): try again later", reason="calls")
            self._places -= 1
        try:
            yield
        finally:
            with self._changed:
                self._places += 1
                self._changed.notify_all()

    @contextlib.contextmanager
    def silent(self, cut: Callable[[], object]) -> Iterator[None]:
        """While a stream waits for its client, and nothing is done for it. Cancelled if its place went to another
        call."""
        key = object()
        with self._changed:
            self._silent[key] = time.monotonic(), cut
        try:
            yield
        finally:
            with self._changed:
                mine = self._silent.pop(key, None)
        if mine is None:
            raise Cancelled(f"the client sent nothing for {self.options.stall_s:g} s, and others wait for a place", reason="stalled")

    def _cut_silent(self) -> bool:
        """Cut off the stream that has been silent longest, if that is too long."""
        key = next(iter(self._silent), None)  # in the order in which they fell silent
        if key is None or time.monotonic() - self._silent[key][0] <= self.options.stall_s:
            return False
        self._silent.pop(key)[1]()
        return True

    @contextlib.contextmanager
    def _within(self, seconds: float, cut: Callable[[], object]) -> Iterator[None]:
        """The block may take so long; then `cut` is called, from another thread."""
        key = object()
        self._limited[key] = time.monotonic() + seconds, cut
        try:
            yield
        finally:
            self._limited.pop(key, None)

    def drain(self, seconds: float, hurry: threading.Event | None = None) -> None:
        """Refuse new calls, and wait for those under way to end, for so long at most, or until `hurry` is set."""
        until = time.monotonic() + seconds
        with self._changed:
            self.ending = True
            while self._under_way and not (hurry and hurry.is_set()) and (left := until - time.monotonic()) > 0:
                self._changed.wait(min(left, HURRY_S))

    def close(self) -> None:
        """Watch no more."""
        self._ended.set()

    def _cut_stalled(self) -> None:
        while not self._ended.wait(min(1.0, self.options.stall_s / 4)):
            for key, (until, cut) in self._limited.copy().items():
                if time.monotonic() > until and self._limited.pop(key, None):
                    cut()

    def begin(self, name: str) -> Call:
        """A call has come in."""
        call = Call(self.metrics, name, self._ended_call)
        with self._changed:
            self._under_way.add(call)
        return call

    def _ended_call(self, call: Call) -> None:
        with self._changed:
            self._under_way.discard(call)
            self._changed.notify_all()


class Call:
    """One call, which is logged and counted when it ends. No token of a history is logged. session: its session's id,
    "" for none. caller: the bearer token that it came with, "" for none."""

    def __init__(self, metrics: Metrics, name: str, tell: Callable[[Call], None]):
        self._metrics, self._name, self._tell, self.session, self.caller = metrics, name, tell, "", ""
        self._started, self.ended = time.monotonic(), False

    def end(self, error: SessionError | None) -> None:
        """It has ended, with this error or well. Only the first of several ends counts."""
        if self.ended:
            return
        self.ended = True
        self._tell(self)
        code = "OK" if error is None else error.code
        self._metrics.calls.labels(self._name, code).inc()
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")
        fields = {
            "time": now,
            "call": self._name,
            "code": code,
            "session": self.session[:8],
            "seconds": round(time.monotonic() - self._started, 4),
        }
        if error is not None:
            fields |= {"error": type(error).__name__, "field": error.field, "reason": error.reason}
        logger.info(json.dumps(fields))
