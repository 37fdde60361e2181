"""The gRPC server: a thin layer over `SessionRuntime`. What it adds: who may call, limits, logs without prompt text, and metrics."""

from __future__ import annotations

import contextlib
import dataclasses
import hmac
import ipaddress
import json
import logging
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from kvjax.checks import whole_number
from kvjax.client.errors import Cancelled, InvalidArgument, ResourceExhausted, SessionError, Unauthenticated
from kvjax.client.wire import FIELD_KEY, REASON_KEY, SERVICE, Method, protocol
from kvjax.serving.session.calls import Calls
from kvjax.serving.session.metrics import Metrics
from kvjax.serving.session.runtime import SessionRuntime
from pallas_kernels.extras import needs_extras

logger = logging.getLogger("kvjax.server")

MOST_HEADERS = 16 * 1024
"""Bytes of a call's metadata."""


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
        max_calls: calls at once; each takes a thread.
        calls_per_second: of each token, on average, in bursts of up to ten seconds' worth; None: no limit.
        http_port: for /metrics and /healthz; None: none; 0 chooses a free one.
    """

    host: str = "127.0.0.1"
    port: int = 50051
    tokens: tuple[str, ...] = ()
    certificate: tuple[bytes, bytes] | None = None
    max_message_bytes: int = 16 * 2**20
    max_tokens: int = 2**20
    max_new_tokens: int = 32_768
    max_calls: int = 256
    calls_per_second: float | None = None
    http_port: int | None = None

    def __post_init__(self):
        for name in ("port", "max_message_bytes", "max_tokens", "max_new_tokens", "max_calls"):
            whole_number(name, getattr(self, name), 0 if name == "port" else 1)
        if any(len(token) < 16 or not token.isascii() for token in self.tokens):
            raise ValueError("a bearer token must have at least 16 characters, all of them ASCII")
        if not is_loopback(self.host) and not self.tokens:
            raise ValueError(f"{self.host} is not a loopback address, so calls must carry a bearer token: give --token-file")


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches the address."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


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


class Gate:
    """Who may call, and how often."""

    def __init__(self, options: ServerOptions):
        self._tokens = options.tokens
        self._allowance = None if options.calls_per_second is None else Allowance(options.calls_per_second)

    def enter(self, authorization: str) -> None:
        """Unauthenticated unless the value of the header `authorization` names a token; ResourceExhausted if it calls too often."""
        given, found = authorization.removeprefix("Bearer ").encode(), ""
        for token in self._tokens:  # all of them, so that the time says nothing
            if hmac.compare_digest(given, token.encode()) and authorization.startswith("Bearer "):
                found = token
        if self._tokens and not found:
            raise Unauthenticated("the call needs a bearer token of the server, in its metadata: authorization: Bearer TOKEN")
        if self._allowance is not None and not self._allowance.take(found):
            raise ResourceExhausted("too many calls per second: try again later", reason="rate")


class Server:
    """A gRPC server over a runtime. `start` returns at once; `stop` drains. port, http_port: those that it listens on."""

    def __init__(self, runtime: SessionRuntime, metrics: Metrics, options: ServerOptions):
        needs_extras("kvjax serve", "server")
        import grpc
        from grpc_health.v1 import health, health_pb2, health_pb2_grpc
        from grpc_reflection.v1alpha import reflection

        self.runtime, self.metrics, self.options = runtime, metrics, options
        metrics.runtime = runtime
        self._gate, self._calls = Gate(options), Calls(runtime, options.max_tokens, options.max_new_tokens)
        sizes = [("grpc.max_receive_message_length", options.max_message_bytes), ("grpc.max_metadata_size", MOST_HEADERS)]
        self._server = grpc.server(
            ThreadPoolExecutor(options.max_calls + 8, thread_name_prefix="kvjax call"),
            options=[*sizes, ("grpc.so_reuseport", 0)],
            maximum_concurrent_rpcs=options.max_calls,
        )
        handlers = {name: self._handler(method) for name, method in protocol().methods.items()}
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
        self._health, self._serving = health.HealthServicer(), health_pb2.HealthCheckResponse
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        reflection.enable_server_reflection((SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME), self._server)
        host = f"[{options.host}]" if ":" in options.host and not options.host.startswith("[") else options.host
        try:
            self.port = self._bind(f"{host}:{options.port}")
        except RuntimeError as error:
            raise OSError(f"cannot listen on {host}:{options.port}: choose another --port ({error})") from None
        self._pages = None

    def _bind(self, address: str) -> int:
        import grpc

        if self.options.certificate is None:
            return self._server.add_insecure_port(address)
        chain, key = self.options.certificate
        return self._server.add_secure_port(address, grpc.ssl_server_credentials([(key, chain)]))

    @property
    def http_port(self) -> int | None:
        """The port of /metrics and /healthz; None where there is none."""
        return None if self._pages is None else self._pages.server_address[1]

    def start(self) -> None:
        """Listen."""
        self._server.start()
        for name in ("", SERVICE):
            self._health.set(name, self._serving.SERVING)
        if self.options.http_port is not None:
            from kvjax.serving.session.pages import serve_pages

            self._pages = serve_pages(self.options.host, self.options.http_port, self.metrics, self._gate)

    def stop(self, drain_s: float = 10.0) -> None:
        """Refuse new calls, let those under way end within `drain_s` seconds, and close the runtime."""
        self._health.enter_graceful_shutdown()
        stopped = self._server.stop(drain_s)
        stopped.wait(drain_s + 1)
        self.runtime.close()
        if self._pages is not None:
            self._pages.shutdown()

    def _handler(self, method: Method) -> Any:
        """The handler of one call: unary, or streaming."""
        import grpc

        behaviour = getattr(self._calls, method.name)
        kinds = {
            (False, False): (grpc.unary_unary_rpc_method_handler, self._unary),
            (False, True): (grpc.unary_stream_rpc_method_handler, self._streaming),
            (True, True): (grpc.stream_stream_rpc_method_handler, self._streaming),
        }
        make, wrap = kinds[method.streams]
        codec = {"request_deserializer": method.request.FromString, "response_serializer": method.response.SerializeToString}
        return make(lambda request, context: wrap(method.name, behaviour, request, context), **codec)

    def _unary(self, name: str, behaviour: Any, request: Any, context: Any) -> Any:
        with self._watched(name, request, context):
            return behaviour(request, context)

    def _streaming(self, name: str, behaviour: Any, request: Any, context: Any) -> Iterator[Any]:
        with self._watched(name, request, context):
            yield from behaviour(request, context)

    @contextlib.contextmanager
    def _watched(self, name: str, request: Any, context: Any) -> Iterator[None]:
        """The block of one call: check who calls, turn errors into statuses, count, and log. No token of a history is logged."""
        started, error = time.monotonic(), None
        try:
            self._gate.enter(str(dict(context.invocation_metadata()).get("authorization", "")))
            yield
        except SessionError as raised:
            error = raised
        except GeneratorExit:
            error = Cancelled("the client has gone")
            raise
        except Exception as raised:
            logger.exception("%s failed", name)
            error = SessionError(f"{type(raised).__name__}: see the server's log")
        finally:
            code = "OK" if error is None else error.code
            self.metrics.calls.labels(name, code).inc()
            session = getattr(request, "session_id", "")[:8]
            fields = {"call": name, "code": code, "session": session, "seconds": round(time.monotonic() - started, 4)}
            if error is not None:
                fields |= {"error": type(error).__name__, "field": error.field, "reason": error.reason}
            logger.info(json.dumps(fields))
            if error is not None and context.is_active():
                self._abort(context, error)

    def _abort(self, context: Any, error: SessionError) -> None:
        import grpc

        keys = ((FIELD_KEY, error.field), (REASON_KEY, error.reason))
        context.set_trailing_metadata(tuple((key, value) for key, value in keys if value))
        context.abort(grpc.StatusCode[error.code], str(error) if not isinstance(error, InvalidArgument) else str(error)[:1000])
