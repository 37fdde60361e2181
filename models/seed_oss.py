"""Seed-OSS: Llama's layers, with biases of q, k and v apart from that of o."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvjax.model.config import ModelConfig
from kvjax.model.layers import LayerConfig, Rope, RopeScaling
from kvjax.models.dense import DEFAULTS, NO_WINDOWS, flag, head_dim_of, same_fields, same_layers
from kvjax.models.family import Family


def layers_of(read: Mapping[str, Any], theta: float, scaling: RopeScaling | None) -> tuple[LayerConfig, ...]:
    """The layers that config.json's fields describe. ValueError that names the field at fault."""
    biases = {"qkv_bias": flag(read, "attention_bias"), "o_bias": flag(read, "attention_out_bias")}
    return same_layers(read, Rope(theta, head_dim_of(read), scaling), **biases)


def fields_of(config: ModelConfig) -> dict[str, Any]:
    """config.json's fields of the layers. ValueError for layers that it has no words for."""
    mixer, mlp = config.layers[0].mixer, config.layers[0].mlp
    return same_fields(config) | {"attention_bias": mixer.qkv_bias, "attention_out_bias": mixer.o_bias, "mlp_bias": mlp.bias}


FAMILY = Family(
    model_type="seed_oss",
    architecture="SeedOssForCausalLM",
    defaults=DEFAULTS
    | {
        "vocab_size": 155136,
        "intermediate_size": 27648,
        "num_hidden_layers": 64,
        "num_attention_heads": 80,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 524288,
        "attention_bias": True,
        "attention_out_bias": False,
        "mlp_bias": False,
        "bos_token_id": 0,
    },
    only=NO_WINDOWS,
    harmless=frozenset({"residual_dropout"}),
    layers_of=layers_of,
    fields_of=fields_of,
)
