"""Policies of one's own on the command line: wherever a policy is named, and how their errors read."""

import json

import pytest

from kvjax.evaluation.run import EvaluationRun, Plan
from kvjax.models.loading import load
from kvjax.policies.decode import Window, parse

FILE = """
import dataclasses

import jax.numpy as jnp

from kvjax.policies.decode import Stateless, Window
from kvjax.policies.prefill import SinkWindow


@dataclasses.dataclass(frozen=True)
class Near(Window):
    sink_tokens: int = 1
    window_tokens: int = 40


@dataclasses.dataclass(frozen=True)
class NearPrefill(SinkWindow):
    sink_tokens: int = 1
    window_tokens: int = 4


@dataclasses.dataclass(frozen=True)
class Wrong(Stateless):
    def select(self, query, layer, ctx, state):
        return jnp.zeros(3) @ jnp.zeros(4), state
"""
PAGES = ("--page-size", "16", "--prefill-chunk", "64")


@pytest.fixture
def file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(FILE)
    return tmp_path / "mine.py"


def test_generate_and_plan_take_them(kvjax, model_folder, file):
    prompt = "the lantern by the harbor went out, and nobody on the island knew why. "
    own, built_in = (
        kvjax("generate", prompt, "-m", model_folder, "--policy", decode, "--prefill", prefill, "--max-new-tokens", 8, *PAGES)
        for decode, prefill in (("mine.py:Near:2/40", "mine.py:NearPrefill"), ("window:2+40", "window:1+4"))
    )
    assert own[:2] == built_in[:2] == (0, built_in[1]), own[2]
    status, out, _ = kvjax("plan", "--model", model_folder, "--policy", "mine.py:Near:2/40")
    assert (status, "window:2+40 (42 keys" in out) == (0, True)


@pytest.mark.long
def test_needle_records_them_by_name(kvjax, model_folder, file):
    sizes = ("--length", 400, "--trials", 2, "--max-batch", 2, "--distractors", 0, *PAGES)
    status, _, said = kvjax("needle", "-m", model_folder, *sizes, "-p", "mine.py:Near", "--json", "needle.json")
    assert status == 0, said
    assert [row["policy"] for row in json.loads(file.with_name("needle.json").read_text())["results"]] == ["mine.py:Near"]


def test_a_batch_job_does_not_go_on_with_another_file(kvjax, model_folder, file):
    records = file.with_name("in.jsonl")
    records.write_text(json.dumps({"prompt": "x" * 50, "max_new_tokens": 3}) + "\n")
    command = ("batch", records, "--out", file.with_name("out.jsonl"), "-m", model_folder, "--policy", "mine.py:Near")
    status, _, said = kvjax(*command, *PAGES, "--policy", "mine.py:Wrong")
    assert status == 1, "the policy fails at its first step, and the partial file stays"
    assert kvjax(*command, *PAGES, "--policy", "mine.py:Wrong")[0] == 1
    file.write_text(FILE + "# edited\n")
    status, _, said = kvjax(*command, *PAGES, "--policy", "mine.py:Wrong")
    assert status == 2
    assert "policy" in said


@pytest.mark.parametrize(
    ("name", "status", "said"),
    [
        ("mine.py:Wrong", 1, "kvjax: mine.py, line 25: TypeError: dot_general requires contracting dimensions to have the same shape"),
        ("mine.py:Far", 2, "kvjax: policy 'mine.py:Far': mine.py has no class Far; its classes are Near, NearPrefill, Wrong"),
        ("other.py:Near", 2, "kvjax: policy 'other.py:Near': there is no file other.py"),
    ],
)
def test_errors_in_ones_own_file_are_one_line(kvjax, model_folder, file, name, status, said):
    found = kvjax("generate", "x" * 50, "-m", model_folder, "--policy", name, *PAGES)
    assert found[0] == status
    assert said in found[2]
    assert found[2].count("\n") == 1


@pytest.mark.long
def test_a_plan_of_policy_objects_runs(model_folder):
    text = "The lantern by the harbor went out, and nobody on the island knew why. " * 80
    own = Window(1, 41)
    sizes = {"trials": 2, "windows": 2, "steps": 4, "free_steps": 2, "batch": 2, "page_size": 16, "prefill_chunk": 64, "distractors": 0}
    run = EvaluationRun(load(model_folder), text, Plan(policies=("dense", own), lengths=(192,), **sizes))
    records = [run.measure(unit) for unit in run.units()]
    assert list(records[0]["beside"]) == ["window:1+41", "dense again"]
    assert parse(run.plan.others[0]) == own
