"""`--lora` of the commands, and adapters in what batch jobs and answers say."""

import json

import numpy as np
import pytest
from safetensors.numpy import save_file

from kvjax.models import load
from kvjax.serving.batch.partial import Partial

A_NAME, B_NAME = (f"base_model.model.model.layers.0.self_attn.q_proj.lora_{which}.weight" for which in "AB")


@pytest.fixture(scope="module")
def adapter(model, tmp_path_factory):
    """An adapter of the shared model."""
    folder, draw = tmp_path_factory.mktemp("lora"), np.random.default_rng(5)
    mixer, width = model.config.layers[0].mixer, model.config.hidden_size
    a, b = draw.standard_normal((2, width)), draw.standard_normal((mixer.num_heads * mixer.head_dim, 2))
    save_file({A_NAME: a.astype(np.float32), B_NAME: b.astype(np.float32)}, folder / "adapter_model.safetensors")
    fields = {"peft_type": "LORA", "r": 2, "lora_alpha": 8, "base_model_name_or_path": "owner/base"}
    (folder / "adapter_config.json").write_text(json.dumps(fields))
    return folder


def test_score_counts_each_adapter(kvjax, model_folder, adapter):
    def logprob(*lora):
        words = [word for each in lora for word in ("--lora", each)]
        status, out, err = kvjax("score", "--model", model_folder, *words, "one two three four", " five six")
        assert status == 0, err
        return json.loads(out)["logprob"]

    plain, once, twice = logprob(), logprob(adapter), logprob(adapter, adapter)
    assert len({plain, once, twice}) == 3
    assert logprob(f"{adapter}:0") == plain
    assert logprob(f"{adapter}:2") == pytest.approx(twice, abs=1e-4)


def test_a_batch_job_goes_on_with_its_adapters_alone(kvjax, model_folder, adapter, tmp_path, monkeypatch):
    (tmp_path / "in.jsonl").write_text('{"prompt": "one two"}\n')
    words = "batch", tmp_path / "in.jsonl", "--out", tmp_path / "out.jsonl", "--model", model_folder, "--max-new-tokens", 2
    with monkeypatch.context() as patch:
        patch.setattr(Partial, "append", interrupt)
        assert kvjax(*words, "--lora", f"{adapter}:0.5")[0] == 130
    for others in ((), ("--lora", adapter), ("--lora", f"{adapter}:0.5", "--lora", adapter)):
        status, _, err = kvjax(*words, *others)
        assert (status, f"was begun with --lora {adapter}:0.5, and this run has " in err) == (2, True), err
    status, _, err = kvjax(*words, "--lora", f"{adapter}:0.5")
    assert status == 0, err
    assert f"{model_folder}+{adapter}:0.5, dense" in err


def interrupt(self, result):
    """In the place of what keeps an answer."""
    raise KeyboardInterrupt


def test_quantize_writes_the_merged_model(kvjax, model_folder, adapter, tmp_path):
    status, _, err = kvjax("quantize", "--model", model_folder, "--lora", adapter, tmp_path / "packed")
    assert status == 0, err
    codes = [
        np.asarray(each.params["layers"][0]["q"].codes)
        for each in (load(tmp_path / "packed"), load(model_folder, lora=adapter, weights="int8"), load(model_folder, weights="int8"))
    ]
    np.testing.assert_array_equal(codes[0], codes[1])
    assert (codes[0] != codes[2]).any()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--model", "{model}", "--lora", "{adapter}:x"), "has the scale 'x'"),
        (("--model", "{model}", "--lora", ""), "the adapter's name is empty"),
        (("--model", "{model}", "--lora", "{model}"), "it is a model, not an adapter: give it as the model"),
        (("--model", "needle", "--lora", "{adapter}"), "must be [2, 384] for model.layers.0.self_attn.q_proj.weight"),
        (("--model", "{adapter}"), "is an adapter for owner/base, not a model: kvjax.load('owner/base', lora="),
    ],
)
def test_what_is_refused(words, said, kvjax, model_folder, adapter):
    status, _, err = kvjax("score", *(word.format(model=model_folder, adapter=adapter) for word in words), "a", "b")
    assert status == 2
    assert said in err
    assert len(err.splitlines()) == 1
