"""`--cache-format` gives an engine with packed pages, wherever a command makes one, and the plan of its pool."""

from __future__ import annotations

import json

import pytest

from kvjax import Engine, generate
from kvjax.engine.memory import memory_plan
from kvjax.models.loading import load

PAGES = ("--page-size", 16, "--prefill-chunk", 32, "--dtype", "float32")
FORMAT = "k=int8:channel,v=int4"
PROMPT = "the lamp that she kept in the cellar was of no use to anyone any more, and so she lit it"


@pytest.fixture(scope="module")
def loaded(model_folder):
    return load(model_folder, dtype="float32")


def test_plan_counts_packed_pages_and_the_rows_of_open_ones(kvjax, model_folder, loaded):
    status, out, err = kvjax("plan", "--model", model_folder, *PAGES, "--max-batch", 2, "--memory", 1, "--cache-format", FORMAT)
    assert (status, err) == (0, "")
    assert f"pages packed as {FORMAT}" in out.splitlines()[0]
    plan = memory_plan(loaded.config, page_size=16, cache_format=FORMAT, sequences=2, prefill_chunk=32, available_bytes=2**30)
    assert out.partition("\n")[2].strip() == str(plan)
    assert plan.bytes_per_1k_tokens < memory_plan(loaded.config, page_size=16, available_bytes=2**30).bytes_per_1k_tokens / 2
    assert "open pages" in out


def test_generate_and_batch_answer_as_the_engine_does(kvjax, model_folder, loaded, tmp_path):
    sizes = {"pages": 20, "page_size": 16, "prefill_chunk": 32, "batch_buckets": (1,), "cache_format": FORMAT}
    expected = generate(Engine(loaded, **sizes), PROMPT, max_new_tokens=12)
    common = ("--model", model_folder, *PAGES, "--pages", 20, "--cache-format", FORMAT)  # as above: programs are compiled once
    status, out, err = kvjax("generate", *common, "--max-new-tokens", 12, PROMPT)
    assert (status, err, out.rstrip("\n")) == (0, "", expected)
    source, answers = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text(json.dumps({"id": 1, "prompt": PROMPT, "max_new_tokens": 12}) + "\n")
    assert kvjax("batch", source, "--out", answers, *common, "--max-batch", 1)[0] == 0
    assert json.loads(answers.read_text())["text"] == expected


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--cache-format", "int5"), "'int5' is not a format"),
        (("--cache-format", "int8", "--policy", "auto"), "name one of those"),
    ],
)
def test_plan_says_what_does_not_fit(kvjax, model_folder, options, said):
    status, out, err = kvjax("plan", "--model", model_folder, *PAGES, *options)
    assert (status, out) == (2, "")
    assert said in " ".join(err.split())
