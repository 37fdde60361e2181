"""OLMo 2: norms only after attention and MLP, and one RMSNorm over all heads of q, and one over those of k.

Sources: 2 OLMo 2 Furious (arXiv 2501.00656); details as in transformers' `Olmo2ForCausalLM`, which the tests compare
with.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from kvjax.model.config import ModelConfig
from kvjax.model.layers import LayerConfig, Rope, RopeScaling
from kvjax.models.dense import DEFAULTS, NO_WINDOWS, flag, head_dim_of, same_fields, same_layers
from kvjax.models.family import Family

NORMS = {"attn_post_norm": "post_attention_layernorm.weight", "mlp_post_norm": "post_feedforward_layernorm.weight"}
"""Names of a layer's norms."""


def layers_of(read: Mapping[str, Any], theta: float, scaling: RopeScaling | None) -> tuple[LayerConfig, ...]:
    """The layers that config.json's fields describe. ValueError that names the field at fault."""
    biased, rope = flag(read, "attention_bias"), Rope(theta, head_dim_of(read), scaling)
    layers = same_layers(read, rope, qkv_bias=biased, o_bias=biased, qk_norm=True, joint_norm=True)
    return tuple(dataclasses.replace(layer, pre_norms=False, post_norms=True) for layer in layers)


def fields_of(config: ModelConfig) -> dict[str, Any]:
    """config.json's fields of the layers. ValueError for layers that it has no words for."""
    return same_fields(config) | {"attention_bias": config.layers[0].mixer.o_bias}


FAMILY = Family(
    model_type="olmo2",
    architecture="Olmo2ForCausalLM",
    defaults=DEFAULTS | {"vocab_size": 50304, "rms_norm_eps": 1e-5, "attention_bias": False, "bos_token_id": None, "eos_token_id": 50279},
    only=NO_WINDOWS,
    layer_tensors=NORMS,
    layers_of=layers_of,
    fields_of=fields_of,
)
