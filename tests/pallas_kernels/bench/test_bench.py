"""A run of the op benchmarks from end to end on tiny cases, and what is done with a case that cannot run."""

from __future__ import annotations

import dataclasses
import fnmatch
import json
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rich.console import Console

from pallas_kernels.bench import inputs, measure, ops, report, session, torch_sdpa
from pallas_kernels.bench.cases import BUDGETS, PACKED, PROJECTIONS, Case, all_cases, baselines, matching
from pallas_kernels.core import dispatch
from pallas_kernels.core.page_format import unpack
from pallas_kernels.core.pages import Pages

SPARSE = Case("sparse", "tiny", 2048, 2, "top:8")
INDEX = Case("index", "tiny", 1024, 1, "bounds16")
APPEND = Case("append", "tiny", 1024, 2, "bounds16")


@pytest.fixture(autouse=True)
def _quick(monkeypatch, copy_once):
    monkeypatch.setattr(measure, "TIMED_SECONDS", 0.01)
    monkeypatch.setattr(session, "copy_rate", copy_once)
    monkeypatch.setattr(session, "read_rate", copy_once)
    monkeypatch.setattr(inputs, "MIN_OPS", 2)


def run(*cases, **options):
    options = {"baselines": False, "json_out": None, "console": Console(quiet=True)} | options
    return session.run(cases, options.pop("implementation", None), **options)


def test_names_are_unique_and_cover_the_reach():
    names = [case.name for case in all_cases()]
    assert len(set(names)) == len(names)
    for tokens in ("8k", "32k", "128k", "512k", "1024k"):
        for batch in (1, 4, 8):
            for what in ("dense/*/dense", "sparse/*/top:8", "sparse/*/top:32", "sparse/*/quest:64", "sparse/*/quest:256"):
                op, _, policy = what.split("/")
                assert f"{op}/qwen2.5-7b/{tokens}/b{batch}/{policy}" in names
    assert {"sparse/qwen2.5-7b/128k/b1/cascade:4/32", "sparse/qwen2.5-7b/1024k/b1/cascade:4/32"} <= set(names)
    for pattern in ("pair/*", "gather/*", "select/*", "index/*", "append/*/open", "project/*/gate-up", "sparse/llama-3.1-8b/*"):
        assert fnmatch.filter(names, pattern)


def test_the_same_key_budgets_at_both_block_sizes():
    assert BUDGETS["top:8"].keys == 13 * 128
    assert BUDGETS["quest:64"].keys == 97 * 16
    for coarse, fine in (("top:8", "quest:64"), ("top:32", "quest:256")):
        assert BUDGETS[fine].k * BUDGETS[fine].block_size == BUDGETS[coarse].k * BUDGETS[coarse].block_size


def test_globs_choose():
    assert {case.policy for case in matching(["sparse/qwen*/8k/b1/top:*"])} == {"top:8", "top:32"}
    assert "tiny" not in {case.shape for case in matching([])}
    with pytest.raises(ValueError, match=r"no case matches 'dense/nothing'"):
        matching(["*/tiny/*", "dense/nothing"])


def test_baselines_stand_at_every_place_where_attention_is_measured():
    assert baselines([SPARSE, INDEX, SPARSE], ["a", "b"]) == [Case("baseline", "tiny", 2048, 2, name) for name in "ab"]


def test_bytes_that_have_to_move():
    top = Case("sparse", "qwen2.5-7b", 131_072, 8, "top:8")
    keys = 8 * 4 * 1664
    assert inputs.bytes_read(top, keys) == {"kv": 2 * keys * 128 * 2, "index": 8 * 4 * 1024 * 2 * 128 * 2}
    assert inputs.bytes_read(Case("gather", *top.place, "top:8"), keys) == {"kv": 2 * keys * 128 * 2, "index": 0}
    assert inputs.bytes_read(Case("select", *top.place, "quest:64"), keys) == {"kv": 0, "index": 8 * 4 * 8192 * 2 * 128 * 2}
    cascade = Case("sparse", *top.place, "cascade:4/32")
    assert inputs.bytes_read(cascade, keys) == inputs.bytes_read(top, keys) | {"codes": 8 * 4 * 32 * (128 + 8) * 64}
    assert inputs.bytes_held(cascade, 3) - inputs.bytes_held(top, 3) == 3 * 8 * 4 * 1024 * (128 + 8) * 64
    by_keys = Case("sparse", *top.place, "cascade:4/32+cache", "int8")
    assert inputs.bytes_read(by_keys, keys)["codes"] == 8 * 4 * 32 * 128 * (128 + 2)
    dense = Case("dense", "llama-3.1-8b", 8192, 1, "dense")
    assert inputs.bytes_read(dense, 8 * 8192) == {"kv": 2 * 8 * 8192 * 128 * 2, "index": 0}
    assert inputs.bytes_read(INDEX, 2 * 1024) == {"keys": 2 * 1024 * 64 * 2, "index": 2 * 64 * 2 * 64 * 2}
    tokens = 2 * 2 * 2 * 2 * 64 * 2  # K and V, read and written, rows, heads
    assert inputs.bytes_read(APPEND, 4 * 128) == {"tokens": tokens, "keys": 4 * 128 * 64 * 2, "index": 4 * 8 * 2 * 64 * 2}
    assert inputs.bytes_read(Case("append", *APPEND.place, "open"), 0) == {"tokens": tokens, "keys": 0, "index": 0}


def test_enough_copies_to_leave_the_cache(monkeypatch):
    monkeypatch.setattr(inputs, "cache_bytes", lambda: 60 * 2**20)
    assert inputs.copies_needed(2**20) == inputs.MAX_OPS
    assert inputs.copies_needed(10 * 2**20) == 12
    assert inputs.copies_needed(2**30) == 1


def test_pools_are_permuted_and_no_table_names_the_page_of_nan():
    pool, tables = inputs.make_pool(SPARSE, copies=3, seed=1)
    used = 3 * 2 * 16
    assert tables.shape == (3, 2, 16)
    assert sorted(tables.reshape(-1)) == list(range(1, used + 1))
    assert (np.diff(tables.reshape(-1)) != 1).mean() > 0.9
    k, v = (np.asarray(x, np.float32) for x in (pool.pages.k, pool.pages.v))
    assert np.isnan(k[0]).all()
    assert np.isnan(v[0]).all()
    assert np.isfinite(k[1:]).all()
    assert (k[1:].std(axis=(1, 2, 3)) > 0.9).all()
    assert not np.array_equal(k[1], v[1])
    big = np.asarray(inputs.random_pages(jax.random.key(0), (512, 1, 4, 8)), np.float32)
    assert (big[1:].std(axis=(1, 2, 3)) > 0.4).all(), "a chunk was left out"
    assert not np.array_equal(big[1], big[257]), "chunks repeat"
    assert (inputs.pool_pages(255), inputs.pool_pages(256), inputs.pool_pages(512)) == (256, 512, 768)


@pytest.mark.long
def test_packed_pages_are_compared_with_unpacked_ones():
    """The same op, places and queries, with the last page open; checked against numbers that are not rounded on the way
    from codes."""
    plain, packed = (Case("dense", "tiny", 1024, 2, "dense", format) for format in (None, "int8-channel"))
    assert {plain, packed} <= set(matching([f"{plain.name}*"]))
    rows = run(plain, packed)
    assert rows[1]["error"] < 2e-2
    assert rows[1]["bytes"]["kv"] == 2 * 2 * 1024 * (2 * 64 + 2 * 64 / 128 + 2)
    assert rows[1]["unpacked"] == {"case": plain.name, "times": rows[1]["median_s"] / rows[0]["median_s"]}
    assert "unpacked" not in rows[0]
    pool, table = inputs.make_pool(packed, copies=1, seed=1)
    opened = np.asarray(pool.pages.open.row_of)[table[0, :, -1]]
    assert opened.tolist() == [0, 1]
    numbers = np.asarray(unpack(dataclasses.replace(pool.pages.k_packed, read_as="float32"), pool.pages.k, pool.pages.k_scales))
    np.testing.assert_allclose(numbers[table[0, :, -1]], np.asarray(pool.pages.open.k, np.float32), atol=0.05)


@pytest.mark.long
def test_a_chunk_of_prefill_over_packed_pages():
    """Its own pages are open; the queries that are checked read what they should."""
    rows = run(*(Case("chunk", "tiny", 1024, 2, "dense", format) for format in (None, "q4_0")), Case("chunk", "tiny", 1024, 2, "dense:128"))
    assert rows[0]["error"] < 8e-3
    assert rows[2]["error"] < 8e-3
    assert rows[1]["error"] < 2e-2
    assert rows[1]["path"] == {"flash_attention": "xla"}
    assert rows[1]["unpacked"] == {"case": "chunk/tiny/1k/b2/dense", "times": rows[1]["median_s"] / rows[0]["median_s"]}


@pytest.mark.parametrize(("policy", "queries"), [("dense:128", 128), ("dense", 8192), ("lists:32", 8192)])
def test_how_many_queries_a_chunk_has(policy, queries):
    case = Case("chunk", "qwen2.5-7b", 131_072, 1, policy)
    assert case in matching([f"chunk/*/128k/*/{policy}"])
    assert case.queries == queries


def test_lists_of_a_chunk_lie_between_the_first_block_and_the_window():
    case = Case("chunk", "qwen2.5-7b", 131_072, 1, "lists:32", "int8")
    assert case in matching(["chunk/*"])
    lists = inputs.chunk_lists(case, seed=3)
    assert lists.shape == (1, 64, 28, 32)
    first = (case.tokens - case.queries) // 128 + np.arange(64)
    assert (lists >= 1).all()
    assert (lists < first[None, :, None, None] - 7).all()
    assert all(len(set(each)) == 32 for each in lists.reshape(-1, 32))
    assert (lists[:, :, 0] == lists[:, :, 6]).all()
    assert (lists[:, :, 0] != lists[:, :, 7]).any()


@pytest.mark.quick_but("bounds16")
@pytest.mark.parametrize("policy", ["bounds16", "open"])
def test_appends_run_in_place_on_a_page_each(policy):
    """On the CPU too; the same bits as the reference."""
    case = Case("append", *APPEND.place, policy)
    (row,) = run(case)
    assert (row["error"], row["same_bits"], row["chain"]) == (0, True, 2)
    assert (row["keys_read"], row["blocks_read"]) == ((128, 8) if policy == "bounds16" else (0, 0))
    positions = np.concatenate([tokens[2] for tokens in inputs.new_tokens(case, 8, seed=0)], axis=1)
    assert positions.tolist() == [[page * 128 + (127 if policy == "bounds16" else 64) for page in range(8)]] * 2


@pytest.mark.quick("down", "logits")
@pytest.mark.parametrize("policy", PROJECTIONS)
def test_projections(policy):
    (row,) = run(Case("project", "tiny", 0, 2, policy))
    assert row["error"] < (1e-5 if policy == "logits" else 8e-3)
    assert row["same_bits"]
    assert row["speedup"]["over"] == "xla"
    sizes = {"qkv": 256 * 512, "o": 256 * 256, "gate-up": 256 * 1024, "down": 512 * 256, "logits": 256 * 1024}
    assert row["bytes"] == {"weights": 2 * sizes[policy]}


@pytest.mark.quick("int4")
@pytest.mark.parametrize("format", PACKED)
def test_projections_of_packed_weights(format, tmp_path):
    file = tmp_path / "ops.json"
    (row,) = run(Case("project", "tiny", 0, 2, f"gate-up:{format}"), json_out=file)
    assert row["error"] < 8e-3
    assert row["same_bits"]
    codes = 256 * 1024 // (2 if format == "int4" else 1)
    scales = {"int4": 2 * 1024 * 2, "int8": 4 * 1024, "fp8": 4 * 1024}.get(format, 4 * 2 * 2 * 4)
    assert row["bytes"] == {"weights": codes + scales}
    assert row["fraction_of_read"] * json.loads(file.read_text())["read"]["bytes_per_s"] == pytest.approx(row["bytes_per_s"])
    assert "% of read" in session._line(row)
    assert [str(column.header) for column in report.table([row]).columns][-1] == "of read"


@pytest.mark.long
def test_the_rate_of_reads(monkeypatch):
    monkeypatch.setattr(measure, "COPY_BYTES", (2**20, 2**20))
    monkeypatch.setattr(inputs, "CHUNK_PAGES", 8)
    found = measure.read_rate()
    assert found["bytes_per_s"] * found["timing"]["median_s"] == pytest.approx(found["bytes"])


def test_a_run_end_to_end(tmp_path):
    file = tmp_path / "deep" / "ops.json"
    rows = run(SPARSE, INDEX, baselines=True, baseline_names=["xla"], json_out=file)
    base, sparse, index = rows
    assert [row["case"] for row in rows] == ["baseline/tiny/2k/b2/xla", "sparse/tiny/2k/b2/top:8", "index/tiny/1k/b1/bounds16"]
    if jax.default_backend() == "cpu":
        assert sparse["path"] == {"selected_attention": "composed", "select_blocks": "xla", "gather_attention": "xla"}
    assert (sparse["keys_read"], sparse["blocks_read"]) == (1664, 13)
    assert (base["keys_read"], index["keys_read"]) == (2048, 1024)
    assert sparse["error"] < 4e-3
    assert sparse["lse_error"] < 1e-4
    assert index["error"] == 0
    assert sparse["same_bits"]
    assert index["same_bits"]
    assert sparse["same_blocks_as_xla"] == 1
    assert sparse["speedup"] == {"over": base["case"], "times": base["median_s"] / sparse["median_s"]}
    assert "speedup" not in index
    assert sparse["bytes_per_s"] == sum(sparse["bytes"].values()) / sparse["median_s"]
    written = json.loads(file.read_text())
    assert written["rows"] == json.loads(json.dumps(rows))
    assert written["copy"]["bytes_per_s"] * sparse["fraction_of_copy"] == pytest.approx(sparse["bytes_per_s"])
    assert written["provenance"]["versions"]["jax"] == jax.__version__
    if jax.default_backend() == "cpu":
        assert {row["clock"] for row in rows} == {"wall"}


@pytest.mark.long
def test_two_ops_and_one_are_the_same_but_for_the_launch():
    one, two = run(Case("sparse", "tiny", 1024, 2, "quest:64"), Case("pair", "tiny", 1024, 2, "quest:64"))
    assert two["path"].keys() == {"select_blocks", "gather_attention"}
    for field in ("keys_read", "blocks_read", "bytes", "copies", "chain"):
        assert one[field] == two[field]
    assert max(one["error"], two["error"]) < 4e-3


def test_a_choice_from_a_shortlist():
    (row,) = run(Case("sparse", "tiny", 2048, 2, "cascade:4/32"))
    assert (row["keys_read"], row["same_blocks_as_xla"], row["same_bits"]) == (9 * 128, 1, True)
    assert row["error"] < 4e-3
    assert row["bytes"]["codes"] == 2 * 2 * 16 * (128 + 8) * 32


@pytest.mark.long
def test_a_choice_from_a_shortlist_of_packed_pages():
    (row,) = run(Case("sparse", "tiny", 2048, 2, "cascade:4/32+cache", "int8"))
    assert (row["keys_read"], row["same_blocks_as_xla"], row["same_bits"]) == (9 * 128, 1, True)


def test_a_list_that_others_would_not_make_shows(monkeypatch):
    def selected(q, *arrays, sm_scale, implementation, **sizes):
        from pallas_kernels.attention.selected_attention import selected_attention

        return selected_attention(-q, *arrays, sm_scale=-sm_scale, **sizes)

    monkeypatch.setattr("pallas_kernels.bench.ops.selected_attention", selected)
    (row,) = run(SPARSE)
    assert row["error"] < 4e-3, "attention over that list is right"
    assert row["same_blocks_as_xla"] < 0.9


@pytest.mark.quick("nan")
@pytest.mark.parametrize("wrong", ["value", "nan", "lse", "random"])
def test_a_wrong_op_shows_in_its_row(wrong, monkeypatch):
    count = iter(range(100))

    def gather(*arrays, blocks, sm_scale, implementation, block_size):
        from pallas_kernels.attention.gather_attention import gather_attention

        out, lse = gather_attention(*arrays, blocks=blocks, sm_scale=sm_scale, block_size=block_size)
        out = {"value": out.at[0, 0, 1].multiply(1.05), "nan": out.at[0, 0, 1, 3].set(jnp.nan)}.get(wrong, out)
        if wrong == "random":
            out = out + jax.pure_callback(lambda: np.float32(next(count)), jax.ShapeDtypeStruct((), jnp.float32)).astype(out.dtype)
        return out, lse + (wrong == "lse")

    monkeypatch.setattr("pallas_kernels.bench.ops.gather_attention", gather)
    (row,) = run(Case("dense", "tiny", 1024, 2, "dense"))
    assert row["same_bits"] == (wrong != "random")
    assert (row["error"] > 0.02) == (wrong != "lse")
    assert row["lse_error"] == pytest.approx(float(wrong == "lse"), abs=1e-3)


@pytest.mark.long
def test_ops_of_a_program_take_turns_on_different_inputs(monkeypatch):
    """Otherwise the cache would be measured, or one op's work serve the next."""
    seen = []

    def chained(op):
        program = ops.chained(op)
        return lambda pool, owns: seen.append(owns) or program(pool, owns)

    monkeypatch.setattr(measure, "chained", chained)
    monkeypatch.setattr(inputs, "copies_needed", lambda moved: 3)
    (row,) = run(Case("gather", "tiny", 2048, 2, "top:8"))
    assert (row["copies"], row["chain"]) == (3, 3)
    owns = seen[0]
    assert len(owns) == 3
    pages = [set(np.asarray(table).reshape(-1).tolist()) for _, table, _, _ in owns]
    assert len(set.union(*pages)) == sum(map(len, pages)), "batches share pages"
    for part in (0, 3):  # queries, lists
        assert len({np.asarray(own[part]).tobytes() for own in owns}) == 3
    assert len({own[2].unsafe_buffer_pointer() for own in owns}) == 3, "lengths are shared"


def test_ops_of_a_program_run_one_after_the_other():
    program = ops.chained(lambda pool, x: x @ pool)
    text = program.lower(jnp.ones((8, 8)), [(jnp.ones((8, 8)),)] * 4).as_text()
    assert text.count("optimization_barrier") == 3
    results = program(2 * jnp.eye(8), [(i * jnp.ones((8, 8)),) for i in range(4)])
    assert [float(x[0, 0]) for x in results] == [0, 2, 4, 6]


def test_ops_of_a_program_read_their_own_pages():
    """The barrier holds all arguments of an op back, or XLA reads the pages of several ops at once."""
    owns = [(jnp.ones(2, jnp.int32), jnp.ones(3, jnp.int32))] * 2
    program = jax.make_jaxpr(ops.chained(lambda pool, *own: pool[own[0]]))(jnp.ones((8, 8)), owns)
    (inner,) = (each.params["jaxpr"] for each in program.eqns)
    (barrier,) = (each for each in inner.eqns if each.primitive.name == "optimization_barrier")
    assert sorted(x.aval.shape for x in barrier.invars) == [(2,), (2, 8), (3,)]


def test_a_named_implementation_runs():
    (row,) = run(Case("select", "tiny", 1024, 2, "top:8"), implementation="reference")
    assert row["path"] == {"select_blocks": "reference"}
    assert row["bytes"]["kv"] == 0


@pytest.mark.long
def test_another_platforms_path_runs_what_is_composed_too():
    (row,) = run(SPARSE, implementation="xla")
    assert row["path"] == {"selected_attention": "composed", "select_blocks": "xla", "gather_attention": "xla"}
    with pytest.raises(NotImplementedError, match="no op has an implementation 'mosaic_tpu'"):
        run(SPARSE, implementation="mosaic_tpu")


def _refuses(case, implementation):
    raise NotImplementedError("not here")


def test_what_cannot_run_leaves_a_row_that_says_why(monkeypatch, tmp_path):
    monkeypatch.setattr(measure, "op_of", _refuses)
    assert run(INDEX)[0]["skipped"] == "not here"
    monkeypatch.setattr(measure, "op_of", lambda case, implementation: 1 / 0)
    assert run(INDEX)[0]["failed"] == "ZeroDivisionError: division by zero"
    monkeypatch.setattr(inputs, "memory_bytes", lambda: 2**20)
    file = tmp_path / "ops.json"
    (row,) = run(SPARSE, json_out=file)
    assert row["skipped"] == "needs 0.0 GiB; arrays may take 0.0 of 0.0 GiB"
    assert json.loads(file.read_text())["rows"] == [row]


def test_rows_of_pytorch_come_from_its_kernels(monkeypatch):
    case = Case("baseline", "tiny", 1024, 2, "torch-flash")
    other = Case("baseline", "tiny", 1024, 2, "torch-cudnn")
    asked = []

    def ask(requests):
        asked.extend(requests)
        request = requests[0]
        period, pause = 5000.0, 3e6
        starts = [
            call * (pause + request["chain"] * period) + i * period for call in range(request["calls"]) for i in range(request["chain"])
        ]
        kernels = [(name, start + a, start + b) for start in starts for name, a, b in (("split", 0, 2000), ("combine", 2500, 3000))]
        return {
            case.name: {"name": case.name, "kernels": kernels, "replay_difference": 0.0, "torch": "9.9"},
            other.name: {"name": other.name, "skipped": "no kernel"},
        }

    monkeypatch.setattr(torch_sdpa, "ask", ask)
    monkeypatch.setattr(torch_sdpa, "installed", lambda: True)
    first, second = measure.torch_rows([case, other], 1e9)
    assert [request["backend"] for request in asked] == ["flash", "cudnn"]
    assert first["median_s"] == pytest.approx(3e-6)
    assert first["path"] == {"torch 9.9": "flash"}
    assert first["bytes_per_s"] == pytest.approx(2 * 2 * 2 * 1024 * 64 * 2 / 3e-6)
    assert second["skipped"] == "no kernel"
    broken = {"name": case.name, "kernels": [("k", 0, 1)] * 7, "replay_difference": 0.0, "torch": "9.9"}
    monkeypatch.setattr(torch_sdpa, "ask", lambda requests: {case.name: broken})
    assert "equal calls" in measure.torch_rows([case], 1e9)[0]["failed"]
    monkeypatch.setattr(torch_sdpa, "installed", lambda: False)
    assert [row["skipped"] for row in measure.torch_rows([case], 1e9)] == ["PyTorch is not installed"]


def test_a_process_that_fails_is_a_failure_of_its_rows(monkeypatch):
    monkeypatch.setattr(torch_sdpa, "installed", lambda: True)
    monkeypatch.setattr(torch_sdpa, "__name__", "no.such.module")
    (row,) = measure.torch_rows([Case("baseline", "tiny", 1024, 2, "torch-flash")], 1e9)
    assert "No module named" in row["failed"]


def test_listening_hears_the_choices_of_its_block():
    q, table, lengths = jnp.ones((1, 1, 2, 8)), jnp.zeros((1, 1), jnp.int32), jnp.ones(1, jnp.int32)
    pages = Pages(jnp.ones((1, 1, 8, 8)), jnp.ones((1, 1, 8, 8)))
    from pallas_kernels.attention.gather_attention import gather_attention

    with dispatch.listening() as outer:
        with dispatch.listening() as inner:
            pass
        gather_attention(q, pages, table, lengths, sm_scale=1.0, implementation="reference")
    gather_attention(q, pages, table, lengths, sm_scale=1.0, implementation="xla")
    assert (outer, inner) == ({"gather_attention": "reference"}, {})


def command(*arguments):
    return subprocess.run([sys.executable, "-m", "pallas_kernels.bench", *arguments], capture_output=True, text=True, check=False)


def test_help_and_list_start_no_device():
    shown = command("--help")
    assert shown.returncode == 0
    for word in ("--list", "--json", "--implementation", "--no-baselines", "op/shape/tokens/batch/policy"):
        assert word in shown.stdout
    listed = command("--list", "*/tiny/1k/*")
    assert listed.stdout.splitlines() == [case.name for case in matching(["*/tiny/1k/*"])]
    bad = command("nothing/*")
    assert bad.returncode == 2
    assert "no case matches 'nothing/*'" in bad.stderr


def test_a_failure_is_the_exit_status(monkeypatch, capsys):
    import typer

    from pallas_kernels.bench import __main__ as command_line

    monkeypatch.setattr(measure, "op_of", lambda case, implementation: 1 / 0)
    with pytest.raises(typer.Exit) as stopped:
        command_line.bench(["select/tiny/1k/b2/top:8"], baselines=False)
    assert stopped.value.exit_code == 1
    out, err = capsys.readouterr()
    assert "ZeroDivisionError" in err
    assert "select/tiny/1k/b2/top:8" in out
