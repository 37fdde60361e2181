"""What each call of the protocol does with a runtime."""

from __future__ import annotations

import array
import collections
import dataclasses
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from kvjax.client.errors import Cancelled, InvalidArgument, ResourceExhausted, SessionError
from kvjax.client.wire import protocol, sampling_fields
from kvjax.serving.sessions.generation import Generation
from kvjax.serving.sessions.runtime import Session, SessionRuntime
from kvjax.serving.sessions.throttle import Throttle

if TYPE_CHECKING:
    from kvjax.serving.server.options import ServerOptions


REQUEST_BYTES = 256
"""About what a request takes in memory beside its content."""


class Calls:
    """One method for each call, by its name. They take a message and the call's context, and raise `SessionError`s.

    options: of the server, of which these are limits. throttle: of all streams. silent: the block in which a Converse
    waits for its client, and nothing is done for it; it is given what cuts the call off.
    """

    def __init__(self, runtime: SessionRuntime, options: ServerOptions, throttle: Throttle, silent: Callable[..., AbstractContextManager]):
        self._runtime, self._max_tokens, self._max_new_tokens = runtime, options.max_tokens, options.max_new_tokens
        self._max_stop_tokens = min(options.max_stop_tokens, runtime.engine.config.vocab_size)
        self._most_bytes, self._throttle, self._types = options.max_message_bytes, throttle, protocol()
        self._silent = silent

    def CreateSession(self, request: Any, context: Any) -> Any:
        """A new session."""
        if request.history_mode not in (self._types.HISTORY_MODE_UNSPECIFIED, self._types.HISTORY_MODE_EXACT):
            raise InvalidArgument(f"there is no history mode {request.history_mode}", field="history_mode")
        tokens, policy = self._tokens(request.token_ids), request.policy or None
        session = self._heard(self._runtime.create(tokens, policy=policy, **_patience(context)), context)
        return self._types.CreateSessionResponse(session_id=session.id, history_mode=self._types.HISTORY_MODE_EXACT)

    def AppendTokens(self, request: Any, context: Any) -> Any:
        """More of a history."""
        return self._append(request.session_id, request, context)

    def Generate(self, request: Any, context: Any) -> Iterator[Any]:
        """The tokens of one generation, and then what it was."""
        generation = self._begin(request.session_id, request)
        generation.kept_if_broken = 0
        if not context.add_callback(generation.stop):  # the call has ended already
            generation.cancel()
            return
        yield from self._events(generation, self._types.GenerateResponse)

    def Converse(self, requests: Iterator[Any], context: Any) -> Iterator[Any]:
        """Appends and generations of one session, in the order in which they come."""
        talk = _Talk(requests, self._most_bytes)
        context.add_callback(talk.end)
        while True:
            with self._silent(context.cancel):
                request = talk.next()
            if request is None:
                return
            action = request.WhichOneof("action")
            if action == "append":
                yield self._types.ConverseResponse(appended=self._append(talk.session_id, request.append, context))
            elif action == "generate":
                generation = self._begin(talk.session_id, request.generate)
                generation.kept_if_broken = 0
                if talk.generates(generation):
                    yield from self._events(generation, self._types.ConverseResponse)
                    talk.generates(None)
            elif action is None:
                raise InvalidArgument("a message of Converse holds append, generate or stop", field="action")

    def CloseSession(self, request: Any, context: Any) -> Any:
        """The end of a session."""
        self._runtime.session(request.session_id).close(timeout=context.time_remaining())
        return self._types.CloseSessionResponse()

    def GetSessionInfo(self, request: Any, context: Any) -> Any:
        """What is known of a session."""
        info = self._runtime.session(request.session_id).info(**_patience(context))
        fields = ("history_tokens", "cached_tokens", "dropped_tokens", "kv_live_bytes", "demoted", "generating", "policy", "violations")
        return self._types.GetSessionInfoResponse(**{name: getattr(info, name) for name in fields})

    def ForkSession(self, request: Any, context: Any) -> Any:
        """A second session with the same history."""
        child = self._heard(self._runtime.session(request.session_id).fork(**_patience(context)), context)
        return self._types.ForkSessionResponse(session_id=child.id)

    def _heard(self, session: Session, context: Any) -> Session:
        """A new session, unless nobody waits for its id any more: then it is closed."""
        if not context.is_active():
            session.close()
            raise Cancelled("the client has gone before it was told of the session")
        return session

    def _tokens(self, tokens: Any) -> array.array:
        if len(tokens) > self._max_tokens:
            raise ResourceExhausted(f"{len(tokens)} token ids in one call are more than the server's limit of {self._max_tokens}")
        return array.array("I", tokens)  # a list would take forty bytes for each, as long as the call waits

    def _append(self, session_id: str, request: Any, context: Any) -> Any:
        at = request.at if request.HasField("at") else None
        tokens = self._tokens(request.token_ids)
        length = self._runtime.session(session_id).append(tokens, at=at, **_patience(context))
        return self._types.AppendTokensResponse(history_tokens=length)

    def _begin(self, session_id: str, request: Any) -> Generation:
        stops, most = len(request.sampling.stop_tokens.token_ids), self._max_stop_tokens
        if stops > most:  # millions of them would take seconds to look at
            raise InvalidArgument(f"{stops:,} stop tokens in one call are more than the limit of {most:,}", field="stop_token_ids")
        fields = sampling_fields(request.sampling)
        if fields.get("max_new_tokens", 1) > self._max_new_tokens:
            raise InvalidArgument(f"max_new_tokens is above the server's limit of {self._max_new_tokens}", field="max_new_tokens")
        at = request.at if request.HasField("at") else None
        return self._runtime.session(session_id).generate(at=at, **fields)

    def _events(self, generation: Generation, response: Any) -> Iterator[Any]:
        """Responses of one generation. It is cancelled when nobody takes them any more."""
        types, first = self._types, True
        try:
            while tokens := generation.ready(self._throttle):
                if first and generation.dropped_tokens:
                    yield response(truncated=types.HistoryTruncated(dropped_tokens=generation.dropped_tokens))
                first = False
                yield response(tokens=types.GeneratedTokens(token_ids=tokens))
        except Cancelled as error:
            if not generation.stopped or error.reason:
                raise
        finally:
            generation.cancel()
        reason = getattr(types, f"FINISH_REASON_{generation.finish_reason.upper()}")
        figures = {"history_tokens": generation.history_tokens, "prefill_tokens": generation.prefill_tokens}
        yield response(finished=types.Finished(reason=reason, **figures))


@dataclasses.dataclass(eq=False)
class _Asked:
    """A request of a Converse. size: about its bytes in memory. keep: how many tokens stay of a generation that was
    stopped before it began."""

    request: Any
    size: int = 0
    keep: int | None = None

    @property
    def generates(self) -> bool:
        """Whether it asks for a generation."""
        return not isinstance(self.request, SessionError | None) and self.request.WhichOneof("action") == "generate"


def _patience(context: Any) -> dict[str, Any]:
    """How long a call's client waits: arguments of methods of a runtime."""
    return {"timeout": context.time_remaining(), "active": context.is_active}


class _Talk:
    """The requests of one Converse, read by a thread, so that `stop` acts at once.

    most_bytes: of requests that wait. Beyond it the client's are not read, so one that sends without end fills no
    memory.
    """

    def __init__(self, requests: Iterator[Any], most_bytes: int):
        self.session_id, self._most_bytes, self._waiting_bytes = "", most_bytes, 0
        self._waiting: collections.deque[_Asked] = collections.deque()
        self._current: _Asked | None = None
        self._generation: Generation | None = None
        self._ended, self._changed = False, threading.Condition()
        threading.Thread(target=self._read, args=(requests,), name="kvjax converse", daemon=True).start()

    def next(self) -> Any:
        """The next request that is not a stop; None after the last. Raises what reading it raised."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._ended)
            self._current = self._waiting.popleft() if self._waiting else _Asked(None)
            self._waiting_bytes -= self._current.size
            self._changed.notify_all()
            request = self._current.request
        if isinstance(request, SessionError):
            raise request
        if request is not None:
            self.session_id = request.session_id or self.session_id
        return request

    def generates(self, generation: Generation | None) -> bool:
        """Say which generation a stop ends; None: it has ended. Returns False, and ends it, if the call has ended."""
        with self._changed:
            asked, self._generation = self._current, generation
            if generation is None:
                self._current = None
                return True
            ended = self._ended
        if ended:
            generation.cancel()
        elif asked.keep is not None:
            generation.stop(asked.keep)
        return not ended

    def end(self) -> None:
        """The call has ended."""
        with self._changed:
            self._ended, generation = True, self._generation
            self._changed.notify_all()
        if generation is not None:
            generation.stop()

    def _read(self, requests: Iterator[Any]) -> None:
        try:
            for request in requests:
                if request.WhichOneof("action") == "stop":
                    self._stop(request.stop.keep)
                else:
                    self._put(_Asked(request, request.ByteSize() + REQUEST_BYTES))
        except SessionError as error:
            self._put(_Asked(error))
        except Exception:  # the connection was cut, which ends the call too
            self.end()
        finally:
            self._put(_Asked(None))

    def _put(self, asked: _Asked) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._ended or not self._waiting or self._waiting_bytes + asked.size <= self._most_bytes)
            self._waiting.append(asked)
            self._waiting_bytes += asked.size
            self._changed.notify_all()

    def _stop(self, keep: int) -> None:
        """Stop the generation under way; if there is none, the first of those asked for that have not begun."""
        with self._changed:
            generation = self._generation
            if generation is None:
                asked = (each for each in (self._current, *self._waiting) if each is not None and each.generates)
                first = next(asked, None)
                if first is not None:
                    first.keep = keep
        if generation is not None:
            generation.stop(keep)
