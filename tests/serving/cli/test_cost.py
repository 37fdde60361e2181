"""`kvjax cost ...`: what it prints is the library's, and input that cannot be is named."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path

import pytest
from planted_meshes import mesh_run
from planted_runs import in_launches
from planted_tiers import sizes, tier_run

from kvjax.cost_model import known_cost_model, known_cost_models, load_cost_models, step_bytes
from kvjax.cost_model.evidence import read_evidence
from kvjax.cost_model.records import to_json
from kvjax.policies.decode import parse
from kvjax.serving.bench.decode import SHAPES

QWEN = SHAPES["qwen2.5-7b"]
TIERS = ("--device-memory", "8GB", "--host-memory", "60GB")
NO_STEPS = ([8], "8", None, float("nan"), 0, True)

pytestmark = pytest.mark.usefixtures("empty_folder")


def words(text):
    return " ".join(text.replace("│", " ").split())


def refused(kvjax, arguments, said):
    status, _, err = kvjax(*arguments)
    assert (status, said in words(err)) == (2, True), (arguments, err)


def write(name, figures):
    Path(name).write_text(json.dumps(figures))
    return name


@pytest.fixture
def meshes(kvjax):
    """A file of a cost model that was fitted to planted rows of meshes, and what the fit printed."""
    status, out, err = kvjax("cost", "fit", write("meshes.json", mesh_run()), "--json", "cost.json")
    assert status == 0, err
    return out


@pytest.mark.parametrize("former", ["bill", "bill predict --lengths 8k", "regime-map --out map.png", "bill --help"])
def test_former_names_say_what_they_are_now(kvjax, former):
    refused(kvjax, former.split(), "kvjax cost")
    with pytest.raises(ImportError, match=r"kvjax.bill is kvjax.cost_model now"):
        __import__("kvjax.bill")


# Fitting


def test_fit_writes_the_cost_model_and_prints_how_wrong_it_is(kvjax, planted_results):
    status, out, _ = kvjax("cost", "fit", *planted_results, "--json", "cost.json")
    assert status == 0
    (cost,) = load_cost_models(Path("cost.json"))
    assert (cost.device, cost.model, cost.source) == ("Planted 9000", "qwen2.5-7b", "grid-b1.json grid-b4.json")
    assert (cost.bytes_per_s, cost.c0, dict(cost.c1)["top:8"].fixed) == pytest.approx((4e12, 1e-3, 2e-4), rel=1e-6)
    assert cost.measured == ((1, 8192, 131_072), (4, 8192, 131_072))
    for text in ("4.000 TB/s, c0 1.000 ms", "c1(top:8)", "choosing by it loses 0.00%", "a batch"):
        assert text in words(out)
    assert "mesh or tier" not in out, "there is one alone"
    (checked,) = json.loads(Path("cost.json").read_text())["held_out"]
    assert checked["errors"]["device"]["cell"]["speedup"][1] < 1e-6


def test_results_and_files_with_wrong_fields_are_refused_by_name(kvjax, planted_results):
    good = json.loads(planted_results[0].read_text())
    rows, first = good["rows"][1:], "wrong.json: shape qwen2.5-7b, tokens 8192, batch 1, policy dense"
    for row, said in (
        (
            {"median_s": -1.0},
            f"{first}: median_s must be a finite number above 0, got -1.0",
        ),
        ({"median_s": "3"}, "median_s must be a finite number above 0, got '3'"),
        ({"bytes": None}, "wrong.json: a field is of another kind ('NoneType' object has no attribute 'values'), so it is no result"),
        *(({"steps_per_launch": value}, f"{first}: steps_per_launch must be") for value in NO_STEPS),
    ):
        refused(kvjax, ("cost", "fit", write("wrong.json", good | {"rows": [each | row for each in rows]})), said)
    refused(kvjax, ("cost", "fit", write("wrong.json", good | {"rows": 5})), "'int' object is not iterable")
    for provenance in ("today", 5, []):
        said = "wrong.json: a field is of another kind"
        refused(kvjax, ("cost", "fit", write("wrong.json", good | {"provenance": provenance})), said)
    refused(kvjax, ("cost", "fit", write("wrong.json", good | {"bench": "ops"})), "wrong.json: this is a result of kvjax bench 'ops'")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("predict --fit deep.json", "deep.json holds lists or objects more than 50 deep"),
        ("evidence deep.json --into table.json", "deep.json holds lists or objects more than 50 deep"),
        ("evidence evaluation.json --into five.json", "five.json has no checksum"),
    ],
)
def test_files_nested_too_deep_and_tables_that_are_none_are_named(kvjax, arguments, said):
    Path("deep.json").write_text("[" * 200_000)
    write("five.json", {"rows": 5})
    write("evaluation.json", {"forced": []})
    refused(kvjax, ("cost", *arguments.split()), said)


def test_launches_are_kept_apart(kvjax, planted_results):
    eight = in_launches(planted_results[0], 8)
    status, out, err = kvjax("cost", "fit", planted_results[1], eight, "--steps-per-launch", 8, "--json", "cost.json")
    assert status == 0, err
    assert "rows of one device with other steps per launch are left out: 9 of 1 (--steps-per-launch 1)" in words(out)
    (cost,) = load_cost_models(Path("cost.json"))
    assert (cost.steps_per_launch, cost.measured) == (8, ((1, 8192, 131_072),))
    assert "Planted 9000, qwen2.5-7b, bfloat16, 8 steps per launch: 4.000 TB/s" in out
    refused(kvjax, ("cost", "fit", eight), "of 1 steps per launch: they have 9 of 8 (--steps-per-launch 8)")


def test_fit_takes_rows_of_pages_in_host_memory(kvjax):
    status, out, err = kvjax("cost", "fit", write("tiers.json", tier_run()), "--json", "cost.json")
    assert status == 0, err
    assert "bus: 45.0 GB/s, 12.0 us a layer, hits 70%, error 0.0%" in words(out)
    (cost,) = load_cost_models(Path("cost.json"))
    frames, length = sizes(), 2**19
    arguments = ("cost", "predict", "--fit", "cost.json", "--lengths", "512k", "--batches", "1", "--policies", "dense,top:32", *TIERS)
    status, out, err = kvjax(*arguments)
    assert status == 0, err
    for policy in ("dense", "top:32"):
        found = cost.predict(QWEN, policy, length, frames=frames)
        assert f"{found.seconds * 1e3:.3f}" in out
        assert f"{found.bus_bytes / 1e9:.3f}" in out
    fewer = f"{cost.assuming(hits=0.2).predict(QWEN, 'top:32', length, frames=frames).seconds * 1e3:.3f}"
    assert fewer not in out
    assert fewer in kvjax(*arguments, "--assume", "hits=0.2")[1]


def test_fit_takes_rows_of_meshes(kvjax, meshes):
    assert "exchanges: 5.0 us each, 80.0 GB/s, 15.0 us a layer that chooses" in words(meshes)
    assert "a mesh or tier" in meshes
    refused(kvjax, ("cost", "fit", write("few.json", mesh_run(meshes=((2, 1),)))), "bandwidth and c0 need dense rows of at least two sizes")


# Predicting


def test_predict_says_what_is_a_projection_and_why(kvjax, planted_results):
    kvjax("cost", "fit", *planted_results, "--json", "cost.json")
    arguments = ("cost", "predict", "--fit", "cost.json", "--lengths", "128k", "--batches", "4", "--policies", "dense,top:8,top:16")
    status, out, _ = kvjax(*arguments)
    seconds = step_bytes(QWEN, parse("top:8"), 131_072, 4).total / 4e12 + 1.2e-3
    assert (status, f"{seconds * 1e3:.3f}" in out) == (0, True)
    assert re.findall(r"(measurements|projection) │", out) == ["measurements", "measurements", "projection"]
    for option, reason in (
        (("--assume", "bandwidth=8,c0=0"), "assumed: bandwidth 8 TB/s, c0 0 ms"),
        (("--shape", "llama-3.1-8b"), "measured on qwen2.5-7b"),
        (("--cache-format", "int8"), "measured with pages as they are, not with those packed as int8"),
    ):
        assert f"projection: {reason}" in kvjax(*arguments, *option)[1]


def test_built_in_cost_models_of_packed_formats(kvjax):
    asked = ("cost", "predict", "--lengths", "128k", "--batches", "1")
    for weights, pages in (("int8", None), ("int4", "int8")):
        status, out, err = kvjax(*asked, "--weights", weights, *(("--cache-format", pages) if pages else ()))
        assert status == 0, err
        said = f"NVIDIA H200, qwen2.5-7b, bfloat16, weights {weights}{f', pages {pages}' if pages else ''}, 8 steps per launch: "
        assert (out.startswith(said), "projection" in out) == (True, False)
    status, out, _ = kvjax(*asked, "--weights", "int8", "--tensor", "2", "--policies", "top:32")
    assert (status, "projection: exchanges were measured on qwen2.5-7b in bfloat16" in out) == (0, True)
    status, out, _ = kvjax("cost", "predict", "--lengths", "96k", "--batches", "1", "--weights", "int8", *TIERS)
    assert (status, "projection: the bus was measured on qwen2.5-7b in bfloat16" in out) == (0, True)
    status, _, err = kvjax(*asked, "--weights", "int8", "--cache-format", "int8", "--policies", "quest:64")
    measured = "--policies dense,quest:64 --weights int8 --cache-format int8 --steps-per-launch 8 --json FILE"
    assert (status, f"{measured}, then kvjax cost fit FILE --steps-per-launch 8" in words(err)) == (2, True), err


def test_without_a_shape_the_model_is_that_of_the_file(kvjax):
    made = known_cost_model("NVIDIA H200", QWEN, "bfloat16", "int8")
    few = dataclasses.replace(made, c1=made.c1[:1])
    asked = ("cost", "predict", "--fit", "few.json", "--weights", "int8", "--lengths", "128k", "--batches", "1")
    write("few.json", {"cost_models": [to_json(few)]})
    status, out, err = kvjax(*asked)
    assert status == 0, err
    shown = out.partition("tokens  ")[2]
    assert ("top:8" in shown, "top:32" in shown, "scaled by layers" in out) == (False, True, False), "of policies those that it has"
    assert "scaled by layers" in kvjax(*asked, "--shape", "llama-3.1-8b")[1]


def test_predict_on_a_mesh(kvjax, meshes):
    asked = ("cost", "predict", "--fit", "cost.json", "--lengths", "64k", "--batches", "8", "--policies", "top:32")
    (cost,) = load_cost_models(Path("cost.json"))
    status, out, _ = kvjax(*asked, "--tensor", "2", "--context", "2")
    found = cost.predict(QWEN, "top:32", 65_536, 8, tensor=2, context=2)
    assert (status, f"{found.parts['exchanges'] * 1e3:.3f}" in out, "projection:" in out) == (0, True, False)
    assert "projection: tensor 4 x context 8 was not measured" in kvjax(*asked, "--tensor", "4", "--context", "8")[1]
    assert "projection: assumed: latency 5 us, links 10 GB/s" in kvjax(*asked, "--tensor", "2", "--assume", "latency=5,links=10")[1]


def test_predict_compares_meshes(kvjax, meshes):
    asked = ("cost", "predict", "--fit", "cost.json", "--lengths", "64k", "--batches", "8", "--policies", "dense")
    status, out, err = kvjax(*asked, "--tensor", "1,3,4", "--context", "1,2")
    assert status == 0, err
    assert "refused: tensor 3 x context 2: 4 KV heads cannot be split over tensor=3 devices" in out
    assert re.findall(r"^│ (\d) +│ (\d) ", out, re.MULTILINE) == [("1", "1"), ("1", "2"), ("4", "1"), ("4", "2")]
    refused(kvjax, (*asked, "--tensor", "3", "--context", "1,2"), "no mesh of these can run this")
    refused(kvjax, (*asked, "--context", "3"), "power of two")


# Regimes


@pytest.mark.long
def test_regimes_are_drawn_and_named(kvjax, planted_results):
    kvjax("cost", "fit", *planted_results, "--json", "cost.json")
    drawn = ("--policies", "top:32", "--memory", 139, "--json", "map.json", "-o", "map.png")
    status, out, err = kvjax("cost", "regimes", "--fit", "cost.json", *drawn)
    assert status == 0, err
    marked = re.findall(r"top:32 │ (\d+) +│ (?:from [\d,]+ tokens|never) +│ ([^│]*?) +│", out)
    assert [(batch, said.partition(":")[0].partition(";")[0]) for batch, said in marked] == [
        ("1", "measurements at this batch"),
        ("2", "between batches 1 and 4"),
        ("4", "measurements at this batch"),
        *((batch, "projection") for batch in ("8", "16", "32", "64")),
    ]
    assert Path("map.png").stat().st_size > 10_000
    (found,) = json.loads(Path("map.json").read_text())["maps"]
    assert len(found["speedup"]) == len(found["batches"])


@pytest.mark.parametrize("command", [("cost", "predict"), ("cost", "regimes"), ("bench", "decode"), ("bench", "prefill")])
def test_help_lists_the_shapes(kvjax, command):
    status, out, _ = kvjax(*command, "--help")
    assert status == 0
    assert f"{', '.join(SHAPES)}, or a model folder or hub id" in words(out)


# Evidence and choices


def test_evidence_is_recorded_and_the_choice_explained(kvjax, model, model_folder, tmp_path, monkeypatch):
    from kvjax.cost_model import CostModel, Price, auto
    from kvjax.cost_model.predict import sizes_of
    from kvjax.model.identity import fingerprint
    from kvjax.models.loading import load

    interval = {"value": 0.01, "low": 0.0, "high": 0.02}
    cells = [{"policy": "dense", "hits": 200, "against_dense": None}, {"policy": "window:4+8", "hits": 200, "against_dense": {"lost": 0}}]
    cells = [cell | {"invalid_trials": 0} for cell in cells]
    run = {
        "settings": {"model": "tiny", "windows": 5, "steps": 1024},
        "policies": [{"policy": "dense"}, {"policy": "window:4+8"}],
        "retrieval": [{"length": 512, "task": "needle", "haystack": "codes"} | cell for cell in cells],
        "forced": [{"length": 512, "policy": "dense"}, {"length": 512, "policy": "window:4+8", "kl": interval}],
    }
    Path("evaluation.json").write_text(json.dumps(run))
    status, _, err = kvjax("cost", "evidence", "evaluation.json", "--into", "evidence.json")
    assert (status, "name the model (--model)" in err) == (2, True)
    status, out, _ = kvjax("cost", "evidence", "evaluation.json", "--into", "evidence.json", "--model", model_folder)
    assert (status, out) == (0, "evidence.json: 1 rows of 1 models\n")
    rows = read_evidence(Path("evidence.json"))
    assert (rows[0].fingerprint, rows[0].source) == (fingerprint(load(model_folder)), "evaluation.json")

    status, out, _ = kvjax("cost", "choose", "--model", model_folder, "--lengths", "512", "--batches", "1")
    assert (status, "no evidence is recorded for this model" in out) == (0, True)
    monkeypatch.setattr(auto, "known_evidence", lambda mark: tuple(each for each in rows if each.fingerprint == mark))
    fields = {"device": "chip", "model": "it", "sizes": sizes_of(model.config), "dtype": "float32", "measured": ((1, 1, 512),)}
    made = CostModel(1e6, 0.0, (("window:4+8", Price(0.0)),), **fields, error=0.0, source="planted")
    monkeypatch.setattr(auto, "calibrate", lambda *_, **__: made)
    monkeypatch.setattr(auto, "_calibrated", {})
    status, out, _ = kvjax("cost", "choose", "--model", model_folder, "--lengths", "512", "--batches", "1", "--level", "fast")
    assert status == 0
    assert "512 tokens, batch 1: window:4+8: the cost model of chip gives window:4+8, the fastest on record as fast" in out
    arguments = ("--lengths", "512", "--batches", "1", "--level", "fast", "--device-memory", "1MB", "--host-memory", "4MB")
    status, out, err = kvjax("cost", "choose", "--model", model_folder, *arguments)
    assert (status, "the cost model of chip has no term for pages in host memory" in out) == (0, True), err
    status, out, err = kvjax("cost", "choose", "--model", model_folder, "--lengths", "512", "--batches", "1", "--weights", "int8")
    assert (status, "no evidence is recorded for this model" in out) == (0, True), f"packed weights are another model: {out}{err}"


def test_prefill_is_timed_recorded_and_explained(kvjax, model_folder, monkeypatch):
    from kvjax.cost_model import PrefillEvidence, auto, prefill_times

    sizes = {"shape": "tiny", "heads": 4, "kv_heads": 2, "head_dim": 8, "dtype": "float32", "page_size": 128}
    timed = [("dense", "paged", 512, 1e-3), ("dense", "paged", 4096, 64e-3), ("sparse", "window:8+64", 4096, 8e-3)]
    rows = [sizes | {"op": op, "policy": name, "tokens": n, "median_s": s, "p10_s": s, "p90_s": s} for op, name, n, s in timed]
    provenance = {"device": "Planted 9000", "date": "2026"}
    Path("ops.json").write_text(json.dumps({"bench": "prefill-ops", "provenance": provenance, "rows": rows}))
    status, out, err = kvjax("cost", "fit", "ops.json", "--json", "times.json")
    assert status == 0, err
    assert "Planted 9000, tiny, 4/2 heads of 8 in float32, pages of 128; times within 0.0%" in out
    assert "dense: 512 tokens 1.000 ms, 4,096 tokens 64.000 ms" in out

    report = {
        "bench": "prefill-echo",
        "provenance": provenance,
        "settings": {"model": "tiny", "dtype": "float32", "text": ["a.txt"]},
        "policies": [{"policy": "dense"}, {"policy": "window:8+64"}],
        "cells": [{"length": 4096, "prompts": 25, "facts_invalid": []}],
        "rows": [
            {"length": 4096, "policy": "dense", "hits": 400, "kl": {"high": 0.0}},
            {"length": 4096, "policy": "window:8+64", "kl": {"high": 0.01}, "against_dense": {"lost": 0, "design_effect": 1.0}},
        ],
    }
    Path("echo.json").write_text(json.dumps(report))
    recorded = ("cost", "evidence", "echo.json", "--into", "evidence.json")
    status, _, err = kvjax(*recorded)
    assert (status, "echo.json has no fingerprint" in " ".join(err.split())) == (2, True)
    status, _, err = kvjax(*recorded, "--model", model_folder, "--dtype", "bfloat16")
    assert (status, "give --dtype float32" in " ".join(err.split())) == (2, True)
    status, out, _ = kvjax(*recorded, "--model", model_folder)
    assert (status, out) == (0, "evidence.json: 1 rows of 1 models\n")

    found = read_evidence(Path("evidence.json"), PrefillEvidence)
    tables = prefill_times.read_prefill_times(Path("times.json"))
    monkeypatch.setattr(auto, "recorded_prefill_evidence", lambda: found)
    monkeypatch.setattr(auto, "known_prefill_times", lambda: tables)
    chosen = ("cost", "choose", "--prefill", "--model", model_folder, "--lengths", "500,4k", "--prefill-chunk", "512")
    status, out, _ = kvjax(*chosen, "--device", "Planted 9000")
    assert status == 0
    assert "tokens 0 to 512: dense: of those on record as assured, window:8+64 is the fastest on Planted 9000" in out
    assert "tokens 3,584 to 4,096: window:8+64: of those on record" in out
    assert "no prefill was timed on cpu" in kvjax(*chosen)[1]
    status, _, err = kvjax("cost", "choose", "--model", model_folder, "--device", "Planted 9000")
    assert (status, "needs --prefill" in " ".join(err.replace("│", " ").split())) == (2, True)


@pytest.mark.long
def test_generate_takes_prefill_auto_and_says_what_it_does(kvjax, model_folder):
    arguments = ("generate", "ember", "--model", model_folder, "--max-new-tokens", 5)
    dense = kvjax(*arguments)[1]
    assert kvjax(*arguments, "--prefill", "auto:fast")[1] == dense
    status, _, err = kvjax(*arguments, "--prefill", "auto:sure")
    assert (status, "fidelity level 'sure' is not understood" in " ".join(err.replace("│", " ").split())) == (2, True)


WRONG = [
    (("predict", "--device", "an abacus"), "no built-in cost model of 'an abacus', only of NVIDIA H200"),
    (("predict", "--policies", "dense,mean:3"), "has no c1 for mean:3"),
    (("predict", "--device-memory", "8GB"), "go together: give both, or neither"),
    (("predict", "--fit", "plain.json", *TIERS), "has no term of the bus; fit one to rows of benchmarks.tiers, or assume its rate"),
    (("predict", *TIERS[:3], "1KB"), "--host-memory of 1,000 is less than one page"),
    (("predict", "--fit", "plain.json", "--tensor", "4"), "--tensor 1,2,4 --context 1,2,4 --steps-per-launch 1,8 --json FILE"),
    (("predict", "--tensor", "2", *TIERS), "on its devices alone"),
    (("predict", "--assume", "speed=3"), "'speed' cannot be assumed; there are bandwidth (TB/s)"),
    (("predict", "--assume", "c0"), "write it as bandwidth=3.05,c0=0"),
    (("predict", "--fit", "plain.json", "--assume", "latency=5"), "assume latency and links together"),
    (("predict", "--policies", "auto"), "chooses among policies"),
    (("choose", "--model", "needle", "--prefill", "--batches", "4"), "--batches: is about decoding"),
    (("choose", "--model", "needle", "--prefill", *TIERS), "is about decoding, and --prefill is not"),
    (("choose", "--model", "needle", "--device", "Planted 9000"), "needs --prefill"),
    (("regimes", *TIERS, "--memory", "80"), "as --device-memory does: leave one of them out"),
    (("fit", "old.json"), "old.json: shape qwen2.5-7b, tokens 131072, policy dense: the row does not say what was listed"),
    (("evidence", "forced.json", "old.json", "--into", "table.json"), "record them in two tables"),
]


@pytest.mark.parametrize(("arguments", "said"), WRONG)
def test_wrong_usage_is_named(kvjax, arguments, said):
    old = {"shape": "qwen2.5-7b", "layers": 28, "tokens": 2**17, "policy": "dense", "median_s": 1.0}
    plain = [dataclasses.replace(each, bus=None, exchanges=None) for each in known_cost_models()]
    write("plain.json", {"cost_models": list(map(to_json, plain))})
    write("old.json", {"bench": "tiers", "provenance": {"date": "2026", "device": "it"}, "rows": [old]})
    write("forced.json", {"forced": []})
    refused(kvjax, ("cost", *arguments), said)
