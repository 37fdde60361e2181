"""The asynchronous client: the same surface as `kvjax.client.sync`, with `await`."""

from __future__ import annotations

import asyncio
import contextlib
import weakref
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any

from kvjax.client import arguments
from kvjax.client.errors import Cancelled, SessionError, Unavailable
from kvjax.client.shared import (
    FIRST_WAIT_S,
    Connection,
    Heard,
    SessionInfo,
    append_request,
    check_open,
    create_request,
    deadline,
    generate_request,
    info_of,
    may_repeat,
    was_closed_before,
)
from kvjax.client.wire import error_of, protocol


class AsyncClient:
    """A connection to a server, for the tasks of one event loop. Arguments as of `kvjax.client.sync.Client`."""

    def __init__(self, address: str = "127.0.0.1:50051", **options: Any):
        known = protocol()  # says which extra is missing, if one is
        import grpc

        self._closed = False
        self.streams = weakref.WeakSet[AsyncIterator[int]]()  # that are being read
        self.connection = each = Connection(address, **options)
        if each.root_certificate is None:
            self._channel = grpc.aio.insecure_channel(address, options=each.options)
        else:
            self._channel = grpc.aio.secure_channel(address, grpc.ssl_channel_credentials(each.root_certificate), options=each.options)
        kinds = {(False, False): self._channel.unary_unary, (False, True): self._channel.unary_stream}
        self._methods = {
            name: kinds[method.streams](
                method.path, request_serializer=method.request.SerializeToString, response_deserializer=method.response.FromString
            )
            for name, method in known.methods.items()
            if method.streams in kinds
        }

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def create_session(self, token_ids: Sequence[int] = (), *, policy: str | None = None) -> AsyncSession:
        """A new session with an initial history, possibly empty. policy: a decode policy of the server; None: its
        first."""
        request = create_request(token_ids, policy)
        answer = await self.call("CreateSession", request)
        return AsyncSession(self, answer.session_id, len(request.token_ids))

    async def session(self, session_id: str) -> AsyncSession:
        """The session of an id, for a client that did not create it. SessionNotFound."""
        found = AsyncSession(self, arguments.session_id(session_id), 0)
        found.length = (await found.info()).history_tokens
        return found

    async def close(self) -> None:
        """Close the connection. Generations that are being read end as if their loops were left. Sessions live on,
        until they have been idle for too long."""
        for each in tuple(self.streams):
            with contextlib.suppress(SessionError, RuntimeError):  # the server is gone, or another task reads it
                await each.aclose()
        self._closed = True
        await self._channel.close()

    async def call(self, name: str, request: Any) -> Any:
        """Send one request, again if the connection fails and that is safe. Raises SessionError."""
        import grpc

        each, attempt = self.connection, 0
        while True:
            check_open(self._closed)
            try:
                with self.ends_calls():
                    return await self._methods[name](request, timeout=deadline(each.timeout_s), metadata=each.metadata)
            except grpc.RpcError as failed:
                error = error_of(failed)
                if was_closed_before(name, error, attempt):
                    return protocol().CloseSessionResponse()
                if not may_repeat(name, error, attempt, each.retries):
                    raise error from None
            await asyncio.sleep(FIRST_WAIT_S * 2**attempt)
            attempt += 1

    @contextlib.contextmanager
    def ends_calls(self) -> Iterator[None]:
        """The block waits for a call. Where `close` ended it, gRPC says that the task was cancelled, which nobody has
        done: Cancelled."""
        try:
            yield
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if not self._closed or task is None or task.cancelling():
                raise
            raise Cancelled("the client was closed while the call ran: make another, and call again") from None

    def stream(self, request: Any, timeout: float | None) -> Any:
        """Begin a Generate."""
        check_open(self._closed)
        return self._methods["Generate"](request, timeout=deadline(timeout), metadata=self.connection.metadata)


class AsyncSession:
    """One session of a server, as `kvjax.client.sync.Session`."""

    def __init__(self, client: AsyncClient, session_id: str, length: int):
        self._client, self.id, self.length = client, session_id, length

    def __repr__(self) -> str:
        return f"AsyncSession({self.id!r}, length={self.length})"

    async def __aenter__(self) -> AsyncSession:
        return self

    async def __aexit__(self, *_: object) -> None:
        with contextlib.suppress(SessionError):  # it may have ended
            await self.close()

    async def append(self, token_ids: Sequence[int]) -> int:
        """Add tokens to the history, and return its length."""
        self.length = (await self._client.call("AppendTokens", append_request(self.id, token_ids, self.length))).history_tokens
        return self.length

    def generate(self, *, timeout: float | None = None, heard: Heard | None = None, **sampling: Any) -> AsyncIterator[int]:
        """Generate tokens, as an asynchronous iterator of ids; arguments as of `kvjax.client.sync.Session.generate`.

        heard: a `kvjax.client.shared.Heard` that gets finish_reason and the other figures. To break off, use
        `contextlib.aclosing`: then the tokens that were iterated over join the history.
        """
        timeout = arguments.seconds("timeout", timeout)
        heard = arguments.instance("heard", heard, (Heard,), "a kvjax.client.shared.Heard") or Heard()
        # What is wrong is said now, and not when the iteration begins.
        tokens = self._tokens(generate_request(self.id, self.length, sampling), timeout, heard)
        self._client.streams.add(tokens)
        return tokens

    async def _tokens(self, request: Any, timeout: float | None, heard: Heard) -> AsyncIterator[int]:
        given = attempt = 0
        while True:
            call = self._client.stream(request, timeout)
            try:
                async for token in self._read(call, heard):
                    given += 1
                    yield token
                self.length = heard.history_tokens
                return
            except (GeneratorExit, asyncio.CancelledError):
                call.cancel()
                if given:
                    await self.append(heard.tokens[:given])
                raise
            except SessionError as error:
                if heard.tokens or attempt >= self._client.connection.retries or not isinstance(error, Unavailable):
                    raise
            await asyncio.sleep(FIRST_WAIT_S * 2**attempt)
            attempt += 1

    async def fork(self) -> AsyncSession:
        """A second session with the same history."""
        answer = await self._client.call("ForkSession", protocol().ForkSessionRequest(session_id=self.id))
        return AsyncSession(self._client, answer.session_id, self.length)

    async def info(self) -> SessionInfo:
        """What the server knows of the session."""
        return info_of(self.id, await self._client.call("GetSessionInfo", protocol().GetSessionInfoRequest(session_id=self.id)))

    async def close(self) -> None:
        """End the session. Its pages are free when this returns."""
        await self._client.call("CloseSession", protocol().CloseSessionRequest(session_id=self.id))

    async def _read(self, call: Any, heard: Heard) -> AsyncIterator[int]:
        import grpc

        try:
            with self._client.ends_calls():
                async for response in call:
                    for token in heard.take(response):
                        yield token
        except grpc.RpcError as failed:
            raise error_of(failed) from None
