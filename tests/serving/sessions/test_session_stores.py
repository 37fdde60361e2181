"""Many idle sessions and full stores: how often the runtime looks for room, counted in calls, and what a disk that
fails costs."""

import collections
import logging

import pytest
from tiny_models import make_model

from kvjax import Engine
from kvjax.cache.stores.suspended import SuspendedPages
from kvjax.serving.sessions.core import SessionCore
from kvjax.serving.sessions.generation import Run
from kvjax.serving.sessions.limits import Limits
from kvjax.serving.sessions.policy_table import PolicyTable
from kvjax.serving.sessions.runtime import checked_sampling

MANY = 300
PAGES = MANY + 20


@pytest.fixture(scope="module")
def engine():
    return Engine(make_model(), "dense", pages=PAGES, page_size=16, prefill_chunk=32, batch_buckets=(4,))


@pytest.fixture
def core(engine, request):
    """Sessions of one page each, without a prefill, in the order of their last use. The test's parameter is the limit
    of host memory."""
    limits = {"capacity": 2 * MANY, "idle_ttl_s": 10_000.0, "demote_after_s": 1.0, "window": None, "history": 10**6}
    engine.suspended.limit(request.param)
    now = [0.0]
    hooks = {"observe": lambda name, value: None, "clock": lambda: now[0]}
    made = SessionCore(engine, Limits(**limits), PolicyTable(engine), slots=4, max_gap_ms=None, draft=None, **hooks)
    made.now = now
    for _ in range(MANY):
        occupied(made)
    yield made
    made.end_all()
    assert engine.allocators["full"].free == PAGES


def occupied(core, tokens=1):
    """A session whose pages are taken, but hold nothing."""
    record = core.create([1] * tokens, None, False)
    core.engine.reserve([record.sequence], tokens)
    record.sequence.tokens, record.sequence.length, record.floor = [1] * tokens, tokens, tokens
    return record


@pytest.fixture
def counted(monkeypatch):
    """How often each method of the stores was called."""
    counts = collections.Counter()
    for kind, name in ((SessionCore, "live_bytes"), (SuspendedPages, "make_room")):
        method = getattr(kind, name)

        def called(self, *given, _name=name, _method=method, **named):
            counts[_name] += 1
            return _method(self, *given, **named)

        monkeypatch.setattr(kind, name, called)
    return counts


@pytest.mark.parametrize("core", [0], indirect=True)
def test_a_sweep_with_full_stores_looks_once_and_stops_at_the_first(core, counted):
    core.now[0] = 5.0
    core.sweep()
    assert counted == {"make_room": 1, "live_bytes": 1}
    counted.clear()
    assert not core._give_room(None)
    assert not counted
    assert not core.counts["demoted"]
    assert len(core.records) == MANY


def page_bytes(core):
    return core.live_bytes(next(iter(core.records.values())))


@pytest.mark.parametrize("core", [None], indirect=True)
def test_looking_for_room_takes_calls_in_proportion_to_the_sessions(core, counted):
    """A third fits into host memory. The others are asked for once each, and in the next sweep only one of them."""
    core.engine.suspended.limit(MANY // 3 * page_bytes(core))
    core.now[0] = 5.0
    counted.clear()
    core.sweep()
    assert core.counts["demoted"] == MANY // 3
    assert sum(counted.values()) < 3 * MANY
    counted.clear()
    core.sweep()
    assert counted == {"make_room": 1, "live_bytes": 1}
    counted.clear()
    assert not core._give_room(None)
    assert sum(counted.values()) <= 2 * MANY
    core.end(next(iter(core.records.values())), "close")  # a demoted one: now there is room again
    assert core._give_room(None)
    assert core.counts["demoted"] == MANY // 3 + 1


@pytest.mark.parametrize("core", [0], indirect=True)
def test_steps_do_not_look_at_idle_sessions(core, counted):
    record = core.create([1, 2, 3], None, False)
    run = Run(record.id, checked_sampling({"max_new_tokens": 20, "ignore_eos": True}), None)
    core.begin(record, run)
    touched = collections.Counter()

    class Watched(collections.OrderedDict):
        def values(self):
            touched["values"] += 1
            return super().values()

    core.records = Watched(core.records)
    while not run.over:
        core.step()
    assert len(run.tokens) == 20
    core.conclude(run, 20)
    assert not counted
    assert not touched


@pytest.mark.parametrize("core", [None], indirect=True)
def test_what_does_not_fit_does_not_hide_what_does(core):
    """A session of four pages is too large for what is left of host memory. The next one, of one page, is moved."""
    for record in list(core.records.values()):
        core.end(record, "close")
    large, small = occupied(core, 60), occupied(core)
    core.engine.suspended.limit(2 * core.live_bytes(small))
    assert core._give_room(None)
    assert (large.sequence.suspended is None, small.sequence.suspended is None) == (True, False)
    assert not core._give_room(None)


@pytest.mark.parametrize("core", [0], indirect=True)
def test_a_disk_that_fails_does_not_end_the_runtime(core, monkeypatch, tmp_path, caplog):
    """The session that was being moved stays in host memory, one line is logged, and the disk counts as full for a
    while."""

    def full(file, blocks):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("kvjax.cache.stores.suspended._mapped", full)
    core.engine.suspended.limit(0, tmp_path, 10**12)
    core.now[0] = 5.0
    with caplog.at_level(logging.ERROR):
        core.sweep()
        core.sweep()
    assert len([each for each in caplog.records if "No space left" in each.message]) == 1
    assert core.counts["demoted"] == 1
    assert not core.counts["shelved"]
    assert core.step() is None
