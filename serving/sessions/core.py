"""The sessions of one engine, for one thread: what `SessionRuntime` runs in its own.

* A session's cache holds only tokens that prefill wrote. A generation runs on a fork, whose pages go when it ends, and
  its tokens are prefilled before the next one. So the bits of the cache depend on the history, and not on how it came
  in (INV-3), and a generation that was cut off leaves the session as it was. The price is the prefill of generated
  tokens. Every token of the history is prefilled once.
* Generations of all sessions go through one `kvjax.Scheduler`. They are decoded together, in one batch bucket, so the
  bits of each do not depend on the others.

Source: ADR 0008, sections 2.2 to 2.8.
"""

from __future__ import annotations

import array
import collections
import itertools
import logging
import secrets
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np

from kvjax.cache import OutOfPages
from kvjax.client.errors import Cancelled, FailedPrecondition, InvalidArgument, ResourceExhausted, SessionError, SessionNotFound
from kvjax.client.shared import SessionInfo
from kvjax.engine.engine import Engine
from kvjax.engine.sampling import Sampling
from kvjax.engine.sequence import CachedSequence
from kvjax.policies.decode import DecodePolicy
from kvjax.scheduler.request import Request
from kvjax.scheduler.scheduler import Scheduler
from kvjax.serving.sessions.generation import Run
from kvjax.serving.sessions.journal import Journal
from kvjax.serving.sessions.limits import MAX_WAITING, Limits
from kvjax.serving.sessions.policy_table import PolicyTable
from kvjax.serving.sessions.session import Record, Violation, check_invariants

logger = logging.getLogger(__name__)

REMEMBERED = 10_000
"""Ended sessions whose reason is remembered."""
WAITING_TOLD_S = 10.0
"""How long all tokens of a generation are there, and other calls wait for who asked for them, before the log says
so."""
OUTCOMES = {"close": "closed", "ttl": "evicted", "lru": "evicted", "failed": "failed"}
"""How a session ended, by reason: the labels of the paper's `session_total` and `session_evicted_total`."""


class SessionCore:
    """Sessions and their generations. policies: those that sessions may have. observe, clock: as in `SessionRuntime`.
    counts: events so far, by name."""

    def __init__(
        self,
        engine: Engine,
        limits: Limits,
        policies: PolicyTable,
        *,
        slots: int | None,
        max_gap_ms: float | None,
        draft: str | DecodePolicy | None,
        observe: Callable[[str, float], None],
        clock: Callable[[], float],
        journal: Journal | None = None,
    ):
        self.engine, self.limits, self.policies, self.observe, self.clock = engine, limits, policies, observe, clock
        self.counts: collections.Counter[str] = collections.Counter()
        self.records: collections.OrderedDict[str, Record] = collections.OrderedDict()  # the one used longest ago first
        self._ended: collections.OrderedDict[str, str] = collections.OrderedDict()
        self._page_bytes = {name: engine.spec.bytes_per_page(name, engine.indexes) for name in engine.allocators}
        hooks = {"on_token": self._token, "on_short": self._give_room, "texts": False}  # detokenizing is the clients' business
        self.scheduler = Scheduler(engine, slots=slots, max_gap_ms=max_gap_ms, draft=draft, **hooks)
        self._runs: dict[Any, Run] = {}  # by handle
        self._heard: dict[Run, list[int]] = {}  # tokens of the step under way
        self._journal = journal
        if journal is not None:
            try:
                self._restore(journal)
            except BaseException:
                journal.close()
                raise

    def _restore(self, journal: Journal) -> None:
        """Take the sessions that are on disk. Their idle time begins now: while no server ran, nobody could use
        them."""
        missing: dict[str, str] = {}
        for each in sorted(journal.load(), key=lambda stored: stored.written):
            try:
                self.engine.check_tokens(each.history or [0])
            except ValueError as error:
                raise ValueError(f"the file of session {each.id} is damaged: {error}; delete it, or restore it") from None
            try:
                policy = self.policies.find(each.policy)
            except (InvalidArgument, ResourceExhausted):
                name = str(each.policy)[:60]
                missing.setdefault(name if name.isprintable() else ascii(name), each.id)
                continue
            self.records[each.id] = Record(each.id, policy, self.engine.new_sequence(), self.clock(), each.history, stored=True)
        if missing:
            named = ", ".join(f"{policy} (session {session})" for policy, session in itertools.islice(missing.items(), 8))
            options = " ".join(f"--policy {policy}" for policy in itertools.islice(missing, 8))
            own = ", if you know these files and trust them" if any(".py:" in policy for policy in missing) else ""
            raise ValueError(
                f"sessions on disk have policies that this server does not have: {named}. Start it with {options}{own}, or with the "
                "--allow-policy that it had, or give another folder; a session that is not needed ends when its file is deleted"
            )

    # Sessions

    def find(self, session_id: str) -> Record:
        """A session's record, which is then the one used last. SessionNotFound says how the session ended."""
        record = self.records.get(session_id)
        if record is None:
            reason = self._ended.get(session_id, "unknown")
            raise SessionNotFound(f"there is no session {session_id[:40]!r} ({reason}): create a new one", reason=reason)
        self._touch(record)
        return record

    def create(self, tokens: array.array, policy: DecodePolicy | None, kept: bool) -> Record:
        """A new session. At capacity, the idle one used longest ago ends. kept: whether it is on disk, where sessions
        are."""
        self._check_length(len(tokens))
        leaving = self._leaving_for_one()
        record = Record(secrets.token_hex(16), policy, self.engine.new_sequence(), self.clock(), stored=kept and self._journal is not None)
        record.history.extend(tokens)
        self._keep(record)  # which may fail, and then no other session ends for it
        for each in leaving:
            self.end(each, "lru")
        return record

    def append(self, record: Record, tokens: array.array, at: int | None) -> int:
        """Add tokens to a history. Returns its length."""
        self._check_length(len(record.history) + len(tokens))
        if record.lacks(tokens, at):
            self._extend(record, tokens)
        return len(record.history)

    def fork(self, record: Record) -> Record:
        """A second session with the same history. It shares sealed pages. Where running generations leave no room, it
        holds none, and its first generation prefills the history, with the same bits."""
        leaving = self._leaving_for_one(record)
        self._look_for_damage(record)
        self._checked(record)
        floor = record.floor
        try:
            if record.sequence.suspended is not None:
                self._with_room(lambda: self._promote(record), record)
            sequence = self._with_room(lambda: self.engine.fork(record.sequence), record)
        except ResourceExhausted as error:
            if not isinstance(error.__cause__, OutOfPages):
                raise
            sequence, floor = self.engine.new_sequence(), min(record.floor, record.dropped)
        held = record.history[:], record.dropped, floor, record.stored
        child = Record(secrets.token_hex(16), record.policy, sequence, self.clock(), *held)
        self._keep(child)  # the last that may fail: until here no other session has ended for it
        for each in leaving:
            self.end(each, "lru")
        return child

    def info(self, record: Record) -> SessionInfo:
        """What is known of a session."""
        sequence, policy = record.sequence, record.policy or self.scheduler.policy
        kinds = {kind: self.counts[kind] for kind in ("inv1", "inv2", "inv3")}
        figures = {"kv_live_bytes": self.live_bytes(record), "demoted": sequence.suspended is not None}
        figures |= {"generating": record.run is not None, "policy": policy.describe(), "violations": kinds}
        return SessionInfo(record.id, len(record.history), sequence.length, record.dropped, **figures)

    def audit(self, record: Record) -> None:
        """Prefill what the cache holds once more, and compare the next token's logits bit by bit (INV-3). A difference
        closes the session."""
        self._look_for_damage(record)
        sequence = record.sequence
        self._checked(record)
        if sequence.logits is None:
            return
        if sequence.suspended is not None:
            self._with_room(lambda: self._promote(record), record)
        (again,) = self._with_room(lambda: self.engine.prefill([sequence.tokens]), record)
        try:
            same = bytes_of(again.logits) == bytes_of(sequence.logits)
        finally:
            self.engine.free(again)
        if not same:
            self._violated(record, Violation("inv3", "one prefill of the history gives other logits than the session has"))

    def demote(self, record: Record) -> None:
        """Move a session's pages to host memory, and those that have been there longest on to disk if it is full.
        ResourceExhausted if both are, or if the disk cannot be written to."""
        store, sequence = self.engine.suspended, record.sequence
        if sequence.suspended is not None or not sequence.length:
            return
        try:
            if not store.make_room(self.live_bytes(record)):
                raise ResourceExhausted(f"the {store.host_bytes:,} bytes of host memory for sessions are full, and so is the disk")
            self.engine.suspend(sequence)
            self.counts["demoted"] += 1
            store.make_room(0)  # its own pages go on, too, if there was room for them on disk alone
        except OSError as error:
            raise ResourceExhausted(f"pages of a session could not be written to {store.folder}: {error.strerror}") from error
        finally:
            self.counts |= collections.Counter(shelved=store.moved)  # without a count of 0

    def end(self, record: Record, reason: str) -> None:
        """End a session, and free its pages. A generation that runs ends with the error Cancelled, and calls that wait
        with NOT_FOUND."""
        self.records.pop(record.id)
        if record.stored and self._journal is not None:
            self._journal.end(record.id)
        self._ended[record.id] = reason
        while len(self._ended) > REMEMBERED:
            self._ended.popitem(last=False)
        self.counts[OUTCOMES[reason]] += 1
        self.counts[f"reason_{reason}"] += 1
        if record.run is not None:
            run, record.run = record.run, None
            self._stop(run, Cancelled(f"the session was ended ({reason})", reason=reason))
        if record.sequence in self.engine.sequences:
            self.engine.free(record.sequence)
        for task, future in record.waiting:
            self.answer(task, future)  # they do not find the session any more
        record.waiting.clear()
        logger.info("session %s ended: %s, %d tokens", record.id[:8], reason, len(record.history))

    # Generations

    def begin(self, record: Record, run: Run) -> None:
        """Give a generation to the scheduler. Its errors are told through the run."""
        length = len(record.history)
        if run.at is not None and run.at != length:
            raise InvalidArgument(f"the caller takes the history to have {run.at} tokens, but it has {length}", field="at")
        if not length:
            raise FailedPrecondition("the history is empty: append at least one token first")
        self._look_for_damage(record)
        self._checked(record)
        self._truncate(record, run)
        kept = record.kept(self.limits.window)
        run.prefill_tokens = len(kept) - record.sequence.length
        record.run, run.admitted = run, time.monotonic()
        self.observe("session_history_tokens", length)
        self.observe("generate_prefill_tokens", run.prefill_tokens)
        request = Request(kept, run.sampling, id=run, policy=record.policy)
        run.handle = self.scheduler.submit(request, record.sequence)
        self._runs[run.handle] = run

    def conclude(self, run: Run, keep: int) -> int:
        """End a generation; the first `keep` of its tokens join the history. Returns its length, 0 if the session is
        gone. keep -1: only stop it; its caller concludes it later."""
        record = self.records.get(run.session_id)
        mine = record is not None and record.run is run
        self._stop(run, Cancelled("the generation was cancelled"))
        if not mine or keep < 0:
            return 0 if record is None else len(record.history)
        record.run = None
        self._touch(record)
        try:
            self._extend(record, run.tokens[:keep])
            self._checked(record, since=max(0, len(record.history) - record.dropped - keep - run.prefill_tokens))
        finally:
            self._next_turn(record)
        return len(record.history)

    def in_turn(self, session_id: str, task: Callable[[Record], Any], future: Future) -> None:
        """Run a task of a session after the calls that came before it."""

        def call() -> Any:
            return task(self.find(session_id))

        record = self.records.get(session_id)
        if record is None or record.idle:
            self.answer(call, future)
        elif record.has_room_for_a_call(MAX_WAITING):
            record.waiting.append((call, future))
        else:
            self.answer(_refuse_to_wait, future)

    def answer(self, task: Callable[[], Any], future: Future) -> None:
        """Run a task, unless its caller has given up."""
        if not future.set_running_or_notify_cancel():
            return
        try:
            future.set_result(task())
        except BaseException as error:
            future.set_exception(error)

    def warm_up(self, policy: DecodePolicy, tokens: int | None) -> None:
        """Compile what generations under a policy run, for histories of up to so many tokens: greedy steps, and those
        that draw at random for histories of a few pages."""
        self.engine.warmup(tokens=tokens, policy=policy)
        for temperature in (0.0, 1.0):
            (sequence,) = self.engine.prefill([[0]])
            try:
                sampling = Sampling(max_new_tokens=2, temperature=temperature, ignore_eos=True)
                run = Run("", sampling, None, over=True)  # nobody is told of its tokens
                handle = self.scheduler.submit(Request([0], sampling, id=run, policy=policy), sequence)
                while handle.completion is None:
                    self.step()
            finally:
                self.engine.free(sequence)

    def end_all(self) -> None:
        """Stop everything, and free all pages. Sessions that are on disk stay there."""
        if self._journal is not None:
            self._journal.close()
            self._journal = None
        for record in list(self.records.values()):
            self.end(record, "close")
        self.scheduler.close()

    def step(self) -> None:
        """Step the scheduler, and tell the ends of generations."""
        try:
            self.scheduler.step()
        except Exception:
            logger.exception("a step failed; the generations that ran have ended with this error")
        self._give_tokens()
        for handle, run in list(self._runs.items()):
            if not handle.prompt_tokens:  # it waits; the next step may admit it, prefill it and give its first token
                run.admitted = time.monotonic()
            if handle.completion is not None:
                del self._runs[handle]
                self._finish(run, handle.completion)

    def tell_of_waiting(self) -> None:
        """Log the generations that nobody takes the tokens of while other calls of their sessions wait: such calls may
        wait for ever."""
        for record in self.records.values():
            run = record.run
            if record.waiting and run is not None and run.over and not run.told and time.monotonic() - run.ended >= WAITING_TOLD_S:
                run.told = True
                logger.warning(
                    "session %s: %d calls wait for its generation, whose tokens have all come: iterate over it to the end, or cancel() it",
                    *(record.id[:8], len(record.waiting)),
                )

    def sweep(self) -> None:
        """End sessions that have been idle for too long, and demote those that have been for a while, up to the first
        that has no room."""
        now, ttl, demote_after = self.clock(), self.limits.idle_ttl_s, self.limits.demote_after_s
        demote_after = ttl if demote_after is None else demote_after
        full = False
        for record in list(self.records.values()):
            idle = now - record.used
            if idle < min(ttl, demote_after):
                return  # those after it were used later
            if not record.idle:
                continue
            if idle >= ttl:
                self.end(record, "ttl")
            elif not full and record.sequence.suspended is None and record.sequence.length:
                full = not self._demote_if_room(record)

    @property
    def quiet(self) -> bool:
        """Whether no generation runs, and every caller has taken the end of its own."""
        return self.scheduler.idle and all(record.run is None for record in self.records.values())

    def gauges(self) -> dict[str, int]:
        """`SessionRuntime.gauges`."""
        records = self.records.values()
        return {
            "sessions": len(records),
            "generating": self.scheduler.running,
            "waiting": self.scheduler.waiting + sum(len(record.waiting) for record in records),
            "kv_live_bytes": sum(map(self.live_bytes, records)),
            "device_pages": sum(each.total - each.free for each in self.engine.allocators.values()),
            "free_pages": sum(each.free for each in self.engine.allocators.values()),
            **self.engine.suspended.usage(),
        }

    def live_bytes(self, record: Record) -> int:
        """Bytes of a session's pages on the device."""
        pages = record.sequence.pages.items()
        return sum(self._page_bytes[name] * sum(page >= 0 for page in ids) for name, ids in pages)

    # Inside

    def _keep(self, record: Record) -> None:
        """A new session is there."""
        if record.stored:
            try:
                self._journal.create(record.id, self.policies.name(record.policy or self.scheduler.policy), record.history)
            except BaseException:
                self.engine.free(record.sequence)
                raise
        self.records[record.id] = record

    def _extend(self, record: Record, tokens: Sequence[int]) -> None:
        if record.stored:
            self._journal.extend(record.id, tokens)
        record.history.extend(tokens)

    def _touch(self, record: Record) -> None:
        record.used = self.clock()
        self.records.move_to_end(record.id)
        self.engine.suspended.touch(record.sequence)

    def _next_turn(self, record: Record) -> None:
        """Run the calls that wait for a session's generation, up to the next generation."""
        while record.waiting and record.run is None and record.id in self.records:
            self.answer(*record.waiting.popleft())

    def _check_length(self, tokens: int) -> None:
        """ResourceExhausted for a history above the limit, and for one that never fits, unless a window drops what is
        too much."""
        if tokens > self.limits.history:
            raise ResourceExhausted(f"a history of {tokens:,} tokens is above the limit of {self.limits.history:,} (--max-history)")
        if self.limits.window is None:
            self._told(lambda: self.engine.check_length(tokens))

    def _told(self, call: Callable[[], Any]) -> Any:
        """The result of an engine's call, whose errors about sizes become ResourceExhausted."""
        try:
            return call()
        except OutOfPages as short:
            raise _too_few_pages(short) from short
        except ValueError as error:
            raise ResourceExhausted(str(error)) from error

    def _with_room(self, call: Callable[[], Any], busy: Record) -> Any:
        """The result of a call that takes pages. While there are too few, idle sessions other than `busy` are
        demoted."""
        while True:
            try:
                return call()
            except OutOfPages as short:
                if not self._give_room(busy.sequence):
                    raise _too_few_pages(short) from short

    def _promote(self, record: Record) -> None:
        self.engine.check_room(record.sequence.length, record.sequence)
        self.engine.resume(record.sequence)

    def _give_room(self, needing: CachedSequence | None) -> bool:
        """Demote a session, so that another sequence gets its pages, or the next step (None). Returns whether there was
        one.

        First the idle one used longest ago, then one whose generation has not begun. For a step, at last one whose
        generation runs: on a fork, with which it shares all pages but the open one.
        """
        if self.engine.suspended.full:
            return False
        there = [each for each in self.records.values() if each.sequence.suspended is None and each.sequence.length]
        runs = [(each, each.run) for each in there if each.sequence is not needing]
        runs = [(each, run) for each, run in runs if run is None or run.handle is None or not run.handle.prompting]
        idle = [record for record, run in runs if run is None or run.over]
        not_begun = [record for record, run in runs if run is not None and not run.over and not run.tokens]
        running = [record for record, run in runs if run is not None and run.tokens and needing is None]
        return any(self._demote_if_room(each) for each in (*idle, *not_begun, *running))

    def _demote_if_room(self, record: Record) -> bool:
        """Demote a session if host memory and disk have room. Returns whether its pages have left the device."""
        try:
            self.demote(record)
        except ResourceExhausted as error:
            if error.__cause__ is not None:
                logger.error("%s; for a while nothing is written there", error)
        return record.sequence.suspended is not None

    def _leaving_for_one(self, busy: Record | None = None) -> list[Record]:
        """The idle sessions but `busy`, those used longest ago, that have to end for one more. After a restart there
        may be more than the capacity, if that is smaller than it was."""
        count = len(self.records) + 1 - self.limits.capacity
        idle = [each for each in self.records.values() if each.idle and each is not busy]
        if len(idle) < count:
            raise ResourceExhausted(f"all {self.limits.capacity} sessions are in the middle of a call: close one, or try again later")
        return idle[: max(count, 0)]

    def _truncate(self, record: Record, run: Run) -> None:
        """Apply the window: when more is dropped than before, what is kept is prefilled again."""
        window = self.limits.window
        dropped = 0 if window is None else window.dropped(len(record.history))
        if dropped == record.dropped:
            return
        run.dropped_tokens, record.dropped = dropped - record.dropped, dropped
        self.counts["truncated"] += 1
        self._begin_again(record)

    def _look_for_damage(self, record: Record) -> None:
        """Where a session's pages on disk are not those that were written, its history is prefilled again, with the
        same bits."""
        try:
            if record.sequence.suspended is not None:
                self.engine.suspended.get(record.sequence)
        except ValueError:
            logger.error("session %s: its pages on disk are damaged; its history is prefilled again", record.id[:8])
            self.counts["damaged"] += 1
            self._begin_again(record)

    def _begin_again(self, record: Record) -> None:
        """Drop what the cache holds of a session. The next generation prefills its history."""
        if record.sequence in self.engine.sequences:
            self.engine.free(record.sequence)
        record.sequence = self.engine.new_sequence()
        record.floor = min(record.floor, record.dropped)

    def _checked(self, record: Record, since: int = 0) -> None:
        """Check the session's invariants. FailedPrecondition, and the session is closed, if one is violated."""
        try:
            check_invariants(self.engine, record, self.limits.window, since)
        except Violation as violation:
            self._violated(record, violation)

    def _violated(self, record: Record, violation: Violation) -> None:
        self.counts[violation.kind] += 1
        logger.error("session %s violates %s: %s", record.id[:8], violation.kind, violation)
        self.end(record, "failed")
        raise FailedPrecondition(f"{violation.kind}: {violation}; the session is closed", reason=violation.kind)

    # Tokens

    def _token(self, request: Request, token: int, piece: str) -> None:
        run = request.id
        if not run.over:
            self._heard.setdefault(run, []).append(token)

    def _give_tokens(self) -> None:
        """Give the tokens of a step to their generations, and tell their times."""
        heard, self._heard = self._heard, {}
        for run, tokens in heard.items():
            before = run.latest
            run.add(*tokens)
            gaps = len(tokens)
            if before is None:
                self.observe("time_to_first_token_seconds", run.latest - run.asked)
                self.observe("generate_prefill_duration_seconds", run.latest - run.admitted)
                before, gaps = run.latest, gaps - 1
            for _ in range(gaps):
                self.observe("token_gap_seconds", (run.latest - before) / gaps)

    def _stop(self, run: Run, error: SessionError) -> None:
        """Take a generation from the scheduler, if it has not ended."""
        if run.over:
            return
        if run.turn is not None:
            run.turn.cancel()  # it waits no more, if it did
        if run.handle is not None:
            self._runs.pop(run.handle, None)
            self.scheduler.cancel(run.handle)
        run.end("cancelled", error)

    def _finish(self, run: Run, completion: Any) -> None:
        """A generation has ended by itself, or failed."""
        error, missed = completion.error, completion.missed
        if missed is not None and missed.samples:
            self.observe("attention_missed_share", missed.mean)
            self.counts.update(missed_alarms=missed.alarms, missed_steps=missed.steps, missed_keys=missed.keys)
        if completion.rounds:
            self.counts.update({f"draft_kept_{tokens}": count for tokens, count in enumerate(completion.rounds.kept, 1)})
        if error is None:
            run.end(completion.finish_reason)
            return
        record = self.records.get(run.session_id)
        if isinstance(error, OutOfPages):
            run.end("error", _too_few_pages(error))
        else:
            run.end("error", ResourceExhausted(str(error)) if isinstance(error, ValueError) else SessionError(str(error)))
        if record is not None and self._broken(record.sequence):
            logger.warning("session %s: its cache was lost when a step failed; its history is prefilled again", record.id[:8])
            self._begin_again(record)

    def _broken(self, sequence: CachedSequence) -> bool:
        """Whether a step that failed left a sequence that no call can use."""
        engine = self.engine
        half_way = sequence.failed is not None or engine.slices_left(sequence) < engine.slices_left(None)
        return half_way or sequence not in engine.sequences


def _too_few_pages(short: OutOfPages) -> ResourceExhausted:
    """What the caller of a session is told, who can give no more pages. What whoever runs the server can do is
    logged."""
    logger.warning("%s", short)
    if short.needed > short.total:
        return ResourceExhausted(f"{short.needed:,} pages are needed, and there are only {short.total:,}: send a shorter history")
    counted = f"{short.needed:,} needed, {short.free:,} free of {short.total:,}"
    return ResourceExhausted(f"the pages are full ({counted}): try again later, or close sessions")


def _refuse_to_wait() -> None:
    raise ResourceExhausted(f"{MAX_WAITING:,} calls wait for the session already, the limit: try again later", reason="calls")


def bytes_of(logits: Any) -> bytes:
    """The bits of an array, wherever it is."""
    return np.asarray(logits).tobytes()
