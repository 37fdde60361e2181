"""`kvjax bench prefill` on tiny shapes: rows and tables say what was run; parts of a profile; measures against dense attention."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path

import jax
import numpy as np
import pytest
import typer

from kvjax.models.decoder import TransformerDecoder
from kvjax.placement import place_params
from kvjax.policies.prefill import BoundsBlocks, MeasureOnceMaskOnce, SinkWindow, parse_prefill
from kvjax.serving.bench import prefill as prefill_bench
from kvjax.serving.bench import prefill_layers, prefill_ops
from kvjax.serving.bench.decode import SHAPES, config_of
from kvjax.serving.bench.prefill import PrefillPlan, policies_of, run_prefill_plan, split
from kvjax.serving.bench.random_model import placed, random_params
from kvjax.serving.cli import bench as bench_cli
from kvjax.serving.cli import overlap as overlap_cli
from kvjax.serving.cli import prefill as prefill_cli
from pallas_kernels.bench import report
from pallas_kernels.bench.prefill import report as prefill_report
from pallas_kernels.bench.prefill import targets as prefill_targets
from pallas_kernels.bench.timing import Kernel

SMALL = MeasureOnceMaskOnce(k=4, k_exact=2, k_trim=4, chi=64, window_tokens=64)
OPS = ["baseline", "dense", "dense", "query-sparse", "union", "block-sparse", "delta", "sparse"]
BOUNDS = BoundsBlocks(k=2, window_tokens=128)


@pytest.fixture(scope="module", autouse=True)
def few_calls():
    """Calls are timed twice, not for half a second."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prefill_ops, "MOST_CALLS", 2)
        yield


@pytest.fixture(scope="module")
def op_rows():
    return list(prefill_ops.op_rows("tiny", 1024, (SMALL,), 1e12))


@pytest.fixture(scope="module")
def bounds_rows():
    return list(prefill_ops.op_rows("tiny", 1024, (BOUNDS, SinkWindow(64, 128)), 1e12, baselines=False))


@pytest.fixture(scope="module")
def time_rows():
    plan = PrefillPlan("tiny", config_of("tiny", dtype="float32"), (300, 2**40), policies_of("dense,window:64+128"), 128, 2)
    return list(run_prefill_plan(plan))


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
    """Two walks over the blocks that begin at or before a query, two products each; a policy without steps has its whole alone."""
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
    text = (Path(__file__).parents[2] / "docs" / "prefill.md").read_text(encoding="utf-8")
    for said in (
        "which costs 1/64 of the keys' bytes",
        "both together 1/64 of dense attention's",
        "Up to 5,248 tokens the lists of `bounds:32`",
        "Up to twice as many tokens, 10,496, it is dense too",
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


def test_time_to_first_token(time_rows):
    dense, window, *skipped = time_rows
    assert [row["policy"] for row in time_rows] == ["dense", "window:64+128"] * 2
    for row in (dense, window):
        assert len(row["rounds_s"]) == 2
        assert row["tokens_per_s"] == pytest.approx(300 / row["median_s"])
        assert row["path"]["flash_attention"] == ("xla" if jax.default_backend() == "cpu" else row["path"]["flash_attention"])
        assert row["temp_bytes"] < row["held_bytes"] * 8
    assert all("weights and cache need" in row["skipped"] for row in skipped)


@pytest.mark.long
def test_the_cache_has_what_a_policy_scans():
    """Indexes are in the cache, are counted, and change what lists hold: without them no bound would be seen."""
    config, bounds = SHAPES["tiny"], BoundsBlocks(k=1, window_tokens=128)
    plan = PrefillPlan("tiny", config, (1024,), (parse_prefill("dense"), bounds), 128, 1)
    dense, sparse = run_prefill_plan(plan)
    assert sparse["path"]["select_tiles"]
    assert sparse["path"]["page_index"]
    index = prefill_bench.empty_cache(plan, 1024, bounds).layers[0].index["bounds128"]
    assert sparse["held_bytes"] - dense["held_bytes"] == index.nbytes * config.num_layers


@pytest.mark.quick_but("bounds")
@pytest.mark.parametrize("name", ["dense", "bounds"])
def test_the_steps_are_the_engines(model, name):
    """Logits of the benchmark's chunks are those of an engine's prefill."""
    policy = {"dense": parse_prefill("dense"), "bounds": BoundsBlocks(k=1, chi=32, key_block=32, sink_tokens=32, window_tokens=128)}[name]
    plan = PrefillPlan("", model.config, (300,), (policy,), 128, 1)
    chunks = prefill_bench._chunks(plan, 300)
    assert [chunk[0] for chunk in chunks] == [128, 256, 300]
    from kvjax import Engine
    from kvjax.models.decoder import TransformerDecoder
    from kvjax.policies.prefill import indexes_of
    from kvjax.steps import prefill_step

    tokens = np.concatenate([chunk[1][0] for chunk in chunks])[:300].tolist()
    (sequence,) = Engine(model, pages=4, prefill_chunk=128, prefill=policy).prefill([tokens])
    cache = prefill_bench.empty_cache(plan, 300, policy)
    for last, *operands in chunks:
        cache = cache.replace(lengths=np.array([last], np.int32))
        logits, cache, _ = prefill_step(TransformerDecoder(model.config), policy, indexes_of(policy), model.params, cache, *operands)
    np.testing.assert_array_equal(np.asarray(logits[0]), np.asarray(sequence.logits))


def test_a_profile_falls_into_parts():
    names = {
        "flash_attention_kernel_mosaic_gpu_kernel": "dense attention",
        "merge_kernel_mosaic_gpu_kernel": "dense attention",
        "query_sparse_attention_kernel_mosaic_gpu_kernel": "query-sparse attention",
        "block_sparse_attention_kernel_mosaic_gpu_kernel": "block-sparse attention",
        "sort_3": "union",
        "select_tiles_kernel_mosaic_gpu_kernel_2": "select",
        "top_k_kernel_mosaic_gpu_kernel": "select",
        "input_scatter_fusion": "append",
        "nvjet_sm90_tst_128x256": "projections",
        "gemm_fusion_dot_12": "projections",
        "loop_multiply_fusion_2": "overhead",
    }
    kernels = [Kernel(name, 1e9 * i, 1e9 * i + 5e8) for i, name in enumerate(names)]
    found = split(kernels)
    for name in set(names.values()):
        assert found[name] == pytest.approx(0.5 * list(names.values()).count(name))
    assert found["idle"] == pytest.approx(5.0)
    assert sum(found.values()) == pytest.approx(10.5)


def test_the_longest_kernels_are_named():
    chunks = [[Kernel("a_1", 0, 3e9), Kernel("a_2", 4e9, 5e9), Kernel("b", 6e9, 7e9)], [Kernel("b", 0, 1e9), Kernel("c", 2e9, 2.5e9)]]
    assert prefill_bench.longest(chunks, 2) == pytest.approx({"a": 2.0, "b": 1.0})


def test_a_split_shows_parts_that_earlier_runs_did_not_have():
    place = {"shape": "tiny", "tokens": 1024}
    old, new = ({"policy": name, "profile": {"parts_s": [parts]}} for name, parts in (("a", {"x": 0.25}), ("b", {"y": 0.5, "x": 0.5})))
    first, _, *lines = prefill_report.split_table([place | old, place | new]).splitlines()
    assert first.endswith("| ms a chunk | y | x |")
    assert [line.split("|")[5:-1] for line in lines] == [[" 0.0 (0%) ", " 250.0 (100%) "], [" 500.0 (50%) ", " 500.0 (50%) "]]


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


def test_command_writes_json(tmp_path, capsys, monkeypatch, op_rows):
    file = tmp_path / "prefill.json"
    bench_cli.prefill_command("tiny", "256", "dense", 128, 1, "float32", 1, False, None, False, False, None, file)
    written = json.loads(file.read_text())
    assert (written["bench"], written["rows"][0]["tokens"], written["rows"][0]["layers"]) == ("prefill", 256, 1)
    printed = capsys.readouterr().out
    assert re.search(r"tiny +256 +dense +128 ", printed)
    assert "|" not in printed  # a table for the terminal
    assert printed.count("shape") == 1  # none without rows
    bench_cli.prefill_command("tiny", "256", "dense", 128, 1, "float32", 1, json_out=file, implementation="xla")
    run = json.loads(file.read_text())
    assert (run["bench"], run["implementation"], set(run["rows"][0]["path"].values())) == ("prefill-forced", "xla", {"xla"})
    monkeypatch.setattr(
        prefill_ops,
        "op_rows",
        lambda shape, tokens, policies, peak, baselines, **_: iter(
            op_rows if (tokens, [str(p) for p in policies], baselines) == (512, ["momo:4/2", "bounds:4"], False) else ()
        ),
    )
    bench_cli.prefill_command("tiny", "512", "momo:4/2,bounds:4", None, None, "bfloat16", None, True, False, False, False, None, file)
    written = json.loads(file.read_text())
    assert (written["bench"], [row["op"] for row in written["rows"]]) == ("prefill-ops", OPS)
    assert written["peak"]["flops_per_s"] > 0


@pytest.mark.parametrize(
    ("run", "message"),
    [
        (lambda: prefill_cli.layers_run("needle", "1k,1000", "momo:4/2", "bfloat16"), "multiples of 128 tokens, got 1000"),
        (lambda: prefill_cli.ops_run("tiny", "1k", "dense", "bfloat16"), "got 'dense': name a sparse one"),
        (lambda: prefill_cli.ops_run("tiny", "1k", "momo:4/2", "int8"), "dtype 'int8' is not one of"),
        (lambda: prefill_cli.time_run("tiny", "1k", "dense", "float32", chunk=100, rounds=1, layers=1), "multiple of the page size"),
        (lambda: prefill_cli.time_run("tiny", "1k", "dense", "float32", chunk=128, rounds=0, layers=1), "rounds must be at least 1"),
        (lambda: prefill_cli.time_run("tiny", "1k", "dense", "float32", chunk=128, rounds=1, layers=0), "layers must be at least 1"),
        (lambda: prefill_cli.time_run("tiny", "1x", "dense", "float32", chunk=128, rounds=1, layers=1), "not understood"),
        (lambda: prefill_ops.make_prompt("tiny", 100), "multiple of 128"),
    ],
)
def test_what_makes_no_sense_is_refused(run, message):
    with pytest.raises(ValueError, match=message):
        run()


@pytest.mark.long
def test_prompts_over_packed_weights_and_pages():
    run = prefill_cli.time_run(
        "tiny", "200", "dense", "float32", chunk=128, layers=1, packed=((None, None), ("int4", "k=int8:channel,v=int4"))
    )
    plain, packed = run.rows(lambda what: None, {})
    assert (packed["weights"], packed["cache_format"]) == ("int4", "k=int8:channel,v=int4")
    assert "median_s" in packed
    pages = 3 * 2 * 128 * 2 * 16 * 4, 3 * 2 * (128 * (16 + 8 + 2) + 2 * 16) + 2 * 2 * 128 * 2 * 16 * 4  # packed: and two open pages
    weights = [
        sum(leaf.nbytes for leaf in jax.tree.leaves(random_params(config_of("tiny", 1, "float32"), weights=each)))
        for each in (None, "int4")
    ]
    assert [row["held_bytes"] for row in (plain, packed)] == [sum(each) for each in zip(pages, weights, strict=True)]
    assert "dense, weights int4, pages k=int8:channel,v=int4" in run.table([plain, packed])
    with pytest.raises(ValueError, match="weights is 'int3'"):
        prefill_cli.time_run("tiny", "1k", "dense", "float32", packed=(("int3", None),))


def test_ops_and_measures_exclude_each_other():
    with pytest.raises(typer.BadParameter, match="exclude each other"):
        bench_cli.prefill_command("tiny", "1k", "dense", 128, 1, "float32", None, True, None, True, False, None, None)


def test_baselines_belong_to_ops():
    with pytest.raises(typer.BadParameter, match="belongs to --ops") as refused:
        bench_cli.prefill_command("tiny", "1k", "dense", 128, 1, "float32", None, False, False, False, False, None, None)
    assert refused.value.param_hint == "--baselines"


@pytest.mark.parametrize(
    ("form", "options", "named"),
    [
        ("--ops", {"chunk": 128}, "--chunk"),
        ("--ops", {"rounds": 1}, "--rounds"),
        ("--ops", {"layers": 1}, "--layers"),
        ("--measures", {"rounds": 1}, "--rounds"),
        ("--measures", {"layers": 1}, "--layers"),
    ],
)
def test_options_that_do_nothing_are_refused(form, options, named):
    names = ("chunk", "rounds", "dtype", "layers", "text", "json_out", "baselines")
    given = dict.fromkeys(names) | {"ablate": False} | options
    shape = {"--ops": "tiny", "--measures": "needle"}[form]
    with pytest.raises(typer.BadParameter, match=f"does nothing with {form}: leave it out") as refused:
        bench_cli.prefill_command(shape, "1k", "momo:4/2", ops=form == "--ops", measures=form == "--measures", **given)
    assert refused.value.param_hint == named


def test_measures_refuse_sizes_without_a_model():
    names = ("chunk", "rounds", "dtype", "layers", "text", "json_out", "baselines")
    with pytest.raises(typer.BadParameter, match="needs a real model, but tiny has no weights"):
        bench_cli.prefill_command("tiny", "1k", "momo:4/2", ops=False, measures=True, ablate=False, **dict.fromkeys(names))


@pytest.mark.long
def test_layers_of_a_model_over_a_text(model, monkeypatch):
    """Dense is its own oracle; a policy that reads less has an error, and so few keys as its lists, sinks and window hold."""
    monkeypatch.setattr(prefill_layers, "CALLS", 1)
    policies = [parse_prefill(name) for name in ("window:64+1024", "oracle:1")]
    policies.append(BoundsBlocks(1, sink_tokens=128, window_tokens=128, dense_below=0))
    tokens = np.random.default_rng(0).integers(0, model.config.vocab_size, 512).tolist()
    rows = list(prefill_layers.layer_rows("tiny", model, tokens, policies))
    assert [row["policy"] for row in rows] == ["dense", *map(str, policies)]
    dense, window, oracle, bounds = rows
    assert (dense["keys_read"], dense["error"], dense["speedup"]["times"]) == (256.5, 0.0, 1.0)
    assert (window["error"], window["keys_read"]) == (0.0, 256.5)  # dense at this length
    assert oracle["error"] == 0.0
    tiles = [min(max(0, tile - 1), 1) * 128 for tile in range(4)]
    near = np.minimum(np.arange(512) + 1, 256).mean()
    assert bounds["keys_read"] == pytest.approx(np.mean(tiles) + near)
    assert bounds["error"] > 1e-4
    assert {row["layers"] for row in rows} == {model.config.num_layers}
    table = prefill_report.layers_table([*rows, {**window, "failed": "no memory"}])
    assert "| dense | xla |" in table
    assert "| FAILED no memory |" in table


def test_measures_take_chunk_and_dtype(monkeypatch):
    import kvjax
    from kvjax.fidelity import measures

    asked = []
    load = kvjax.load
    monkeypatch.setattr(kvjax, "load", lambda model, dtype: asked.append(dtype) or load(model, dtype=dtype))
    monkeypatch.setattr(measures, "record_prefill", lambda model, ids, **sizes: asked.append(sizes))
    monkeypatch.setattr(measures, "measure_recorded", lambda recorded, policy: [{"policy": str(policy)}])
    run = prefill_cli.measures_run("needle", "2k", "oracle:4", "bfloat16", chunk=256)
    assert [(row["policy"], row["dtype"], row["chunk"]) for row in run.rows(print, {})] == [("oracle:4", "bfloat16", 256)]
    assert asked == ["bfloat16", {"chunk": 256, "page_size": 128}]
    with pytest.raises(ValueError, match="chunk 100 must be a positive multiple of the page size 128"):
        prefill_cli.measures_run("needle", "2k", "oracle:4", chunk=100)


def test_a_text_that_is_not_there_is_named_with_its_option(tmp_path):
    for read in (
        lambda: prefill_cli.measures_run("needle", "2k", "oracle:4", files=[tmp_path / "none.txt"]),
        lambda: overlap_cli.measure_overlap(
            "needle", "64", 4, "8", kind="relu", files=[tmp_path / "none.txt"], json_out=None, plot=None, save=None
        ),
    ):
        with pytest.raises(typer.BadParameter, match=r"there is no file .*none\.txt") as refused:
            read()
        assert refused.value.param_hint == "--text"


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


def test_one_failure_loses_no_other_row(monkeypatch):
    monkeypatch.setattr(prefill_bench, "_measure", lambda *_: 1 / 0)
    plan = PrefillPlan("tiny", config_of("tiny", dtype="float32"), (128, 256), (parse_prefill("dense"),), 128, 1)
    assert [row["failed"] for row in run_prefill_plan(plan)] == ["ZeroDivisionError: division by zero"] * 2


@pytest.mark.parametrize("sizes", [(2, 2), pytest.param((4, 1), marks=pytest.mark.long), pytest.param((1, 4), marks=pytest.mark.long)])
def test_a_prompt_on_a_mesh_has_the_logits_of_one_device(sizes, monkeypatch):
    """In chunks whose tables are wider and wider, as those of long prompts are. Long cases run dense prefill on their meshes, too."""
    monkeypatch.setattr(prefill_bench, "staged_width", lambda pages: -(-pages // 4) * 4)
    policies = *policies_of("dense"), BoundsBlocks(k=1, window_tokens=128, dense_below=0)
    shape, params = ("tiny", config_of("tiny", dtype="float32"), (700,), policies, 256, 1, None, None), None
    found = {}
    for mesh_sizes in ((1, 1), sizes):
        plan = PrefillPlan(*shape, *mesh_sizes)
        decoder, shards = TransformerDecoder(plan.config), plan.shards(700)
        params = random_params(plan.config) if params is None else place_params(decoder, params, shards)
        on_mesh = plan.policies[1:] if sizes == (2, 2) else plan.policies
        for policy in plan.policies if mesh_sizes == (1, 1) else on_mesh:
            cache = prefill_bench.empty_cache(plan, 700, policy)
            tables = prefill_bench._tables(plan, cache, 700)
            assert len(tables) == (1 if mesh_sizes[1] == 1 else 2)
            for last, *operands in prefill_bench._chunks(plan, 700):
                given = prefill_bench.with_tables(cache, tables[prefill_bench._width(plan, last, 700)], shards)
                given = given.replace(lengths=placed(shards, np.array([last], np.int32)))
                static = decoder, policy, prefill_bench.indexes_of(policy)
                logits, cache, _ = prefill_bench.prefill_step(*static, params, given, *placed(shards, operands), shards=shards)
            found[mesh_sizes, policy] = np.asarray(logits)
    for policy in on_mesh:
        one, several = found[(1, 1), policy], found[sizes, policy]
        assert np.abs(several[:, : one.shape[1]] - one).max() <= 1e-5 * np.abs(one).max()
    one, other = (found[(1, 1), policy] for policy in plan.policies)
    assert np.abs(one - other).max() > 1e-3 * np.abs(one).max(), "the policies read the same"


@pytest.mark.long
def test_rows_of_a_mesh_say_so():
    plan = PrefillPlan("tiny", config_of("tiny", dtype="float32"), (300,), policies_of("dense"), 256, 1, None, None, 2, 2)
    alone = dataclasses.replace(plan, tensor=1, context=1)
    (row,), (other,) = (list(run_prefill_plan(each)) for each in (plan, alone))
    assert (row["tensor"], row["context"], other["tensor"], other["context"]) == (2, 2, 1, 1)
    assert 0.25 < row["held_bytes"] / other["held_bytes"] < 0.6, "of one device"
    lines = prefill_report.time_table([row, other]).splitlines()
    assert "dense, tensor 2 context 2" in lines[2]
    assert lines[2].split("|")[8].strip() == "1.00", "compared with dense on the same mesh"


def test_meshes_that_cannot_be_are_refused_or_skipped():
    shape = "tiny", config_of("tiny", dtype="float32"), (300,), policies_of("dense"), 256, 1
    (row,) = run_prefill_plan(PrefillPlan(*shape, context=16))
    assert row["skipped"] == "the mesh needs 16 devices, and there are 8"
    for changed, said in (({"tensor": 3}, "tensor=3"), ({"context": 3}, "context is 3"), ({"tensor": 2, "weights": "int8"}, "one device")):
        with pytest.raises(ValueError, match=said):
            PrefillPlan(*shape, **changed)
