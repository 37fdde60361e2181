"""benchmarks/on_cpu.py, with processes that answer as `transformers` and llama.cpp would: neither is installed here."""

from __future__ import annotations

import contextlib
import json
import sys

import pytest

from benchmarks import against_transformers as turns
from benchmarks import on_cpu as bench
from benchmarks import report
from benchmarks import tables as scheduling
from kvjax.models.saving import save


@pytest.mark.long
def test_all_sides_run_the_same_prompt_and_rows_compare_them(monkeypatch, tmp_path):
    model = turns.random_model(turns.config_of("tiny", None, "float32"))
    save(model, tmp_path / "m")
    plan = bench.CpuRun(str(tmp_path / "m"), 200, 3, 1, 128, ("float32", "int8"), "x.gguf", sys.executable, sys.executable)
    engine = turns.engine_of(model, turns.Comparison("m", "float32", 200, ("dense",), 3, 1, 128, sys.executable))
    started, requests = [], []

    def other(python, script, *arguments):
        started.append((script, arguments))

        def ask(request):
            requests.append(request)
            right = turns.one_round(engine, "dense", **request)
            return {"prefill_s": 4.0, "step_s": [9.0, 9.0, 1.0, 0.5, 0.5], "tokens": right["tokens"], "logits": right["logits"].tolist()}

        ask.versions = {"transformers": "5"} if "transformers" in script else {"llama_cpp_python": "0"}
        return contextlib.nullcontext(ask)

    monkeypatch.setattr(turns, "other_process", other)
    monkeypatch.setattr(turns, "PAUSE", 0.0)
    rows = list(bench.cpu_rows(plan))
    assert [script for script, _ in started] == ["transformers_process.py", "llama_process.py", "llama_process.py"]
    assert [arguments[1] for _, arguments in started[1:]] == ["Q8_0", "Q4_0"]
    assert len({json.dumps(request) for request in requests}) == 1
    sides = [(row["implementation"], row["weights"]) for row in rows[::2]]
    assert sides == [("transformers", "float32"), ("llama.cpp", "Q8_0"), ("llama.cpp", "Q4_0"), ("kvjax", "float32"), ("kvjax", "int8")]
    assert (rows[0]["tokens_per_s"], rows[1]["tokens_per_s"]) == (50.0, 2.0)
    assert rows[6]["error"] < 1e-5 < rows[8]["error"] < 0.1
    assert scheduling.cpu_cells(rows[2])[:4] == ("prompt of 200", "llama.cpp (llama-cpp-python 0)", "Q8_0", "50.0")
    file = tmp_path / "cpu.json"
    made = {"device": "cpu", "versions": {"jax": "0"}, "date": "2026-01-01", "command": "c"}
    file.write_text(json.dumps({"bench": "cpu", "provenance": made, "rows": rows}))
    text = report.rendered("<!-- bench:cpu -->\n<!-- /bench -->", report.load([file]))
    assert [text.count(f"| {name} |") for name in ("Q8_0", "Q4_0", "int8")] == [2, 2, 2]


def test_a_python_without_llama_cpp_is_named(tmp_path):
    with (
        pytest.raises(RuntimeError, match=r"llama could not run: .* has no llama_cpp; install llama-cpp-python there"),
        turns.other_process(sys.executable, "llama_process.py", "x.gguf", "Q8_0", tmp_path, 256, 1),
    ):
        pass
