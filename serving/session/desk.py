"""What the gRPC server and the HTTP server share: how they are reached, who may call and how often, logs without prompt text, metrics."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import hmac
import ipaddress
import json
import logging
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from kvjax.checks import whole_number
from kvjax.client.errors import Cancelled, ResourceExhausted, SessionError, Unauthenticated, Unavailable
from kvjax.serving.session.limits import MAX_STOP_TOKENS
from kvjax.serving.session.metrics import Metrics
from kvjax.serving.session.pace import MESSAGES_PER_SECOND, Pace
from kvjax.serving.session.runtime import SessionRuntime

logger = logging.getLogger("kvjax.server")

HURRY_S = 0.2
"""How often a server that drains looks whether it is to hurry."""
ASKING, ASKING_S = 8, 5.0
"""How many calls of health's `Check`, which need no token, may wait for their message, and for how long."""
MAKE_ROOM_S = 1.0
"""How long a call waits for the place of a stream that is cut off for it."""


@dataclasses.dataclass(frozen=True)
class ServerOptions:
    """How a server is reached, and what it allows.

    Args:
        host: address to listen on. One that is not loopback needs `tokens`.
        port: 0 chooses a free one.
        tokens: bearer tokens, one of which every call must carry; none: calls need no token.
        certificate: PEM files of a certificate chain and its key, for TLS; None: no TLS.
        max_message_bytes: the largest message that it reads.
        max_tokens: the most token ids in one call.
        max_new_tokens: the most tokens that one call may generate.
        max_stop_tokens: the most stop tokens of one call.
        max_calls: calls at once; each takes a thread.
        calls_per_second: of each token, on average, in bursts of up to ten seconds' worth; None: no limit. Each message of a
            Converse counts.
        messages_per_second: of tokens, in all streams together; beyond that, a message has several tokens (`kvjax.serving.session.pace`).
        stall_s: seconds after which a client is cut off that takes none of what is sent to it, does not finish its request over HTTP, or
            sends no first message of its call over gRPC. A Converse that has been silent for so long gives its place to another call
            where all places are taken.
        http_port: for /v1, /metrics and /healthz; None: none; 0 chooses a free one.
        model_name: the model's name in /v1.
        clip_max_tokens: whether max_tokens of a request to /v1 is lowered to what there is room for; False: the request is refused.
    """

    host: str = "127.0.0.1"
    port: int = 50051
    tokens: tuple[str, ...] = ()
    certificate: tuple[bytes, bytes] | None = None
    max_message_bytes: int = 16 * 2**20
    max_tokens: int = 2**20
    max_new_tokens: int = 32_768
    max_stop_tokens: int = MAX_STOP_TOKENS
    max_calls: int = 256
    calls_per_second: float | None = None
    messages_per_second: float = MESSAGES_PER_SECOND
    stall_s: float = 60.0
    http_port: int | None = None
    model_name: str = "kvjax"
    clip_max_tokens: bool = False

    def __post_init__(self):
        for name in ("port", "max_message_bytes", "max_tokens", "max_new_tokens", "max_stop_tokens", "max_calls"):
            whole_number(name, getattr(self, name), 0 if name == "port" else 1)
        if self.port and self.port == self.http_port:
            raise ValueError(f"--port and --http-port are both {self.port}: gRPC and HTTP need a port each")
        if any(len(token) < 16 or not token.isascii() for token in self.tokens):
            raise ValueError("a bearer token must have at least 16 characters, all of them ASCII")
        if not is_loopback(self.host) and not self.tokens:
            raise ValueError(f"{self.host} is not a loopback address, so calls must carry a bearer token: give --token-file")
        if self.certificate is not None:
            tls_context(*self.certificate)


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches the address."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def tls_context(chain: bytes, key: bytes) -> Any:
    """The TLS context of PEM files, which Python reads only from disk. ValueError if they are none, or do not belong together."""
    import ssl

    def no_password() -> str:  # without this, Python would ask on the terminal
        raise ValueError("the key needs a password")

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    with tempfile.TemporaryDirectory() as folder:  # only this user can read it
        paths = Path(folder, "chain"), Path(folder, "key")
        for path, content in zip(paths, (chain, key), strict=True):
            path.write_bytes(content)
        try:
            context.load_cert_chain(*paths, no_password)
        except (ssl.SSLError, ValueError) as error:
            said = getattr(error, "reason", None) or error
            raise ValueError(
                f"--tls-certificate and --tls-key must be PEM files of a certificate chain and its key, without a password: {said}"
            ) from None
    return context


def only_authorization(values: Sequence[str]) -> str:
    """The value of a call's `authorization`; "" if it has none. Unauthenticated if it has several: a proxy in front of the server may have
    looked at another one than we do."""
    if len(values) > 1:
        raise Unauthenticated(f"the call carries {len(values)} authorization entries: send one")
    return values[0] if values else ""


class Allowance:
    """How many calls each bearer token may still make: a bucket that fills at `rate` calls per second, up to ten seconds' worth."""

    def __init__(self, rate: float):
        self._rate, self._most = rate, max(1.0, 10 * rate)
        self._left: dict[str, tuple[float, float]] = {}
        self._lock = threading.Lock()

    def take(self, token: str) -> bool:
        """Take one call. Returns whether there was one."""
        with self._lock:
            now = time.monotonic()
            left, then = self._left.get(token, (self._most, now))
            left = min(self._most, left + (now - then) * self._rate)
            self._left[token] = (left - 1 if left >= 1 else left), now
            return left >= 1


class Desk:
    """Who may call, how often, and what is noted of each call. started: seconds since 1970. ending: whether the server is draining.
    pace: of all its streams."""

    def __init__(self, runtime: SessionRuntime, metrics: Metrics, options: ServerOptions):
        self.runtime, self.metrics, self.options = runtime, metrics, options
        self.started, self.ending = int(time.time()), False
        self.pace = Pace(options.messages_per_second)
        self._allowance = None if options.calls_per_second is None else Allowance(options.calls_per_second)
        self._under_way: set[Call] = set()
        self._changed = threading.Condition()
        self._limited: dict[object, tuple[float, Callable[[], object]]] = {}
        self._silent: dict[object, tuple[float, Callable[[], object]]] = {}
        self._asking: dict[object, Callable[[], object]] = {}
        self._places = options.max_calls
        self._ended = threading.Event()
        threading.Thread(target=self._cut_stalled, name="kvjax stalled", daemon=True).start()

    def caller(self, authorization: str) -> str:
        """The token that the value of the header `authorization` names; "" where none is needed. Unauthenticated if there is none."""
        given, found = authorization.removeprefix("Bearer ").encode(), ""
        for token in self.options.tokens:  # all of them, so that the time says nothing
            if hmac.compare_digest(given, token.encode()) and authorization.startswith("Bearer "):
                found = token
        if self.options.tokens and not found:
            raise Unauthenticated("the call needs a bearer token of the server: authorization: Bearer TOKEN")
        return found

    def enter(self, authorization: str, *, while_ending: bool = False) -> str:
        """The caller. Raises as `caller` and `spend`; Unavailable while the server is draining, unless `while_ending`."""
        found = self.caller(authorization)
        if self.ending and not while_ending:
            raise Unavailable("the server is ending, and takes no new call", reason="ending")
        self.spend(found)
        return found

    def spend(self, caller: str) -> None:
        """Count a call. ResourceExhausted if the caller calls too often."""
        if self._allowance is not None and not self._allowance.take(caller):
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
        """While the message of a call of health's `Check` is awaited. The one that has waited longest is cut off where there are too many,
        so that silent ones keep nobody out."""
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
        """One of the places of calls over gRPC. ResourceExhausted where all are taken, and no silent stream can be cut off."""
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
        """While a stream waits for its client, and nothing is done for it. Cancelled if its place went to another call."""
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
    """One call, which is logged and counted when it ends. No token of a history is logged. session: its session's id, "" for none.
    caller: the bearer token that it came with, "" for none."""

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
