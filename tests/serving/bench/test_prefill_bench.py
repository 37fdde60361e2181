"""`kvjax bench prefill` on tiny shapes: rows and tables say what was run; parts of a profile; measures against dense
attention."""

from __future__ import annotations

import dataclasses
import json
import re

import jax
import numpy as np
import pytest
import typer

from kvjax.cache.formats import parse_cache_format
from kvjax.model.placement import place_params
from kvjax.models.decoder import TransformerDecoder
from kvjax.policies.prefill import BoundsBlocks, MeasureOnceMaskOnce, parse_prefill
from kvjax.serving.bench import prefill as prefill_bench
from kvjax.serving.bench import tables
from kvjax.serving.bench.decode import SHAPES, config_of
from kvjax.serving.bench.prefill import PrefillPlan, policies_of, run_prefill_plan, split
from kvjax.serving.bench.random_model import placed, random_params
from kvjax.serving.cli import bench as bench_cli
from pallas_kernels.bench.timing import Kernel

SMALL = MeasureOnceMaskOnce(k=4, k_exact=2, k_trim=4, chi=64, window_tokens=64)
OPS = ["baseline", "dense", "dense", "query-sparse", "union", "block-sparse", "delta", "sparse"]
BOUNDS = BoundsBlocks(k=2, window_tokens=128)


@pytest.fixture(scope="module")
def time_rows():
    plan = PrefillPlan("tiny", config_of("tiny", dtype="float32"), (300, 2**40), policies_of("dense,window:64+128"), 128, 2)
    return list(run_prefill_plan(plan))


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
    from kvjax.engine.steps import ChunkInputs, StepStatic
    from kvjax.models.decoder import TransformerDecoder
    from kvjax.policies.prefill import indexes_of

    tokens = np.concatenate([chunk[1][0] for chunk in chunks])[:300].tolist()
    (sequence,) = Engine(model, pages=4, prefill_chunk=128, prefill=policy).prefill([tokens])
    cache = prefill_bench.empty_cache(plan, 300, policy)
    for last, *operands in chunks:
        cache = cache.replace(lengths=np.array([last], np.int32))
        static = StepStatic(TransformerDecoder(model.config), policy, indexes_of(policy))
        logits, cache, _ = prefill_bench.prefill_step(static, ChunkInputs(model.params, cache, *operands))
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
    first, _, *lines = tables.split_table([place | old, place | new]).splitlines()
    assert first.endswith("| ms a chunk | y | x |")
    assert [line.split("|")[5:-1] for line in lines] == [[" 0.0 (0%) ", " 250.0 (100%) "], [" 500.0 (50%) ", " 500.0 (50%) "]]


def test_one_failure_loses_no_other_row(monkeypatch):
    monkeypatch.setattr(prefill_bench, "_measure", lambda *_: 1 / 0)
    plan = PrefillPlan("tiny", config_of("tiny", dtype="float32"), (128, 256), (parse_prefill("dense"),), 128, 1)
    assert [row["failed"] for row in run_prefill_plan(plan)] == ["ZeroDivisionError: division by zero"] * 2


@pytest.mark.long
@pytest.mark.parametrize("sizes", [(2, 2), (4, 1), (1, 4)])
def test_a_prompt_on_a_mesh_has_the_logits_of_one_device(sizes, monkeypatch):
    """In chunks whose tables are wider and wider, as those of long prompts are. Long cases run dense prefill on their
    meshes, too."""
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
                static = prefill_bench.StepStatic(decoder, policy, prefill_bench.indexes_of(policy), shards)
                inputs = prefill_bench.ChunkInputs(params, given, *placed(shards, operands))
                logits, cache, _ = prefill_bench.prefill_step(static, inputs)
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
    lines = tables.time_table([row, other]).splitlines()
    assert "dense, tensor 2 context 2" in lines[2]
    assert lines[2].split("|")[8].strip() == "1.00", "compared with dense on the same mesh"


def test_meshes_that_cannot_be_are_refused_or_skipped():
    shape = "tiny", config_of("tiny", dtype="float32"), (300,), policies_of("dense"), 256, 1
    (row,) = run_prefill_plan(PrefillPlan(*shape, context=16))
    assert row["skipped"] == "the mesh needs 16 devices, and there are 8"
    for changed, said in (({"tensor": 3}, "tensor=3"), ({"context": 3}, "context is 3"), ({"tensor": 2, "weights": "int8"}, "one device")):
        with pytest.raises(ValueError, match=said):
            PrefillPlan(*shape, **changed)


def test_command_writes_json(tmp_path, capsys):
    file = tmp_path / "prefill.json"
    bench_cli.prefill_command("tiny", "256", "dense", 128, 1, "float32", 1, file)
    written = json.loads(file.read_text())
    assert (written["bench"], written["rows"][0]["tokens"], written["rows"][0]["layers"]) == ("prefill", 256, 1)
    printed = capsys.readouterr().out
    assert re.search(r"tiny +256 +dense +128 ", printed)
    assert "|" not in printed  # a table for the terminal
    assert printed.count("shape") == 1  # none without rows
    bench_cli.prefill_command("tiny", "256", "dense", 128, 1, "float32", 1, file, implementation="xla")
    run = json.loads(file.read_text())
    assert (run["bench"], run["implementation"], set(run["rows"][0]["path"].values())) == ("prefill-forced", "xla", {"xla"})


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"chunk": 100}, "multiple of the page size"),
        ({"rounds": 0}, "rounds must be at least 1"),
        ({"lengths": "1x"}, "not understood"),
        ({"dtype": "int8"}, "'int8' is not one of"),
        ({"weights": "int3"}, "'int3' is not one of"),
    ],
)
def test_what_makes_no_sense_is_refused(given, message):
    with pytest.raises(typer.BadParameter, match=message):
        bench_cli.prefill_command("tiny", **{"lengths": "1k", "policies": "dense", "chunk": 128, "layers": 1} | given)


@pytest.mark.long
def test_prompts_over_packed_weights_and_pages():
    plain = PrefillPlan("tiny", config_of("tiny", 1, "float32"), (200,), policies_of("dense"), 128, 1)
    both = plain, dataclasses.replace(plain, weights="int4", cache_format=parse_cache_format("k=int8:channel,v=int4", "float32"))
    plain, packed = (row for plan in both for row in run_prefill_plan(plan))
    assert (packed["weights"], packed["cache_format"]) == ("int4", "k=int8:channel,v=int4")
    assert "median_s" in packed
    pages = 3 * 2 * 128 * 2 * 16 * 4, 3 * 2 * (128 * (16 + 8 + 2) + 2 * 16) + 2 * 2 * 128 * 2 * 16 * 4  # packed: and two open pages
    weights = [
        sum(leaf.nbytes for leaf in jax.tree.leaves(random_params(config_of("tiny", 1, "float32"), weights=each)))
        for each in (None, "int4")
    ]
    assert [row["held_bytes"] for row in (plain, packed)] == [sum(each) for each in zip(pages, weights, strict=True)]
    assert "dense, weights int4, pages k=int8:channel,v=int4" in tables.time_table([plain, packed])
