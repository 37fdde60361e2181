"""`kvjax bill ...` and `kvjax regime-map`: what they print is the library's, and input that cannot be is named."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path

import pytest
from planted_meshes import mesh_run
from planted_runs import in_launches
from planted_tiers import sizes, tier_run

from kvjax import bill as kvjax_bill
from kvjax.bill import known_bill, known_bills, load_bills, step_bytes
from kvjax.bill.evidence import read_evidence
from kvjax.bill.report import rendered
from kvjax.bill.step_bill import to_json
from kvjax.policies.decode import parse
from kvjax.serving.bench.decode import SHAPES

QWEN = SHAPES["qwen2.5-7b"]


pytestmark = pytest.mark.usefixtures("empty_folder")


def test_fit_writes_the_bill_and_prints_how_wrong_it_is(kvjax, bill_runs):
    status, out, _ = kvjax("bill", "fit", *bill_runs, "--form", "fixed", "--json", "bill.json")
    assert status == 0
    (bill,) = load_bills(Path("bill.json"))
    assert (bill.device, bill.model, bill.source) == ("Planted 9000", "qwen2.5-7b", "grid-b1.json grid-b4.json")
    assert bill.bytes_per_s == pytest.approx(4e12)
    assert (bill.c0, dict(bill.c1)["top:8"].fixed) == pytest.approx((1e-3, 2e-4))
    assert bill.measured == ((1, 8192, 131_072), (4, 8192, 131_072))
    for text in ("4.000 TB/s, c0 1.000 ms", "c1 = 0: no free sparse parameter", "a constant per policy", "a batch", "dense, top:32, top:8"):
        assert text in out
    (checks,) = json.loads(Path("bill.json").read_text())["held_out"]
    assert checks["errors"]["cell"]["fixed"]["worst"] < 1e-9 < 0.01 < checks["errors"]["cell"]["none"]["worst"]
    assert checks["regret"]["dense, top:32"]["cell"]["worst"] == 0.0
    assert set(checks["errors"]) == {"nothing", "cell", "length", "batch"}
    assert set(checks["impossible"]) == {"budget"}, "two are too few to hold one out"


def test_results_and_bills_with_wrong_fields_are_refused_by_name(kvjax, bill_runs):
    good = json.loads(bill_runs[0].read_text())
    for row, said in (
        ({"median_s": -1.0}, "qwen2.5-7b, 8,192 tokens, batch 1, dense: median_s is -1.0, and a time is a number of seconds above 0"),
        ({"median_s": float("nan")}, "median_s is nan"),
        ({"median_s": "3"}, "median_s is '3'"),
        ({"bytes": None}, "a field is of another kind ('NoneType' object has no attribute 'values') in a result"),
    ):
        Path("wrong.json").write_text(json.dumps({**good, "rows": [{**each, **row} for each in good["rows"][1:]]}))
        status, _, err = kvjax("bill", "fit", "wrong.json")
        assert (status, said in " ".join(err.split())) == (2, True), (row, err)
    for run, said in (({"rows": 5}, "'int' object is not iterable"), ({"bench": "prefill"}, "wrong.json is of kvjax bench prefill")):
        Path("wrong.json").write_text(json.dumps({**good, **run}))
        status, _, err = kvjax("bill", "fit", "wrong.json")
        assert (status, said in " ".join(err.split())) == (2, True), (run, err)
    assert kvjax("bill", "fit", bill_runs[0], "--json", "bill.json")[0] == 0
    bill = json.loads(Path("bill.json").read_text())
    for field, said in (({"c1": []}, "holds no bills"), ({"measured": []}, "without measured steps")):
        Path("wrong.json").write_text(json.dumps({"bills": [{**bill["bills"][0], **field}]}))
        status, _, err = kvjax("bill", "predict", "--fit", "wrong.json")
        assert (status, said in err) == (2, True), (field, err)


def test_a_document_is_filled_from_the_fit(kvjax, bill_runs):
    Path("page.md").write_text("# T\n<!-- bill:parameters -->\nold\n<!-- /bill -->\nkept\n<!-- bill:regret -->\n<!-- /bill -->\n")
    status, _, err = kvjax("bill", "fit", *bill_runs, "--form", "fixed", "--into", "page.md", "--json", "bill.json")
    assert status == 0, err
    text = Path("page.md").read_text()
    assert "| Planted 9000 | qwen2.5-7b | 4.000 | 1.000 | top:32 | 0.200 | 0.000 |" in text
    assert "| qwen2.5-7b | dense, top:8 | a cell |" in text
    assert "old" not in text
    assert "kept" in text
    assert rendered(text, json.loads(Path("bill.json").read_text())) == text
    for wrong, words in (("<!-- bill:poem -->\n<!-- /bill -->", "no part is called 'poem'"), ("<!-- bill:regret -->\n", "not followed")):
        Path("page.md").write_text(wrong)
        status, _, err = kvjax("bill", "fit", *bill_runs, "--into", "page.md")
        assert (status, words in err) == (2, True)


def test_a_bill_of_longer_launches(kvjax, bill_runs):
    eight = in_launches(bill_runs[0], 8)
    Path("page.md").write_text("<!-- bill:errors -->\n<!-- /bill -->\n")
    written = ("--json", "bill.json", "--into", "page.md")
    status, out, err = kvjax("bill", "fit", bill_runs[1], eight, "--steps-per-launch", 8, *written)
    assert status == 0, err
    why = "bandwidth and c0 need dense rows of at least two sizes with everything on the device"
    assert f"| a batch | cannot be: {why} |" in Path("page.md").read_text()
    assert f"cannot be held out: {why}, got 0: measure more lengths or batches (kvjax bench decode" in " ".join(out.split())
    (bill,) = load_bills(Path("bill.json"))
    assert (bill.steps_per_launch, bill.measured) == (8, ((1, 8192, 131_072),)), "the other file is of launches of one step"
    assert "Planted 9000, qwen2.5-7b, bfloat16, 8 steps per launch: 4.000 TB/s" in out
    assert "qwen2.5-7b, 8 steps per launch │" in out
    status, out, _ = kvjax("bill", "predict", "--fit", "bill.json", "--lengths", "32k", "--batches", "1")
    assert (status, "bfloat16, 8 steps per launch: " in out) == (0, True)
    kvjax("bill", "fit", bill_runs[1], eight, "--json", "bill.json")
    (bill,) = load_bills(Path("bill.json"))
    assert (bill.steps_per_launch, bill.measured) == (1, ((4, 8192, 131_072),))


def test_launches_that_no_row_has_are_refused_with_what_to_give(kvjax, bill_runs, tmp_path):
    eight, tiers = in_launches(bill_runs[0], 8), tmp_path / "tiers.json"
    tiers.write_text(json.dumps(tier_run()))
    for arguments, said in (
        ((eight,), "has 1 step per launch: they have 8; give --steps-per-launch 8"),
        (
            (eight, bill_runs[1], "--steps-per-launch", 4),
            "they have 1 and 8; give --steps-per-launch 1 or --steps-per-launch 8",
        ),
        ((tiers, "--steps-per-launch", 8), "has 8 steps per launch: they have 1; give --steps-per-launch 1"),
        ((eight, "--steps-per-launch", 0), "must be a whole number from 1"),
        ((eight, "--steps-per-launch", 8, "--marks", "packed"), "needs --into"),
    ):
        status, _, err = kvjax("bill", "fit", *arguments)
        assert (status, said in " ".join(err.split())) == (2, True), (arguments, err)


def test_marks_with_a_prefix_are_filled(kvjax, bill_runs):
    Path("page.md").write_text("<!-- bill:parameters -->\nold\n<!-- /bill -->\n<!-- bill:packed-parameters -->\n<!-- /bill -->\n")
    status, _, err = kvjax("bill", "fit", *bill_runs, "--form", "fixed", "--into", "page.md", "--marks", "packed")
    assert status == 0, err
    text = Path("page.md").read_text()
    assert text.startswith("<!-- bill:parameters -->\nold\n<!-- /bill -->\n<!-- bill:packed-parameters -->\n| device |")
    status, _, err = kvjax("bill", "fit", *bill_runs, "--into", "page.md", "--marks", "other")
    assert (status, "no mark begins with <!-- bill:other-" in err) == (2, True)


def test_built_in_bills_of_packed_formats(kvjax):
    asked = ("bill", "predict", "--lengths", "128k", "--batches", "1")
    for weights, pages in (("int8", None), ("int8", "int8"), ("int4", None), ("int4", "int8")):
        packed = ("--weights", weights, *(("--cache-format", pages) if pages else ()))
        status, out, err = kvjax(*asked, *packed)
        assert status == 0, err
        said = f"NVIDIA H200, qwen2.5-7b, bfloat16, weights {weights}{f', pages {pages}' if pages else ''}, 8 steps per launch: "
        assert out.startswith(said)
        assert "projection" not in out
        shown = out.partition("tokens  ")[2]
        assert ("top:8" in shown, "top:32" in shown) == (True, True)
        status, out, err = kvjax(*asked, *packed, "--policies", "dense,top:8")
        assert (status, out.count("measurements")) == (0, 2), err
        status, _, err = kvjax(*asked, *packed, "--policies", "top:64")
        assert (status, "has no c1 for top:64" in err) == (2, True)
    status, out, _ = kvjax(*asked, "--weights", "int8", "--cache-format", "int8", "--tensor", "2", "--policies", "top:32")
    assert (status, "extrapolated" in out, "projection: exchanges were measured on qwen2.5-7b in bfloat16" in out) == (0, True, True)
    status, out, _ = kvjax("bill", "predict", "--lengths", "96k", "--batches", "1", "--weights", "int8", *TIERS)
    assert (status, "projection: the bus was measured on qwen2.5-7b in bfloat16" in out) == (0, True)
    status, out, err = kvjax(*asked, "--weights", "int8", "--cache-format", "int8", *TIERS)
    assert (status, "projection: the bus was measured on qwen2.5-7b in bfloat16" in out) == (0, True), err
    assert "│      3.820 │    0.000 │           2.095 │" in out, "more than half of dense's packed pages"
    status, out, _ = kvjax("bill", "predict", "--lengths", "128k", "--batches", "8", "--weights", "int4")
    assert (status, "projection: batch 8 lies outside the measured 1 to 1" in out) == (0, True)
    status, out, _ = kvjax(*asked, "--weights", "fp8")
    assert (status, "measured with weights as they are, not with those packed as fp8" in out) == (0, True)


def test_without_policies_those_that_the_bill_has_are_shown(kvjax):
    few = dataclasses.replace((made := known_bill("NVIDIA H200", QWEN, "bfloat16", "int8")), c1=made.c1[:1])
    assert [name for name, _ in few.c1] == ["top:32"]
    Path("few.json").write_text(json.dumps({"bills": [to_json(few)]}))
    asked = ("bill", "predict", "--fit", "few.json", "--weights", "int8", "--lengths", "128k", "--batches", "1")
    status, out, err = kvjax(*asked)
    assert status == 0, err
    shown = out.partition("tokens  ")[2]
    assert ("top:8" in shown, "top:32" in shown) == (False, True)
    status, _, err = kvjax(*asked, "--policies", "top:8")
    assert (status, "has no c1 for top:8" in err) == (2, True)


@pytest.mark.long
def test_dots_of_a_map_are_steps_of_its_formats_and_launches(kvjax, bill_runs):
    eight = in_launches(bill_runs[0], 8)
    kvjax("bill", "fit", eight, "--steps-per-launch", 8, "--json", "bill.json")
    drawn = ("regime-map", "--fit", "bill.json", "--batches", "1,8", "-o", "map.png")
    assert kvjax(*drawn, "--measured", eight)[0] == 0
    for options in (("--measured", bill_runs[1]), ("--measured", eight, "--weights", "int8")):
        status, _, err = kvjax(*drawn, *options)
        said = f"bfloat16{', weights int8' * (len(options) > 2)}, 8 steps per launch, one device); they have qwen2.5-7b, 28 layers"
        assert (status, said in " ".join(err.split())) == (2, True), err


@pytest.mark.long
def test_a_fitted_bill_predicts_and_draws(kvjax, bill_runs):
    kvjax("bill", "fit", *bill_runs, "--form", "fixed", "--json", "bill.json")
    arguments = ("--fit", "bill.json", "--lengths", "128k", "--batches", "4", "--policies", "dense,top:8,top:16")
    status, out, _ = kvjax("bill", "predict", *arguments)
    seconds = step_bytes(QWEN, parse("top:8"), 131_072, 4).total / 4e12 + 1.2e-3
    assert status == 0
    assert f"{seconds * 1e3:.3f}" in out
    assert out.count("projection") == 2, "top:16 is interpolated; the reason stands below"
    assert re.findall(r"(measurements|projection) │", out) == ["measurements", "measurements", "projection"]
    for option, reason in (
        (("--no-overhead",), "c0 set to 0"),
        (("--bandwidth", 8), "bandwidth set to 8 TB/s"),
        (("--tier", "host", "--link", 52), "a host link of 52 GB/s"),
        (("--shape", "llama-3.1-8b"), "measured on qwen2.5-7b"),
        (("--cache-format", "int8"), "measured with pages as they are, not with those packed as int8"),
        (("--weights", "int4"), "measured with weights as they are, not with those packed as int4"),
    ):
        assert f"projection: {reason}" in kvjax("bill", "predict", *arguments, *option)[1]
    drawn = (
        "--fit",
        "bill.json",
        "--policies",
        "top:32",
        "--measured",
        bill_runs[0],
        "--memory",
        139,
        "--json",
        "map.json",
        "-o",
        "map.png",
    )
    status, out, _ = kvjax("regime-map", *drawn)
    assert status == 0
    marked = re.findall(r"top:32 │ (\d+) +│ (?:from [\d,]+ tokens|never) +│ ([^│]*?) +│", out)
    assert [(batch, words.partition(":")[0].partition(";")[0]) for batch, words in marked] == [
        ("1", "measurements at this batch"),
        ("2", "between batches 1 and 4"),
        ("4", "measurements at this batch"),
        *((batch, "projection") for batch in ("8", "16", "32", "64")),
    ]
    assert out.endswith("written: map.png, map.json\n")
    assert Path("map.png").stat().st_size > 10_000
    (found,) = json.loads(Path("map.json").read_text())["maps"]
    assert len(found["speedup"]) == len(found["batches"])


PROMPTS = ("--tensor", "2", "--prefill", "dense")
TIERS = ("--device-memory", "8GB", "--host-memory", "60GB")


@pytest.fixture
def tiers(tmp_path):
    """A result as `kvjax bench tiers` writes it, with times of a planted law."""
    (tmp_path / "tiers.json").write_text(json.dumps(tier_run()))
    return "tiers.json"


def test_fit_takes_rows_of_pages_in_host_memory(kvjax, tiers):
    Path("page.md").write_text("<!-- bill:bus -->\n<!-- /bill -->\n<!-- bill:bus-errors -->\n<!-- /bill -->\n")
    status, out, err = kvjax("bill", "fit", tiers, "--json", "bill.json", "--into", "page.md")
    assert status == 0, err
    assert "bus: 40.0 GB/s in place, 50.0 GB/s copied, 12.0 us a layer, hits 70%, error 0.0%" in " ".join(out.split())
    (bill,) = load_bills(Path("bill.json"))
    assert bill.bus.copied_per_s == pytest.approx(50e9)
    text = Path("page.md").read_text()
    assert "| Planted 9000 | qwen2.5-7b | 40.0 | 50.0 | 12.0 | 70% |" in text
    assert "| qwen2.5-7b | a device size | bytes over the bus alone | 32 |" in text
    held = json.loads(Path("bill.json").read_text())["held_out_tiers"][0]["errors"]["length"]
    assert held["all"]["seconds"]["worst"] < 1e-6 < 0.05 < held["none"]["seconds"]["worst"]

    frames, length = sizes(), 2**19
    arguments = ("--fit", "bill.json", "--lengths", "512k", "--batches", "1", "--policies", "dense,top:32")
    status, out, err = kvjax("bill", "predict", *arguments, *TIERS)
    assert status == 0, err
    for policy in ("dense", "top:32"):
        found = bill.predict(QWEN, policy, length, frames=frames)
        assert f"{found.seconds * 1e3:.3f}" in out
        assert f"{found.bus_bytes / 1e9:.3f}" in out
    assert f"{bill.predict(QWEN, 'top:32', length, frames=frames, hits=0.2).seconds * 1e3:.3f}" not in out
    assert (
        f"{bill.predict(QWEN, 'top:32', length, frames=frames, hits=0.2).seconds * 1e3:.3f}"
        in kvjax("bill", "predict", *arguments, *TIERS, "--hits", 0.2)[1]
    )
    assert "projection: a host link of 10 GB/s" in kvjax("bill", "predict", *arguments, *TIERS, "--link", 10)[1]
    assert f"{bill.predict(QWEN, 'dense', length).seconds * 1e3:.3f}" in kvjax("bill", "predict", *arguments)[1]


@pytest.mark.long
def test_the_map_of_an_engine_with_pages_in_host_memory(kvjax, tiers):
    kvjax("bill", "fit", tiers, "--json", "bill.json")
    drawn = ("--fit", "bill.json", "--policies", "top:32", "--lengths", "16k,512k", "--json", "map.json", "-o", "map.png")
    status, out, err = kvjax("regime-map", *drawn, *TIERS, "--measured", tiers)
    assert status == 0, err
    assert re.search(r"top:32 │ 1 +│ from [\d,]+ tokens", out)
    (found,) = json.loads(Path("map.json").read_text())["maps"]
    kvjax("regime-map", *drawn)
    (without,) = json.loads(Path("map.json").read_text())["maps"]
    assert found["speedup"][0][-1] > 2 * without["speedup"][0][-1]
    assert (found["frames"]["host"], without["frames"]) == (sizes().host, None)


def test_the_built_in_bill_is_the_default(kvjax):
    status, out, _ = kvjax("bill", "predict", "--lengths", "128k", "--batches", "1")
    assert status == 0
    assert out.startswith("NVIDIA H200, qwen2.5-7b, bfloat16: ")


def test_evidence_is_recorded_and_the_choice_explained(kvjax, model, model_folder, tmp_path, monkeypatch):
    from kvjax.bill import auto_decode
    from kvjax.bill.step_bill import Bill, Price, sizes_of
    from kvjax.identity import fingerprint
    from kvjax.models.loading import load

    interval = {"value": 0.01, "low": 0.0, "high": 0.02}
    cells = [{"policy": "dense", "hits": 200, "against_dense": None}, {"policy": "window:4+8", "hits": 200, "against_dense": {"lost": 0}}]
    cells = [cell | {"invalid_trials": 0} for cell in cells]
    panel = {
        "settings": {"model": "tiny", "windows": 5, "steps": 1024},
        "policies": [{"policy": "dense"}, {"policy": "window:4+8"}],
        "retrieval": [{"length": 512, "task": "needle", "haystack": "codes"} | cell for cell in cells],
        "forced": [{"length": 512, "policy": "dense"}, {"length": 512, "policy": "window:4+8", "kl": interval}],
    }
    Path("panel.json").write_text(json.dumps(panel))
    status, _, err = kvjax("bill", "evidence", "panel.json", "--into", "evidence.json")
    assert (status, "name the model (--model)" in err) == (2, True)
    status, out, _ = kvjax("bill", "evidence", "panel.json", "--into", "evidence.json", "--model", model_folder)
    assert (status, out) == (0, "evidence.json: 1 rows of 1 models\n")
    rows = read_evidence(Path("evidence.json").read_text())
    assert (rows[0].fingerprint, rows[0].source) == (fingerprint(load(model_folder)), "panel.json")

    status, out, _ = kvjax("bill", "choose", "--model", model_folder, "--lengths", "512", "--batches", "1")
    assert (status, "no evidence is recorded for this model" in out) == (0, True)
    monkeypatch.setattr(auto_decode, "recorded_evidence", lambda: rows)
    made = Bill("chip", "it", sizes_of(model.config), "float32", 1e6, 0.0, (("window:4+8", Price(0.0)),), ((1, 1, 512),), 0.0, "planted")
    monkeypatch.setattr(auto_decode, "calibrate", lambda *_, **__: made)
    monkeypatch.setattr(auto_decode, "_calibrated", {})
    status, out, _ = kvjax("bill", "choose", "--model", model_folder, "--lengths", "512", "--batches", "1", "--level", "fast")
    assert status == 0
    assert "512 tokens, batch 1: window:4+8: the bill of chip gives window:4+8, the fastest on record as fast" in out
    arguments = ("--lengths", "512", "--batches", "1", "--level", "fast", "--device-memory", "1MB", "--host-memory", "4MB")
    status, out, err = kvjax("bill", "choose", "--model", model_folder, *arguments)
    assert (status, "the bill of chip has no terms for pages in host memory" in out) == (0, True), err
    status, out, err = kvjax("bill", "choose", "--model", model_folder, "--lengths", "512", "--batches", "1", "--weights", "int8")
    assert (status, "no evidence is recorded for this model" in out) == (0, True), f"packed weights are another model: {out}{err}"


def test_prefill_is_timed_recorded_and_explained(kvjax, model_folder, monkeypatch):
    from kvjax.bill import PrefillEvidence, auto_prefill, prefill_bill

    sizes = {"shape": "tiny", "heads": 4, "kv_heads": 2, "head_dim": 8, "dtype": "float32", "page_size": 128}
    timed = [("dense", "paged", 512, 1e-3), ("dense", "paged", 4096, 64e-3), ("sparse", "window:8+64", 4096, 8e-3)]
    rows = [sizes | {"op": op, "policy": name, "tokens": n, "median_s": s, "p10_s": s, "p90_s": s} for op, name, n, s in timed]
    provenance = {"device": "Planted 9000", "date": "2026"}
    Path("ops.json").write_text(json.dumps({"bench": "prefill-ops", "provenance": provenance, "rows": rows}))
    status, out, err = kvjax("bill", "fit-prefill", "ops.json", "--json", "bill.json")
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
    recorded = ("bill", "evidence-prefill", "echo.json", "--into", "evidence.json")
    status, _, err = kvjax(*recorded)
    assert (status, "echo.json has no fingerprint" in " ".join(err.split())) == (2, True)
    status, _, err = kvjax(*recorded, "--model", model_folder, "--dtype", "bfloat16")
    assert (status, "give --dtype float32" in " ".join(err.split())) == (2, True)
    status, out, _ = kvjax(*recorded, "--model", model_folder)
    assert (status, out) == (0, "evidence.json: 1 rows of 1 models\n")

    found = read_evidence(Path("evidence.json").read_text(), PrefillEvidence)
    bills = prefill_bill.read_prefill_bills(Path("bill.json").read_text())
    monkeypatch.setattr(auto_prefill, "recorded_prefill_evidence", lambda: found)
    monkeypatch.setattr(auto_prefill, "known_prefill_bills", lambda: bills)
    chosen = ("bill", "choose", "--prefill", "--model", model_folder, "--lengths", "500,4k", "--prefill-chunk", "512")
    status, out, _ = kvjax(*chosen, "--device", "Planted 9000")
    assert status == 0
    assert "tokens 0 to 512: dense: of those on record as assured, window:8+64 is the fastest on Planted 9000" in out
    assert "tokens 3,584 to 4,096: window:8+64: of those on record" in out
    assert "no prefill was timed on cpu" in kvjax(*chosen)[1]
    status, _, err = kvjax("bill", "choose", "--model", model_folder, "--device", "Planted 9000")
    assert (status, "needs --prefill" in " ".join(err.replace("│", " ").split())) == (2, True)


@pytest.mark.long
def test_generate_takes_prefill_auto_and_says_what_it_does(kvjax, model_folder):
    arguments = ("generate", "ember", "--model", model_folder, "--max-new-tokens", 5)
    dense = kvjax(*arguments)[1]
    assert kvjax(*arguments, "--prefill", "auto:fast")[1] == dense
    status, _, err = kvjax(*arguments, "--prefill", "auto:sure")
    assert (status, "fidelity level 'sure' is not understood" in " ".join(err.replace("│", " ").split())) == (2, True)


def test_calibrate_writes_a_bill(kvjax, model_folder, monkeypatch):
    from kvjax.bill import Bill, calibration

    made = Bill("chip", "it", (1,) * 8, "float32", 1e9, 1e-3, (), ((1, 1, 2),), 0.02, "a calibration of 3 s")
    monkeypatch.setattr(calibration, "calibrate", lambda model, names, seconds: made)
    status, out, _ = kvjax("bill", "calibrate", "--model", model_folder, "--json", "bill.json")
    assert (status, "mean held-out error 2.0%" in out) == (0, True)
    assert load_bills(Path("bill.json")) == (made,)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("bill", "predict", "--device", "an abacus"), "no built-in bill of 'an abacus', only of NVIDIA H200"),
        (("bill", "predict", "--batches", "many"), "batches 'many' are not understood"),
        (("bill", "predict", "--policies", "dense,mean:3"), "has no c1 for mean:3"),
        (("bill", "predict", "--tier", "host"), "keys and values on 'host' need --link"),
        (("bill", "predict", "--device-memory", "8GB"), "go together: give both, or neither"),
        (("bill", "predict", "--hits", "0.5"), "--hits: needs --device-memory and --host-memory"),
        (("bill", "predict", "--fit", "plain.json", *TIERS), "no bandwidth for the tier 'host'; fit one to rows of kvjax bench tiers"),
        (("bill", "predict", *TIERS[:3], "1KB"), "--host-memory of 1,000 is less than one page"),
        (("bill", "predict", *TIERS, "--tier", "host", "--link", "52"), "leave out --device-memory"),
        (("bill", "predict", "--link", "52"), "--link: needs --tier host or disk"),
        (("bill", "predict", "--tier", "tape", "--link", "52"), "'tape' is not one of device, host, disk"),
        (("bill", "predict", "--prefill-chunk", "512"), "--prefill-chunk: needs --prefill"),
        (("bill", "predict", *PROMPTS, "--policies", "dense"), "--policies: is about steps, and --prefill about prompts"),
        (("bill", "predict", *PROMPTS, "--batches", "1"), "--batches: is about steps"),
        (("bill", "predict", *PROMPTS, "--no-overhead"), "--no-overhead: is about steps"),
        (("bill", "predict", "--devices", "8", "--prefill", "dense"), "--devices: is about steps"),
        (("bill", "choose", "--model", "needle", "--prefill", "--batches", "4"), "--batches: is about decoding"),
        (("bill", "choose", "--model", "needle", "--prefill-chunk", "512"), "--prefill-chunk: needs --prefill, or --device-memory"),
        (("regime-map", "--policies", "top:8,auto:fast"), "--policies: 'auto:fast' chooses among policies: name those"),
        (("regime-map", "--weights", "int2"), "must be one of int8, fp8, int4, fp8:tokens, int8:128x128, fp8:128x128, got int2"),
        (("generate", "x", "--model", "needle", "--dtype", "float64"), "must be one of float32, bfloat16, float16, got float64"),
        (("bill", "choose", "--model", "needle", "--prefill", *TIERS), "is about decoding, and --prefill is not"),
        (("regime-map", *TIERS, "--memory", "80"), "as --device-memory does: leave one of them out"),
        (("regime-map", "--link", "52"), "needs --device-memory and --host-memory"),
        (("bill", "fit", "old.json"), "earlier version's; measure it again"),
        (("regime-map", "--batches", "4"), "the smallest and the largest"),
        (("regime-map", "--lengths", "1m,4k"), "the smallest and the largest"),
        (("bill", "fit", "ops.json"), "ops.json is of kvjax bench ops; give results of kvjax bench decode or tiers"),
        (("bill", "choose", "--model", "needle", "--level", "sure"), "fidelity level 'sure'"),
    ],
)
def test_wrong_usage_is_named(kvjax, arguments, words):
    Path("ops.json").write_text(json.dumps({"bench": "ops", "provenance": {"date": "2026"}}))
    old = {"shape": "qwen2.5-7b", "layers": 28, "tokens": 2**17, "policy": "dense", "median_s": 1.0}
    Path("plain.json").write_text(json.dumps({"bills": [to_json(dataclasses.replace(each, bus=None)) for each in known_bills()]}))
    Path("old.json").write_text(json.dumps({"bench": "tiers", "provenance": {"date": "2026", "device": "it"}, "rows": [old]}))
    status, _, err = kvjax(*arguments)
    assert status == 2
    said = " ".join(err.replace("│", " ").split())
    assert words in said
    assert not re.search("Value error|Input should", said)


def test_all_keys_in_host_memory_come_over_the_bus(kvjax):
    asked = ("bill", "predict", "--lengths", "8k", "--batches", "1", "--policies", "dense,top:8")
    for tier, share in ((("--tier", "host", "--link", 50), 1), (("--tier", "disk", "--link", 5), 1), ((), 0)):
        status, out, err = kvjax(*asked, *tier)
        assert status == 0, err
        rows = re.findall(r"(?:dense|top:8) +│ +[\d.]+ │ +([\d.]+) │ +[\d.]+ │ +([\d.]+) │", out)
        assert len(rows) == 2
        assert all(float(bus) == share * float(keys) and float(keys) for keys, bus in rows), out


def test_a_map_reads_its_measurements_before_it_computes(kvjax, monkeypatch):
    from kvjax.bill import regimes

    monkeypatch.setattr(regimes, "regime_map", lambda *_, **__: pytest.fail("the map was computed first"))
    Path("broken.json").write_text("{")
    status, _, err = kvjax("regime-map", "--measured", "broken.json")
    assert (status, "broken.json is not JSON" in " ".join(err.split())) == (2, True)


@pytest.mark.parametrize("command", [("bill", "predict"), ("regime-map",), ("bench", "decode"), ("bench", "prefill")])
def test_help_lists_the_shapes(kvjax, command):
    status, out, _ = kvjax(*command, "--help")
    assert status == 0
    assert f"{', '.join(SHAPES)}, or a model folder or hub id" in " ".join(out.split())


# Meshes


@pytest.fixture
def mesh_bill(kvjax):
    Path("meshes.json").write_text(json.dumps(mesh_run()))
    status, out, err = kvjax("bill", "fit", "meshes.json", "--form", "fixed", "--json", "mesh-bill.json")
    assert status == 0, err
    return out


def test_fit_takes_rows_of_meshes(kvjax, mesh_bill):
    (bill,) = load_bills(Path("mesh-bill.json"))
    assert bill.mesh.error < 1e-6
    for text in ("all_reduce 4.0 + 3.0 us * log2(n), n 2, 4", "80.0 GB/s", "a number of devices", "exchanges cost nothing"):
        assert text in mesh_bill
    (checks,) = json.loads(Path("mesh-bill.json").read_text())["held_out_meshes"]
    assert checks["errors"]["number of devices"]["log2, all"]["seconds"]["mean"] < 0.05
    status, _, err = kvjax("bill", "fit", "meshes.json", "--law", "cube")
    assert (status, "'cube' is not one of log2, ring" in err) == (2, True)
    Path("meshes.json").write_text(json.dumps(mesh_run(meshes=((2, 1),))))
    status, _, err = kvjax("bill", "fit", "meshes.json")
    assert (status, "of one device has a time to fit: measure --tensor 1 --context 1, too" in err) == (2, True)


def test_predict_on_a_mesh_prints_the_parts(kvjax, mesh_bill):
    asked = ("bill", "predict", "--fit", "mesh-bill.json", "--lengths", "64k", "--batches", "8", "--policies", "top:32")
    status, out, _ = kvjax(*asked, "--tensor", "2", "--context", "2")
    assert status == 0
    for text in ("measured", "read weights", "tensor x 57: sums of the embedding", "context x 28: choosing among", "fitted"):
        assert text in out
    assert "projection:" not in out
    status, out, _ = kvjax(*asked, "--tensor", "4", "--context", "8")
    assert "projection: tensor 4 x context 8 was not measured" in out
    assert "all_gather of 8 devices, measured with 2, 4" in out
    status, out, _ = kvjax(*asked, "--tensor", "2", "--link-bandwidth", "10")
    assert (status, "links of 10 GB/s" in out, "assumed" in out) == (0, True, True)
    status, out, _ = kvjax(*asked)
    assert (status, "part of the step" in out) == (0, False), "on one device nothing changes"


def test_predict_ranks_meshes(kvjax, mesh_bill):
    asked = ("bill", "predict", "--fit", "mesh-bill.json", "--lengths", "64k", "--batches", "8", "--policies", "dense")
    status, out, _ = kvjax(*asked, "--devices", "8,24", "--memory", "40")
    assert status == 0
    assert "refused: tensor 3 x context 8: " in out
    assert "refused: tensor 1 x context 24: context 24 is no power of two" in out
    assert "tensor x context not measured: 4 x 2, 2 x 4, 1 x 8" in out
    assert "memory of the devices was not looked at" not in out
    status, out, err = kvjax(*asked, "--devices", "2", "--memory", "12")
    assert (status, out) == (2, "")
    assert "GiB on each device, and there are 12.0" in err
    assert "more of them, or a greater --memory" in err
    status, out, err = kvjax(*asked, "--devices", "7..9")
    assert (status, out) == (2, "")
    assert "no mesh of 7 devices can run this (tensor 1 x context 7: context 7 is no power of two" in err
    assert "give powers of two, as 4,8" in err
    out = kvjax(*asked, "--devices", "2..9")[1]
    assert "memory of the devices was not looked at" in out
    assert [count for count in range(1, 10) if re.search(rf"^│ {count} ", out, re.MULTILINE)] == [2, 4, 8]
    assert kvjax(*asked, "--devices", "2..x")[0] == 2


def test_a_mesh_without_terms_or_with_wrong_options_is_refused(kvjax, tmp_path):
    built_in = Path(kvjax_bill.__file__).parent / "bills" / "nvidia-h200.json"
    file = json.loads(built_in.read_text(encoding="utf-8"))
    assert all(each.pop("mesh") for each in file["bills"])
    (tmp_path / "bill.json").write_text(json.dumps(file))
    asked = ("bill", "predict", "--lengths", "64k", "--fit", str(tmp_path / "bill.json"))
    refused = {
        ("--tensor", "4"): "kvjax bench decode --tensor 1,2,4 --context 1,2,4 --steps-per-launch 1,8 --json FILE",
        ("--tensor", "4", "--exchange-latency-us", "5"): "needs --link-bandwidth",
        ("--tensor", "4", "--link-bandwidth", "5"): "needs --exchange-latency-us",
        ("--tensor", "4", "--host-devices", "4"): "has no terms for them",
        ("--tensor", "4", "--tier", "host", "--link", "50"): "on its devices alone",
        ("--devices", "4", "--tensor", "2"): "leave out --tensor",
        ("--memory", "80"): "needs --devices",
        ("--prefill", "dense"): "needs --tensor or --context",
        ("--prefill", "oracle:8", "--context", "2"): "is not counted",
        ("--prefill", "dense", "--context", "3"): "is 3, and pages are dealt out over a power of two devices: use 2, 4 or 8",
        ("--prefill", "dense", "--context", "2", "--prefill-chunk", "100"): "is 100, and must be a multiple of the page size 128",
        ("--devices", "8..4"): "write the smaller number first, as 4..8",
    }
    for options, said in refused.items():
        status, _, err = kvjax(*asked, *options)
        assert (status, said in " ".join(err.split())) == (2, True), (options, err)
    by_hand = ("--exchange-latency-us", "5", "--link-bandwidth", "100", "--network-latency-us", "20", "--network-bandwidth", "25")
    asked_of_prompt = ("--context", "2", "--prefill", "bounds:32", "--prefill-chunk", "8192")
    status, out, _ = kvjax(*asked, *asked_of_prompt)
    assert (status, "unfitted: counted; this bill has no terms" in out, "assumed" in out) == (0, True, False)
    status, out, _ = kvjax(*asked, *asked_of_prompt, *by_hand)
    assert (status, "unfitted" in out, "assumed: with values set by hand" in out) == (0, False, True)
    status, out, _ = kvjax("bill", "predict", "--lengths", "64k", "--tensor", "4", "--policies", "dense,top:32")
    assert (status, "measured" in out, "ASSUMED" in out) == (0, True, False), "the built-in bill has these terms"
    status, out, _ = kvjax(*asked, "--tensor", "4", *by_hand)
    assert (status, "ASSUMED: 5 us an exchange of two devices, 100 GB/s" in " ".join(out.split())) == (0, True)
