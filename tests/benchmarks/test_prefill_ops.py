"""The attention of prompts on tiny shapes: errors, counts, tables, and the commands of the three scripts."""

from __future__ import annotations

import json
from pathlib import Path

import jax
import numpy as np
import pytest
import typer

from benchmarks import prefill_layers, prefill_measures, prefill_ops, prefill_targets, report
from benchmarks import prefill_tables as prefill_report
from benchmarks.run import read_prompt
from kvjax.policies.prefill import BoundsBlocks, MeasureOnceMaskOnce, SinkWindow, parse_prefill
from kvjax.serving.bench.decode import config_of
from kvjax.serving.bench.prefill import PrefillPlan, policies_of, run_prefill_plan

DOCS = Path(__file__).parents[2] / "docs"
SMALL = MeasureOnceMaskOnce(k=4, k_exact=2, k_trim=4, chi=64, window_tokens=64)
OPS = ["baseline", "dense", "dense", "query-sparse", "union", "block-sparse", "delta", "sparse"]
NUMBERS = dict.fromkeys(("captured", "of_oracle", "error", "sparsity"), 0.5)
BOUNDS = BoundsBlocks(k=2, window_tokens=128)


@pytest.fixture(scope="module", autouse=True)
def few_calls():
    """Calls are timed twice, not for half a second."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prefill_ops, "MAX_CALLS", 2)
        yield


@pytest.fixture(scope="module")
def op_rows():
    return list(prefill_ops.op_rows("tiny", 1024, (SMALL,), 1e12))


@pytest.fixture(scope="module")
def bounds_rows():
    return list(prefill_ops.op_rows("tiny", 1024, (BOUNDS, SinkWindow(64, 128)), 1e12, baselines=False))


def test_ops_are_right_and_counted(op_rows):
    assert [row["op"] for row in op_rows] == OPS
    assert all(row["same_bits"] and row["median_s"] > 0 for row in op_rows)
    assert all(row["error"] < 5e-3 for row in op_rows if "error" in row)
    dense, listed, union, sparse = op_rows[1], op_rows[3], op_rows[4], op_rows[5]
    assert dense["flops"] == 4 * 4 * 64 * 1024 * 1025 / 2
    assert listed["flops"] == 4 * 4 * 64 * sum(16 * r + 1 for r in range(64))
    assert (listed["lists_full"], listed["exact_slots_right"], union["same_as_reference"], sparse["lists_full"]) == (1, 1, True, 1)
    assert listed["score_error"] < 1e-4
    assert sparse["keys_read"] <= 4 * 64 + 128
    assert op_rows[-1]["speedup"]["times"] > 0
    assert all("error" in row for row in op_rows if row["op"] not in ("union", "delta"))


@pytest.mark.long
def test_steps_of_bounds_are_right_and_counted(bounds_rows):
    """Two walks over the blocks that begin at or before a query, two products each; a policy without steps has its
    whole alone."""
    dense, select, attended, whole, window = bounds_rows
    assert [row["op"] for row in bounds_rows] == ["dense", "select", "block-sparse", "sparse", "sparse"]
    assert [row["policy"] for row in bounds_rows] == ["paged", *[str(BOUNDS)] * 3, "window:64+128"]
    assert all(row["same_bits"] and row["median_s"] > 0 for row in bounds_rows)
    assert select["flops"] == 2 * 2 * 2 * (2 * 64) * 4 / 2 * 128 * sum(range(1, 9))
    assert select["fraction_of_peak"] == pytest.approx(select["flops"] / select["median_s"] / 1e12)
    assert (select["slots_right"], select["lists_full"]) == (1, 1)
    assert select["error"] < 1e-4
    assert select["path"]["select_tiles"] == ("xla" if jax.default_backend() == "cpu" else select["path"]["select_tiles"])
    near = sum(min(t + 1, 256) for t in range(1024))
    listed = 128 * 128 * (0 + 0 + 1 + 2 * 5)  # of blocks 1 to tile - 1: the first tiles have none
    assert attended["keys_read"] == pytest.approx((listed + near) / 1024)
    assert max(attended["error"], whole["error"]) < 5e-3
    assert "error" not in window
    for row in (whole, window):
        assert row["speedup"] == {"over": dense["case"], "times": pytest.approx(dense["median_s"] / row["median_s"])}


@pytest.mark.long
def test_bounds_cost_what_the_documentation_says(bounds_rows):
    """Scoring costs 1/64 of dense attention's operations, its index 1/64 of the keys' bytes."""
    prompt = prefill_ops.make_prompt("tiny", 1024)
    layer = prompt.indexed(BoundsBlocks())
    assert 64 * layer.index["bounds128"].nbytes == layer.pages.k.nbytes
    dense, select = bounds_rows[:2]
    assert 64 * select["flops"] == pytest.approx(dense["flops"] * 9 / 8, rel=2e-3)  # a query's own block, one of 8, counts whole
    assert (BoundsBlocks(32, dense_below=0).dense_tokens, BoundsBlocks(32).dense_tokens) == (5248, 10_496)
    text = " ".join("\n".join((DOCS / f"{page}.md").read_text(encoding="utf-8") for page in ("prefill", "prefill-kernels")).split())
    for said in (
        "1/64 of the keys' bytes",
        "Both walks together cost 1/64 of dense attention's products",
        "Up to 10,496 tokens `bounds:32` is dense",
        "by lists from 5,248 tokens on",
    ):
        assert said in text


@pytest.mark.long
def test_wrong_lists_have_a_large_error(monkeypatch):
    right = prefill_ops.BoundsBlocks.lists
    monkeypatch.setattr(prefill_ops.BoundsBlocks, "lists", lambda *args: jax.numpy.minimum(right(*args), 1))
    rows = list(prefill_ops.op_rows("tiny", 1024, (BOUNDS,), 1e12, baselines=False))
    assert rows[1]["error"] > 0.1
    assert rows[1]["slots_right"] < 1


@pytest.mark.long
def test_a_policy_that_breaks_loses_no_other(monkeypatch):
    monkeypatch.setitem(prefill_ops.LISTINGS, BoundsBlocks, lambda *_: 1 / 0)
    rows = list(prefill_ops.op_rows("tiny", 256, (BOUNDS, SinkWindow(64, 128)), 1e12, baselines=False))
    assert [(row["op"], row.get("failed")) for row in rows[1:]] == [("sparse", "ZeroDivisionError: division by zero"), ("sparse", None)]
    assert "FAILED ZeroDivisionError" in prefill_report.op_table(rows)


def test_dense_attention_comes_from_the_run_with_others_beside_it():
    def row(op, policy, seconds):
        return {"op": op, "policy": policy, "shape": "tiny", "tokens": 1024, "median_s": seconds}

    first = [row("baseline", "cudnn", 1.0), row("dense", "paged", 2.0), row("sparse", "momo:4/2", 3.0)]
    later = [row("dense", "paged", 4.0), row("sparse", "momo:4/2", 5.0), row("sparse", "bounds:4", 6.0)]
    runs = [{"rows": first}, {"rows": later}]
    assert [each["median_s"] for each in prefill_report.merged_ops(runs)] == [1.0, 2.0, 3.0, 6.0]
    assert [each["median_s"] for each in prefill_report.merged_ops(runs[::-1])] == [2.0, 3.0, 6.0, 1.0]


def test_a_wrong_result_has_a_large_error(op_rows, monkeypatch):
    right = prefill_ops.flash_attention
    monkeypatch.setattr(
        prefill_ops, "flash_attention", lambda q, pages, *rest, **named: right(q, pages.replace(v=pages.v[::-1]), *rest, **named)
    )
    prompt = prefill_ops.make_prompt("tiny", 512)
    row = next(prefill_ops._dense(prompt, lambda what: None))
    assert not row["error"] < 0.1


def test_pytorch_is_asked_for_causal_attention_of_the_same_shape(monkeypatch):
    asked = []

    def ask(requests):
        asked.extend(requests)
        return {request["name"]: {"torch": "2", "kernels": [("flash", 4e6 * i, 4e6 * i + 3e5) for i in range(5)]} for request in requests}

    monkeypatch.setattr(prefill_ops, "TORCH", {"cpu": ("flash",)})
    monkeypatch.setattr(prefill_ops.torch_sdpa, "ask", ask)
    monkeypatch.setattr(prefill_ops.torch_sdpa, "installed", lambda: True)
    prompt = prefill_ops.make_prompt("tiny", 256)
    (row,) = prefill_ops._torch_baselines(prompt, lambda what: None)
    assert (asked[0]["queries"], asked[0]["tokens"], asked[0]["heads"], asked[0]["kv_heads"]) == (256, 256, 4, 2)
    assert (row["policy"], row["op"], row["path"]) == ("torch-flash", "baseline", {"torch 2": "flash"})
    assert row["median_s"] == pytest.approx(3e-4)
    assert row["flops"] == 4 * 4 * 64 * 256 * 257 / 2
    monkeypatch.setattr(prefill_ops.torch_sdpa, "installed", lambda: False)
    (row,) = prefill_ops._torch_baselines(prompt, lambda what: None)
    assert "not installed" in row["skipped"]


@pytest.fixture(scope="module")
def time_rows():
    plan = PrefillPlan("tiny", config_of("tiny", dtype="float32"), (300, 2**40), policies_of("dense,window:64+128"), 128, 2)
    return list(run_prefill_plan(plan))


@pytest.mark.long
def test_tables(op_rows, bounds_rows, time_rows):
    runs = [{"bench": "prefill-ops", "rows": [*op_rows, *bounds_rows[1:]]}, {"bench": "prefill", "rows": time_rows}]
    for run in runs:
        run["provenance"] = {"device": "here", "versions": {"jax": "0"}, "date": "2026-01-01", "command": "kvjax"}
    marks = [f"<!-- bench:{name} -->\n<!-- /bench -->" for name in ("prefill-ops", "prefill-steps", "prefill-time", "prefill-measures")]
    text = report.rendered("\n".join(marks), runs)
    assert "| query-sparse | tiny | 1K |" in text
    assert f"| select | tiny | 1K | {BOUNDS} |" in text
    (steps,) = [line.split("|") for line in prefill_report.steps_table(bounds_rows).splitlines() if str(BOUNDS) in line]
    assert steps[5:7] == [" - ", " - "]
    assert steps[9] == " - "
    assert "(paged)" in steps[4]
    assert float(steps[7]) > 0
    assert "window:64+128" in text
    assert text.count("Not measured yet") == 1
    assert len(prefill_report.op_table(op_rows).splitlines()) == len(OPS) + 2


def test_policies_written_out_are_told_apart_by_what_differs():
    written_out = [f"MeasureOnceMaskOnce(gamma={gamma}, chi=64, k_trim=None)" for gamma in (8, 16)]
    figures = dict.fromkeys(("captured", "of_oracle", "error", "sparsity"), 0.5)
    rows = [{"shape": "m", "tokens": 2048, "policy": policy} | figures for policy in (*written_out, "momo:8/8")]
    names = [line.split(" | ")[2] for line in prefill_report.measures_table(rows).splitlines()[2:]]
    assert names == ["MeasureOnceMaskOnce(gamma=8)", "MeasureOnceMaskOnce(gamma=16)", "momo:8/8"]


@pytest.mark.long
def test_layers_of_a_model_over_a_text(model, monkeypatch):
    """Dense is its own oracle; a policy that reads less has an error, and so few keys as its lists, sinks and window
    hold."""
    monkeypatch.setattr(prefill_layers, "CALLS", 1)
    peer = Path(__file__).parents[2] / "benchmarks" / "peers" / "mean.py"
    policies = [parse_prefill(name) for name in ("window:64+1024", f"{peer}:MeanPooled:1")]
    policies.append(BoundsBlocks(1, sink_tokens=128, window_tokens=128, dense_below=0))
    tokens = np.random.default_rng(0).integers(0, model.config.vocab_size, 512).tolist()
    rows = list(prefill_layers.layer_rows("tiny", model, tokens, policies))
    assert [row["policy"] for row in rows] == ["dense", *map(str, policies)]
    dense, window, mean, bounds = rows
    assert (dense["keys_read"], dense["error"], dense["speedup"]["times"]) == (256.5, 0.0, 1.0)
    assert (window["error"], window["keys_read"]) == (0.0, 256.5)  # dense at this length
    assert mean["error"] == 0.0
    tiles = [min(max(0, tile - 1), 1) * 128 for tile in range(4)]
    near = np.minimum(np.arange(512) + 1, 256).mean()
    assert bounds["keys_read"] == pytest.approx(np.mean(tiles) + near)
    assert bounds["error"] > 1e-4
    assert {row["layers"] for row in rows} == {model.config.num_layers}
    table = prefill_report.layers_table([*rows, {**window, "failed": "no memory"}])
    assert "| dense | xla |" in table
    assert "| FAILED no memory |" in table


def test_measures_of_windows_and_rows_have_their_place():
    """A window has errors alone; what rows capture has a column where any run measured it."""
    none = dict.fromkeys(("listed", "captured", "of_oracle", "sparsity", "error_with_delta"))
    window = {"shape": "m", "tokens": 2048, "policy": "window:8+16", "layer": 0, "error": 0.25} | none
    first, _, line = prefill_report.measures_table([window]).splitlines()
    assert [cell.strip() for cell in line.split("|")[4:-1]] == ["", "", "", "0.2500 (0.2500)", "", "", "", ""]
    assert "rows:" not in first
    lists = dict.fromkeys(("listed", "captured", "of_oracle", "sparsity", "error"), 0.5)
    rows = [window | {"policy": "momo:8/8", "layer": layer, "of_oracle_by_rows": share} | lists for layer, share in enumerate((0.75, 0.85))]
    first, _, *lines = prefill_report.measures_table([window, *rows]).splitlines()
    assert first.endswith("| rows: of their oracle's |")
    assert [line.split("|")[-2].strip() for line in lines] == ["", "0.8000 (0.7500)"]


def test_targets_say_what_is_short_and_what_was_not_run():
    op = {"op": "dense", "shape": "qwen2.5-7b", "tokens": 2**15}
    cudnn = op | {"op": "baseline", "policy": "cudnn", "median_s": 1.0}

    def first(paged, contiguous):
        times = (("paged", paged), ("contiguous", contiguous))
        ours = [op | {"policy": name, "median_s": t, "p10_s": 0.95 * t, "p90_s": 1.05 * t} for name, t in times]
        lines = prefill_targets.targets_table([cudnn, *ours], (), (), (), (), ()).splitlines()[2:]
        assert all("not measured" in line or "not run" in line for line in lines[1:])
        return lines[0].split("|")[-2].strip()

    assert first(0.8, 0.8) == "yes"
    assert first(0.8, 0.9) == "no"  # too far apart
    assert first(0.99, 1.01) == "short by less than its own spread (p10 to p90)"
    assert first(1.2, 1.2) == "no"
    of_layers = [{"policy": "momo:32/8", "tokens": 2**14, "layer": n, "error": 0.2, "error_with_delta": 0.1 + n / 5} for n in (0, 1)]
    of_layers = [row | {"error_between": 0.2, "error_between_with_delta": 0.3} for row in of_layers]

    def captured(*shares):
        rows = [row | {"of_oracle": share} for row, share in zip(of_layers, shares, strict=True)]
        return prefill_targets.targets_table((), (), rows, (), (), ())

    assert "| 1.00% short in the mean, 1.00% in layer 0 | yes |" in captured(0.99, 0.99)
    assert "| 1.00% short in the mean, 2.00% in layer 1; beyond it: layer 1 | in the mean, not in every layer |" in captured(1.0, 0.98)
    assert "| 2.00% short in the mean, 2.00% in layer 0; beyond it: layer 0, 1 | no |" in captured(0.98, 0.98)
    assert "| in 1 of 2 (of the queries between the exact ones alone: in 0) | no |" in captured(0.99, 0.99)


def test_targets_of_bounds_are_judged_by_its_rows_alone():
    place = {"shape": "qwen2.5-7b", "tokens": 2**17}
    layers = [place | {"op": "sparse", "policy": name, "median_s": s} for name, s in (("momo:128/8", 0.001), ("bounds:32", 0.0251))]
    times = [place | {"policy": name, "median_s": s} for name, s in (("dense", 1.0), ("bounds:32", 3.6))]
    lines = [line for line in prefill_targets.targets_table([], times, (), (), (), ()).splitlines() if "bounds:32, " in line]
    assert "| bounds:32, first token, 7B shape, 128K: at most 3.6 s | 3.60 s | yes |" in lines
    assert sum("| not run | not measured |" in line for line in lines) == len(lines) - 1 == 6
    layers = [row | {"speedup": {"times": 1.0}} for row in layers]
    lines = prefill_targets.targets_table(layers, (), (), (), (), ()).splitlines()
    assert "| bounds:32, attention of one layer, 28/4 heads, 128K: at most 25 ms | 25.10 ms | no |" in lines


def test_the_command_times_every_length_and_writes_what_it_found(tmp_path, monkeypatch, op_rows):
    file = tmp_path / "prefill.json"
    monkeypatch.setattr(prefill_ops, "peak_flops", lambda dtype: {"flops_per_s": 1e12})
    monkeypatch.setattr(prefill_ops, "op_rows", lambda shape, tokens, *_, **__: iter(op_rows) if tokens == 512 else 1 / 0)
    prefill_ops.ops_command("tiny", "512", "momo:4/2,bounds:4", baselines=False, json_out=file)
    written = json.loads(file.read_text())
    assert (written["bench"], [row["op"] for row in written["rows"]]) == ("prefill-ops", OPS)
    assert written["peak"]["flops_per_s"] == 1e12
    with pytest.raises(typer.Exit):
        prefill_ops.ops_command("tiny", "512,1k", "momo:4/2", json_out=file, implementation="xla")
    written = json.loads(file.read_text())
    assert (written["bench"], written["implementation"]) == ("prefill-ops-forced", "xla")
    assert written["rows"][-1]["failed"] == "ZeroDivisionError: division by zero"


@pytest.mark.parametrize(
    ("run", "message"),
    [
        (lambda: prefill_layers.layers_command("needle", "1k,1000", "momo:4/2"), "multiple of 128 tokens, got 1000"),
        (lambda: prefill_ops.ops_command("tiny", "1k", "dense"), "got 'dense': name a sparse one"),
        (lambda: prefill_measures.measures_command("needle", "2k", "bounds:4", chunk=100), "chunk 100 must be a positive multiple"),
        (lambda: prefill_ops.make_prompt("tiny", 100), "multiple of 128"),
        (lambda: read_prompt("needle", None, (), 10**7), "give more with --text"),
    ],
)
def test_what_makes_no_sense_is_refused(run, message):
    with pytest.raises(ValueError, match=message):
        run()


@pytest.mark.parametrize(
    ("run", "message"),
    [
        (lambda: prefill_ops.ops_command("tiny", "1k", "momo:4/2", "int8"), "'int8' is not one of"),
        (lambda: prefill_ops.ops_command("needle", "1k", "momo:4/2"), "models: benchmarks.prefill_layers"),
        (lambda: prefill_measures.measures_command("needle", "2k", "bounds:4", text=[Path("none.txt")]), "there is no file none.txt"),
    ],
)
def test_what_an_option_cannot_be_is_refused(run, message):
    with pytest.raises(typer.BadParameter, match=message):
        run()


def test_measures_take_chunk_and_dtype(monkeypatch, tmp_path):
    asked = []
    monkeypatch.setattr(prefill_measures, "read_prompt", lambda name, dtype, *_: asked.append(dtype) or (made, [1] * 2048))
    monkeypatch.setattr(prefill_measures, "record_prefill", lambda model, ids, **sizes: asked.append(sizes))
    monkeypatch.setattr(prefill_measures, "measure_recorded", lambda recorded, policy: [{"policy": str(policy), "tokens": 2048} | NUMBERS])
    made = type("Made", (), {"config": type("Config", (), {"compute_dtype": "bfloat16"})})
    prefill_measures.measures_command("needle", "2k", "bounds:4", 256, "bfloat16", json_out=tmp_path / "a.json")
    (row,) = json.loads((tmp_path / "a.json").read_text())["rows"]
    assert (row["policy"], row["dtype"], row["chunk"]) == ("bounds:4", "bfloat16", 256)
    assert asked == ["bfloat16", {"chunk": 256, "page_size": 128}]


def test_a_target_is_judged_where_the_cell_is_valid():
    def line(value, why=()):
        pair = {"difference": {"value": value, "low": value - 0.01, "high": value + 0.01}}
        row = {"policy": "momo:32/8", "length": 2**14, "hits": 390, "facts": 400, "against_dense": pair}
        dense = {"policy": "dense", "length": 2**14, "hits": 385, "facts": 400}
        run = {"rows": [dense, row], "cells": [{"length": 2**14, "facts_invalid": list(why)}]}
        table = prefill_targets.targets_table((), (), (), (), (), [run]).splitlines()
        (found,) = (each for each in table if "after momo:32/8, 16K: at most 1 point" in each)
        return found

    assert line(381 / 400 - 385 / 400).endswith("to -0.000] | yes |")  # as floats less than -0.01
    assert line(-0.0125).endswith("| no |")
    assert line(0.0, ["the control fails"]).endswith("| invalid: the control fails | not measured |")
