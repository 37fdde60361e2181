"""`kvjax quantize`, and `--weights` of other commands."""

import json

import pytest
from typer.testing import CliRunner

from kvjax.model.identity import fingerprint
from kvjax.model.weight_formats import SCHEMES
from kvjax.models import load
from kvjax.serving.cli import plan
from kvjax.serving.cli.app import app
from kvjax.serving.cli.options import Weights


def run(*words):
    return CliRunner().invoke(app, [str(word) for word in words])


def test_schemes_are_those_of_the_library():
    assert [each.value for each in Weights] == list(SCHEMES)


@pytest.mark.parametrize("option", ["-m", "--model"])
def test_quantize_takes_its_model_as_other_commands_do(option, kvjax, model_folder, tmp_path):
    status, out, err = kvjax("quantize", option, model_folder, tmp_path / "packed")
    assert (status, out.partition(":")[0]) == (0, str(tmp_path / "packed")), err
    assert "quantization_config" in json.loads((tmp_path / "packed" / "config.json").read_text())
    assert kvjax("quantize", model_folder, tmp_path / "other")[0] == 2


@pytest.mark.parametrize(
    ("out", "said"),
    [
        ("", "the path of a folder is needed"),
        (".", ". is the current folder"),
        ("notes", "notes is not empty and holds no config.json"),
        ("notes/a.txt", "notes/a.txt is a file"),
        ("/proc/m", "/proc/m cannot be made"),
        ("n" * 300, "choose a shorter one"),
    ],
)
def test_quantize_refuses_a_target_before_it_loads(out, said, kvjax, model_folder, tmp_path, monkeypatch):
    """And leaves nothing behind."""
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "a.txt").write_text("mine")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(plan, "load_model", lambda *_, **__: pytest.fail("the model was loaded"))
    status, _, err = kvjax("quantize", "--model", model_folder, out, "--overwrite")
    assert status == 2
    assert said in err
    assert len(err.splitlines()) == 1
    assert sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")) == ["notes", "notes/a.txt"]


@pytest.mark.long
def test_a_quantized_model_is_planned_and_read(tmp_path):
    folder = tmp_path / "packed"
    done = run("quantize", "--model", "needle", folder, "--weights", "int4")
    assert done.exit_code == 0, done.output
    assert "weights in 6,8" in done.output
    assert fingerprint(load(folder)) == fingerprint(load("needle", weights="int4"))
    again = run("quantize", "--model", "needle", folder)
    assert again.exit_code != 0
    assert "exists already" in str(again.exception or again.output)
    plans = [run("plan", "--model", model, *more).output for model, more in ((folder, ()), ("needle", ("--weights", "int4")))]
    assert ["6.5 MiB" in plan for plan in plans] == [True, True]
    assert "weights int4" in plans[1]
    assert "weights packed as stored" in plans[0]
    refused = run("plan", "--model", folder, "--weights", "int8")
    assert refused.exit_code != 0
    assert "packed weights already" in refused.output
    answer = run("generate", "The capital of", "--model", folder, "--max-new-tokens", 2)
    assert answer.exit_code == 0
    assert answer.output == run("generate", "The capital of", "--model", "needle", "--weights", "int4", "--max-new-tokens", 2).output


def test_batch_jobs_run_on_packed_weights(tmp_path):
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text(json.dumps({"id": "a", "prompt": "The capital of"}) + "\n")
    done = run("batch", source, "--out", out, "--model", "needle", "--weights", "int8", "--max-new-tokens", 2)
    assert done.exit_code == 0, done.output
    assert len(out.read_text().splitlines()) == 1


@pytest.mark.parametrize("command", ["score", "needle", "evaluate", "recall"])
def test_other_commands_take_weights(command):
    assert "--weights" in run(command, "--help").output
