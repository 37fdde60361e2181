"""Gemma 1 (and CodeGemma): Llama with norms that multiply by 1 + w, a tanh GELU, and embeddings times the square root
of the width.

Source: Gemma technical report (arXiv 2403.08295); details as in transformers' `GemmaForCausalLM`. It reads `hidden_act`
"gelu", as the first checkpoints have it, as the tanh approximation.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvjax.model.config import ModelConfig
from kvjax.model.layers import LayerConfig, Rope, RopeScaling
from kvjax.models.dense import DEFAULTS, flag, head_dim_of, same_fields, same_layers
from kvjax.models.family import Family


def layers_of(read: Mapping[str, Any], theta: float, scaling: RopeScaling | None) -> tuple[LayerConfig, ...]:
    """The layers that config.json's fields describe. ValueError that names the field at fault."""
    biased = flag(read, "attention_bias")
    return same_layers(read, Rope(theta, head_dim_of(read), scaling), activation="gelu_tanh", qkv_bias=biased, o_bias=biased)


def fields_of(config: ModelConfig) -> dict[str, Any]:
    """config.json's fields of the layers. ValueError for layers that it has no words for."""
    return same_fields(config) | {"attention_bias": config.layers[0].mixer.o_bias}


FAMILY = Family(
    model_type="gemma",
    architecture="GemmaForCausalLM",
    defaults=DEFAULTS
    | {
        "vocab_size": 256000,
        "hidden_size": 3072,
        "intermediate_size": 24576,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "head_dim": 256,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
        "attention_bias": False,
        "bos_token_id": 2,
        "eos_token_id": 1,
    },
    only={
        "hidden_act": ("gelu_pytorch_tanh", "gelu"),
        "hidden_activation": (None, "gelu_pytorch_tanh"),
        "use_bidirectional_attention": (None, False),
    },
    layers_of=layers_of,
    fields_of=fields_of,
    norm_offset=1.0,
    scaled_embedding=True,
)
