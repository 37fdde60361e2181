"""Sessions for any number of threads: `SessionRuntime`, and `Session`, through which one session is used.

A thread of the runtime owns the engine. Calls of other threads go into a queue, which it empties between two steps.
"""

from __future__ import annotations

import array
import atexit
import bisect
import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence, Set, Sized
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np

from kvjax.cache import OutOfPages
from kvjax.checks import file_path, optional_function, token_ids, whole_number
from kvjax.client import arguments
from kvjax.client.errors import Cancelled, DeadlineExceeded, InvalidArgument, Unavailable
from kvjax.client.shared import SessionInfo
from kvjax.engine.engine import Engine
from kvjax.engine.sampling import Sampling
from kvjax.model.identity import fingerprint
from kvjax.policies.decode import DecodePolicy
from kvjax.serving.sessions.core import SessionCore
from kvjax.serving.sessions.generation import Generation, Run
from kvjax.serving.sessions.journal import Journal
from kvjax.serving.sessions.limits import MAX_HISTORY, MAX_POLICIES, Limits
from kvjax.serving.sessions.policy_table import PolicyTable
from kvjax.serving.sessions.session import Record, check_window

logger = logging.getLogger(__name__)

ANSWERS_S = 0.02
"""Between two steps, calls are answered for so long; the others wait for the next step. Without a bound, clients that
call without pause would stop the generations."""
SWEEP_SECONDS = 1.0
"""How often idle sessions are looked at."""
PUBLISH_SECONDS = 0.1
"""How often `SessionRuntime.published` changes while the engine works."""
SHAPED = ("max_new_tokens", "temperature", "top_k", "top_p", "min_p", "seed", "stop_token_ids", "ignore_eos")
SHAPED += ("repetition_penalty", "presence_penalty", "frequency_penalty")
"""The fields of `kvjax.Sampling` that a generation takes: no text, and one sample."""
Active = Callable[[], bool] | None
"""Whether the caller of a call that waits is still there; None: it is."""


class SessionRuntime:
    """Sessions of one engine, for any number of threads.

        runtime = kvjax.SessionRuntime(engine)
        session = runtime.create([1, 2, 3])
        for token in session.generate(max_new_tokens=20):
            ...

    The runtime owns the engine from here on: do not call it from elsewhere until `close`. A prefill policy that looks
    at several queries of a chunk at once is refused (ValueError), because bits would depend on how a history was cut.

    Args:
        engine: the engine, with the decode policies that sessions may name.
        allow_policies: built-in policies that they may name besides, as top:32, or forms of some, as window:*.
        max_policies: how many distinct policies of forms sessions may bring in. Each compiles at its first use, and
            others wait meanwhile.
        capacity: sessions at once. At capacity, `create` ends the idle one that was used longest ago.
        slots: generations that run at once, as in `kvjax.Scheduler`. It fixes the batch bucket, on which bits depend.
            Others wait.
        max_gap_ms, draft: as in `kvjax.Scheduler`. Sessions may name the policy of `draft`, too.
        idle_ttl_s: seconds after which an idle session ends. Only time in which a runtime has the session counts.
        demote_after_s: seconds after which the pages of an idle session are moved to host memory; None: only when
            others need the room. They come back, with the same bits, when the session is used.
        host_bytes: the most bytes of pages in host memory; None: no limit.
        disk: a folder to which pages of demoted sessions go when host memory is full, those used longest ago first;
            None: nowhere. They do not outlive the process.
        disk_bytes: the most bytes of pages there; together with `disk`.
        window: the most tokens of a history that stay in the cache when a generation begins; None: all of them, and a
            history that is too long for the model or the pool is an error. The first page stays, and the oldest tokens
            after it are dropped, a quarter of the window at a time; the rest is then prefilled again.
        max_history: the most tokens of one history, in the cache or not.
        state: a folder in which histories are kept, so that sessions outlive the process
            (`kvjax.serving.sessions.journal`); None: nowhere.
        observe: called in the runtime's thread with the name of a metric and a value (`kvjax.serving.server.metrics`).
        clock: seconds, for what is idle.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        allow_policies: Sequence[str] = (),
        max_policies: int = MAX_POLICIES,
        capacity: int = 64,
        slots: int | None = None,
        max_gap_ms: float | None = None,
        draft: str | DecodePolicy | None = None,
        idle_ttl_s: float = 1800.0,
        demote_after_s: float | None = None,
        host_bytes: int | None = None,
        disk: str | Path | None = None,
        disk_bytes: int | None = None,
        window: int | None = None,
        max_history: int = MAX_HISTORY,
        state: str | Path | None = None,
        observe: Callable[[str, float], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        if not isinstance(engine, Engine):
            raise TypeError(f"a runtime runs on an engine, got {type(engine).__name__}: SessionRuntime(Engine(model))")
        if not engine.prefill_policy.queries_stand_alone:
            raise ValueError(
                f"prefill {engine.prefill_policy} looks at several queries of a chunk at once, so a session's bits would depend on how its "
                "history came in: make the engine with dense prefill, or with another policy whose queries stand alone"
            )
        whole_number("capacity", capacity, 1)
        _check_times(idle_ttl_s=idle_ttl_s, demote_after_s=demote_after_s, max_gap_ms=max_gap_ms)
        for name, given in (("host_bytes", host_bytes), ("disk_bytes", disk_bytes), ("slots", slots)):
            None if given is None else whole_number(name, given, int(name == "slots"), 2**63)
        optional_function("observe", observe)
        if not callable(clock):
            raise ValueError(f"clock must be a function that gives seconds, got {clock!r:.60}")
        if engine.spec.row_groups and engine.batch_buckets[-1] < 2:
            raise ValueError(
                "a generation runs on a copy beside its session, and this model or cache format keeps a row for each of them: "
                "give the engine a batch bucket of at least 2 (--max-batch)"
            )
        checked = check_window(window, engine.page_size), whole_number("max_history", max_history, 1)
        limits = Limits(capacity, idle_ttl_s, demote_after_s, *checked)
        self._policies = PolicyTable(engine, allow_policies, max_policies)
        if window is not None:
            try:
                engine.check_length(window)
            except (ValueError, OutOfPages) as error:
                raise ValueError(f"a window of {window:,} tokens has no room: {error}") from None
        told = observe or (lambda name, value: None)
        self.engine = engine
        if disk is not None and (host_bytes is None or disk_bytes is None):
            raise ValueError("pages go to disk when host memory is full: give host_bytes and disk_bytes with disk")
        engine.suspended.limit(host_bytes, None if disk is None else file_path(disk), disk_bytes or 0)
        journal = None if state is None else Journal(file_path(state), fingerprint(engine.model))
        options = {"slots": slots, "max_gap_ms": max_gap_ms, "draft": draft, "observe": told, "clock": clock, "journal": journal}
        try:
            self._core = SessionCore(engine, limits, self._policies, **options)
        except BaseException:
            if journal is not None:
                journal.close()
            raise
        self._calls: queue.SimpleQueue[tuple[Callable[[], Any], Future] | None] = queue.SimpleQueue()
        self._closing, self._drained_at = False, 0.0
        self.published = self._core.gauges()
        """`gauges` as they were a moment ago; to read them waits for nothing, also while the engine compiles. Do not
        change it."""
        self._thread = threading.Thread(target=self._loop, name="kvjax sessions", daemon=True)
        self._thread.start()
        # Python ends a daemon's thread anywhere, in the middle of a device's call too, which aborts the process.
        atexit.register(self.close)

    def __repr__(self) -> str:
        return f"SessionRuntime({self.engine!r}, sessions={len(self._core.records)} of {self._core.limits.capacity})"

    def __enter__(self) -> SessionRuntime:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def counts(self) -> dict[str, int]:
        """Events so far: sessions "closed", "evicted" and "failed"; "reason_close", "reason_ttl" and "reason_lru";
        "demoted", of these "shelved" on disk, "damaged" there; "truncated"; violations "inv1", "inv2" and "inv3". Those
        that never happened are left out."""
        return dict(self._core.counts)

    @property
    def policies(self) -> tuple[DecodePolicy, ...]:
        """The policies that sessions may name, but those of forms with '*'."""
        return self._policies.fixed

    def warmup(self, policy: str | DecodePolicy, tokens: int | None = None) -> None:
        """Compile the steps of one of `policies`, for histories of up to `tokens` tokens (None: one page), so that its
        first session does not wait for that. Steps with penalties, and those that draw at random in longer histories,
        are compiled when first used. Sessions wait meanwhile. InvalidArgument for another policy; raises as
        `Engine.warmup`."""
        if policy is None or not isinstance(policy, str | DecodePolicy):
            raise InvalidArgument(f"policy must be one of the runtime's policies, or its name, got {policy!r:.60}", field="policy")
        chosen = self._policies.resolve(policy)
        self._ask(lambda: self._core.warm_up(chosen, tokens), None)

    def create(
        self,
        tokens: Sequence[int] = (),
        *,
        policy: str | DecodePolicy | None = None,
        kept: bool = True,
        timeout: float | None = None,
        active: Active = None,
    ) -> Session:
        """A new session with an initial history of token ids, possibly none.

        policy: the name of its decode policy, one that the engine declares or `allow_policies` allows; or the policy
        itself; None: the engine's. A name is only looked up: no file is loaded for it. kept: whether it is written to
        `state`. timeout: in seconds, as everywhere here: DeadlineExceeded after it, and then nothing was done. active:
        as everywhere here, asked about once a second while the call waits: once it says False, the call is given up
        with the error Cancelled, and nothing was done. InvalidArgument for wrong arguments, bad tokens or a policy that
        is not there, and nothing was done then either. ResourceExhausted if every session is in the middle of a call,
        or the history can never fit.
        """
        given, kept = self._checked(tokens, least=0), arguments.yes_or_no("kept", kept)
        policy = arguments.instance("policy", policy, (str, DecodePolicy), "a decode policy, or the name of one")
        chosen = None if policy is None else self._policies.resolve(policy)
        with _emptied(given):
            return Session(self, self._ask(lambda: self._core.create(given, chosen, kept), timeout, active).id)

    def generate_once(self, tokens: Sequence[int], **sampling: Any) -> tuple[Session, Generation]:
        """A new session, which is not written to `state`, and the generation of its only answer. Both begin in one
        call, so the session is never idle before, and cannot end to make room for another. Errors as of `create` and
        `Session.generate`."""
        given, (run, future) = self._checked(tokens, least=0), self._run_of("", None, sampling)

        def begin() -> Record:
            record = self._core.create(given, None, kept=False)
            run.session_id = record.id
            self._core.in_turn(record.id, lambda record: None if run.over else self._core.begin(record, run), future)
            return record

        return Session(self, self._ask(begin, None).id), Generation(run, self._conclude)

    def session(self, session_id: str) -> Session:
        """The session of an id. Its methods raise SessionNotFound if there is none. InvalidArgument for anything but
        text."""
        return Session(self, arguments.session_id(session_id))

    def gauges(self, timeout: float | None = None) -> dict[str, int]:
        """What is there now: "sessions"; "generating", slots in use; "waiting", calls without a slot or behind others
        of their session; "kv_live_bytes" of all sessions on the device; "host_bytes" and "disk_bytes" of those that
        were demoted; "device_pages" in use, by generations too, and "free_pages" of the pool, "host_pages" and
        "disk_pages"."""
        return self._ask(self._core.gauges, timeout)

    def room_after(self, tokens: int, most: int) -> int:
        """How many tokens, at most `most`, one generation has room for after a history of `tokens` tokens: in the
        model's positions and in the whole pool, by the engine's policy."""
        engine, window = self.engine, self._core.limits.window
        kept = tokens - (0 if window is None else window.dropped(tokens))
        own = engine.page_size if kept % engine.page_size else 0  # a generation runs on a fork, which has an open page of its own

        def lacks(count: int) -> bool:
            try:
                engine.check_length(min(kept + own + count - 1, engine.config.max_positions), engine.policy)
            except (ValueError, OutOfPages):
                return True
            return False

        most = max(0, min(most, engine.config.max_positions - kept + 1))  # the last token needs no position
        return most if not lacks(most) else bisect.bisect_left(range(1, most), True, key=lacks)

    def close(self, *, drain_s: float = 0.0) -> None:
        """End the runtime: refuse new calls, let generations that run go on for up to `drain_s` seconds, and free
        everything."""
        drained = arguments.seconds("drain_s", drain_s)
        if not self._closing:
            self._drained_at = float("inf") if drained is None else time.monotonic() + drained
            self._closing = True
            self._calls.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join()
            atexit.unregister(self.close)  # which held the engine

    # What sessions call

    def _append(self, session_id: str, tokens: Sequence[int], at: int | None, timeout: float | None, active: Active) -> int:
        given, at = self._checked(tokens, least=1), _checked_length(at)
        with _emptied(given):
            return self._ask_in_turn(session_id, lambda record: self._core.append(record, given, at), timeout, active)

    def _generate(self, session_id: str, at: int | None, sampling: dict[str, Any]) -> Generation:
        run, future = self._run_of(session_id, at, sampling)
        self._post(lambda: self._core.in_turn(session_id, lambda record: None if run.over else self._core.begin(record, run), future))
        return Generation(run, self._conclude)

    def _run_of(self, session_id: str, at: int | None, sampling: dict[str, Any]) -> tuple[Run, Future]:
        """A generation that has not begun, and what says whether it did."""
        run = Run(session_id, checked_sampling(sampling), _checked_length(at))
        run.turn = future = Future()
        future.add_done_callback(lambda done: _tell_failure(run, done))
        return run, future

    def _conclude(self, run: Run, keep: int, wait: bool) -> int:
        """End a generation, as `SessionCore.conclude`. wait: False where nobody needs the result."""
        if self._closing and not self._thread.is_alive():
            return 0
        future: Future = Future()
        self._calls.put((lambda: self._core.conclude(run, keep), future))
        try:
            return self._result(future, None) if wait else 0
        except Unavailable:  # the runtime was closed meanwhile, and has ended it
            return 0

    def _ask_in_turn(self, session_id: str, task: Callable[[Record], Any], timeout: float | None, active: Active = None) -> Any:
        timeout, future, queued = arguments.seconds("timeout", timeout), Future(), Future()
        arguments.instance("active", active, (Callable,), "a function")
        queued.add_done_callback(lambda done: _tell_caller(done, future))
        with _given_up(future):
            self._post(lambda: self._core.in_turn(session_id, task, future), queued)
            return self._result(future, timeout, active)

    def _ask(self, task: Callable[[], Any], timeout: float | None, active: Active = None) -> Any:
        timeout, future = arguments.seconds("timeout", timeout), Future()
        arguments.instance("active", active, (Callable,), "a function")
        with _given_up(future):
            self._post(task, future)
            return self._result(future, timeout, active)

    def _post(self, task: Callable[[], Any], future: Future | None = None) -> None:
        if self._closing:
            raise Unavailable("the runtime is closing")
        if future is None:  # nobody waits for it
            future = Future()
            future.add_done_callback(_log_failure)
        self._calls.put((task, future))

    def _result(self, future: Future, timeout: float | None, active: Active = None) -> Any:
        until = None if timeout is None else time.monotonic() + timeout
        while True:
            try:
                return future.result(1.0 if until is None else max(0.0, min(1.0, until - time.monotonic())))
            except TimeoutError:
                if not self._thread.is_alive() and not future.done():
                    raise Unavailable("the runtime was closed before it came to this call") from None
                if until is not None and time.monotonic() >= until:
                    if future.cancel():
                        raise DeadlineExceeded(f"the session was busy for {timeout:g} s; nothing was done") from None
                    until = None  # it runs now, and its result comes
                if active is not None and not active() and future.cancel():
                    raise Cancelled("the caller has gone; nothing was done") from None

    def _checked(self, tokens: Sequence[int], least: int) -> array.array:
        """Token ids as a history holds them, four bytes each: a call may wait with a million of them."""
        try:
            row = isinstance(tokens, Sized) and not isinstance(tokens, str | bytes | Mapping | Set) and getattr(tokens, "ndim", 1) == 1
            none = row and not least and not len(tokens)
            ids = () if none else token_ids(tokens, self.engine.config.vocab_size).array.astype(np.int32, copy=False).tobytes()
            return array.array("i", ids)
        except (ValueError, TypeError, OverflowError) as error:
            raise InvalidArgument(str(error), field="tokens") from None

    # The runtime's thread

    def _loop(self) -> None:
        core, swept, published = self._core, time.monotonic(), time.monotonic()
        try:
            while not (self._closing and (core.quiet or time.monotonic() >= self._drained_at)):
                self._answer(wait=core.scheduler.idle)
                if not core.scheduler.idle:
                    core.step()
                if time.monotonic() - swept >= SWEEP_SECONDS:
                    self._sweep()
                    swept = time.monotonic()
                if core.scheduler.idle or time.monotonic() - published >= PUBLISH_SECONDS:
                    self._publish()
                    published = time.monotonic()
        finally:
            self._closing = True
            self._answer(wait=False)
            core.end_all()
            self._publish()

    def _publish(self) -> None:
        try:
            self.published = self._core.gauges()
        except Exception:  # the calls of all sessions need this thread
            logger.exception("what is there could not be counted")

    def _sweep(self) -> None:
        try:
            self._core.sweep()
            self._core.tell_of_waiting()
        except Exception:  # the calls of all sessions need this thread
            logger.exception("idle sessions could not be looked at")

    def _answer(self, *, wait: bool) -> None:
        """Run the calls that have come in; while generations run, for `ANSWERS_S`, and at least one. wait: for the
        first one, until the next sweep."""
        until = time.monotonic() + ANSWERS_S
        with contextlib.suppress(queue.Empty):
            while True:
                call = self._calls.get(timeout=SWEEP_SECONDS) if wait else self._calls.get_nowait()
                wait = False
                if call is not None:
                    self._core.answer(*call)
                if time.monotonic() > until and not self._core.scheduler.idle and not self._closing:
                    return


class Session:
    """One session of a runtime. Any thread may use it; calls on the same session run in the order in which they
    came."""

    def __init__(self, runtime: SessionRuntime, session_id: str):
        self._runtime, self.id = runtime, session_id

    def __repr__(self) -> str:
        return f"Session({self.id!r})"

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def append(self, tokens: Sequence[int], *, at: int | None = None, timeout: float | None = None, active: Active = None) -> int:
        """Add token ids to the history, and return its length. They are prefilled by the next `generate`.

        at: how long the caller takes the history to be; InvalidArgument if it is not, unless these very tokens already
        stand there, so that a call whose answer was lost can be repeated. timeout, active: as in
        `SessionRuntime.create`. Waits for a generation of the session.
        """
        return self._runtime._append(self.id, tokens, at, timeout, active)

    def generate(self, *, at: int | None = None, **sampling: Any) -> Generation:
        """Generate tokens, as an iterator of ids; a second call waits for the first one to end.

        sampling: fields of `kvjax.Sampling` but those about text: max_new_tokens, temperature, seed and so on. at: as
        in `append`. The tokens join the history when the iteration ends, or as many as were iterated over when it is
        broken off. It begins at once. While it is neither iterated over to its end, nor cancelled, nor forgotten, later
        calls of the session wait.
        """
        return self._runtime._generate(self.id, at, sampling)

    def fork(self, *, timeout: float | None = None, active: Active = None) -> Session:
        """A second session with the same history. Sealed pages are shared, and nothing is prefilled again, unless
        running generations leave no room: then its first generation prefills the history. timeout, active: as in
        `SessionRuntime.create`."""
        runtime = self._runtime
        return Session(runtime, runtime._ask_in_turn(self.id, runtime._core.fork, timeout, active).id)

    def info(self, *, timeout: float | None = None, active: Active = None) -> SessionInfo:
        """What is known of the session. Does not wait for its generation. timeout, active: as in
        `SessionRuntime.create`."""
        core = self._runtime._core
        return self._runtime._ask(lambda: core.info(core.find(self.id)), timeout, active)

    def demote(self, *, timeout: float | None = None) -> None:
        """Move the session's pages to host memory now. They come back, with the same bits, when it is used."""
        self._runtime._ask_in_turn(self.id, self._runtime._core.demote, timeout)

    def audit(self, *, timeout: float | None = None) -> None:
        """Prefill the session's cache once more beside it, and compare the next token's logits bit by bit.
        FailedPrecondition, and the session is closed, if they differ (INV-3). Other sessions wait meanwhile."""
        self._runtime._ask_in_turn(self.id, self._runtime._core.audit, timeout)

    def close(self, *, timeout: float | None = None) -> None:
        """End the session, and free its pages. A generation that runs ends with the error Cancelled."""
        core = self._runtime._core
        self._runtime._ask(lambda: core.end(core.find(self.id), "close"), timeout)


@contextlib.contextmanager
def _given_up(future: Future) -> Iterator[None]:
    """After Ctrl-C, or an error of `active`, a call that still waits is never done."""
    try:
        yield
    except BaseException:
        future.cancel()
        raise


@contextlib.contextmanager
def _emptied(tokens: array.array) -> Iterator[None]:
    """Empty the tokens of a call that its caller has given up. The call itself stays in its queue, and does nothing
    there."""
    try:
        yield
    except (DeadlineExceeded, Cancelled):
        del tokens[:]
        raise


def checked_sampling(fields: dict[str, Any], known: tuple[str, ...] = SHAPED) -> Sampling:
    """The sampling of a generation. known: the fields that it may have. InvalidArgument names the field."""
    for name in fields:
        if name not in known:
            raise InvalidArgument(f"there is no {name!r} in a generation: its fields are {', '.join(known)}", field=name)
    if (stops := fields.get("stop_token_ids")) is not None:
        fields = fields | {"stop_token_ids": arguments.token_ids("stop_token_ids", stops)}
    try:
        return Sampling(**fields)
    except (ValueError, TypeError, OverflowError) as error:
        field = next((name for name in fields if name in str(error)), "")
        raise InvalidArgument(str(error), field=field) from None


def _checked_length(at: int | None) -> int | None:
    try:
        return None if at is None else whole_number("at", at, 0)
    except (ValueError, TypeError) as error:
        raise InvalidArgument(str(error), field="at") from None


def _log_failure(future: Future) -> None:
    if future.exception() is not None:
        logger.error("a call failed in the runtime's thread", exc_info=future.exception())


def _tell_caller(queued: Future, future: Future) -> None:
    """A call that could not be queued ends with that error."""
    if (error := queued.exception()) is not None and future.set_running_or_notify_cancel():
        future.set_exception(error)


def _check_times(**times: float | None) -> None:
    for name, value in times.items():
        if not (value is None and name != "idle_ttl_s") and not (arguments.is_number(value) and value >= 0):
            raise ValueError(f"{name} must be a number from 0 on, got {value!r:.60}")


def _tell_failure(run: Run, future: Future) -> None:
    """A generation that could not begin ends with that error."""
    if not future.cancelled() and (error := future.exception()) is not None:
        run.end("error", error)
