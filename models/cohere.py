"""Cohere's Command R and Aya (`cohere`): parallel blocks, LayerNorm without biases, interleaved RoPE, scaled logits of
the model.

A layer is x + attention(norm(x)) + mlp(norm(x)), with one norm. With `use_qk_norm` (Command R+) each head of q and k
has a LayerNorm with weights of its own. Details as in transformers' `CohereForCausalLM`, which the tests compare with.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from kvjax.model.config import ModelConfig
from kvjax.model.layers import LayerConfig, Rope, RopeScaling
from kvjax.models.dense import DEFAULTS, flag, head_dim_of, same_fields, same_layers
from kvjax.models.family import Family
from kvjax.models.fields import number


def layers_of(read: Mapping[str, Any], theta: float, scaling: RopeScaling | None) -> tuple[LayerConfig, ...]:
    """The layers that config.json's fields describe. ValueError that names the field at fault."""
    biased, normed = flag(read, "attention_bias"), flag(read, "use_qk_norm")
    changes = {"qkv_bias": biased, "o_bias": biased, "qk_norm": normed, "qk_norm_by_head": normed}
    layers = same_layers(read, Rope(theta, head_dim_of(read), scaling), **changes)
    return tuple(dataclasses.replace(layer, parallel=True) for layer in layers)


def scales_of(read: Mapping[str, Any]) -> dict[str, float | None]:
    """The factor of the model's logits, by `ModelConfig`'s name."""
    return {"logit_scale": number(read, "logit_scale")}


def fields_of(config: ModelConfig) -> dict[str, Any]:
    """config.json's fields of the layers and factors. ValueError for layers that it has no words for."""
    mixer = config.layers[0].mixer
    return same_fields(config) | {"attention_bias": mixer.o_bias, "use_qk_norm": mixer.qk_norm, "logit_scale": config.logit_scale}


OWN: Mapping[str, Any] = {name: value for name, value in DEFAULTS.items() if name != "rms_norm_eps"} | {
    "vocab_size": 256000,
    "hidden_size": 8192,
    "intermediate_size": 22528,
    "logit_scale": 0.0625,
    "num_hidden_layers": 40,
    "num_attention_heads": 64,
    "max_position_embeddings": 8192,
    "layer_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "attention_bias": False,
    "bos_token_id": 5,
    "eos_token_id": 255001,
}
"""Fields that both of Cohere's families read, with transformers' defaults."""

FAMILY = Family(
    model_type="cohere",
    architecture="CohereForCausalLM",
    defaults={**OWN, "rope_theta": 500000.0, "use_qk_norm": False},
    layers_of=layers_of,
    fields_of=fields_of,
    centered_norms=True,
    norm_eps="layer_norm_eps",
    scales_of=scales_of,
    interleaved=True,
)
