"""The synchronous client."""

from __future__ import annotations

import contextlib
import time
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

from kvjax.client import arguments
from kvjax.client.errors import SessionError, Unavailable
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


class Client:
    """A connection to a server, for any number of threads.

        with Client("127.0.0.1:50051") as client, client.create_session([1, 2, 3]) as session:
            for token in session.generate(max_new_tokens=20):
                ...

    options: fields of `kvjax.client.shared.Connection`. All errors are `kvjax.client.errors.SessionError`s.
    """

    def __init__(self, address: str = "127.0.0.1:50051", **options: Any):
        known = protocol()  # says which extra is missing, if one is
        import grpc
        import grpc.experimental

        self._closed = False
        self.streams = weakref.WeakSet[Iterator[int]]()  # that are being read
        self.connection = each = Connection(address, **options)
        # The thread that iterates over a generation reads the connection itself: gRPC wakes no second thread for each
        # token.
        given = [*each.options, (grpc.experimental.ChannelOptions.SingleThreadedUnaryStream, 1)]
        if each.root_certificate is None:
            self._channel = grpc.insecure_channel(address, options=given)
        else:
            self._channel = grpc.secure_channel(address, grpc.ssl_channel_credentials(each.root_certificate), options=given)
        kinds = {(False, False): self._channel.unary_unary, (False, True): self._channel.unary_stream}
        self._methods = {
            name: kinds[method.streams](
                method.path, request_serializer=method.request.SerializeToString, response_deserializer=method.response.FromString
            )
            for name, method in known.methods.items()
            if method.streams in kinds
        }

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def create_session(self, token_ids: Sequence[int] = (), *, policy: str | None = None) -> Session:
        """A new session with an initial history, possibly empty. policy: a decode policy of the server; None: its
        first."""
        request = create_request(token_ids, policy)
        answer = self.call("CreateSession", request)
        return Session(self, answer.session_id, len(request.token_ids))

    def session(self, session_id: str) -> Session:
        """The session of an id, for a client that did not create it. SessionNotFound."""
        found = Session(self, arguments.session_id(session_id), 0)
        found.length = found.info().history_tokens
        return found

    def close(self) -> None:
        """Close the connection. Generations that are being read end as if their loops were left. Sessions live on,
        until they have been idle for too long."""
        for each in tuple(self.streams):
            with contextlib.suppress(SessionError, ValueError):  # the server is gone, or another thread reads it
                each.close()
        self._closed = True
        self._channel.close()

    def call(self, name: str, request: Any) -> Any:
        """Send one request, again if the connection fails and that is safe. Raises SessionError."""
        import grpc

        each, attempt = self.connection, 0
        while True:
            check_open(self._closed)
            try:
                return self._methods[name](request, timeout=deadline(each.timeout_s), metadata=each.metadata)
            except grpc.RpcError as failed:
                error = error_of(failed)
                if was_closed_before(name, error, attempt):
                    return protocol().CloseSessionResponse()
                if not may_repeat(name, error, attempt, each.retries):
                    raise error from None
            time.sleep(FIRST_WAIT_S * 2**attempt)
            attempt += 1

    def stream(self, request: Any, timeout: float | None) -> Any:
        """Begin a Generate."""
        check_open(self._closed)
        return self._methods["Generate"](request, timeout=deadline(timeout), metadata=self.connection.metadata)


class Session:
    """One session of a server. length: of its history, as far as this client knows; calls fail where the server knows
    otherwise, so that two clients that share a session notice."""

    def __init__(self, client: Client, session_id: str, length: int):
        self._client, self.id, self.length = client, session_id, length

    def __repr__(self) -> str:
        return f"Session({self.id!r}, length={self.length})"

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(SessionError):  # it may have ended
            self.close()

    def append(self, token_ids: Sequence[int]) -> int:
        """Add tokens to the history, and return its length."""
        self.length = self._client.call("AppendTokens", append_request(self.id, token_ids, self.length)).history_tokens
        return self.length

    def generate(self, *, timeout: float | None = None, **sampling: Any) -> Stream:
        """Generate tokens, as an iterator of ids. sampling: max_new_tokens, temperature, seed and so on, as
        `kvjax.Session.generate`.

        The tokens join the history when the iteration ends. Where it is broken off, those that were iterated over do;
        if the server had finished by then, all of them (`length` counts them). timeout: the deadline in seconds; None:
        none.
        """
        timeout = arguments.seconds("timeout", timeout)
        return Stream(self._client, self, generate_request(self.id, self.length, sampling), timeout)

    def fork(self) -> Session:
        """A second session with the same history."""
        answer = self._client.call("ForkSession", protocol().ForkSessionRequest(session_id=self.id))
        return Session(self._client, answer.session_id, self.length)

    def info(self) -> SessionInfo:
        """What the server knows of the session."""
        return info_of(self.id, self._client.call("GetSessionInfo", protocol().GetSessionInfoRequest(session_id=self.id)))

    def close(self) -> None:
        """End the session. Its pages are free when this returns."""
        self._client.call("CloseSession", protocol().CloseSessionRequest(session_id=self.id))


class Stream(Heard):
    """The tokens of one generation, as an iterator. finish_reason, prefill_tokens, dropped_tokens and history_tokens:
    known at the end."""

    def __init__(self, client: Client, session: Session, request: Any, timeout: float | None):
        super().__init__()
        self._client, self._session, self._request, self._timeout = client, session, request, timeout
        self._begun = False

    def __iter__(self) -> Iterator[int]:
        # A new generator, which nothing else holds: it ends as soon as a loop is left.
        if self._begun:
            raise RuntimeError("a generation can be iterated over once: call generate again for more tokens")
        self._begun = True
        tokens = self._tokens()
        self._client.streams.add(tokens)
        return tokens

    def _tokens(self) -> Iterator[int]:
        given, attempt = 0, 0
        while True:
            call = self._client.stream(self._request, self._timeout)
            try:
                for token in self._read(call):
                    given += 1
                    yield token
                self._session.length = self.history_tokens
                return
            except GeneratorExit:
                call.cancel()
                if given:
                    self._session.append(self.tokens[:given])
                raise
            except SessionError as error:
                if self.tokens or attempt >= self._client.connection.retries or not isinstance(error, Unavailable):
                    raise
            time.sleep(FIRST_WAIT_S * 2**attempt)
            attempt += 1

    def _read(self, call: Any) -> Iterator[int]:
        import grpc

        try:
            for response in call:
                yield from self.take(response)
        except grpc.RpcError as failed:
            raise error_of(failed) from None
