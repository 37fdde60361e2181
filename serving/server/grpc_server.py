"""The gRPC server: a thin layer over `SessionRuntime`. It starts the HTTP server, too, where one is wanted."""

from __future__ import annotations

import contextlib
import gc
import logging
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any

from kvjax.client.errors import Cancelled, InvalidArgument, SessionError, Unauthenticated
from kvjax.client.wire import FIELD_KEY, REASON_KEY, SERVICE, Method, protocol
from kvjax.serving.server.auth import Admission, Call, only_authorization
from kvjax.serving.server.grpc_calls import Calls
from kvjax.serving.server.metrics import Metrics
from kvjax.serving.server.options import ServerOptions
from kvjax.serving.sessions.runtime import SessionRuntime
from pallas_kernels.core.optional import needs_extras

if TYPE_CHECKING:
    from kvjax.serving.server.app import Web

logger = logging.getLogger("kvjax.server")

MAX_HEADERS = 16 * 1024
"""Bytes of a call's metadata."""

BESIDE = 32
"""Calls beside those of the limit: health's `Check`, and those that are being refused."""

LAST_S = 0.5
"""After draining, for what is still being sent."""


IDLE_CONNECTION_MS = 60_000
"""A connection of gRPC without a call is closed after so long. Clients connect again at their next call."""
HANDSHAKE_MS = 5_000
"""How long the handshake of a connection of gRPC may take, with TLS or without; gRPC would wait for two minutes."""


def freeze_live_objects() -> None:
    """Collect garbage, and leave all objects that are there now out of later collections.

    For a process that does nothing but serve, before it listens: modules, model and engine live as long as it does. A
    full collection stops every thread that runs Python, and takes longer the more objects it looks at: hundreds of
    thousands after JAX was imported.
    """
    gc.collect()
    gc.freeze()


def allow_open_files() -> None:
    """Let the process have as many open files as it may: each connection takes one, and many systems begin with
    1,024."""
    import resource

    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


class Server:
    """A gRPC server over a runtime. `start` returns at once; `stop` drains. port, http_port: those that it listens
    on."""

    def __init__(self, runtime: SessionRuntime, metrics: Metrics, options: ServerOptions):
        needs_extras("kvjax serve", "server")
        import grpc
        from grpc_health.v1 import health, health_pb2, health_pb2_grpc
        from grpc_reflection.v1alpha import reflection

        self.runtime, self.metrics, self.options = runtime, metrics, options
        metrics.runtime = runtime
        self._admission = Admission(runtime, metrics, options)
        self._calls = Calls(runtime, options, self._admission.throttle, self._admission.silent)
        at_once = options.max_calls + BESIDE
        sizes = [("grpc.max_receive_message_length", options.max_message_bytes), ("grpc.max_metadata_size", MAX_HEADERS)]
        # Of one connection, also those that were reset and that nothing has looked at yet. Without it a client that
        # begins calls and resets them fills gRPC's queue, and the calls of others are dropped.
        sizes.append(("grpc.max_concurrent_streams", at_once))
        patience = ("grpc.server_handshake_timeout_ms", HANDSHAKE_MS)
        self._server = grpc.server(
            ThreadPoolExecutor(at_once, thread_name_prefix="kvjax call"),
            interceptors=[_gate(self._admission, self._refused)],
            options=[*sizes, ("grpc.so_reuseport", 0), ("grpc.max_connection_idle_ms", IDLE_CONNECTION_MS), patience],
            maximum_concurrent_rpcs=at_once,  # the admission has places for max_calls of the service
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
            remedy = "choose another --port, or a --host that this machine has"
            raise OSError(f"cannot listen on {host}:{options.port}: {remedy} ({error})") from None
        self._web: Web | None = None
        self._http: socket.socket | None = None
        if options.http_port is not None:  # so that a port that is taken is said before anything is compiled
            from kvjax.serving.server.app import bound_socket

            self._http = bound_socket(options.host, options.http_port)

    def _bind(self, address: str) -> int:
        import grpc

        if self.options.certificate is None:
            return self._server.add_insecure_port(address)
        chain, key = self.options.certificate
        return self._server.add_secure_port(address, grpc.ssl_server_credentials([(key, chain)]))

    @property
    def http_port(self) -> int | None:
        """The port of HTTP; None where there is none."""
        return None if self._http is None else self._http.getsockname()[1]

    def start(self) -> None:
        """Listen."""
        self._server.start()
        for name in ("", SERVICE):
            self._health.set(name, self._serving.SERVING)
        if self._http is not None:
            from kvjax.serving.server.app import Web

            self._web = Web(self._admission, self._http)

    def stop(self, drain_s: float = 10.0, hurry: threading.Event | None = None) -> None:
        """Refuse new calls, let those under way end within `drain_s` seconds, and close the runtime. hurry: once set,
        it ends that time."""
        self._health.enter_graceful_shutdown()
        self._admission.drain(drain_s, hurry)
        stopped = self._server.stop(None if hurry is not None and hurry.is_set() else LAST_S)
        if self._web is not None:
            self._web.stop(LAST_S)
        elif self._http is not None:
            self._http.close()
        stopped.wait(LAST_S + 1)
        self.runtime.close()
        self._admission.close()

    def _handler(self, method: Method) -> Any:
        """The handler of one call: unary, or streaming."""
        import grpc

        behaviour = getattr(self._calls, method.name)
        kinds = {
            (False, False): (grpc.stream_unary_rpc_method_handler, self._unary),
            (False, True): (grpc.stream_stream_rpc_method_handler, self._streaming),
            (True, True): (grpc.stream_stream_rpc_method_handler, self._streaming),
        }
        make, wrap = kinds[method.streams]
        # Messages are parsed inside the call, so that one that is none is an error like others, and not a traceback in
        # the log. They are awaited there, too, also where there is only one: gRPC itself would wait for it without end.
        return make(
            lambda content, context: wrap(method, behaviour, content, context), response_serializer=method.response.SerializeToString
        )

    def _unary(self, method: Method, behaviour: Any, content: Iterator[bytes], context: Any) -> Any:
        with self._watched(method.name, context) as call, self._admission.place():
            answer = behaviour(_parsed(method, self._first(content, call, context), call), context)
            call.session = call.session or getattr(answer, "session_id", "")  # a new session's
            return answer
        return method.response()  # nobody gets it: the client has gone, and gRPC would log that None is no message

    def _streaming(self, method: Method, behaviour: Any, content: Iterator[bytes], context: Any) -> Iterator[Any]:
        with self._watched(method.name, context) as call, self._admission.place():
            if method.streams[0]:
                given = self._requests(method, content, call, context)
            else:
                given = _parsed(method, self._first(content, call, context), call)
            with contextlib.closing(behaviour(given, context)) as responses:
                for response in responses:
                    with self._admission.sending(call, context.cancel):
                        yield response

    def _first(self, content: Iterator[bytes], call: Call, context: Any) -> bytes:
        """The message of a call. InvalidArgument if it ends without one, Cancelled if the client goes; a silent one is
        cut off."""
        from grpc import RpcError

        try:
            with self._admission.coming(call, context.cancel):
                found = next(content, None)
        except RpcError:
            raise Cancelled("the client has gone") from None
        if found is None:
            raise InvalidArgument("the call has no message: send one")
        return found

    def _requests(self, method: Method, content: Iterator[bytes], call: Call, context: Any) -> Iterator[Any]:
        """The messages of a call. Each counts as one, the first of them together with the call."""
        with self._admission.coming(call, context.cancel):
            each = next(content, None)
        while each is not None:
            yield _parsed(method, each, call)
            each = next(content, None)
            if each is not None:
                self._admission.spend(call.caller)

    def _refused(self, name: str, context: Any) -> Iterator[Any]:
        """A call without a token."""
        with self._watched(name if name in protocol().methods else "other", context):
            yield from ()

    @contextlib.contextmanager
    def _watched(self, name: str, context: Any) -> Iterator[Call]:
        """The block of one call: check who calls, turn errors into statuses, count, and log."""
        call, error = self._admission.begin(name), None
        try:
            call.caller = self._admission.enter(_authorization(context.invocation_metadata()))
            yield call
        except SessionError as raised:
            error = raised
        except GeneratorExit:
            error = Cancelled("the client has gone")
            raise
        except Exception as raised:
            logger.exception("%s failed", name)
            error = SessionError(f"{type(raised).__name__}: see the server's log")
        finally:
            call.end(error)
            if error is not None and context.is_active():
                self._abort(context, error)

    def _abort(self, context: Any, error: SessionError) -> None:
        import grpc

        keys = ((FIELD_KEY, error.field), (REASON_KEY, error.reason))
        context.set_trailing_metadata(tuple((key, value) for key, value in keys if value))
        context.abort(grpc.StatusCode[error.code], str(error) if not isinstance(error, InvalidArgument) else str(error)[:1000])


def _authorization(metadata: Any) -> str:
    return only_authorization([str(value) for key, value in metadata or () if key == "authorization"])


def _gate(admission: Admission, refused: Callable[[str, Any], Iterator[Any]]) -> Any:
    """What turns away calls without a token before their messages are read: one that never comes would keep a thread.
    So that a balancer can look, `Check` of the health service is answered to anybody, beside the places of other calls;
    its `Watch`, which never ends, takes one of them, and so does reflection."""
    import grpc
    from grpc_health.v1 import health

    def check(handler: Any, requests: Iterator[Any], context: Any) -> Any:
        with admission.asking(context.cancel):
            request = next(requests, None)
        if request is None:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, "the call has no message: send one")
        return handler.unary_unary(request, context)

    def other(handler: Any, requests: Iterator[Any], context: Any) -> Iterator[Any]:
        try:
            with admission.place():
                with admission.coming(None, context.cancel):
                    first = next(requests, None)
                if first is None:
                    return
                with admission.silent(context.cancel):  # it never ends by itself, so its place goes to others that wait
                    if handler.request_streaming:
                        yield from handler.stream_stream(chain((first,), requests), context)
                    else:
                        yield from handler.unary_stream(first, context)
        except SessionError as error:
            context.abort(grpc.StatusCode[error.code], str(error))

    class Gate(grpc.ServerInterceptor):
        def intercept_service(self, continuation: Any, details: Any) -> Any:
            service, _, name = details.method.strip("/").rpartition("/")
            checks = (service, name) == (health.SERVICE_NAME, "Check")
            if not checks:
                try:
                    admission.caller(_authorization(details.invocation_metadata))
                except Unauthenticated:
                    return grpc.stream_stream_rpc_method_handler(lambda requests, context: refused(name, context))
            handler = continuation(details)
            if handler is None or service == SERVICE:
                return handler
            streams = handler.response_streaming
            make, behaviour = (grpc.stream_stream_rpc_method_handler, other) if streams else (grpc.stream_unary_rpc_method_handler, check)
            return make(partial(behaviour, handler), handler.request_deserializer, handler.response_serializer)

    return Gate()


def _parsed(method: Method, content: bytes, call: Call) -> Any:
    """A call's message. InvalidArgument for bytes that are none."""
    from google.protobuf.message import DecodeError

    try:
        request = method.request.FromString(content)
    except DecodeError:
        raise InvalidArgument(f"the {len(content)} bytes are no {method.request.DESCRIPTOR.name}") from None
    call.session = call.session or getattr(request, "session_id", "")
    return request
