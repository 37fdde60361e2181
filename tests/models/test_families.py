"""Families by table: eight unusual configurations of each give transformers' logits, in any cut of the prompt, and come back from a save.

The golden files hold logits alone. Configurations, weights and prompts come from seeds (dense_cases.py), which the scripts share.
"""

import json
from pathlib import Path

import dense_cases
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from kvjax.models import config_json, fused, load, save

GOLDEN = np.load(Path(__file__).with_name("golden") / "dense_cases.npz")
TOLERANCE = 1e-4
CASES, FAMILIES = dense_cases.CASES, dense_cases.FAMILIES


def stored(family, number):
    """(config.json's fields, tensors) of a case, as transformers would save it."""
    fields = dense_cases.fields_of(family, number)
    wanted = fused.stored_wanted(config_json.parse(fields))
    return fields, {w.name: dense_cases.weight_of(family, number, w.name, w.shape) for w in wanted}


def loaded(family, number, folder, **options):
    """A case as kvjax loads it."""
    fields, tensors = stored(family, number)
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(fields))
    save_file(tensors, folder / "model.safetensors")
    long = fields["max_position_embeddings"] if "original_max_position_embeddings" in fields and number < 4 else None
    return load(folder, tokenizer=False, dtype="float32", **({"max_positions": long} if long else {}) | options)


def wanted_logits(family, number):
    """transformers' logits of the prompt's last tokens."""
    return GOLDEN[f"{family} {number} logits"]


def error_of(logits, family, number):
    wanted = wanted_logits(family, number)
    return float(np.abs(logits[-len(wanted) :] - wanted).max())


@pytest.mark.parametrize(("family", "number"), CASES)
def test_logits_are_those_of_transformers(family, number, tmp_path, complete):
    model = loaded(family, number, tmp_path)
    logits, _ = complete(model.decoder, model.params, dense_cases.prompt_of(family, number))
    error = error_of(logits, family, number)
    print(f"{family} {number}: largest logit error {error:.1e}")
    assert error < TOLERANCE


@pytest.mark.parametrize("number", range(8))
@pytest.mark.parametrize("family", FAMILIES)
def test_a_save_holds_what_was_loaded(family, number, tmp_path):
    """The same tensors, bit for bit, and a configuration that says the same."""
    model = loaded(family, number, tmp_path / "first")
    save(model, tmp_path / "second")
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("first", "second"))
    assert before.keys() == after.keys()
    assert all(np.array_equal(before[name], after[name]) for name in before)
    again = load(tmp_path / "second", tokenizer=False, dtype="float32", max_positions=model.config.max_positions)
    assert again.config == model.config
