"""benchmarks/tiers.py with a tiny shape: pages lie where the cost model says, and steps read there what it counts."""

from __future__ import annotations

import collections
import dataclasses
import json
import threading
from pathlib import Path

import jax
import pytest

from benchmarks import reuse, tiered_prompts, tiers
from benchmarks.hollow import FakeEngine, random_model
from benchmarks.lists import Fresh, Replayed
from benchmarks.tables import gigabytes, shape_text, tiered_prefill_cells, tiers_cells
from kvjax.cache.host_pool import FrameCounts
from kvjax.compilation import NAMED
from kvjax.cost_model.bytes import pages_on_host, step_bytes
from kvjax.cost_model.fitting import DEVICE, read_cells
from kvjax.policies.decode import parse
from kvjax.policies.prefill import parse_prefill
from kvjax.serving.bench.decode import config_of

CONFIG = config_of("tiny", 1, "float32")
LISTS = Path(__file__).parents[2] / "benchmarks" / "results" / "cpu" / "lists.json"


def plan(**changed):
    fields = {"shape": "tiny", "config": CONFIG, "tokens": (4096, 6144), "policies": (parse("dense"), parse("top:8"), Fresh(8))}
    return tiers.Tiered(**(fields | {"device_bytes": (10**6,), "steps": 4, "rounds": 2} | changed))


@pytest.fixture(scope="module")
def rows():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiers, "COPY", 1 << 20)
        return list(tiers.tiered_rows(plan()))


@pytest.mark.long
def test_small_numbers_are_not_rounded_to_nothing():
    assert [gigabytes(count) for count in (0, 3_140_000, 49_000_000, 51_000_000, 8 * 10**9)] == ["0.0", "0.0031", "0.049", "0.1", "8.0"]
    told = [shape_text({"shape": "tiny", "layers": layers}) for layers in (None, 1, 2)]
    assert told == ["tiny", "tiny, 1 layer", "tiny, 2 layers"]


def test_rows_of_every_length_size_and_policy(rows):
    names = [(row["device_bytes"], row["tokens"], row["policy"]) for row in rows]
    policies = ("dense", "top:8", "top:8, nothing shared")
    assert names == [(10**6, tokens, policy) for tokens in (4096, 6144) for policy in policies]
    assert {(row["name"], row["lists"]) for row in rows} == {("dense", "own"), ("top:8", "own"), ("top:8", "nothing shared")}
    assert all(len(tiers_cells(row)) == 12 for row in rows)


def test_packed_pages_cross_the_bus_packed(monkeypatch):
    monkeypatch.setattr(tiers, "COPY", 1 << 20)
    changes = {"cache_format": "int8", "tokens": (4096,), "policies": (parse("top:8"),), "device_bytes": (10**5,)}
    (row,) = tiers.tiered_rows(plan(**changes))
    (layer,) = CONFIG.cache_spec(tiers.PAGE_SIZE).layers
    bytes_of_key = layer.head_dim + 2  # a scale of bfloat16 for each token
    assert row["read_bytes"] == pytest.approx(13 * 128 * 2 * layer.kv_heads * bytes_of_key, rel=0.1)
    assert 0 < row["host_bytes"] <= row["read_bytes"]
    assert tiers_cells(row)[0] == "tiny, 1 layer, `int8` pages"
    assert tiered_prefill_cells({**row, "chunk": 512, "skipped": "no room"})[0] == tiers_cells(row)[0]
    assert read_cells([{"bench": "tiers", "provenance": {"device": "cpu", "date": "2026"}, "rows": [row]}], lambda *_: CONFIG) == {}


def test_launches_of_several_steps_read_what_single_steps_read(monkeypatch):
    monkeypatch.setattr(tiers, "COPY", 1 << 20)
    fields = {"tokens": (4096,), "policies": (parse("dense"), Fresh(8)), "steps": 8}
    alone, together = (list(tiers.tiered_rows(plan(**fields, steps_per_launch=count))) for count in (1, 2))
    for one, two in zip(alone, together, strict=True):
        assert (one["steps_per_launch"], two["steps_per_launch"], two["steps"], two["samples"]) == (1, 2, 8, 2)
        assert two["mean_length"] == one["mean_length"]
        assert (two["asked_bytes"], two["copied_bytes"]) == (one["asked_bytes"], one["copied_bytes"])
        assert two["host_bytes"] == pytest.approx(one["host_bytes"], rel=0.01)
        assert two["read_bytes"] == pytest.approx(one["read_bytes"], rel=0.01)
        assert [tiers_cells(row)[2] for row in (one, two)] == [f"`{one['policy']}`", f"`{one['policy']}`, 2 steps per launch"]
    run = {"bench": "tiers", "provenance": {"device": "cpu", "date": "2026"}, "rows": [*alone, *together]}
    assert [len(read_cells([run], lambda *_: CONFIG, count).popitem()[1]) for count in (1, 2)] == [2, 2]
    for count in (3, 17):
        with pytest.raises(ValueError, match=f"steps per launch must be 1 to 16 and divide 8 steps, got {count}"):
            plan(steps=8, steps_per_launch=count)
    plan(policies=(parse("heavy:8"),), steps_per_launch=2)
    half = dataclasses.replace(parse("top:8"), dense_layers=1)
    with pytest.raises(ValueError, match=r"what the first 1 layers of policy .* read in host memory is counted for single steps"):
        plan(policies=(half,), steps_per_launch=2)
    plan(policies=(half,))


@pytest.mark.long
def test_pages_lie_and_are_read_where_the_cost_model_says(rows):
    run = {"bench": "tiers", "provenance": {"device": "cpu", "date": "2026"}, "rows": rows}
    ((key, tiered),) = read_cells([run], lambda *_: CONFIG).items()
    assert key == ("cpu", "tiny", 1, "float32", None, None)
    for row in rows:
        (cell,) = [each for each in tiered if (each.length, each.policy, each.lists) == (row["tokens"], row["name"], row["lists"])]
        frames = FrameCounts(*row["frames"])
        assert row["host_pages"] == pages_on_host(frames, row["mean_length"]) > 0
        sized = step_bytes(CONFIG, parse(cell.policy), row["mean_length"], dtype="float32", frames=frames)
        assert cell.bytes.in_place == sized.in_place, "a dense step reads every page there, and no other step any"
        assert (cell.bytes.in_place > 0) == (cell.policy == "dense") == (cell.bytes.hot_layers == 0) == (cell.hits is None)
        if cell.policy != "dense":
            assert 0.6 < cell.bytes.listed / sized.listed < 1.5, "spread evenly, about"
            assert row["copied_bytes"] == row["host_bytes"]
    shared, fresh = (
        next(each.hits for each in tiered if each.lists == kind and each.policy != "dense") for kind in ("own", "nothing shared")
    )
    assert shared > fresh


def test_pages_of_a_hollow_sequence_lie_where_prefill_would_leave_them():
    """The newest ones on the device; pages of a sequence that is bound at once would lie there the other way round."""
    frame = CONFIG.cache_spec(128).bytes_per_frame("full")
    engine = FakeEngine(random_model(CONFIG), "dense", device_bytes=10 * frame, host_bytes=40 * frame, batch_buckets=(1,))
    sequence = engine.hollow_sequence(4096)
    places = engine.frames["full"].frame_of[sequence.pages["full"]]
    assert (places < engine.frames["full"].counts.border).tolist() == [False] * 22 + [True] * 10
    assert not engine.frames["full"].moving


def test_what_does_not_fit_is_said(monkeypatch):
    monkeypatch.setattr(tiers, "random_model", lambda config: None)
    monkeypatch.setattr(tiers, "COPY", 1 << 20)
    monkeypatch.setattr(tiers, "memory_plan", lambda *_, **__: type("Plan", (), {"pages_that_fit": 30}))
    rows = list(tiers.tiered_rows(plan(device_bytes=(None,), policies=(parse("dense"),))))
    assert [row["skipped"] for row in rows] == [
        "35 pages are more than the 30 that fit on the device",
        "51 pages are more than the 30 that fit on the device",
    ]
    assert tiers_cells(rows[0])[5] == "does not fit"
    assert read_cells([{"bench": "tiers", "provenance": {"device": "cpu", "date": "2026"}, "rows": rows}], lambda *_: CONFIG) == {}


@pytest.mark.long
def test_slow_steps_run_fewer_to_a_round_and_everything_on_the_device_is_timed_beside_it(rows, monkeypatch):
    assert {row["steps"] for row in rows} == {4}
    monkeypatch.setattr(tiers, "COPY", 1 << 20)
    (row,) = tiers.tiered_rows(plan(tokens=(4096,), policies=(parse("dense"),), device_bytes=(None,), seconds=1e-9))
    assert (row["steps"], row["samples"], row["mean_length"]) == (1, 2, 4096 + tiers.LEAST + 1)
    assert (row["host_bytes"], row["asked_bytes"], row["frames"], row["host_pages"]) == (0, 0, None, 0)
    run = {"bench": "tiers", "provenance": {"device": "cpu", "date": "2026"}, "rows": [row]}
    ((_, (cell,)),) = read_cells([run], lambda *_: CONFIG).items()
    assert (cell.policy, cell.length, cell.kind) == ("dense", 4096, DEVICE)


def test_lists_are_not_read_twice():
    replayed = Replayed.of(LISTS)
    steps = len(json.loads(LISTS.read_text())["rows"][0]["lists"][0])
    assert replayed.recorded_steps == steps == 256
    plan(policies=(replayed,), steps=8, rounds=30)
    plan(policies=(replayed,), steps=8, rounds=27, steps_per_launch=8)
    plan(policies=(replayed,), steps=256, rounds=5, device_bytes=(None,))
    with pytest.raises(ValueError, match=r"lists of 256 steps, and 264 steps would read some twice.*--steps 8 --rounds 30"):
        plan(policies=(replayed,), steps=8, rounds=31)
    with pytest.raises(ValueError, match=r"lists of 256 steps, and 264 steps would read some twice.*--steps 8 --rounds 27"):
        plan(policies=(replayed,), steps=8, rounds=28, steps_per_launch=8)
    with pytest.raises(ValueError, match=r"as --steps 16 --rounds 11, or record more by benchmarks.lists --steps 272"):
        plan(policies=(replayed,), steps=16, rounds=12, steps_per_launch=16)
    plan(policies=(replayed,), steps=16, rounds=11, steps_per_launch=16)
    for name in ("tokens", "steps", "rounds"):
        with pytest.raises(ValueError, match=f"{name} must be at least 1"):
            plan(**{name: (0,) if name == "tokens" else 0})


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("xx", "Expecting value"),
        ("[]", "must be integers or slices"),
        ('{"rows": []}', "not enough values"),
        ('{"rows": [{"pages": 3}]}', "'lists'"),
        ('{"rows": [{"lists": [], "pages": 3}]}', r"lists \[0\] of 3 pages"),
        ('{"rows": [{"lists": [[[[1, 2]], [[1]]]], "pages": 3}]}', "inhomogeneous"),
        ('{"rows": [{"lists": [[[[1, 3]]]], "pages": 3}]}', r"lists \[1, 1, 1, 2\] of 3 pages"),
    ],
)
def test_a_damaged_file_of_lists_is_named(tmp_path, text, why):
    (tmp_path / "lists.json").write_text(text)
    with pytest.raises(ValueError, match=f"lists.json is no file of benchmarks.lists: .*{why}"):
        Replayed.of(tmp_path / "lists.json")


@pytest.mark.long
def test_a_prompt_copies_its_earlier_pages_once_for_each_chunk(monkeypatch):
    monkeypatch.setattr(tiers, "COPY", 1 << 20)
    fields = {"shape": "tiny", "config": CONFIG, "tokens": (4096,), "policies": (parse_prefill("dense"),), "chunk": 512}
    tiered, resident = tiered_prompts.tiered_prompt_rows(tiered_prompts.TieredPrompts(**fields, device_bytes=(10**6, None)))
    frame = CONFIG.cache_spec(128).bytes_per_frame("full")
    there = 4096 // 128 - tiered["moved_bytes"] // frame
    assert 0 < there < 4096 // 128, "pages that the device has room for"
    moved = [4 * chunk - there for chunk in range(1, 9) if 4 * chunk > there]
    host = 4096 // 128 + 1  # pages that fit there: fewer than the next size of a window above 16
    assert tiered["staged_bytes"] == frame * sum(16 if pages <= 16 else host for pages in moved)
    assert (resident["staged_bytes"], resident["moved_bytes"]) == (0, 0)
    assert [len(row["chunks_s"]) for row in (tiered, resident)] == [8, 8]
    assert all(len(tiered_prefill_cells(row)) == 12 for row in (tiered, resident))
    with pytest.raises(ValueError, match="chunk 500 must be a multiple of the page size 128"):
        tiered_prompts.TieredPrompts(**fields | {"chunk": 500}, device_bytes=(None,))


@pytest.mark.long
def test_programs_of_a_prompt_are_compiled_beside_each_other(monkeypatch):
    """Those that copy pages: nothing is left for the chunks that run them."""
    monkeypatch.setattr(tiers, "COPY", 1 << 20)
    found, now = collections.defaultdict(collections.Counter), [""]

    def hear(event, duration, **named):
        if event.endswith("backend_compile_duration") and named.get("fun_name") == "jit(prefill_slice)":
            found[now[0].split()[0]][threading.current_thread().name.startswith(NAMED)] += 1

    jax.clear_caches()
    jax.monitoring.register_event_duration_secs_listener(hear)
    fields = {"shape": "tiny", "config": CONFIG, "tokens": (12288,), "policies": (parse_prefill("dense"),), "chunk": 1024}
    plan = tiered_prompts.TieredPrompts(**fields, device_bytes=(10**6,))
    try:
        list(tiered_prompts.tiered_prompt_rows(plan, lambda what: now.insert(0, what)))
    finally:
        jax.monitoring.clear_event_listeners()
    assert set(found) == {"pages", "programs"}, "a prompt whose pages move, and then everything at once"
    assert found["programs"] == {True: 3}


def test_only_known_stores_are_timed():
    with pytest.raises(ValueError, match="stores are none, device, host, disk, not tape"):
        reuse.Reused("tiny", CONFIG, 1024, 64, 512, 1, None, ("host", "tape"))


def test_the_peak_of_memory_says_after_what_it_rose(monkeypatch):
    taken = iter((5, 5, 9, 8, 12))
    monkeypatch.setattr(tiered_prompts, "memory_stats", lambda: {"peak_bytes_in_use": next(taken)})
    peaks = tiered_prompts.Peaks()
    for what in ("weights", "pages", "programs", "the prompt", "another"):
        peaks.look(what)
    assert peaks.measured(-4) == {"peak_bytes": 8, "peaks": [("weights", 1), ("programs", 5), ("another", 8)]}
    monkeypatch.setattr(tiered_prompts, "memory_stats", dict)
    nothing = tiered_prompts.Peaks()
    nothing.look("weights")
    assert nothing.measured(7) == {"peak_bytes": None, "peaks": []}
