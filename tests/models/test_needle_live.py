"""The embedded model in transformers itself, wherever PyTorch can be imported."""

import runpy
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")


def test_transformers_loads_the_embedded_model_and_answers_as_stored():
    script = runpy.run_path(str(Path(__file__).with_name("make_needle_golden.py")))
    model, tokenizer = script["load"]()
    assert type(model).__name__ == "Qwen2ForCausalLM"
    stored = np.load(script["GOLDEN"])
    ids = stored["prompts"][: stored["lengths"][0]].tolist()
    tokens, lead = script["greedy"](model, ids)
    assert tokens == stored["greedy"][0].tolist()
    assert lead > script["CLEAR"]
    assert tokenizer.decode(stored["answers"][0]).strip().isdigit()


def test_checkpoint_is_stored_as_the_card_says():
    from transformers import AutoModelForCausalLM

    script = runpy.run_path(str(Path(__file__).with_name("make_needle_golden.py")))
    model = AutoModelForCausalLM.from_pretrained(script["MODEL"])
    assert model.dtype == torch.bfloat16
    assert model.lm_head.weight is model.model.embed_tokens.weight
