"""Helium (Kyutai): Llama with interleaved RoPE, and without a bias of the output projection."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvjax.model.config import ModelConfig
from kvjax.model.layers import LayerConfig, Rope, RopeScaling
from kvjax.models.dense import DEFAULTS, flag, head_dim_of, same_fields, same_layers
from kvjax.models.family import Family
from kvjax.models.fields import size


def layers_of(read: Mapping[str, Any], theta: float, scaling: RopeScaling | None) -> tuple[LayerConfig, ...]:
    """The layers that config.json's fields describe. ValueError that names the field at fault."""
    heads, head_dim, hidden = size(read, "num_attention_heads"), head_dim_of(read), size(read, "hidden_size")
    if heads * head_dim != hidden:  # transformers gives the output projection so many inputs
        raise ValueError(f"config.json: hidden_size {hidden} of a Helium must be num_attention_heads {heads} times head_dim {head_dim}")
    return same_layers(read, Rope(theta, head_dim, scaling), qkv_bias=flag(read, "attention_bias"))


def fields_of(config: ModelConfig) -> dict[str, Any]:
    """config.json's fields of the layers. ValueError for layers that it has no words for."""
    first = config.layers[0]
    return same_fields(config) | {"attention_bias": first.mixer.qkv_bias, "mlp_bias": first.mlp.bias}


FAMILY = Family(
    model_type="helium",
    architecture="HeliumForCausalLM",
    defaults=DEFAULTS
    | {
        "vocab_size": 48000,
        "hidden_size": 2560,
        "intermediate_size": 7040,
        "num_hidden_layers": 24,
        "num_attention_heads": 20,
        "num_key_value_heads": 20,
        "head_dim": 128,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-8,
        "rope_theta": 100000.0,
        "attention_bias": False,
        "mlp_bias": False,
    },
    layers_of=layers_of,
    fields_of=fields_of,
    interleaved=True,
)
