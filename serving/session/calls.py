"""What each call of the protocol does with a runtime."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from typing import Any

from kvjax.client.errors import Cancelled, InvalidArgument, ResourceExhausted
from kvjax.client.wire import protocol, sampling_fields
from kvjax.serving.session.pace import Pace
from kvjax.serving.session.runtime import Session, SessionRuntime
from kvjax.serving.session.stream import Generation


class Calls:
    """One method for each call, by its name. They take a message and the call's context, and raise `SessionError`s.

    max_tokens: the most token ids in one call. max_new_tokens: the most that one call may generate. pace: of all streams.
    """

    def __init__(self, runtime: SessionRuntime, max_tokens: int, max_new_tokens: int, pace: Pace):
        self._runtime, self._max_tokens, self._max_new_tokens = runtime, max_tokens, max_new_tokens
        self._pace, self._types = pace, protocol()

    def CreateSession(self, request: Any, context: Any) -> Any:
        """A new session."""
        if request.history_mode not in (self._types.HISTORY_MODE_UNSPECIFIED, self._types.HISTORY_MODE_EXACT):
            raise InvalidArgument(f"there is no history mode {request.history_mode}", field="history_mode")
        tokens, policy = self._tokens(request.token_ids), request.policy or None
        session = self._heard(self._runtime.create(tokens, policy=policy, timeout=context.time_remaining()), context)
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
        talk = _Talk(requests)
        context.add_callback(talk.end)
        while (request := talk.next()) is not None:
            action = request.WhichOneof("action")
            if action == "append":
                yield self._types.ConverseResponse(appended=self._append(talk.session_id, request.append, context))
            elif action == "generate":
                generation = self._begin(talk.session_id, request.generate)
                generation.kept_if_broken = 0
                if talk.generates(generation):
                    yield from self._events(generation, self._types.ConverseResponse, lambda: talk.stopped)
                    talk.generates(None)
            elif action is None:
                raise InvalidArgument("a message of Converse holds append, generate or stop", field="action")

    def CloseSession(self, request: Any, context: Any) -> Any:
        """The end of a session."""
        self._runtime.session(request.session_id).close(timeout=context.time_remaining())
        return self._types.CloseSessionResponse()

    def GetSessionInfo(self, request: Any, context: Any) -> Any:
        """What is known of a session."""
        info = self._runtime.session(request.session_id).info(timeout=context.time_remaining())
        fields = ("history_tokens", "cached_tokens", "dropped_tokens", "kv_live_bytes", "demoted", "generating", "policy", "violations")
        return self._types.GetSessionInfoResponse(**{name: getattr(info, name) for name in fields})

    def ForkSession(self, request: Any, context: Any) -> Any:
        """A second session with the same history."""
        child = self._heard(self._runtime.session(request.session_id).fork(timeout=context.time_remaining()), context)
        return self._types.ForkSessionResponse(session_id=child.id)

    def _heard(self, session: Session, context: Any) -> Session:
        """A new session, unless nobody waits for its id any more: then it is closed."""
        if not context.is_active():
            session.close()
            raise Cancelled("the client has gone before it was told of the session")
        return session

    def _tokens(self, tokens: Any) -> list[int]:
        if len(tokens) > self._max_tokens:
            raise ResourceExhausted(f"{len(tokens)} token ids in one call are more than the server's limit of {self._max_tokens}")
        return list(tokens)

    def _append(self, session_id: str, request: Any, context: Any) -> Any:
        at = request.at if request.HasField("at") else None
        tokens = self._tokens(request.token_ids)
        length = self._runtime.session(session_id).append(tokens, at=at, timeout=context.time_remaining())
        return self._types.AppendTokensResponse(history_tokens=length)

    def _begin(self, session_id: str, request: Any) -> Generation:
        fields = sampling_fields(request.sampling)
        if fields.get("max_new_tokens", 1) > self._max_new_tokens:
            raise InvalidArgument(f"max_new_tokens is above the server's limit of {self._max_new_tokens}", field="max_new_tokens")
        at = request.at if request.HasField("at") else None
        return self._runtime.session(session_id).generate(at=at, **fields)

    def _events(self, generation: Generation, response: Any, stopped: Callable[[], bool] = lambda: False) -> Iterator[Any]:
        """Responses of one generation. It is cancelled when nobody takes them any more."""
        types, first = self._types, True
        try:
            while tokens := generation.ready(self._pace):
                if first and generation.dropped_tokens:
                    yield response(truncated=types.HistoryTruncated(dropped_tokens=generation.dropped_tokens))
                first = False
                yield response(tokens=types.GeneratedTokens(token_ids=tokens))
        except Cancelled:
            if not stopped():
                raise
        finally:
            generation.cancel()
        reason = types.FINISH_REASON_CANCELLED if stopped() else getattr(types, f"FINISH_REASON_{generation.finish_reason.upper()}")
        figures = {"history_tokens": generation.history_tokens, "prefill_tokens": generation.prefill_tokens}
        yield response(finished=types.Finished(reason=reason, **figures))


class _Talk:
    """The requests of one Converse, read by a thread, so that `stop` acts at once."""

    def __init__(self, requests: Iterator[Any]):
        self.session_id, self.stopped = "", False
        self._requests: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._generation: Generation | None = None
        self._ended, self._lock = False, threading.Lock()
        threading.Thread(target=self._read, args=(requests,), name="kvjax converse", daemon=True).start()

    def next(self) -> Any:
        """The next request that is not a stop; None after the last. InvalidArgument for bytes that are none."""
        request = self._requests.get()
        if isinstance(request, InvalidArgument):
            raise request
        if request is not None:
            self.session_id = request.session_id or self.session_id
        return request

    def generates(self, generation: Generation | None) -> bool:
        """Say which generation a stop ends. Returns False, and ends it, if the call has ended."""
        with self._lock:
            self._generation, self.stopped = generation, False
            if not self._ended or generation is None:
                return True
        generation.cancel()
        return False

    def end(self) -> None:
        """The call has ended."""
        with self._lock:
            self._ended, generation = True, self._generation
        self._requests.put(None)
        if generation is not None:
            generation.stop()

    def _read(self, requests: Iterator[Any]) -> None:
        try:
            for request in requests:
                if request.WhichOneof("action") != "stop":
                    self._requests.put(request)
                    continue
                with self._lock:
                    generation = self._generation
                    if generation is not None:
                        generation.kept_if_broken, self.stopped = request.stop.keep, True
                if generation is not None:
                    generation.stop()
        except InvalidArgument as error:
            self._requests.put(error)
        except Exception:  # the connection was cut, which ends the call too
            self.end()
        finally:
            self._requests.put(None)
