"""HTTP: /metrics and /healthz, and a shim for clients of OpenAI's API.

The shim is deprecated and frozen (ADR 0008, section 2.7): /v1/completions, /v1/chat/completions and /v1/models, single
shot. Each request makes a session, generates, and closes it. No prefix is reused, and no session id is told. Chat
templates are applied here, and never by the runtime.
"""

from __future__ import annotations

import asyncio
import datetime
import email.utils
import json
import logging
import socket
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any

from kvjax.client.errors import Cancelled, DeadlineExceeded, InvalidArgument, ResourceExhausted, SessionError, Unavailable
from kvjax.serving.bodies import WrongField, check_once, from_json
from kvjax.serving.server.auth import only_authorization
from kvjax.serving.server.completion import TextCompletion
from kvjax.serving.server.connections import ACCEPTED, FIRST_S, WAITING, impatient, quick_handshakes
from kvjax.serving.server.openai_form import Asked, Form, asked, no_model, usage_of
from kvjax.serving.server.options import tls_context

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

    from kvjax.serving.server.auth import Admission, Call

logger = logging.getLogger("kvjax.server")

DEPRECATED = datetime.datetime(2026, 6, 1, tzinfo=datetime.UTC)
"""When ADR 0008 deprecated the shim."""
SUNSET = datetime.datetime(2027, 12, 31, tzinfo=datetime.UTC)
"""The shim stays at least until then. The ADR leaves the date open (open question 3); this one is ours."""
NOTICE = {
    "Deprecation": f"@{int(DEPRECATED.timestamp())}",
    "Sunset": email.utils.format_datetime(SUNSET, usegmt=True),
    "Link": '</deprecation>; rel="deprecation"; type="text/plain"',
}
"""Headers of every response of the shim: RFC 9745, RFC 8594."""
WHY = """\
/v1 is deprecated and frozen: ADR 0008, section 2.7. Each request prefills its whole prompt anew.
Sessions over gRPC keep their cache: docs/sessions.md of kvjax, `from kvjax.client import Client`.
"""
STATUS = {
    "INVALID_ARGUMENT": 400,
    "UNAUTHENTICATED": 401,
    "NOT_FOUND": 404,
    "RESOURCE_EXHAUSTED": 429,
    "UNAVAILABLE": 503,
    "DEADLINE_EXCEEDED": 504,
}
"""HTTP statuses of errors; others are 500."""
REASONS = {"bytes": 413, "stalled": 408}
"""HTTP statuses of errors by reason, before those of their codes."""
FIELDS = {"tokens": "prompt"}
"""OpenAI's names of fields that the runtime calls otherwise. What a request names itself is called as it was typed."""
KINDS = {401: "authentication_error", 429: "rate_limit_error"}
"""OpenAI's types of errors, by status; others are invalid_request_error below 500, and server_error from there on."""
IDLE_CONNECTION_S = 5
QUICK_JSON = 64 * 1024
"""Bytes of a body that is parsed between other things."""
LONG_TEXTS = 2
"""Requests with bodies above `QUICK_JSON` whose text is tokenized at once. That takes some 230 times the memory of the
text."""
MAX_SIMPLE_JSON = 2**20
"""Bytes of a body that does not wait for larger ones."""
MAX_PIECES = 2**21
"""Values of a body, at most; an object, a list or a text counts as eight. More take longer than half a second to
parse."""
PAUSE = 3
"""After a body, none is parsed for so many times as long as that took."""
QUIET_S = 5.0
"""A stream that has sent nothing for so long sends a comment, because proxies close connections on which nothing
comes."""


class Web:
    """The HTTP server, in a thread of its own, which listens from here on.

    admission: who may call, limits, logs and metrics, which are those of the gRPC server. bound: a socket of
    `bound_socket`. Needs the extra `server`.
    """

    def __init__(self, admission: Admission, bound: socket.socket):
        import uvicorn

        options = admission.options
        self._socket = bound
        bound.listen(WAITING)
        self._routes = _Routes(admission)
        config = uvicorn.Config(
            self._routes.app(), http=impatient(options.stall_s, 2 * options.max_calls + 16), loop="asyncio", backlog=ACCEPTED,
            timeout_keep_alive=IDLE_CONNECTION_S, lifespan="off", ws="none", log_config=None, access_log=False, server_header=False,
            proxy_headers=False,
        )  # fmt: skip
        if options.certificate is not None:
            config.ssl_context_factory = lambda config, default: tls_context(*options.certificate)

        class Quick(uvicorn.Server):
            async def startup(self, sockets: list[socket.socket] | None = None) -> None:
                if options.certificate is not None:
                    quick_handshakes(min(FIRST_S, options.stall_s))
                await super().startup(sockets)
                bound.listen(WAITING)  # asyncio takes `backlog` for both: how many wait, and how many it takes at once

        self._server = Quick(config)
        self._thread = threading.Thread(target=self._server.run, kwargs={"sockets": [self._socket]}, name="kvjax http", daemon=True)
        self._thread.start()

    def stop(self, drain_s: float) -> None:
        """Take no new connections, and let requests under way run for `drain_s` seconds."""
        self._server.config.timeout_graceful_shutdown = max(1, round(drain_s))
        self._server.should_exit = True
        self._thread.join(drain_s + 5)
        self._socket.close()
        self._routes.close()


def bound_socket(host: str, port: int) -> socket.socket:
    """A socket that has its port, and does not listen yet. OSError if it cannot have the port."""
    bound = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind((host.strip("[]"), port))
    except OSError as error:
        bound.close()
        raise OSError(f"cannot listen on {host}:{port}: choose another --http-port ({error.strerror})") from None
    return bound


class _Routes:
    """The pages. What waits for the runtime does so in threads, one for each request; /metrics and /healthz wait for
    neither."""

    def __init__(self, admission: Admission):
        self._admission, self._running = admission, 0
        self._bodies: dict[asyncio.Future, None] = {}  # that are being read, the oldest first
        # A request that is cut off keeps its thread for a moment.
        self._threads = ThreadPoolExecutor(2 * admission.options.max_calls + 4, thread_name_prefix="kvjax http")
        self._parsers = _Parser(), _Parser()  # of bodies up to `MAX_SIMPLE_JSON`, and of larger ones
        self._long_texts = asyncio.Semaphore(LONG_TEXTS)
        self._ending: set[asyncio.Future] = set()

    def close(self) -> None:
        """Let threads end."""
        self._threads.shutdown(wait=False)
        for each in self._parsers:
            each.close()

    def app(self) -> Any:
        """The ASGI application."""
        from starlette.applications import Starlette
        from starlette.routing import Route

        shim = {"/v1/completions": partial(self._complete, chat=False), "/v1/chat/completions": partial(self._complete, chat=True)}
        routes = [Route(path, self._watched(path, page, NOTICE), methods=["POST"]) for path, page in shim.items()]
        routes += [
            Route("/v1/models", self._watched("/v1/models", self._models, NOTICE)),
            Route("/v1/models/{name:path}", self._watched("/v1/models", self._models, NOTICE)),
            Route("/metrics", self._watched("/metrics", self._metrics, {})),
            Route("/healthz", self._health),
            Route("/deprecation", self._why),
        ]
        return Starlette(routes=routes, exception_handlers={404: _missing, 405: _missing})

    def _watched(self, path: str, page: Callable, headers: dict[str, str]) -> Callable:
        """A page behind the gate, whose errors are answers in OpenAI's form. headers: of every response."""

        async def answered(request: Request) -> Any:
            call = self._admission.begin(path)
            try:
                self._admission.enter(only_authorization(request.headers.getlist("authorization")), while_ending=path == "/metrics")
                response = await page(request, call)
            except SessionError as error:
                call.end(error)
                response = error_response(error)
            except asyncio.CancelledError:
                response = error_response(self._cut_off(call))
            except Exception as raised:
                logger.exception("%s failed", path)
                error = SessionError(f"{type(raised).__name__}: see the server's log")
                call.end(error)
                response = error_response(error)
            response.headers.update(headers)
            return response

        return answered

    def _cut_off(self, call: Call) -> SessionError:
        """What a request is told whose time has passed while the server ends. To be called where a task was cancelled:
        raises that again where it was not by the server's end."""
        if not self._admission.ending:
            raise
        error = Unavailable("the server has ended before the answer was complete: send the request again", reason="ending")
        call.end(error)
        return error

    async def _models(self, request: Request, call: Call) -> Response:
        from starlette.responses import JSONResponse

        found = {"id": self._admission.options.model_name, "object": "model", "created": self._admission.started, "owned_by": "kvjax"}
        name = request.path_params.get("name")
        if name not in (None, found["id"]):
            raise no_model(name, found["id"])
        call.end(None)
        return JSONResponse(found if name else {"object": "list", "data": [found]})

    async def _metrics(self, request: Request, call: Call) -> Response:
        from starlette.responses import Response

        text = self._admission.metrics.text()
        call.end(None)
        return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")

    async def _health(self, request: Request) -> Response:
        from starlette.responses import PlainTextResponse

        return PlainTextResponse("ending\n", 503) if self._admission.ending else PlainTextResponse("ok\n")

    async def _why(self, request: Request) -> Response:
        from starlette.responses import PlainTextResponse

        return PlainTextResponse(WHY, headers=NOTICE)

    async def _complete(self, request: Request, call: Call, chat: bool) -> Any:
        """Answer one request of the shim."""
        from starlette.responses import JSONResponse

        options, runtime = self._admission.options, self._admission.runtime
        content = [await self._content(request)]
        if self._running >= options.max_calls:
            raise ResourceExhausted(f"{self._running} requests are under way, the server's limit: try again later", reason="calls")
        self._running += 1
        begun, streams = None, False
        try:
            wanted = await self._wanted(content.pop(), chat)  # nothing here holds the body while the request waits and runs
            begun, form = (
                asyncio.ensure_future(self._in_thread(TextCompletion, runtime, wanted, self._admission.throttle)),
                Form(wanted, options.model_name),
            )
            if wanted.stream:
                await asyncio.wait((begun,), timeout=QUIET_S)
                if begun.done():
                    begun.result()  # its error has a status of its own
                streams = True
                pieces, ends = self._pieces(begun, form, call), partial(self._end, begun)
                return _Streamed(pieces, options.stall_s, call, ends, partial(self._cut_off, call))
            completion = await _unless_gone(request, asyncio.shield(begun))
            call.session = completion.session.id
            text = await _unless_gone(request, self._all(completion))
            answer = form.whole(text, completion.finish_reason, usage_of(completion.prompt_tokens, completion.generated))
            call.end(None)
            return JSONResponse(answer)
        finally:
            if not streams:
                await self._end(begun)

    async def _wanted(self, content: bytearray, chat: bool) -> Asked:
        """What a body asks for, checked."""
        given = chat, self._admission.runtime, self._admission.options
        if len(content) <= QUICK_JSON:
            return await self._in_thread(asked, _json(content), *given)
        body = await self._parsers[len(content) > MAX_SIMPLE_JSON].parse(content)
        async with self._long_texts:
            return await self._in_thread(asked, body, *given)

    async def _content(self, request: Request) -> bytearray:
        """A request's body. Of too many that are under way, the oldest is given up."""
        options = self._admission.options
        reading = asyncio.ensure_future(_body(request, options.max_message_bytes))
        self._bodies[reading] = None
        if len(self._bodies) > options.max_calls:  # one that never comes keeps nobody out
            oldest = next(iter(self._bodies))
            del self._bodies[oldest]
            oldest.cancel()
        try:
            return await asyncio.wait_for(reading, options.stall_s)
        except TimeoutError:
            raise DeadlineExceeded(f"the body did not come within {options.stall_s:g} s", reason="stalled") from None
        except asyncio.CancelledError:
            if reading in self._bodies:
                raise
            said = f"{options.max_calls} bodies are under way, the server's limit, and this one is the slowest: try again later"
            raise ResourceExhausted(said, reason="calls") from None
        finally:
            self._bodies.pop(reading, None)

    async def _all(self, completion: TextCompletion) -> str:
        texts = []
        while (text := await self._in_thread(completion.more)) is not None:
            texts.append(text)
        return "".join(texts)

    async def _pieces(self, begun: asyncio.Future[TextCompletion], form: Form, call: Call) -> AsyncIterator[bytes]:
        """The events of a streamed answer, and comments while none comes. The request was valid, and its status has
        been sent, so an error is an event, also before the first text."""
        before, text, completion = form.first(), "", None
        try:
            while text is not None:
                coming = begun if completion is None else _heard(asyncio.ensure_future(self._in_thread(completion.more)))
                while not (await asyncio.wait((coming,), timeout=QUIET_S))[0]:
                    yield b": waiting for the first token\n\n" if before is not None else b": waiting for the next token\n\n"
                if completion is None:
                    completion = begun.result()
                    call.session = completion.session.id
                    continue
                text = coming.result()
                for event in before or ():
                    yield _event(event)
                before = None
                if text:
                    yield _event(form.piece(text))
        except SessionError as error:
            call.end(error)
            yield _event(error_body(error)[1])
            return
        for event in form.last(completion.finish_reason, usage_of(completion.prompt_tokens, completion.generated)):
            yield _event(event)
        call.end(None)
        yield b"data: [DONE]\n\n"

    async def _end(self, begun: asyncio.Future[TextCompletion] | None) -> None:
        """Free what a request holds. It goes on where the request was cancelled."""
        ending = asyncio.ensure_future(self._free(begun))
        self._ending.add(ending)
        ending.add_done_callback(self._ending.discard)
        await asyncio.shield(ending)

    async def _free(self, begun: asyncio.Future[TextCompletion] | None) -> None:
        try:
            if begun is not None:
                await asyncio.wait((begun,))
                if begun.exception() is None:
                    begun.result().stop()
                    await self._in_thread(begun.result().close)
        finally:
            self._running -= 1

    async def _in_thread(self, work: Callable, *arguments: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work, *arguments)


class _Parser:
    """Parses bodies, one after the other and with pauses, because Python runs nothing else while it parses."""

    def __init__(self):
        self._thread, self._pause_until = ThreadPoolExecutor(1, thread_name_prefix="kvjax json"), 0.0

    def close(self) -> None:
        """Let the thread end."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def parse(self, content: bytearray) -> Any:
        """The JSON of a body. InvalidArgument as `_check_pieces` and `_json`."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._parse, content)

    def _parse(self, content: bytearray) -> Any:
        time.sleep(max(0.0, self._pause_until - time.monotonic()))
        began = time.monotonic()
        try:
            _check_pieces(content)
            return _json(content)
        finally:
            now = time.monotonic()
            self._pause_until = now + PAUSE * (now - began)


class _Streamed:
    """A response of server-sent events that calls `end` whatever happens, also when the client goes before the first of
    them. A client that takes none for `stall_s` seconds is cut off. cut_off: gives the last event of a response whose
    task was cancelled."""

    def __init__(
        self,
        pieces: AsyncIterator[bytes],
        stall_s: float,
        call: Call,
        end: Callable[[], Awaitable[None]],
        cut_off: Callable[[], SessionError],
    ):
        from starlette.responses import StreamingResponse

        self._stall_s, self._call, self._end, self._cut_off = stall_s, call, end, cut_off
        self._response = StreamingResponse(pieces, media_type="text/event-stream", headers={"Cache-Control": "no-store"})
        self.headers = self._response.headers

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        async def limited(message: Any) -> None:
            try:
                await asyncio.wait_for(send(message), self._stall_s)
            except TimeoutError:
                self._call.end(Cancelled("the client takes nothing of what is sent to it", reason="stalled"))
                raise

        try:
            await self._response(scope, receive, limited)
        except asyncio.CancelledError:
            last = _event(error_body(self._cut_off())[1])
            await limited({"type": "http.response.body", "body": last, "more_body": False})
        finally:
            self._call.end(Cancelled("the client has gone"))  # unless it has ended already
            await self._end()


def _heard(coming: asyncio.Future) -> asyncio.Future:
    """The future itself. If its client leaves before it ends, nobody asks for its error, and asyncio must not log
    that."""
    coming.add_done_callback(lambda done: done.cancelled() or done.exception())
    return coming


async def _unless_gone(request: Request, work: Awaitable[Any]) -> Any:
    """The result of `work`. Cancelled if the client goes before."""

    async def gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    tasks = [asyncio.ensure_future(work), asyncio.ensure_future(gone())]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if tasks[0].done():
            return tasks[0].result()
        raise Cancelled("the client has gone")
    finally:
        for task in tasks:
            task.cancel()


async def _body(request: Request, most: int) -> bytearray:
    """A request's body."""
    from starlette.requests import ClientDisconnect

    content, announced = bytearray(), request.headers.get("content-length", "")
    try:
        if announced.isdecimal() and int(announced[:20]) > most:  # before all of it has come
            raise _too_large(most)
        async for chunk in request.stream():
            content += chunk
            if len(content) > most:
                raise _too_large(most)
    except ClientDisconnect:
        raise Cancelled("the client has gone") from None
    return content


def _too_large(most: int) -> ResourceExhausted:
    return ResourceExhausted(f"the body has more than {most} bytes, the server's limit", reason="bytes")


def _check_pieces(content: bytearray) -> None:
    """InvalidArgument for a body with so many values that Python would run nothing else for long while it parses."""
    plain = bytes(content).replace(b"\\\\", b"").replace(b'\\"', b"")
    pieces = 4 * plain.count(b'"')
    if pieces <= MAX_PIECES:
        outside = b"".join(plain.split(b'"')[::2])
        pieces += outside.count(b",") + 8 * (outside.count(b"[") + outside.count(b"{"))
    if pieces > MAX_PIECES:
        said = f"the body has more than {MAX_PIECES:,} values, where an object, a list or a text counts as eight"
        raise InvalidArgument(f"{said}: send fewer in one request")


def _json(content: bytearray) -> Any:
    """The JSON of a body."""
    try:
        value, twice = from_json(content.decode("utf-8-sig"))  # Python would read UTF-16 and UTF-32, too
        check_once(twice)
    except WrongField as error:
        raise InvalidArgument(str(error), field=error.field) from None
    except ValueError as error:
        raise InvalidArgument(f"the body is no JSON: {error}") from None
    return value


def _event(content: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(content).encode() + b"\n\n"


def error_body(error: SessionError) -> tuple[int, dict[str, Any]]:
    """The HTTP status of an error, and its body in OpenAI's form."""
    status = REASONS.get(error.reason) or STATUS.get(error.code, 500)
    kind = KINDS.get(status, "invalid_request_error" if status < 500 else "server_error")
    param, said = _plain(FIELDS.get(error.field, error.field)) or None, _plain(str(error))
    return status, {"error": {"message": said[:1000], "type": kind, "param": param, "code": error.reason or None}}


def _plain(text: str) -> str:
    """Text without halves of characters, which JSON may hold, and UTF-8 may not."""
    return text.encode(errors="replace").decode()


def error_response(error: SessionError) -> Response:
    """The response that tells an error."""
    from starlette.responses import JSONResponse

    status, body = error_body(error)
    return JSONResponse(body, status, {"Retry-After": "1"} if status in (429, 503) else None)


async def _missing(request: Request, error: Any) -> Response:
    from starlette.responses import JSONResponse

    asked = f"{request.method} {request.url.path[:80]}"
    said = f"there is no {asked}: there are /v1/completions, /v1/chat/completions, /v1/models, /metrics, /healthz"
    body = {"error": {"message": said, "type": "invalid_request_error", "param": None, "code": None}}
    return JSONResponse(body, error.status_code, NOTICE if request.url.path.startswith("/v1") else None)
