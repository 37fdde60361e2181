"""Ernie 4.5, the dense models (Baidu): Llama with interleaved RoPE, and one switch for all biases."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvjax.layers import LayerConfig, Mlp, Rope, RopeScaling
from kvjax.model import ModelConfig
from kvjax.models.attention_layers import attention_of, head_dim_of, only_layer, said, sizes_of
from kvjax.models.family import Family
from kvjax.models.fields import layer_count, size


def layers_of(read: Mapping[str, Any], theta: float, scaling: RopeScaling | None) -> tuple[LayerConfig, ...]:
    """The layers that config.json's fields describe. ValueError that names the field at fault."""
    biased = said(read, "use_bias")
    mixer = attention_of(read, Rope(theta, head_dim_of(read), scaling), qkv_bias=biased, o_bias=biased)
    return (LayerConfig(mixer, Mlp(size(read, "intermediate_size"), bias=biased)),) * layer_count(read)


def fields_of(config: ModelConfig) -> dict[str, Any]:
    """config.json's fields of the layers. ValueError for layers that it has no words for."""
    layer = only_layer(config, FAMILY.architecture)
    return sizes_of(layer) | {"use_bias": layer.mixer.o_bias}


FAMILY = Family(
    model_type="ernie4_5",
    architecture="Ernie4_5ForCausalLM",
    defaults={
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
        "rope_scaling": None,
        "rope_parameters": None,
        "original_max_position_embeddings": None,
        "tie_word_embeddings": True,
        "use_bias": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    layers_of=layers_of,
    fields_of=fields_of,
    interleaved=True,
)
