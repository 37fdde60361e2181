"""`lm_eval --model kvjax`: the entry point, what it makes of a command line's arguments, and what results record."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import subprocess
import sys
import tomllib
import types
from pathlib import Path

import pytest

from kvjax.engine.engine import Engine
from kvjax.model.identity import fingerprint
from kvjax.models import load
from kvjax.serving import KvjaxLM, harness

ENTRY_POINTS = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]["entry-points"]
DOCUMENTS = [
    {"question": "amber anchor basil", "choices": [" cobalt", " coral delta", " ember"], "gold": 0},
    {
        "question": " ".join(["lantern marble nectar"] * 20) + " olive",
        "choices": [" olive", " orchid pepper quartz raven", " quartz"],
        "gold": 1,
    },
]
POLICY = "window:8+24"


@pytest.fixture(scope="module")
def arguments(model_folder):
    """What the harness makes of --model_args pretrained=...,policy=...: numbers are numbers."""
    sizes = {"pages": 32, "page_size": 16, "prefill_chunk": 64}
    return {"pretrained": str(model_folder), "policy": POLICY, "dtype": "fp32", "max_length": 256, "seed": 3, **sizes}


@pytest.fixture(scope="module")
def model_class():
    """What lm_eval finds under the name kvjax in the group of entry points that it reads."""
    (name,) = ENTRY_POINTS["lm_eval.models"]
    assert name == "kvjax"
    return importlib.metadata.EntryPoint(name, ENTRY_POINTS["lm_eval.models"][name], "lm_eval.models").load()


@pytest.fixture(scope="module")
def lm(model_class, arguments):
    """As lm_eval's evaluator makes it; the command line always passes these three."""
    return model_class.create_from_arg_obj(arguments, {"batch_size": 2, "max_batch_size": None, "device": "cuda:0"})


def direct_answers(folder, policy=POLICY) -> list[float]:
    """Log-probabilities of every choice, without the harness or the command line's arguments."""
    lm = KvjaxLM(Engine(load(folder), policy, pages=32, page_size=16, prefill_chunk=64))
    pairs = [(document["question"], choice) for document in DOCUMENTS for choice in document["choices"]]
    return [logprob for logprob, _ in lm.loglikelihood([types.SimpleNamespace(args=pair) for pair in pairs])]


def test_arguments_reach_model_engine_and_adapter(lm, arguments):
    assert isinstance(lm, KvjaxLM)
    assert (str(lm.policy), lm.slots, lm.max_length, lm.seed) == (POLICY, 2, 256, 3)
    assert (lm.engine.page_size, lm.engine.prefill_chunk, lm.engine.allocators["full"].total) == (16, 64, 32)
    assert lm.engine.model.name == arguments["pretrained"]
    pair = types.SimpleNamespace(args=(DOCUMENTS[1]["question"], " orchid pepper quartz raven"))
    ((found, _),) = lm.loglikelihood([pair])
    assert found == direct_answers(arguments["pretrained"])[4]
    assert abs(found - direct_answers(arguments["pretrained"], "dense")[4]) > 0.01, "the continuation is read through the policy"


@pytest.mark.parametrize(
    ("asked", "slots"),
    [
        ({}, None),
        ({"batch_size": 1, "max_batch_size": 4}, 1),
        ({"batch_size": "auto"}, None),
        ({"batch_size": "auto:4", "max_batch_size": 4}, 4),
        ({"batch_size": "8"}, 8),
    ],
)
def test_batch_size_is_what_is_decoded_together(asked, slots, arguments):
    assert KvjaxLM.create_from_arg_obj(arguments, asked).slots == slots


def test_the_model_is_loaded_for_the_sequences_that_are_asked_for(arguments):
    assert KvjaxLM.create_from_arg_obj(arguments | {"max_positions": 300}).engine.config.max_positions == 300


def test_results_record_checkpoint_and_policy(lm, arguments):
    recorded = json.loads(json.dumps(lm.get_model_info()))
    assert recorded["model_name"] == arguments["pretrained"]
    assert recorded["model_fingerprint"] == fingerprint(load(arguments["pretrained"]))
    assert recorded["policy"] == POLICY
    assert recorded["policy_in_full"] == "Window(sink_tokens=8, window_tokens=24, release=False, remap=False)"
    assert (recorded["prefill"], recorded["model_dtype"], recorded["page_size"]) == ("dense", "float32", 16)
    assert {"kvjax_version", "jax_version", "model_num_parameters", "model_device"} <= set(recorded)


def test_wrong_arguments_are_named(arguments):
    with pytest.raises(ValueError, match=r"'parallelize'.*pretrained, policy"):
        KvjaxLM.create_from_arg_obj(arguments | {"parallelize": True})
    with pytest.raises(ValueError, match="need pretrained="):
        KvjaxLM.create_from_arg_obj({"policy": "dense"})


def test_the_command_says_what_is_missing(monkeypatch):
    monkeypatch.setattr(harness, "LM", object)
    with pytest.raises(SystemExit, match="lm_eval is not installed"):
        harness.main()


# With lm_eval itself, where it is installed

needs_lm_eval = pytest.mark.skipif(importlib.util.find_spec("lm_eval") is None, reason="lm_eval is not installed")


@needs_lm_eval
def test_lm_eval_runs_a_task_and_records_what_ran(arguments, tmp_path):
    """Its own command line on a task of local files; the results' JSON has the scores, the checkpoint and the
    policy."""
    (tmp_path / "questions.jsonl").write_text("".join(json.dumps(document) + "\n" for document in DOCUMENTS))
    common = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(tmp_path / "questions.jsonl")}}, "test_split": "test"}
    common |= {"doc_to_text": "question", "target_delimiter": ""}
    choices = {"output_type": "multiple_choice", "doc_to_target": "gold", "doc_to_choice": "choices", "metric_list": [{"metric": "acc"}]}
    words = {"output_type": "generate_until", "doc_to_target": "{{choices[gold]}}", "metric_list": [{"metric": "exact_match"}]}
    words |= {"generation_kwargs": {"until": ["\n"], "max_gen_toks": 4}}
    for name, own in (("tiny_choices", choices), ("tiny_words", words)):
        (tmp_path / f"{name}.yaml").write_text(json.dumps({"task": name, **common, **own}))  # JSON is YAML
    model_args = ",".join(f"{name}={value}" for name, value in arguments.items())
    command = [sys.executable, "-m", "kvjax.serving.harness", "--model", "kvjax", "--model_args", model_args]
    command += [
        "--tasks",
        "tiny_choices,tiny_words",
        "--include_path",
        str(tmp_path),
        "--output_path",
        str(tmp_path / "out"),
        "--log_samples",
    ]
    environment = {"PATH": "", "HOME": str(tmp_path), "HF_DATASETS_OFFLINE": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": ":".join(sys.path)}
    ran = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    (file,) = (tmp_path / "out").rglob("results_*.json")
    results = json.loads(file.read_text())
    assert results["config"]["model"] == "kvjax"
    assert results["config"]["model_name"] == arguments["pretrained"]
    assert results["config"]["model_fingerprint"] == fingerprint(load(arguments["pretrained"]))
    assert results["config"]["policy"] == POLICY
    assert set(results["results"]) == {"tiny_choices", "tiny_words"}
    (samples,) = (tmp_path / "out").rglob("samples_tiny_choices_*.jsonl")
    lines = sorted((json.loads(line) for line in samples.read_text().splitlines()), key=lambda line: line["doc_id"])
    found = [float(answer[0][0]) for line in lines for answer in line["resps"]]
    assert found == pytest.approx(direct_answers(arguments["pretrained"]), abs=1e-5)


@needs_lm_eval
def test_lm_eval_takes_the_entry_point_and_arguments_in_one_string(arguments):
    from lm_eval.api.model import LM
    from lm_eval.api.registry import Registry

    registry = Registry("model", base_cls=LM)
    value = ENTRY_POINTS["lm_eval.models"]["kvjax"]
    registry.register("kvjax", target=importlib.metadata.EntryPoint("kvjax", value, "lm_eval.models"))
    model_args = ",".join(f"{name}={value}" for name, value in arguments.items())
    lm = registry.get("kvjax").create_from_arg_string(model_args, {"batch_size": 1, "max_batch_size": None, "device": "cpu"})
    assert (str(lm.policy), lm.slots, lm.seed, lm.engine.page_size) == (POLICY, 1, 3, 16)
