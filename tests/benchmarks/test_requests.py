"""The scripts host, traffic, replicas and compiling with tiny shapes: what they run is the engine and the scheduler."""

from __future__ import annotations

import json
import time

import jax
import numpy as np
import pytest
import typer

from benchmarks import compiling, replicas, report, traffic
from benchmarks import host as host_time
from benchmarks import tables as scheduling
from benchmarks.hollow import FakeEngine, random_model
from kvjax.engine.engine import Engine
from kvjax.engine.step_plan import Chunk, StepPlan
from kvjax.serving.bench.decode import config_of

CONFIG = config_of("tiny", 1, "float32")


@pytest.fixture(scope="module")
def hollow():
    engine = FakeEngine(random_model(CONFIG), "top:8", pages=20, prefill_chunk=128, batch_buckets=(1,))
    engine.fill_pages()
    return engine


def test_a_hollow_beginning_is_not_computed_and_the_rest_is(hollow):
    before = np.asarray(hollow._pool.layers[0].pages.k)
    hollow.hollow = 256
    sequence = hollow.new_sequence()
    hollow.reserve([sequence], 384)
    passed, computed = (hollow.step(StepPlan(chunks=(Chunk(sequence, list(range(128))),))).chunks[0] for _ in range(2))
    assert (passed, sequence.length, len(sequence.tokens), len(hollow.chunk_clock)) == (None, 384, 384, 1)
    assert np.isfinite(computed.logits).all()
    after = np.asarray(hollow._pool.layers[0].pages.k)
    first, second, third = sequence.pages["full"]
    np.testing.assert_array_equal(after[[first, second]], before[[first, second]])
    assert not np.array_equal(after[third], before[third])
    hollow.free(sequence)


def test_pages_are_filled_and_their_index_is_theirs(hollow):
    layer = hollow._pool.layers[0]
    assert np.std(layer.pages.k) == pytest.approx(1, abs=0.1)
    np.testing.assert_array_equal(layer.index["bounds128"][5, :, 0, 0], layer.pages.k[5].max(1))


def test_host_time_is_a_step_less_the_call_of_it():
    rows = list(host_time.host_rows([(2, 2)], steps=20, layers=1, policy="top:8"))
    assert [row["what"] for row in rows] == ["engine", "scheduler", "listening", "logprobs"]
    for row in rows:
        assert 0 < row["own_s"] < row["median_s"]
        assert 0 < row["dispatch_s"] < row["median_s"]
        assert 0 < row["release_s"] < row["median_s"]
    with pytest.raises(ValueError, match="no history"):
        list(host_time.host_rows([(2, 1)], steps=200, layers=1, policy="top:8"))


def test_every_step_of_the_host_benchmark_is_taken():
    """The steps that are timed are real ones: each makes every sequence a token longer, and pages are taken on the
    way."""
    engine = FakeEngine(host_time.passing_model(1), "dense", pages=8, batch_buckets=(2,), prefill_chunk=128)
    run, close = host_time._engine_steps(engine, [100, 120], 40)
    for _ in range(40):
        run()
    assert sorted(each.length for each in engine.sequences) == [140, 160]
    assert engine.allocators["full"].free == 4
    assert len(engine.dispatch_s) == len(engine.release_s) == 40
    close()
    assert not engine.sequences


def test_what_starts_the_copy_of_results_counts_as_dispatch(monkeypatch):
    monkeypatch.setattr(Engine, "_send", lambda self, packed: time.sleep(0.02))
    engine = FakeEngine(host_time.passing_model(1), "dense", pages=8, batch_buckets=(1,), prefill_chunk=128)
    run, close = host_time._engine_steps(engine, [100], 4)
    for _ in range(4):
        run()
    close()
    assert min(engine.dispatch_s) >= 0.02


@pytest.mark.long
def test_throughput(tmp_path, capsys):
    file = tmp_path / "throughput.json"
    sizes = {"requests": 2, "prompt": 200, "answer": 3, "prefill": "dense", "chunk": 128, "dtype": "float32", "layers": 1}
    traffic.throughput_command("tiny", "dense,top:8", **sizes, json_out=file)
    written = json.loads(file.read_text())
    assert (written["bench"], [row["policy"] for row in written["rows"]]) == ("throughput", ["dense", "top:8"])
    for row in written["rows"]:
        assert row["seconds"] == pytest.approx(row["prefill_s"] + row["decode_s"])
        assert row["prefill_tokens_per_s"] == pytest.approx(400 / row["prefill_s"])
        assert row["decode_tokens_per_s"] == pytest.approx(4 / row["decode_s"])
    assert "top:8" in capsys.readouterr().out
    assert "2 of 200 + 3" in report.parts([written])["throughput"]()


@pytest.mark.long
def test_replicas(tmp_path, capsys):
    file = tmp_path / "replicas.json"
    sizes = {"requests": 2, "prompt": 200, "answer": 3, "prefill": "dense", "chunk": 128, "dtype": "float32", "layers": 1}
    replicas.replicas_command("tiny", "1,2", 1, 1, "dense", **sizes, json_out=file)
    written = json.loads(file.read_text())
    assert [(row["data"], row["tensor"]) for row in written["rows"]] == [(1, 1), (2, 1)]
    one, two = written["rows"]
    assert one["answer_tokens_per_s"] == pytest.approx(2 * 3 / one["seconds"])
    assert two["prompt_tokens_per_s"] == pytest.approx(4 * 200 / two["seconds"])
    assert (one["of_first"], two["of_first"]) == (1, pytest.approx(two["answer_tokens_per_s"] / one["answer_tokens_per_s"]))
    assert "1 x 1" in capsys.readouterr().out
    assert scheduling.made("replicas", written["rows"]).count("2 of 200 + 3") == 2
    with pytest.raises(typer.BadParameter, match="data 9 x tensor 1 x context 1 needs 9 devices, and there are 8"):
        replicas.replicas_command("tiny", "1,9", layers=1)


@pytest.fixture(scope="module")
def gaps():
    sizes = {"prompt": 1024, "computed": 768, "neighbours": 2, "history": 100, "chunk": 128}
    return traffic.gaps_row(traffic.Gaps("tiny", CONFIG, 50, "dense", "top:8", **sizes))


def test_gaps(gaps):
    assert gaps["gaps"] >= 1
    assert 0 < gaps["p50_s"] <= gaps["p95_s"] <= gaps["p99_s"] <= gaps["largest_s"]
    assert min(gaps["quiet_s"], gaps["prefill_tokens_per_s"], gaps["alone_tokens_per_s"]) > 0
    assert "first 256 tokens" in gaps["note"]
    assert "last 0K" not in scheduling.made("gaps", [gaps])


@pytest.mark.parametrize(
    ("changed", "message"),
    [({"prompt": 1000}, "prompt must be"), ({"computed": 256}, "5 chunks"), ({"neighbours": 0}, "neighbour")],
)
def test_gaps_that_make_no_sense(changed, message):
    sizes = {"prompt": 1024, "computed": 768, "neighbours": 2, "history": 100, "chunk": 128}
    with pytest.raises(ValueError, match=message):
        traffic.Gaps("tiny", CONFIG, 50, "dense", **sizes | changed)


def test_compilations_are_counted_once_and_only_while_listening():
    double = jax.jit(lambda x: 2 * x)
    with compiling.listening() as heard:
        double(np.ones(3, np.float32))
        double(np.zeros(3, np.float32))
    double(np.ones(4, np.float32))
    assert heard.programs == {"<lambda>": 1}
    assert all(seconds > 0 for seconds in heard.seconds.values())
    assert jax.config.jax_enable_compilation_cache


@pytest.mark.long
def test_cold_counts_the_programs_of_a_prompt():
    sizes = {"chunk": 128, "prefill": "dense", "policy": "top:8"}
    row = compiling.cold_row("tiny", CONFIG, prompt=640, computed=256, **sizes)
    assert (row["by_name"]["prefill_slice"], row["by_name"]["decode_and_sample"]) == (1, 1), "one table width, one kind of slice"
    assert row["compiling_s"] > 0
    assert row["warm_s"] < row["wall_s"]
    with pytest.raises(ValueError, match="multiple of the chunk of 128"):
        compiling.cold_row("tiny", CONFIG, prompt=640, computed=250, **sizes)


@pytest.mark.long
def test_programs_of_a_mixed_job():
    row = compiling.programs_row("tiny", CONFIG, lengths=(50, 130), policies=("dense", "top:8"), chunk=128, prefill="dense", slots=4)
    assert row["requests"] == 8
    assert row["by_name"]["decode_and_sample"] in (2, 3, 4), "two policies, with a row that draws or without"
    assert row["programs"] == sum(row["by_name"].values())
    assert "8 requests" in scheduling.made("programs", [row])


def test_commands_refuse_what_makes_no_sense():
    with pytest.raises(typer.BadParameter, match="equally many"):
        host_time.host_command("64,8", "1024")
    with pytest.raises(typer.BadParameter, match="int8"):
        compiling.cold_command(dtype="int8")
