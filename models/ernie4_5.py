"""Ernie 4.5, the dense models (Baidu): Llama with interleaved RoPE, and one switch for all biases."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvjax.model.config import ModelConfig
from kvjax.model.layers import LayerConfig, Rope, RopeScaling
from kvjax.models.dense import DEFAULTS, flag, head_dim_of, same_fields, same_layers
from kvjax.models.family import Family


def layers_of(read: Mapping[str, Any], theta: float, scaling: RopeScaling | None) -> tuple[LayerConfig, ...]:
    """The layers that config.json's fields describe. ValueError that names the field at fault."""
    biased = flag(read, "use_bias")
    rope = Rope(theta, head_dim_of(read), scaling)
    return same_layers({**read, "mlp_bias": biased}, rope, qkv_bias=biased, o_bias=biased)


def fields_of(config: ModelConfig) -> dict[str, Any]:
    """config.json's fields of the layers. ValueError for layers that it has no words for."""
    return same_fields(config) | {"use_bias": config.layers[0].mixer.o_bias}


FAMILY = Family(
    model_type="ernie4_5",
    architecture="Ernie4_5ForCausalLM",
    defaults=DEFAULTS
    | {
        "vocab_size": 103424,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 18,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "tie_word_embeddings": True,
        "use_bias": False,
    },
    layers_of=layers_of,
    fields_of=fields_of,
    interleaved=True,
)
