"""A family that is missing is refused with the nearest supported one and what differs, for every text model of
transformers."""

import json
from pathlib import Path

import pytest

from kvjax.models import config_json
from kvjax.models.families import FAMILIES
from kvjax.models.missing import MISSING, nearest

TRANSFORMERS = json.loads((Path(__file__).with_name("golden") / "text-models.json").read_text())
"""The names in `MODEL_FOR_CAUSAL_LM_MAPPING_NAMES` of transformers 5.24."""

WITHIN = {within.model_type for family in FAMILIES.values() for within in family.within}
LOADED = FAMILIES.keys() | WITHIN


@pytest.mark.parametrize("name", [name for name in TRANSFORMERS if name not in LOADED])
def test_every_other_text_model_is_refused_with_the_nearest_family(name):
    with pytest.raises(ValueError, match=r"model_type is .*; the nearest supported family is (\w+); a .* has .* \(docs/checkpoints.md"):
        config_json.parse({"model_type": name})


def test_the_table_names_each_family_once_and_only_families_that_are_missing():
    names = [name for group in MISSING.values() for name in group.split()]
    assert sorted(names) == sorted(set(names) & set(TRANSFORMERS) - LOADED)
    assert {family for family, _ in MISSING} <= FAMILIES.keys()


@pytest.mark.parametrize(
    ("architecture", "said"),
    [
        ("MixtralForCausalLM", "llama; a mixtral has a mixture of experts"),
        ("GptOssForCausalLM", "ministral; a gpt_oss has a mixture of experts .*, and attention sinks"),
        ("GPT2LMHeadModel", "llama; a gpt2 has learned positions"),
        ("Starcoder2ForCausalLM", "qwen2; a starcoder2 has LayerNorm with biases, and an MLP without a gate"),
    ],
)
def test_an_architecture_alone_says_the_same(architecture, said):
    with pytest.raises(ValueError, match=f"architectures is .*; the nearest supported family is {said}"):
        config_json.parse({"architectures": [architecture]})


def test_a_name_that_nobody_knows_has_no_nearest_family():
    assert nearest("of_my_own") is None
    with pytest.raises(ValueError, match="model_type is 'of_my_own'; supported: Llama"):
        config_json.parse({"model_type": "of_my_own"})
