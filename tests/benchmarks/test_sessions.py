"""benchmarks/sessions.py: what its agents do, its figures and its gates. The run of half an hour is long."""

import collections
import dataclasses
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from tiny_models import make_model

from benchmarks import tables as scheduling
from benchmarks.agents import TRACE, Spread, Turn, Work, drawn, token_count
from benchmarks.session_costs import SPARE, Tokens, Turns, counted, idle_rows, tokens_row, turn_rows
from benchmarks.sessions import BUCKET_S, Load, Polled, Watched, _buckets, gates, load_row, note, page_of
from kvjax import Engine, SessionRuntime
from kvjax.serving.server.grpc_server import Server
from kvjax.serving.server.metrics import Metrics
from kvjax.serving.server.options import ServerOptions
from pallas_kernels.core.results import device_here, provenance

SIZES = {"history": 200, "tokens": 1 / 64, "times": 0.0, "longest_wait_s": 1.0, "max_batch": 4, "pages": None, "chunk": 128}
SIZES |= {"dtype": "float32", "layers": None}
Counted = collections.namedtuple("Counted", "turns errors")


def test_draws_have_the_median_and_the_90th_percentile_of_the_trace():
    random = np.random.default_rng(0)
    for spread in (TRACE.tool_s, TRACE.human_s, TRACE.append, TRACE.output):
        p50, p90 = np.percentile([spread.draw(random) for _ in range(20_000)], (50, 90))
        assert (p50, p90) == (pytest.approx(spread.p50, rel=0.1), pytest.approx(spread.p90, rel=0.1))
    assert np.mean([TRACE.output.draw(random) for _ in range(100_000)]) == pytest.approx(523, rel=0.05)
    assert Spread(2.0, 2.0).draw(random) == 2.0


def test_a_short_run_through_the_client():
    """Two agents for a few seconds on a tiny model. Its figures are counted, and G1 and G2 are not decided."""
    engine = Engine(make_model(), "dense", pages=80, page_size=16, prefill_chunk=32, batch_buckets=(4,))
    metrics = Metrics()
    server = Server(SessionRuntime(engine, slots=4, observe=metrics.observe), metrics, ServerOptions(port=0, http_port=0))
    server.start()
    try:
        watched = Watched(server.port, server.http_port, engine.config.vocab_size, page_of(engine), device_here(), pid=os.getpid())
        row = load_row(Load("tiny", (2,), 0.05, "dense", **SIZES), 2, watched)
    finally:
        server.stop(0.0)
    assert row["turns"] == row["gates"]["G5"]["calls"] > 4
    assert row["sessions"] > 2
    assert not row["errors"]
    assert {name: gate["holds"] for name, gate in row["gates"].items()} == {"G3": True, "G4": True, "G5": True, "G6": None}
    assert set(row["compressed"]) == {"memory", "latency"}
    assert row["compressed"]["memory"]["unaccounted_bytes"] == row["compressed"]["memory"]["pages_left"] == 0
    assert sum(bucket["turns"] for bucket in row["buckets"]) <= row["turns"]
    assert row["generated"] == pytest.approx(row["generated_per_s"] * row["wall_s"])
    assert 0 < row["first_s"]["p50"] <= row["first_s"]["p95"] <= row["turn_s"]["p95"]
    assert row["buckets"][1]["kv_peak_bytes"] > 0
    assert row["workload"]["repeat_s"] == row["buckets"][0]["to_s"]
    if Path("/proc/self/stat").exists():
        assert 0 < watched.cpu_seconds() <= time.process_time() + 1.0
    assert row["appended"] <= row["prefilled"]
    assert len(scheduling.TABLES["sessions"][0]) == len(scheduling.sessions_cells(json.loads(json.dumps(row))))
    told = {"G1": {"holds": True, "ours": True}, "G2": {"holds": True, "ours": False}, "G6": {"holds": None}}
    assert scheduling.sessions_cells(row | {"gates": told})[-1] == "G1, G2 (not ours), G6 not run"
    assert len(scheduling.session_buckets([row]).splitlines()) == 2 + 3


def made_run(kv=(100, 104, 96), turn=(1.0, 1.1, 1.2), seconds=3 * BUCKET_S, process=(1000, 700, 1000), needed=(100, 110, 96)):
    """Buckets with these peaks and latencies, as a run of so long gives them."""
    step = seconds / 3
    seen = enumerate(zip(kv, process, needed, strict=True))
    polled = [Polled(number * step + 1, {"session_kv_live_bytes": peak}, *others, cpu_s=0.0) for number, (peak, *others) in seen]
    turns = [Turn(number * step + 1, each / 2, each, (0.1,), 1, 1) for number, each in enumerate(turn)]
    return _buckets(turns, 0.0, polled, seconds)


def decided(buckets, seconds=3 * BUCKET_S, violations=0.0, calls=3, through=3, left=0.0):
    after = {f"cache_invariant_violations_total['{kind}']": violations for kind in ("inv1", "inv2", "inv3")}
    after |= {"kv_pages['device']": left, "kv_pages['host']": 0.0, "kv_pages['disk']": 0.0}
    counted = {"rpc_total['Generate', 'OK']": calls, "rpc_total['AppendTokens', 'OK']": 50}
    return gates(seconds, buckets, after, counted, [Counted([None] * through, {})])


def test_only_the_first_and_the_last_look_keep_all_metrics():
    polled = []
    for number in range(4):
        note(polled, Polled(number, {"session_kv_live_bytes": number, "other": 1}, 0, 0, 0.0))
    assert [(each.metrics["session_kv_live_bytes"], "other" in each.metrics) for each in polled] == [
        (0, True),
        (1, False),
        (2, False),
        (3, True),
    ]


def test_gates_hold_and_fail_by_their_numbers():
    good = decided(made_run())["gates"]
    assert {name: gate["holds"] for name, gate in good.items()} == dict.fromkeys(("G1", "G2", "G4", "G5"), True)
    assert (good["G1"]["ours"], good["G2"]["ours"]) == (True, False)
    assert good["G1"]["drift"] == {"kv": pytest.approx(0.04), "process": 0.0}
    assert good["G2"]["drift"]["p50"] == pytest.approx(0.2)
    for name, bad in (
        ("G1", decided(made_run(kv=(100, 111, 100)))),
        ("G1", decided(made_run(kv=(100, 89, 100)))),
        ("G1", decided(made_run(process=(1000, 1000, 1101)))),
        ("G2", decided(made_run(turn=(1.0, 1.0, 1.6)))),
        ("G4", decided(made_run(), violations=1.0)),
        ("G5", decided(made_run(), calls=4)),  # one that came not through the client
        ("G5", decided(made_run(), calls=0, through=0)),
    ):
        assert [each for each, gate in bad["gates"].items() if not gate["holds"]] == [name]


def test_a_page_that_no_history_fills_is_noticed():
    """Where peaks stay the same, and where they differ by chance."""
    for bad in (made_run(kv=(100, 100, 100), needed=(100, 99, 100)), made_run(kv=(100, 104, 96), needed=(99, 110, 96))):
        assert not decided(bad)["gates"]["G1"]["ours"]
        assert decided(bad)["gates"]["G1"]["unaccounted_bytes"] == 1
    assert not decided(made_run(), left=1.0)["gates"]["G1"]["ours"]
    assert not decided(made_run(process=(1000, 1051, 1000)))["gates"]["G1"]["ours"]
    assert not decided(made_run(kv=(100, 106, 100), needed=(100, 106, 100)))["gates"]["G1"]["ours"]


def pages_over_time(seed, agents, seconds, work):
    """Pages that histories fill, second by second, where agents do as `Agent` does and no server leaks: a turn takes
    0.6 s, and 30 ms for each generated token."""
    random, total = np.random.default_rng(seed), np.zeros(seconds)
    for number in range(agents):
        now, begun, turn, length = 0.0, 0.0, 0, int(random.uniform(0.1, 0.9) * work.history)
        while now < seconds:
            if now - begun >= work.repeat_s:
                begun, turn = begun + work.repeat_s, 0
            this, began = drawn(work, 100 * seed + number, turn), now
            turn, now = turn + 1, now + this.wait_s
            total[int(began) : int(now)] += -(-length // 128)
            if length >= 0.95 * work.history:
                length = token_count(work, TRACE.append, random)
            appended = min(this.appended, max(1, (work.history - length) // 2))
            output = min(this.output, max(1, work.history - length - appended))
            began, length = now, length + appended
            now += 0.6 + 0.03 * output
            total[int(began) : int(now)] += -(-length // 128)
            length += output
    return total


def test_peaks_differ_by_chance_without_a_leak():
    """So that a bound on their drift says little about leaks, for the load of docs/measured/sessions.md."""
    work, drifts = Work(1.0, 30.0, 1 / 16, 4096, 10, 600.0), []
    for seed in range(20):
        peaks = pages_over_time(seed, 6, 1800, work).reshape(3, 600).max(1)
        drifts.append(np.abs(peaks / peaks[0] - 1).max())
    assert np.median(drifts) == pytest.approx(0.1, abs=0.03)
    assert np.mean(np.array(drifts) < 0.05) < 0.35


def test_each_bucket_has_the_work_of_the_first():
    """Only then does the median latency of a turn say something about the server. Where turns are drawn anew, the
    medians of 280 of them differ by more than our 5% in most runs."""
    work, turns = Work(1.0, 30.0, 1 / 16, 4096, 10, 600.0), 47
    sizes = [[drawn(work, agent, turn) for turn in range(turns)] for agent in range(6)]
    assert sizes == [[drawn(work, agent, turn) for turn in range(turns)] for agent in range(6)]
    assert len({each for agent in sizes for each in agent}) > 0.99 * 6 * turns

    def latency(agents):
        return np.median([0.6 + 0.03 * drawn(work, agent, turn).output for agent in agents for turn in range(turns)])

    drifts = [latency(range(first + 6, first + 12)) / latency(range(first, first + 6)) - 1 for first in range(0, 240, 12)]
    assert np.mean(np.abs(drifts) > 0.05) > 0.5


def test_drift_that_other_programs_do_not_cause_is_told_beside():
    buckets = made_run()
    for bucket, (generated, prefilled, cpu) in zip(buckets, ((10, 30, 8.0), (1, 1, 1.0), (20, 15, 14.0)), strict=True):
        bucket |= {"turns": 5, "generated": generated, "prefilled": prefilled, "server_cpu_s": cpu}
    beside = decided(buckets)["gates"]["G2"]["beside"]
    assert beside == {"generated_per_turn": 1.0, "prefilled_per_turn": -0.5, "server_cpu_per_token": pytest.approx(14 / 35 / (8 / 40) - 1)}
    buckets[0]["server_cpu_s"] = 0.0
    assert decided(buckets)["gates"]["G2"]["beside"]["server_cpu_per_token"] is None
    buckets[-1]["turns"] = 0
    assert set(decided(buckets)["gates"]["G2"]["beside"].values()) == {None}


def test_only_half_an_hour_decides_memory_and_latency():
    short = decided(made_run(seconds=1799.0), 1799.0)
    assert set(short["gates"]) == {"G4", "G5"}
    assert short["compressed"]["memory"]["holds"]
    assert len(made_run(seconds=4 * 3600.0)) == 24
    empty = decided(_buckets([], 0.0, [], 60.0), 60.0)["compressed"]
    assert not empty["memory"]["holds"]
    assert not empty["latency"]["holds"]


def test_sizes_that_make_no_sense_are_refused():
    with pytest.raises(ValueError, match="at least 64"):
        Load("needle", (1,), 1.0, "dense", **{**SIZES, "history": 10})
    with pytest.raises(ValueError, match="'nonsense' is not understood"):
        Load("needle", (1,), 1.0, "nonsense", **SIZES)
    sizes = {"rounds": 1, "chunk": 100, "answer": 6}
    for plan in (
        lambda: Load("needle", (1,), 1.0, "dense", **{**SIZES, "chunk": 100}),
        lambda: Tokens("tiny", 1, "float32", "dense", sessions=3, prompt=20, **sizes),
        lambda: Turns("tiny", 1, "float32", "dense", history=20, appended=2, **sizes),
    ):
        with pytest.raises(ValueError, match="chunk 100 must be a multiple of the page size 128"):
            plan()


def test_rounds_in_which_something_was_compiled_do_not_count():
    compiled, heard = (9, 0, 2, 0, 0, 0), []
    found = counted(3, lambda number: {"number": number, "compiled": compiled[number]}, heard.append, "rounds")
    assert [each["number"] for each in found] == [1, 3, 4]
    assert [said.endswith("; not counted") for said in heard] == [True, False, True, False, False]
    warm = counted(1, lambda number: {"number": number, "compiled": 0}, heard.append, "rounds", warm=True)
    assert [each["number"] for each in warm] == [0]
    with pytest.raises(RuntimeError, match=f"in so many of {2 + SPARE} rounds that only 0 of 2 count"):
        counted(2, lambda number: {"compiled": 1}, heard.append, "rounds")


@pytest.mark.long
def test_costs_of_tokens_are_what_was_counted():
    """A server in a process of its own. CPU time that is used in it, or by the clients, and not by the engine alone, is
    overhead."""
    plan = Tokens("tiny", 1, "float32", "dense", sessions=3, prompt=20, answer=6, rounds=1, chunk=128)
    row = tokens_row(plan)
    (engine, _), (told,) = row["rounds_of_engine"], row["rounds_through_grpc"]
    assert 3 <= told["messages"] - 3 <= 18  # and one at the end of each
    assert min(engine["cpu_s"], told["server_cpu_s"], told["client_cpu_s"], told["gap_p50_s"]) > 0
    assert row["tokens_per_s"] == pytest.approx(18 / told["seconds"])
    assert told["compiled"] == row["engine"]["compiled"] == 0
    beyond = told["server_cpu_s"] + told["client_cpu_s"] - row["engine"]["cpu_s"]
    assert row["overhead_s"] == pytest.approx(beyond / 18)
    columns, cells = scheduling.TABLES["session-tokens"]
    assert len(columns) == len(cells(json.loads(json.dumps(row))))
    with pytest.raises(ValueError, match="at least 1 session"):
        dataclasses.replace(plan, answer=1)


@pytest.mark.long
def test_a_step_beside_idle_sessions_is_timed_while_they_are_there():
    plan = Tokens("tiny", 1, "float32", "dense", sessions=1, prompt=20, answer=4, rounds=2, chunk=128, idle=5)
    rows = list(idle_rows(plan))
    told = [row.pop("provenance") for row in rows]  # the server's, so that this process takes no memory of the device
    assert [{name: each[name] for name in device_here()} for each in told] == [device_here()] * 3
    assert set(told[0]) == set(provenance())
    assert [(row["open"], row["held"]) for row in rows] == [
        (0, {"sessions": 0, "pages": 0}),
        (5, {"sessions": 5, "pages": 5}),
        (0, {"sessions": 0, "pages": 0}),
    ]
    columns, cells = scheduling.TABLES["session-idle"]
    for row in rows:
        first, second = row["rounds_through_grpc"]
        assert row["through_grpc"]["gap_p50_s"] == pytest.approx((first["gap_p50_s"] + second["gap_p50_s"]) / 2)
        assert min(first["gap_p50_s"], first["server_cpu_s"]) > 0
        assert len(columns) == len(cells(json.loads(json.dumps(row))))
    assert scheduling.made("session-idle", rows + rows).count("tiny, 1 layer,") == 3
    with pytest.raises(ValueError, match="at least 1 session, got 0"):
        next(idle_rows(dataclasses.replace(plan, idle=0)))


@pytest.mark.long
def test_a_turn_prefills_what_is_new_and_a_new_session_everything():
    plan = Turns("tiny", 1, "float32", "dense", history=300, appended=20, answer=3, rounds=1, chunk=128)
    said: list[str] = []
    rows = {row["kind"]: row for row in turn_rows(plan, said.append)}
    assert list(rows) == ["resident", "demoted", "again"]
    turns = sum(each.startswith(("resident, round", "demoted, round")) for each in said)
    assert turns >= 3
    # Before them, one turn to the end of a chunk and one to a token before it, and a usual one after each.
    before = 300 + 3 + (384 - 303) + 3 + 23 + (511 - 410) + 3 + 23
    assert {kind: [(turn["prefilled"], turn["chunks"]) for turn in row["turns"]] for kind, row in rows.items()} == {
        "again": [(before + turns * 23, 5)],
        "resident": [(23, 1)],
        "demoted": [(23, 1)],
    }
    assert [each for each in said if "warm up" in each] == ["a turn to warm up: chunks 1", "a turn to warm up: chunks 2"]
    assert all(0 < turn["append_s"] < turn["first_s"] for row in rows.values() for turn in row["turns"])
    assert all(row["first_s"] > 0 for row in rows.values())
    assert not any(turn["compiled"] for row in rows.values() for turn in row["turns"])
    assert rows["resident"]["filled_s"] > rows["resident"]["first_s"]
    columns, cells = scheduling.TABLES["session-turn"]
    assert {len(cells(json.loads(json.dumps(row)))) for row in rows.values()} == {len(columns)}


def test_a_table_of_turns_has_each_kind():
    of_all = {
        "shape": "tiny",
        "layers": 1,
        "dtype": "float32",
        "policy": "dense",
        "history": 9,
        "appended": 2,
        "chunk": 128,
        "first_s": 1.0,
    }
    turns = {"resident": [{"first_s": 0.5}, {"first_s": 2.0}]}  # as older files have them
    turns |= {kind: [{"first_s": 0.5, "chunks": 2}, {"first_s": 2.0, "chunks": 1}] for kind in ("demoted", "again")}
    told = scheduling.made("session-turn", [{"op": "session-turn", "kind": kind, "turns": each} | of_all for kind, each in turns.items()])
    assert [told.count(said) for said in ("on the device", "in host memory", "the whole history")] == [1, 1, 1]
    assert told.count("| 2 | - | 1,000.0 | 500.0 to 2,000.0 |") == 1
    assert told.count("| 2 | 1, 2 | 1,000.0 | 500.0 to 2,000.0 |") == 2


def test_the_longest_history_of_turns_is_never_passed():
    for history, appended, answer, chunk in ((300, 20, 3, 128), (100_000, 200, 16, 256), (1, 700, 1, 128)):
        plan = Turns("tiny", 1, "float32", "dense", history=history, appended=appended, answer=answer, rounds=2, chunk=chunk)
        length, counts = history + answer, []
        for place in plan.warm_up:
            length += ((place - length) % chunk or chunk) + answer
            counts.append(plan.chunks(length - answer, length + appended))
            length += appended + answer
        every = {plan.chunks(at, at + answer + appended) for at in range(chunk)}
        assert counts == [min(every), max(every)]
        assert length + 2 * (2 + SPARE) * (appended + answer) <= plan.longest


@pytest.mark.long
def test_half_an_hour_holds_the_gates(tmp_path):
    # With 110 pages the pool is full all the time, and idle sessions are demoted; with room for all, peaks differ by
    # chance.
    command = [sys.executable, "-m", "benchmarks.sessions", "--agents", "6", "--minutes", "30", "--pages", "110"]
    subprocess.run([*command, "--json", str(tmp_path / "out.json")], check=True, timeout=3000)
    (row,) = json.loads((tmp_path / "out.json").read_text())["rows"]
    assert not row["errors"]
    assert {name: gate["holds"] for name, gate in row["gates"].items()} == {f"G{number}": True for number in range(1, 7)}
    assert row["gates"]["G1"]["ours"]
    # Our 5% of latency is not asserted: other programs on the machine change it. The work is that of the first ten
    # minutes, though.
    beside = row["gates"]["G2"]["beside"]
    assert max(abs(beside["generated_per_turn"]), abs(beside["prefilled_per_turn"])) < 0.1
