"""`kvjax bench decode` on a tiny model: the steps are the engine's, and rows say what was read and what had to move."""

from __future__ import annotations

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import typer
from tiny_models import sharing

from kvjax.cache.formats import parse_cache_format
from kvjax.cost_model.fitting import MESH, read_cells
from kvjax.engine.sampling import SamplingRows
from kvjax.engine.steps import StepInputs, StepStatic, decode_and_sample
from kvjax.models import TransformerDecoder
from kvjax.models.decoder import param_shapes
from kvjax.policies.decode import parse
from kvjax.serving.bench import decode as decode_bench
from kvjax.serving.bench import tables
from kvjax.serving.bench.decode import SHAPES, Plan, bytes_read, config_of, policies_of, random_params
from kvjax.serving.cli import app as cli
from kvjax.serving.cli import bench as bench_cli
from kvjax.serving.cli.options import parse_lengths
from pallas_kernels.bench import measure
from pallas_kernels.core.page_format import unpack


def plan(**changed):
    fields = {"shape": "tiny", "config": config_of("tiny", dtype="float32"), "lengths": (2048,), "policies": policies_of("dense,top:8")}
    return Plan(**(fields | {"batch": 2, "steps": 3, "rounds": 2} | changed))


@pytest.fixture(scope="module")
def drafted():
    return list(decode_bench.run_plan(plan(lengths=(2048, 2**40), drafts=(1, 4, 16)), 1e9))


@pytest.fixture(scope="module")
def rows():
    return list(decode_bench.run_plan(plan(lengths=(2048, 2**40)), 1e9))


def test_known_shapes_have_the_weights_of_their_models():
    assert SHAPES["qwen2.5-7b"].num_params == 7_615_616_512
    assert SHAPES["llama-3.1-8b"].num_params == 8_030_261_248
    assert SHAPES["llama-3.1-70b"].num_params == 70_553_706_496


def test_a_shape_may_be_a_folder(model_folder, model):
    assert config_of(str(model_folder), dtype="float32") == model.config
    assert config_of("qwen2.5-7b", 3).num_layers == 3
    with pytest.raises((ValueError, OSError)):
        config_of("./no/such/folder")


@pytest.mark.parametrize(("text", "tokens"), [("8k,128K, 1m", (8192, 131_072, 1_048_576)), ("100", (100,))])
def test_lengths(text, tokens):
    assert parse_lengths(text) == tokens


@pytest.mark.parametrize("text", ["", "8q", "k", "8k,,1m", "1.5k"])
def test_lengths_that_are_none(text):
    with pytest.raises(ValueError, match="are not understood"):
        parse_lengths(text)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"steps": 2048}, "no history"),
        ({"batch": 0}, "batch"),
        ({"rounds": 0}, "rounds"),
        ({"lengths": (0,)}, "lengths"),
        ({"drafts": (1, 5)}, r"drafts must be among 1, 4, 8, 16, each once, got \(1, 5\)"),
        ({"drafts": (4, 4)}, "each once"),
        ({"drafts": ()}, "drafts must be"),
        ({"steps_per_launch": (2,)}, r"1 to 16 and divide 3 steps, each once, got \(2,\)"),
        ({"steps_per_launch": (3, 3)}, "each once"),
        ({"steps": 34, "steps_per_launch": (17,)}, "1 to 16"),
        ({"steps_per_launch": (1, 3), "drafts": (1, 4)}, "have no drafts"),
        ({"policies": policies_of("top:8,top:8+missed1")}, r"top:8\+missed1 runs two programs"),
    ],
)
def test_plans_that_make_no_sense(changed, message):
    with pytest.raises(ValueError, match=message):
        plan(**changed)


def test_rows_say_what_was_read(rows):
    dense, top, *skipped = rows
    assert [row["policy"] for row in rows] == ["dense", "top:8"] * 2
    assert (dense["keys_read"], dense["blocks_read"], dense["reads_everything"]) == (2048, 16, True)
    assert (top["keys_read"], top["blocks_read"], top["reads_everything"]) == (1664, 13, False)
    inner = {"page_index"}  # called by append_tokens where that is not one kernel
    assert dense["path"].keys() - inner == {"append_tokens", "gather_attention", "project_tokens"}
    assert top["path"].keys() - inner == {"append_tokens", "gather_attention", "project_tokens", "select_blocks", "selected_attention"}
    for row in (dense, top):
        assert len(row["rounds_s"]) == 2
        assert 0 < row["p10_s"] <= row["median_s"] <= row["p90_s"]
        assert row["bytes_per_s"] == pytest.approx(sum(row["bytes"].values()) / row["median_s"])
        assert row["fraction_of_copy"] == pytest.approx(row["bytes_per_s"] / 1e9)
        assert (row["profile"] is None) == (jax.default_backend() != "gpu")
    assert all("weights and cache need" in row["skipped"] for row in skipped)


def test_rows_of_several_steps_per_launch_have_the_time_of_one(tmp_path):
    found = list(decode_bench.run_plan(plan(policies=policies_of("top:8"), steps=6, steps_per_launch=(1, 3)), 1e9))
    assert [row["steps_per_launch"] for row in found] == [1, 3]
    one, three = found
    assert [three[name] for name in ("keys_read", "blocks_read", "bytes")] == [one[name] for name in ("keys_read", "blocks_read", "bytes")]
    assert three["of_one"] == pytest.approx(three["median_s"] / one["median_s"])
    lines = [tables.step_cells(row)[3] for row in found]
    assert lines == ["top:8", "top:8, 3 steps per launch"]
    run = {"bench": "decode", "provenance": {"device": "a", "date": "2026"}, "rows": found}
    (cells,) = read_cells([run], lambda shape, layers: config_of(shape, layers, "float32")).values()
    assert [cell.seconds for cell in cells] == [one["median_s"]], "a cost model is fitted to one step per launch"


@pytest.mark.long
def test_steps_with_drafts_go_through_the_same_positions(drafted):
    timed, skipped = drafted[:6], drafted[6:]
    assert [(row["policy"], row["drafted"]) for row in drafted] == [
        (name, count) for name in ("dense", "top:8") for count in (1, 4, 16)
    ] * 2
    assert all("weights and cache need" in row["skipped"] for row in skipped)
    for row, one in zip(timed, (timed[0],) * 3 + (timed[3],) * 3, strict=True):
        assert row["of_one"] == pytest.approx(row["median_s"] / one["median_s"])
    dense, top = timed[:3], timed[3:]
    assert [row["keys_read"] for row in dense] == [2048 + row["drafted"] - 1 for row in dense]
    assert [row["reads_everything"] for row in timed] == [True] * 3 + [False] * 3
    assert top[0]["keys_read"] < top[1]["keys_read"] < top[2]["keys_read"], "every draft has a list"
    one, four, _ = dense
    item = 4
    assert four["bytes"]["weights"] - one["bytes"]["weights"] == 2 * 3 * SHAPES["tiny"].hidden_size * item


@pytest.mark.long
def test_a_draft_that_is_accepted_is_an_error(monkeypatch):
    """It would move the steps after it on, past the positions that are compared."""
    monkeypatch.setattr(decode_bench, "_without_drafts", lambda tokens: jnp.zeros_like(tokens))
    monkeypatch.setattr(decode_bench, "random_params", lambda config, *_: jax.tree.map(jnp.zeros_like, random_params(config)))
    rows = list(decode_bench.run_plan(plan(policies=policies_of("dense"), drafts=(4,)), 1e9))
    assert "a draft was accepted" in rows[0]["failed"]


@pytest.mark.long
@pytest.mark.parametrize("mesh", [(2, 2), pytest.param((4, 1), marks=pytest.mark.long), pytest.param((1, 4), marks=pytest.mark.long)])
def test_rows_of_a_mesh_say_what_its_devices_read(mesh):
    """The reader refuses rows whose bytes are not those that the cost model counts."""
    p = plan(policies=policies_of("top:2"), tensor=mesh[0], context=mesh[1], rounds=1, steps=2)
    (row,) = list(decode_bench.run_plan(p, 1e9))
    assert (row["tensor"], row["context"], row["keys_read"]) == (*mesh, 7 * 128)
    assert row["profile"] is None
    run = {"bench": "decode", "rows": [row], "provenance": {"device": "cpu", "date": "2026"}}
    ((cell,),) = read_cells([run], lambda shape, layers: p.config).values()
    assert (cell.bytes.weights, cell.bytes.index) == (row["bytes"]["weights"], row["bytes"]["index"])
    assert cell.bytes.kv == pytest.approx(row["bytes"]["kv"], rel=0.01)
    assert cell.exchanges.choosing == (2 if mesh[1] > 1 else 0)
    assert cell.kind == MESH
    assert f"top:2, tensor {mesh[0]} context {mesh[1]}" in tables.step_cells(row)


@pytest.mark.parametrize("command", ["decode", "prefill"])
def test_a_run_that_timed_nothing_says_so(kvjax, command, monkeypatch, copy_once):
    monkeypatch.setattr(measure, "copy_rate", copy_once)
    status, _, err = kvjax("bench", command, "--shape", "tiny", "--lengths", "1k", "--policies", "dense", "--context", "16")
    assert status == 1
    assert "nothing was timed: the mesh needs 16 devices, and there are 8" in err


def test_a_mesh_that_cannot_be_is_refused_or_skipped():
    rows = list(decode_bench.run_plan(plan(context=16), 1e9))
    assert [row["skipped"] for row in rows] == ["the mesh needs 16 devices, and there are 8"] * 2
    for changed, said in (
        ({"tensor": 3}, "KV heads cannot be copied to tensor=3"),
        ({"tensor": 2, "drafts": (4,)}, "drafts are timed on one"),
        ({"context": 3}, "context is 3"),
    ):
        with pytest.raises(ValueError, match=said):
            plan(**changed)


def test_pages_of_a_mesh_are_dealt_out_in_turn():
    table = np.asarray(decode_bench.random_cache(plan(context=4), 2100).table_of(0))[:, :17]
    each = plan(context=4).pool(2100)
    assert each == 10, "17 pages of 2 sequences over 4 devices, and the page that is none"
    assert (table.reshape(-1) // each == np.arange(34) % 4).all()
    assert len(set(table.reshape(-1).tolist())) == 34
    assert (table % each > 0).all()


def test_no_second_cache_is_held(rows):
    assert all(row["temp_bytes"] < decode_bench.cache_bytes(plan(), 2048) / 4 for row in rows[:2])


def test_bytes_of_a_step():
    p = plan(config=SHAPES["qwen2.5-7b"], batch=1, lengths=(131_072,))
    params = jax.tree.map(
        lambda shape: jax.ShapeDtypeStruct(shape, jnp.bfloat16),
        param_shapes(p.config),
        is_leaf=lambda x: isinstance(x, tuple) and isinstance(x[0], int),
    )
    params = jax.tree.map(lambda leaf: Sized(leaf), params)
    keys = 28 * 4 * 37 * 128
    found = bytes_read(p, parse("top:32"), 131_072, keys, params)
    assert found["weights"] == 2 * (p.config.num_params - 152_064 * 3584 + 3584)
    assert 14.13e9 < found["weights"] < 14.15e9
    assert found["kv"] == 2 * keys * 128 * 2
    assert found["index"] == 28 * 1024 * 4 * 2 * 128 * 2
    assert bytes_read(p, parse("dense"), 131_072, keys, params)["index"] == 0
    assert bytes_read(p, parse("quest:64"), 131_072, keys, params)["index"] == 8 * found["index"]


PACKED = {"weights": "int8", "cache_format": parse_cache_format("k=int8:channel,v=int4", "float32")}


def test_rows_of_packed_weights_and_pages_say_what_was_read():
    """The reader refuses rows whose bytes are not those that the cost model counts."""
    p = plan(policies=policies_of("dense,top:2"), lengths=(2000,), rounds=1, steps=2, **PACKED)
    cache = decode_bench.random_cache(p, 2000)
    assert sum(x.nbytes for x in jax.tree.leaves(cache.layers)) == decode_bench.cache_bytes(p, 2000)
    layer = cache.layers[0]
    keys = unpack(layer.pages.k_packed, layer.pages.k, layer.pages.k_scales)
    assert np.isnan(keys[0]).all()
    np.testing.assert_array_equal(layer.index["bounds128"][1:, :, 0, 0], keys[1:].max(2))
    rows = list(decode_bench.run_plan(p, 1e9))
    run = {"bench": "decode", "rows": rows, "provenance": {"device": "cpu", "date": "2026"}}
    ((key, (dense, top)),) = read_cells([run], lambda shape, layers: p.config).items()
    assert (key.weights, key.cache_format) == ("int8", "k=int8:channel,v=int4")
    sealed, open_page = 15 * 128, 2000 - 15 * 128
    assert dense.bytes.kv == 2 * 2 * 2 * (sealed * (16 + 2 * 16 / 128 + 8 + 2) + open_page * 2 * 16 * 4)
    assert rows[1]["policy"] == "top:2"
    assert top.bytes.kv == 2 * 2 * 2 * (6 * 128 * (16 + 2 * 16 / 128 + 8 + 2) + open_page * 2 * 16 * 4)
    assert "top:2, weights int8, pages k=int8:channel,v=int4" in tables.step_cells(rows[1])


@pytest.mark.long
def test_rows_of_packed_weights_and_pages_of_a_mesh():
    p = plan(tensor=2, context=2, **PACKED)
    run = {"bench": "decode", "rows": list(decode_bench.run_plan(p, 1e9)), "provenance": {"device": "cpu", "date": "2026"}}
    (key,) = read_cells([run], lambda shape, layers: p.config)
    assert (key.weights, key.cache_format) == ("int8", "k=int8:channel,v=int4")
    layer = decode_bench.random_cache(p, p.lengths[0]).layers[0]
    devices = {shard.device: np.asarray(shard.data) for shard in layer.open.k.addressable_shards}
    (first, other), (second, _) = p.shards(p.lengths[0]).mesh.devices  # one row of heads each
    np.testing.assert_array_equal(devices[first], devices[second])
    assert not (devices[first] == devices[other]).all()


class Sized:
    """A leaf of the sizes of an array that is not there."""

    def __init__(self, leaf):
        self.nbytes = leaf.size * leaf.dtype.itemsize


def test_the_cache_is_what_an_engine_would_hold():
    p = plan(policies=policies_of("top:8,quest:64,mean:8"))
    cache = decode_bench.random_cache(p, 2100)
    table = np.asarray(cache.table_of(0))
    assert table.shape == (2, 64), "the next width above 17 pages"
    assert (table[:, 17:] == -1).all()
    assert sorted(table[:, :17].reshape(-1)) == list(range(1, 35))
    assert cache.lengths.tolist() == [2097, 2097]
    assert len(cache.layers) == 2
    layer = cache.layers[0]
    assert layer.pages.k.shape == layer.pages.v.shape == (35, 2, 128, 16)
    assert np.isnan(layer.pages.k[0]).all()
    assert np.isfinite(layer.pages.k[1:]).all()
    assert set(layer.index) == {"bounds128", "bounds16", "mean128"}
    np.testing.assert_array_equal(layer.index["bounds128"][1:, :, 0, 0], layer.pages.k[1:].max(2))
    assert not np.array_equal(cache.layers[0].pages.k[1:], cache.layers[1].pages.k[1:])
    assert sum(x.nbytes for x in jax.tree.leaves(cache.layers)) == decode_bench.cache_bytes(p, 2100)


def test_layers_that_read_anothers_pages_have_none_and_are_read_as_often():
    p = plan(config=sharing(config_of("tiny", 3, dtype="float32"), (None, None, 0)))
    cache = decode_bench.random_cache(p, 2100)
    assert [layer is None for layer in cache.layers] == [False, False, True]
    assert (
        sum(x.nbytes for x in jax.tree.leaves(cache.layers)) == decode_bench.cache_bytes(p, 2100) == decode_bench.cache_bytes(plan(), 2100)
    )
    read = bytes_read(p, parse("top:8"), 2048, 0, decode_bench.random_params(p.config))
    assert read["index"] == 2 * 3 * 16 * 2 * 2 * 16 * 4, "batch, layers, pages, KV heads, rows of bounds"


def test_a_round_is_the_engines_steps_fed_by_each_other():
    p = plan(policies=policies_of("top:8"))
    params = decode_bench.random_params(p.config)
    rows = jax.tree.map(jnp.asarray, SamplingRows.of([None] * 2))
    (runner,) = decode_bench._compiled(p, 2048, params, decode_bench.random_cache(p, 2048), rows, print)
    _, after = decode_bench._round(p, 2048, runner, params, decode_bench.random_cache(p, 2048), rows)

    cache, tokens = decode_bench.random_cache(p, 2048), jnp.zeros(2, jnp.int32)
    for _ in range(3):
        static = StepStatic(TransformerDecoder(p.config), parse("top:8"), p.indexes)
        sampled, _, cache, _, _ = decode_and_sample(static, StepInputs(params, cache, tokens, jnp.ones(2, bool), ((), ()), rows))
        tokens = sampled.tokens
    assert after.lengths.tolist() == cache.lengths.tolist() == [2048, 2048]
    for one, other in zip(jax.tree.leaves(after), jax.tree.leaves(cache), strict=True):
        np.testing.assert_array_equal(one, other)


def test_reading_a_page_that_no_sequence_owns_is_an_error():
    p = plan(policies=policies_of("dense"))
    params = decode_bench.random_params(p.config)
    rows = jax.tree.map(jnp.asarray, SamplingRows.of([None] * 2))
    cache = decode_bench.random_cache(p, 2048)
    cache = cache.replace(page_tables={"full": cache.table_of(0).at[1, 3].set(0)})
    (runner,) = decode_bench._compiled(p, 2048, params, cache, rows, print)
    with pytest.raises(RuntimeError, match="not finite"):
        decode_bench._round(p, 2048, runner, params, cache, rows)


def test_the_command(tmp_path, monkeypatch, capsys, copy_once):
    monkeypatch.setattr(measure, "copy_rate", copy_once)
    file = tmp_path / "decode.json"
    bench_cli.decode_command("tiny", "1k", "dense", 1, 2, 1, dtype="float32", layers=1, json_out=file)
    written = json.loads(file.read_text())
    (row,) = written["rows"]
    assert (written["bench"], row["op"], row["layers"], row["tokens"], row["keys_read"]) == ("decode", "decode", 1, 1024, 1024)
    assert row["fraction_of_copy"] == pytest.approx(row["bytes_per_s"] / written["copy"]["bytes_per_s"])
    assert "dense" in capsys.readouterr().out


@pytest.mark.long
def test_the_command_with_drafts(tmp_path, monkeypatch, capsys, copy_once):
    monkeypatch.setattr(measure, "copy_rate", copy_once)
    file = tmp_path / "drafts.json"
    bench_cli.decode_command("tiny", "1k", "dense", 1, 2, 1, "4,1", dtype="float32", layers=1, json_out=file)
    run = json.loads(file.read_text())
    four, one = run["rows"]
    assert (run["bench"], four["drafted"], one["drafted"], one["of_one"]) == ("drafts", 4, 1, 1.0)
    assert "of one" in capsys.readouterr().out
    made = tables.draft_cells(four)
    assert made[4:7] == ("4", ", ".join(sorted(set(four["path"].values()))), f"{four['median_s'] * 1e3:.2f}")
    assert made[-1] == f"{four['of_one']:.3f}"
    with pytest.raises(ValueError, match=r"this is a result of kvjax bench .*: give those of kvjax bench decode"):
        read_cells([run], config_of)


@pytest.mark.long
def test_the_command_on_a_forced_path(tmp_path, monkeypatch, copy_once):
    monkeypatch.setattr(measure, "copy_rate", copy_once)
    file = tmp_path / "forced.json"
    bench_cli.decode_command("tiny", "1k", "top:1", 1, 2, 1, "1", dtype="float32", layers=1, json_out=file, implementation="xla")
    run = json.loads(file.read_text())
    assert (run["bench"], run["implementation"]) == ("decode-forced", "xla")
    assert set(run["rows"][0]["path"].values()) <= {"composed", "xla"}
    with pytest.raises(ValueError, match=r"this is a result of kvjax bench .*: give those of kvjax bench decode"):
        read_cells([run], config_of)
    with pytest.raises(typer.BadParameter, match="no platform's path is called 'triton'"):
        bench_cli.decode_command("tiny", "1k", "dense", 1, 2, 1, dtype="float32", layers=1, implementation="triton")


def test_the_command_refuses_what_it_cannot_do():
    """Numbers are refused by their options: test_bad_command_lines.py."""
    fields = {"shape": "tiny", "lengths": "1k", "policies": "dense", "batch": 1, "steps": 2, "rounds": 1}
    with pytest.raises(typer.BadParameter):
        bench_cli.decode_command(**fields, dtype="int8", layers=None, json_out=None)


@pytest.mark.long
def test_a_length_that_breaks_or_does_not_fit_leaves_rows_that_say_so(monkeypatch, tmp_path, capsys, copy_once):
    monkeypatch.setattr(measure, "copy_rate", copy_once)
    monkeypatch.setattr(decode_bench, "_compiled", lambda *_: 1 / 0)
    file = tmp_path / "decode.json"
    with pytest.raises(typer.Exit) as stopped:
        bench_cli.decode_command("tiny", "1k,2k", "dense", 1, 2, 1, "1", dtype="float32", layers=1, json_out=file)
    assert stopped.value.exit_code == 1
    failed = json.loads(file.read_text())["rows"]
    assert [(row["tokens"], row["failed"]) for row in failed] == [(n, "ZeroDivisionError: division by zero") for n in (1024, 2048)]
    assert "FAILED" in capsys.readouterr().out
    monkeypatch.setattr(decode_bench, "memory_bytes", lambda: 2**20)
    assert all("skipped" in row for row in decode_bench.run_plan(plan(), 1e9))


def test_help(capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", ["kvjax", "bench", "decode", "--help"])
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    assert not stopped.value.code
    out = capsys.readouterr().out
    for option in ("--shape", "--lengths", "--policies", "--batch", "--steps", "--rounds", "--drafts", "--dtype", "--layers", "--json"):
        assert option in out
