"""Sessions in process: bits that do not depend on how a history came in, turns, errors, and what is freed."""

import array
import dataclasses
import itertools
import os
import shutil
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from tiny_models import VOCAB, make_family, make_model

from kvjax import Engine, SessionRuntime, TopBlocks
from kvjax.cache.stores.blocks import block_bytes
from kvjax.client.errors import (
    Cancelled,
    DeadlineExceeded,
    FailedPrecondition,
    InvalidArgument,
    ResourceExhausted,
    SessionError,
    SessionNotFound,
)
from kvjax.engine import prefill_runner
from kvjax.scheduler.drafting import Drafting
from kvjax.serving.sessions.journal import HEAD, Journal
from kvjax.serving.sessions.session import Record, Violation, Window, check_invariants

PAGES, PAGE, CHUNK = 48, 16, 32
TOP = TopBlocks(k=1, sink=1, local=1, block_size=PAGE)  # reads 48 keys
TEXT = np.random.default_rng(0).integers(0, VOCAB, 200).tolist()
WAIT = 60.0

pytestmark = pytest.mark.bits


def make_engine(model):
    return Engine(model, "dense", policies=[TOP], pages=PAGES, page_size=PAGE, prefill_chunk=CHUNK, batch_buckets=(4,))


def free_pages(engine):
    return {name: each.free for name, each in engine.allocators.items()}


@pytest.fixture(scope="module")
def engine():
    return make_engine(make_model())


@pytest.fixture
def runtime(engine):
    """A runtime whose sessions leave nothing behind."""
    before = free_pages(engine)
    with SessionRuntime(engine, slots=4, capacity=8) as used:
        yield used
        assert not {kind for kind in used.counts if kind.startswith("inv")} - getattr(used, "expected", set())
    assert (free_pages(engine), engine.sequences, dict(engine._runs)) == (before, set(), {})


def said(session, count=5, **sampling):
    return list(session.generate(max_new_tokens=count, stop_token_ids=(), **sampling))


@pytest.mark.quick_but("dense")
@pytest.mark.parametrize("policy", [None, TOP], ids=["dense", "top"])
def test_bits_do_not_depend_on_the_way(runtime, policy):
    check_ways(runtime, TEXT[:90], policy)


def check_ways(runtime, tokens, policy):
    """At least five ways lead to the same tokens: at once, one append, one by one, cut by prefills, forked, demoted, in
    company."""
    expected = said(runtime.create(tokens, policy=policy), temperature=1.0, seed=11)
    made = {"at once": runtime.create(tokens, policy=policy), "one append": runtime.create(policy=policy)}
    made["one append"].append(tokens)
    made["one by one"] = runtime.create(policy=policy)
    for token in tokens:
        made["one by one"].append([token])
    cut = made["cut"] = runtime.create(tokens[:5], policy=policy)  # each generation prefills what there is, and leaves nothing behind
    borders = [*(each for each in (5, 21, 50, 66) if each < len(tokens)), len(tokens)]
    for first, last in itertools.pairwise(borders):
        stopped = cut.generate(max_new_tokens=4)
        next(stopped)
        stopped.cancel(keep=0)
        cut.append(tokens[first:last])
    made["forked"] = cut.fork()
    demoted = made["demoted"] = cut.fork()
    demoted.generate(max_new_tokens=1).cancel(keep=0)
    demoted.demote()
    assert demoted.info().demoted or not demoted.info().cached_tokens
    for name, session in made.items():
        assert said(session, temperature=1.0, seed=11) == expected, name
        session.close()
    company = [runtime.create(TEXT[number : 60 + number], policy=policy) for number in range(3)]
    streams = [each.generate(max_new_tokens=12, stop_token_ids=()) for each in company]
    assert said(runtime.create(tokens, policy=policy), temperature=1.0, seed=11) == expected
    assert all(len(list(stream)) == 12 for stream in streams)


def test_sessions_say_the_same_with_drafts(engine, monkeypatch):
    """Also where a client leaves in the middle of a launch: what it took joins the history, and the rest is dropped."""
    monkeypatch.setattr(Drafting, "next", lambda self, ready: self._launches[1])
    monkeypatch.setattr(Engine, "has_program", lambda self, group: True)
    found = []
    for draft in (None, TOP, "lookup"):
        with SessionRuntime(engine, slots=4, draft=draft) as used:
            session = used.create(TEXT[:60])
            told = said(session, 40, temperature=1.0, seed=3)
            session.append([5, 6])
            stream = session.generate(max_new_tokens=40, stop_token_ids=())
            told += [next(stream) for _ in range(3)]
            stream.cancel()
            found.append((told, session.info().history_tokens, said(session, 20)))
            kept = {name: count for name, count in used.counts.items() if name.startswith("draft_kept_")}
            assert not kept if draft is None else sum(kept.values()) > 0
    assert found[0] == found[1] == found[2]


def test_turns_equal_one_append_of_the_same_ids(runtime):
    """The exact mode: what was generated is prefilled, so it has the bits that a client's own tokens have."""
    turns, ids = runtime.create(TEXT[:40]), TEXT[:40]
    for number in range(3):
        ids = ids + said(turns, 7, seed=number, temperature=1.0) + TEXT[40 + 9 * number : 49 + 9 * number]
        turns.append(ids[-9:])
    whole = runtime.create()
    whole.append(ids)
    assert said(whole, 8) == said(turns, 8)
    turns.audit()
    assert turns.info().cached_tokens == len(ids)


def test_nothing_is_prefilled_twice(engine):
    seen = []
    with SessionRuntime(engine, slots=4, observe=lambda name, value: seen.append((name, value))) as runtime:
        session = runtime.create(TEXT[:70])
        first = session.generate(max_new_tokens=4, stop_token_ids=())
        assert (len(list(first)), first.prefill_tokens, first.finish_reason, first.history_tokens) == (4, 70, "length", 74)
        session.append(TEXT[70:75])
        second = session.generate(max_new_tokens=4, stop_token_ids=())
        assert (len(list(second)), second.prefill_tokens) == (4, 9)  # the four generated tokens, and the five appended ones
    assert [value for name, value in seen if name == "generate_prefill_tokens"] == [70, 9]
    assert sum(name == "token_gap_seconds" for name, _ in seen) == 6
    timed = [
        [value for name, value in seen if name == each] for each in ("generate_prefill_duration_seconds", "time_to_first_token_seconds")
    ]
    assert all(0 < prefill <= first for prefill, first in zip(*timed, strict=True))
    assert timed[0][1] > 1e-4  # and not what is left of a step after the prefill in it


def test_what_watched_generations_miss_is_counted(engine):
    seen, policy = [], "window:4+12+missed0.001"
    with SessionRuntime(engine, slots=4, observe=lambda name, value: seen.append((name, value)), allow_policies=["window:*"]) as runtime:
        for name in (policy, "dense"):
            session = runtime.create(TEXT[:70], policy=name)
            assert len(list(session.generate(max_new_tokens=5, stop_token_ids=()))) == 5
        counts = {name: runtime.counts[name] for name in ("missed_alarms", "missed_steps", "missed_keys")}
    (share,) = [value for name, value in seen if name == "attention_missed_share"]
    heads = sum(engine.config.layers[each].mixer.num_kv_heads for each in range(2))
    assert 0.001 < share < 1
    assert counts["missed_alarms"] == heads
    assert counts["missed_steps"] == 4 * heads
    assert counts["missed_keys"] > 4 * heads * 40


def test_breaking_off_keeps_what_was_taken(runtime):
    session = runtime.create(TEXT[:20])
    for taken, _ in enumerate(session.generate(max_new_tokens=200, stop_token_ids=()), 1):
        if taken == 3:
            break
    assert session.info().history_tokens == 23
    assert not session.info().generating
    stream = session.generate(max_new_tokens=200, stop_token_ids=())
    stream.kept_if_broken = 0
    next(stream)
    stream.stop()  # as a server does when the connection is cut
    with pytest.raises(Cancelled):
        list(stream)
    assert session.info().history_tokens == 23
    dropped = session.generate(max_new_tokens=200, stop_token_ids=())
    next(dropped)
    del dropped
    assert session.append([1]) == 25


def test_threads_that_share_a_generation_get_each_token_once_and_the_end(runtime):
    session = runtime.create(TEXT[:20])
    expected = said(session.fork(), 40)
    stream, found = session.generate(max_new_tokens=40, stop_token_ids=()), []
    threads = [threading.Thread(target=lambda: found.extend(iter(stream.token, None)), daemon=True) for _ in range(3)]
    for each in threads:
        each.start()
    for each in threads:
        each.join(WAIT)
    assert not any(each.is_alive() for each in threads)
    assert sorted(found) == sorted(expected)
    assert session.info().history_tokens == 60
    other = session.generate(max_new_tokens=4, stop_token_ids=())
    with other._reading, pytest.raises(DeadlineExceeded, match="no token came within"):  # another thread waits for a token
        other.token(timeout=0.05)
    assert len(list(other)) == 4


def test_calls_of_a_session_wait_for_its_generation(runtime):
    session, other = runtime.create(TEXT[:20]), runtime.create(TEXT[:20])
    first, second = (session.generate(max_new_tokens=5, stop_token_ids=()) for _ in range(2))
    with pytest.raises(DeadlineExceeded, match="nothing was done"):
        session.append([1], timeout=0.05)
    assert len(said(other)) == 5
    with pytest.raises(DeadlineExceeded):
        second.token(timeout=0.05)
    appended = threading.Thread(target=lambda: session.append([1, 2]))
    appended.start()
    one, two = list(first), list(second)
    appended.join()
    assert session.info().history_tokens == 32
    assert said(runtime.create([*TEXT[:20], *one])) == two


def test_errors_are_typed_and_name_the_field(runtime):
    session = runtime.create()
    for call, kind, field in (
        (lambda: session.append([VOCAB]), InvalidArgument, "tokens"),
        (lambda: session.append([]), InvalidArgument, "tokens"),
        (lambda: session.append("text"), InvalidArgument, "tokens"),
        (lambda: session.append([1], at=4), InvalidArgument, "at"),
        (lambda: session.generate(max_new_tokens=0), InvalidArgument, "max_new_tokens"),
        (lambda: session.generate(temperature=-1.0), InvalidArgument, "temperature"),
        (lambda: session.generate(stop=("a",)), InvalidArgument, "stop"),
        (lambda: runtime.create(policy="top:32"), InvalidArgument, "policy"),
        (lambda: list(session.generate()), FailedPrecondition, ""),
        (lambda: runtime.create(TEXT * 20), ResourceExhausted, ""),
        (lambda: runtime.session("0" * 32).info(), SessionNotFound, ""),
    ):
        with pytest.raises(kind) as caught:
            call()
        assert caught.value.field == field
    session.append([1, 2], at=0)
    assert session.append([1, 2], at=0) == 2  # the same call again, whose answer was lost
    with pytest.raises(InvalidArgument):
        session.append([1, 3], at=0)
    with pytest.raises(InvalidArgument):
        list(session.generate(at=1))
    assert session.info().history_tokens == 2


def test_sessions_end_by_close_by_time_and_at_capacity(engine):
    now = [0.0]
    with SessionRuntime(engine, slots=4, capacity=2, idle_ttl_s=100.0, clock=lambda: now[0]) as runtime:
        first, second = runtime.create(TEXT[:20]), runtime.create(TEXT[:20])
        stream = first.generate(max_new_tokens=300, stop_token_ids=())
        next(stream)
        third = runtime.create()  # `first` is in the middle of a call, though it was used longest ago
        with pytest.raises(SessionNotFound) as caught:
            second.append([1])
        assert caught.value.reason == "lru"
        waiting = third.generate(max_new_tokens=1)
        with pytest.raises(FailedPrecondition):
            list(waiting)
        first.close()
        with pytest.raises(Cancelled):
            list(stream)
        now[0] = 101.0
        until = time.monotonic() + WAIT
        while runtime.counts.get("reason_ttl", 0) < 1 and time.monotonic() < until:
            time.sleep(0.05)
        with pytest.raises(SessionNotFound) as caught:
            third.info()
        assert caught.value.reason == "ttl"
        assert {key: value for key, value in runtime.counts.items() if key in ("closed", "evicted")} == {"closed": 1, "evicted": 2}
        assert free_pages(engine)["full"] == PAGES


def test_idle_sessions_are_demoted_when_pages_run_out(runtime, engine):
    """Four sessions of 12 or 13 pages in a pool of 48, each with a fork while it generates."""
    alone = [said(runtime.create(TEXT[number : number + 190])) for number in range(2)]
    sessions = [runtime.create(TEXT[number : number + 190]) for number in range(5)]
    streams = [session.generate(max_new_tokens=5, stop_token_ids=()) for session in sessions]
    answers = [list(stream) for stream in streams]
    assert answers[:2] == alone
    assert runtime.counts["demoted"] > 0
    assert runtime.gauges()["host_bytes"] > 0
    again = runtime.create(TEXT[:190] + answers[0])
    assert said(sessions[0]) == said(again)


def prefill(session):
    """Have the session's history prefilled, and generate nothing."""
    stream = session.generate(max_new_tokens=4, stop_token_ids=())
    next(stream)
    stream.cancel(keep=0)


def test_demoted_sessions_go_on_to_disk_when_host_memory_is_full(engine, tmp_path):
    """Host memory for one session of 10 pages, and disk for two. They come back with the same bits."""
    size, stored = 10 * engine.spec.bytes_per_page("full", engine.indexes), 10 * block_bytes(engine.spec, "full")
    with SessionRuntime(engine, slots=4, host_bytes=size, disk=tmp_path / "pages", disk_bytes=2 * size) as runtime:
        sessions = [runtime.create(TEXT[number : number + 150]) for number in range(4)]
        expected = []
        for each in sessions:
            with each.fork() as child:
                expected.append(said(child, 3))
            prefill(each)
        for number in (2, 0, 1):
            sessions[number].demote()
        gauges = runtime.gauges()
        assert (gauges["host_bytes"], gauges["disk_bytes"], gauges["host_pages"], gauges["disk_pages"]) == (stored, 2 * stored, 10, 20)
        held = [runtime._core.records[each.id].sequence for each in sessions]
        assert [each in engine.suspended.on_disk for each in held] == [
            True,
            False,
            True,
            False,
        ]  # 2 and 0 were used longest ago
        assert all(each.info().demoted for each in sessions[:3])
        with pytest.raises(ResourceExhausted, match="so is the disk"):
            sessions[3].demote()
        assert not list((tmp_path / "pages").iterdir())  # files without a name: nothing stays after a kill
        assert [said(each, 3) for each in sessions] == expected
        assert runtime.gauges()["disk_bytes"] == runtime.gauges()["host_bytes"] == 0
        assert (runtime.counts["demoted"], runtime.counts["shelved"]) == (3, 2)
        sessions[2].demote()
        sessions[2].audit()
    with pytest.raises(ValueError, match="give host_bytes"):
        SessionRuntime(engine, disk=tmp_path, disk_bytes=1)
    with pytest.raises(ValueError, match="name another folder"):
        SessionRuntime(engine, host_bytes=1, disk=Path(__file__), disk_bytes=1)


def test_a_full_disk_leaves_a_demoted_session_in_host_memory(engine, tmp_path, monkeypatch):
    with SessionRuntime(engine, slots=4, host_bytes=0, disk=tmp_path, disk_bytes=10**9) as runtime:
        session = runtime.create(TEXT[:50])
        prefill(session)
        with session.fork() as child:
            expected = said(child, 3)

        def full(file, blocks):
            raise OSError(28, "No space left on device")

        monkeypatch.setattr("kvjax.cache.stores.suspended._mapped", full)
        with pytest.raises(ResourceExhausted, match="No space left"):
            session.demote()
        assert session.info().demoted
        assert said(session, 3) == expected


def test_a_violated_invariant_closes_the_session(runtime, engine):
    runtime.expected = {"inv1", "inv2", "inv3"}
    session = runtime.create(TEXT[:40])
    said(session)
    record = runtime._core.records[session.id]
    record.sequence.tokens[3] += 1
    with pytest.raises(FailedPrecondition) as caught:
        said(session)
    assert caught.value.reason == "inv1"
    with pytest.raises(SessionNotFound) as caught:
        session.info()
    assert caught.value.reason == "failed"
    other = runtime.create(TEXT[:40])
    said(other)
    record = runtime._core.records[other.id]
    record.sequence.logits = record.sequence.logits.at[3].add(1e-3)
    with pytest.raises(FailedPrecondition, match="inv3"):
        other.audit()
    assert (runtime.counts["inv1"], runtime.counts["inv3"], runtime.counts["failed"]) == (1, 1, 2)


@pytest.mark.parametrize("family", ["qwen3_5_text", pytest.param("llama", marks=pytest.mark.long)])
def test_a_chunk_that_fails_half_way_loses_no_session(monkeypatch, family):
    """Its generation ends with the error. The next one prefills what is needed, with the same bits; other sessions see
    nothing."""
    monkeypatch.setattr(prefill_runner, "SLICES", (1,))
    engine, honest, calls = make_engine(make_family(family)), prefill_runner.prefill_slice, []

    def failing(*args, **kwargs):
        calls.append(args)
        if len(calls) == 2:
            raise RuntimeError("out of memory while compiling")
        return honest(*args, **kwargs)

    with SessionRuntime(engine, slots=4, capacity=8) as runtime:
        expected, other, session = said(runtime.create(TEXT[:70])), runtime.create(TEXT[:70]), runtime.create(TEXT[:50])
        session.generate(max_new_tokens=1).cancel(keep=0)
        session.append(TEXT[50:70])
        with monkeypatch.context() as patch:
            patch.setattr(prefill_runner, "prefill_slice", failing)
            with pytest.raises(SessionError, match="out of memory while compiling"):
                said(session)
        assert (said(session), said(other), session.info().history_tokens) == (expected, expected, 75)
        session.audit()
        assert not {"failed", "inv1", "inv2", "inv3"} & runtime.counts.keys()
    assert not engine.sequences


def test_a_cache_that_decode_steps_wrote_is_noticed(runtime, engine):
    """The mutant of the exact mode: generated tokens stay in the cache as the steps wrote them."""
    runtime.expected = {"inv3"}
    session = runtime.create(TEXT[:90], policy=TOP)
    tokens = said(session, 8)
    record = runtime._core.records[session.id]
    runtime._ask(lambda: [engine.decode([record.sequence], [token], TOP) for token in tokens], WAIT)
    session.append([5])
    said(session, 1)
    with pytest.raises(FailedPrecondition, match="inv3"):
        session.audit()


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        (lambda record: record.sequence.tokens.pop(), "inv1"),
        (lambda record: record.sequence.pages["full"].pop(), "inv1"),
        (lambda record: record.sequence.pages["full"].__setitem__(0, -1), "inv1"),
        (lambda record: record.history.__setitem__(30, 5), "inv1"),
        (lambda record: record.sequence.tokens.__setitem__(3, 5), "inv1"),
        (lambda record: setattr(record, "floor", 41), "inv2"),
    ],
)
def test_each_violation_is_found(engine, change, kind):
    (sequence,) = engine.prefill([TEXT[:40]])
    try:
        record = Record("a", None, sequence, 0.0)
        record.history.extend(TEXT[:45])
        check_invariants(engine, record, None)
        assert record.floor == record.still_equal(None) == 40
        check_invariants(engine, record, None, since=30)
        assert (record.checked_tokens, record.checked_history.tolist()) == (sequence.tokens, TEXT[:40])
        pages = list(sequence.pages["full"])
        change(record)
        with pytest.raises(Violation) as caught:
            check_invariants(engine, record, None)
        assert caught.value.kind == kind
        sequence.pages["full"][:] = pages
    finally:
        engine.free(sequence)


def test_a_window_drops_the_oldest_tokens_by_the_length_alone(engine):
    window = Window(64, 16)
    assert [window.dropped(length) for length in (64, 65, 80, 81)] == [0, 16, 16, 32]
    with SessionRuntime(engine, slots=4, window=64) as runtime:
        grown = runtime.create(TEXT[:60])
        said(grown, 1)
        length = grown.info().history_tokens
        grown.append(TEXT[60:70])
        stream = grown.generate(max_new_tokens=3, stop_token_ids=(), at=length + 10)
        tokens = list(stream)
        assert stream.dropped_tokens == 16
        assert runtime.counts["truncated"] == 1
        assert grown.info().dropped_tokens == 16
        record = runtime._core.records[grown.id]
        history = record.history.tolist()[:-3]
        assert said(runtime.create(history), 3) == tokens
        assert said(runtime.create(history[:16] + history[32:]), 3) == tokens
    with pytest.raises(ValueError, match="at least four pages"):
        SessionRuntime(engine, window=63)


def test_the_runtime_makes_no_text(engine):
    """It would take time in every step."""

    class Tokenizer:
        def decode(self, *arguments, **options):
            raise AssertionError("a token became text in the loop of steps")

    model = dataclasses.replace(engine.model, tokenizer=Tokenizer())
    with SessionRuntime(make_engine(model), slots=4) as runtime:
        assert said(runtime.create(TEXT[:20]), 4)
        assert len(list(runtime.create(TEXT[:20]).generate(max_new_tokens=300))) > 4


def test_prefill_that_depends_on_cuts_is_refused():
    engine = Engine(make_model(), prefill="oracle:2", pages=8, page_size=64, prefill_chunk=64, batch_buckets=(1,))
    with pytest.raises(ValueError, match="bits would depend"):
        SessionRuntime(engine)


def test_a_killed_process_loses_no_acknowledged_token(engine, tmp_path):
    """A copy of the folder, made while the process runs, is what a kill would leave."""
    named = Engine(engine.model, "quest:2", pages=PAGES, page_size=PAGE, prefill_chunk=CHUNK, batch_buckets=(4,))
    with SessionRuntime(named, slots=4, state=tmp_path / "a") as first:
        talk, ended = first.create(TEXT[:40]), first.create(TEXT[:9])
        told = said(talk, 4)
        talk.append([3, 1])
        child = talk.fork()
        child.append([9])
        ended.close()
        running = child.generate(max_new_tokens=200, stop_token_ids=())
        next(running)
        shutil.copytree(tmp_path / "a", tmp_path / "b")
        (half,) = (tmp_path / "b").glob(f"{child.id}*")
        whole = half.read_bytes()
        half.write_bytes(whole[: -HEAD.size] + b"abc" + whole[3 - HEAD.size :])  # a part of a record, of which nobody was told
        running.cancel(keep=0)
        with pytest.raises(ValueError, match="another process has"):
            SessionRuntime(engine, state=tmp_path / "a")
        answers = [said(each, 3) for each in (talk, child)]
    other = Engine(engine.model, "quest:2", pages=PAGES, page_size=PAGE, prefill_chunk=CHUNK, batch_buckets=(4,))
    with SessionRuntime(other, slots=4, state=tmp_path / "b") as again:
        back = [again.session(each.id) for each in (talk, child)]
        assert [each.info().history_tokens for each in back] == [46, 47]
        assert again._core.records[talk.id].history.tolist() == [*TEXT[:40], *told, 3, 1]
        assert [said(each, 3) for each in back] == answers
        with pytest.raises(SessionNotFound):
            again.session(ended.id).info()
        back[0].close()
    with SessionRuntime(other, slots=4, state=tmp_path / "b") as last:  # a shutdown ends no session
        assert last.session(child.id).info().history_tokens == 50
        assert last.gauges()["sessions"] == 1
    with pytest.raises(ValueError, match="another model"):
        SessionRuntime(make_engine(make_model(hidden_size=32)), state=tmp_path / "b")
    (file,) = (tmp_path / "b").glob("*.session")
    whole = file.read_bytes()
    token = whole[: -HEAD.size - 1] + b"\x7f" + whole[-HEAD.size :]
    for damaged, problem in ((whole[5:], "no header of a session"), (token, "are not those written")):
        file.write_bytes(damaged)
        with pytest.raises(ValueError, match=problem):
            SessionRuntime(other, state=tmp_path / "b")
    file.write_bytes(whole)
    with SessionRuntime(other, slots=4, state=tmp_path / "b") as mended:
        assert mended.session(child.id).info().history_tokens == 50


def check_cuts(folder, make):
    """Wherever a kill cuts the record that it is writing, all of its tokens are lost, and none before; what is appended
    then is kept."""
    journal = make(folder, "model")
    journal.create("a" * 32, "dense", array.array("i", [1, 2]))
    (path,) = folder.glob("*.session")
    before = path.stat().st_size - HEAD.size  # without the end mark
    journal.extend("a" * 32, [3] * 12)
    journal.close()
    whole = path.read_bytes()
    for cut in range(before, len(whole) + 1):
        path.write_bytes(whole[:cut])
        kept = [1, 2, *[3] * 12] if cut >= len(whole) - HEAD.size else [1, 2]
        for length in (1, 40):
            again = make(folder, "model")
            assert [each.history.tolist() for each in again.load()] == [kept]
            again.extend("a" * 32, [9] * length)
            again.close()
            kept = kept + [9] * length


def test_of_a_call_that_was_being_written_all_tokens_come_back_or_none(tmp_path):
    check_cuts(tmp_path, Journal)
    assert not list(tmp_path.glob("*.partial"))


class WithoutTruncation(Journal):
    """A mutant: what a kill left of a record stays behind the last one."""

    def load(self):
        (path,) = self._folder.glob("*.session")
        content = path.read_bytes()
        found = list(super().load())
        path.write_bytes(content)
        return iter(found)


class WithoutRecords(Journal):
    """A mutant: tokens without a record around them, as version 1 wrote them."""

    def load(self):
        for each in super().load():
            (path,) = self._folder.glob("*.session")
            tokens = path.read_bytes().partition(b"\n")[2][12:]
            yield dataclasses.replace(each, history=array.array("i", tokens[: len(tokens) // 4 * 4]))


@pytest.mark.parametrize("mutant", [WithoutTruncation, WithoutRecords])
def test_a_journal_that_is_not_atomic_is_noticed(mutant, tmp_path):
    with pytest.raises((AssertionError, ValueError, FailedPrecondition)):
        check_cuts(tmp_path, mutant)


def test_a_disk_that_is_full_leaves_the_history_as_it_was(tmp_path, monkeypatch):
    journal = Journal(tmp_path, "model")
    journal.create("a" * 32, "dense", array.array("i", [1, 2]))
    write = os.pwrite

    def full(handle, content, at):
        write(handle, content[:7], at)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(ResourceExhausted, match="No space left"):
        journal.extend("a" * 32, [3, 4])
    monkeypatch.setattr(os, "pwrite", write)
    journal.extend("a" * 32, [5])
    journal.close()
    assert [each.history.tolist() for each in Journal(tmp_path, "model").load()] == [[1, 2, 5]]


@pytest.mark.long
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", ["qwen2", "gemma3_text", "qwen3_5_text", "shared"])
@pytest.mark.parametrize("policy", [None, TOP], ids=["dense", "top"])
@pytest.mark.parametrize("length", [3, 16, 33, 90, 150])
def test_bits_do_not_depend_on_the_way_in_any_model(family, dtype, policy, length):
    model = make_model(compute_dtype=dtype) if family == "qwen2" else make_family(family, dtype=dtype)
    engine = make_engine(model)
    with SessionRuntime(engine, slots=4, capacity=16) as runtime:
        check_ways(runtime, TEXT[:length], policy)
        assert not {kind for kind in runtime.counts if kind.startswith("inv")}
    assert not engine.sequences
