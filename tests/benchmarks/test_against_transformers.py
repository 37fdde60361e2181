"""benchmarks/against_transformers.py, with a process that answers as `transformers` would: PyTorch is not installed
here."""

from __future__ import annotations

import contextlib
import json
import sys

import numpy as np
import pytest

from benchmarks import against_transformers as bench
from benchmarks import report
from benchmarks import tables as scheduling

PLAN = bench.Comparison("tiny", "float32", tokens=200, policies=("dense", "top:1"), steps=3, rounds=2, chunk=128, python=sys.executable)


class Asked:
    """What the other process answers; the tokens that are expected after the prompt are wrong from the third on."""

    def __init__(self, engine):
        self.engine, self.requests = engine, []
        self.versions = {"torch": "2", "transformers": "5", "attention": "sdpa"}

    def __call__(self, request):
        self.requests.append(request)
        right = bench.one_round(self.engine, "dense", request["prompt"], request["steps"])
        tokens = [*right["tokens"][:2], *(token + 1 for token in right["tokens"][2:])]
        return {"prefill_s": 7.0, "step_s": [9.0, 9.0, 1.0, 2.0, 3.0], "tokens": tokens, "logits": right["logits"].tolist()}


@pytest.fixture
def asked(monkeypatch):
    made = Asked(bench.engine_of(bench.random_model(bench.config_of("tiny", None, "float32")), PLAN))
    monkeypatch.setattr(bench, "_other", lambda *_: contextlib.nullcontext(made))
    monkeypatch.setattr(bench, "PAUSE", 0.0)
    return made


@pytest.mark.long
def test_both_run_the_same_prompt_and_steps_and_rows_compare_them(asked, tmp_path):
    rows = list(bench.comparison_rows(PLAN))
    assert [(row["implementation"], row["policy"], row["op"]) for row in rows] == [
        (name, policy, op)
        for name, policy in (("transformers", "dense"), ("kvjax", "dense"), ("kvjax", "top:1"))
        for op in ("prompt", "step")
    ]
    assert len(asked.requests) == PLAN.rounds + 1
    assert all(len(request["prompt"]) == 200 and request["steps"] == 5 for request in asked.requests)
    theirs, their_step, ours, *_ = rows
    assert (theirs["median_s"], their_step["median_s"], their_step["samples"]) == (7.0, 2.0, 6)
    assert (ours["same_tokens"], ours["tokens_after"]) == (2, 6)
    assert ours["error"] == 0
    file = tmp_path / "transformers.json"
    made = {"device": "cpu", "versions": {"jax": "0"}, "date": "2026-01-01", "command": "c"}
    file.write_text(json.dumps({"bench": "transformers", "provenance": made, "rows": rows}))
    text = report.rendered("<!-- bench:transformers -->\n<!-- /bench -->", report.load([file]))
    assert text.count("| tiny | float32 |") == 6
    assert "| prompt of 200 | transformers 5, sdpa | 7,000.0 | 0.0e+00 | 6 of 6 |" in text
    assert scheduling.TABLES["transformers"][0][-1] == "equal tokens"


def test_another_model_shows_as_an_error(asked, monkeypatch):
    right = asked.__call__
    monkeypatch.setattr(Asked, "__call__", lambda self, request: right(request) | {"logits": np.ones(512).tolist()})
    assert all(row["error"] > 0.5 for row in bench.comparison_rows(PLAN) if row["implementation"] == "kvjax")


def test_only_cpus_are_compared(monkeypatch):
    monkeypatch.setattr(bench.jax, "default_backend", lambda: "gpu")
    with pytest.raises(ValueError, match="JAX uses gpu: set JAX_PLATFORMS=cpu"):
        next(bench.comparison_rows(PLAN))


def test_a_python_without_torch_is_named(tmp_path):
    with (
        pytest.raises(RuntimeError, match="has no torch; install torch and transformers there"),
        bench._other(sys.executable, tmp_path, "float32", 1),
    ):
        pass
