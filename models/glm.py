"""GLM-4 (`glm`): Llama's layers with gate and up stored as one matrix, and interleaved RoPE on a part of each head.

Details as in transformers' `GlmForCausalLM`, which the tests compare with.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvjax.model.config import ModelConfig
from kvjax.model.layers import LayerConfig, Rope, RopeScaling
from kvjax.models.dense import DEFAULTS, flag, head_dim_of, same_fields, same_layers
from kvjax.models.family import Family
from kvjax.models.partial_rope import rotary_fraction, rotated_of

ENDS = [151329, 151336, 151338]
"""The ids that end a text where config.json gives none."""

PAD = 151329
"""The id of padding where config.json gives none."""


def spread(fields: Mapping[str, Any]) -> Mapping[str, Any]:
    """config.json's fields, with the default of `eos_token_id` for null."""
    return {name: value for name, value in fields.items() if name != "eos_token_id" or value is not None}


def layers_of(read: Mapping[str, Any], theta: float, scaling: RopeScaling | None) -> tuple[LayerConfig, ...]:
    """The layers that config.json's fields describe. ValueError that names the field at fault."""
    head_dim = head_dim_of(read)
    return same_layers(read, Rope(theta, rotated_of(read, head_dim), scaling), qkv_bias=flag(read, "attention_bias"))


def fields_of(config: ModelConfig) -> dict[str, Any]:
    """config.json's fields of the layers. ValueError for layers that it has no words for."""
    mixer = config.layers[0].mixer
    partial = rotary_fraction(mixer.rope.dim, mixer.head_dim)
    pad = {} if config.vocab_size > PAD else {"pad_token_id": None}  # transformers wants its default inside the vocabulary
    return same_fields(config) | pad | {"attention_bias": mixer.qkv_bias, "partial_rotary_factor": partial}


FAMILY = Family(
    model_type="glm",
    architecture="GlmForCausalLM",
    defaults=DEFAULTS
    | {
        "vocab_size": 151552,
        "intermediate_size": 13696,
        "num_hidden_layers": 40,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 0.00000015625,
        "partial_rotary_factor": 0.5,
        "attention_bias": True,
        "bos_token_id": None,
        "eos_token_id": ENDS,
    },
    layers_of=layers_of,
    fields_of=fields_of,
    spread=spread,
    rope_keys=frozenset({"partial_rotary_factor"}),
    fused={"mlp.gate_up_proj.weight": ("gate", "up")},
    interleaved=True,
)
