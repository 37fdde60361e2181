"""Phi-3, Phi-3.5 and Phi-4 (mini and 14B): Llama's layers with q, k and v stored as one matrix, and gate and up as
another; RoPE on a part of each head, with longrope; a sliding window in all layers or in none.

Source: details as in transformers' `Phi3ForCausalLM`, which the tests compare with.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvjax.model.config import ModelConfig
from kvjax.model.layers import LayerConfig, Rope, RopeScaling
from kvjax.models.dense import DEFAULTS, head_dim_of, padding, same_fields, same_layers
from kvjax.models.family import Family
from kvjax.models.fields import size
from kvjax.models.partial_rope import rotary_fraction, rotated_of

CODE = ("configuration_phi3.Phi3Config", "modeling_phi3.Phi3Model", "modeling_phi3.Phi3ForCausalLM")
"""Classes of the family's own code on the Hub."""

LENGTH, TRAINED = "original_max_position_embeddings", 4096
"""The field of longrope's trained length, and its default."""


def layers_of(read: Mapping[str, Any], theta: float, scaling: RopeScaling | None) -> tuple[LayerConfig, ...]:
    """The layers that config.json's fields describe. ValueError that names the field at fault."""
    if scaling is not None and scaling.kind != "longrope":
        raise ValueError(f"config.json: RoPE has rope_type {scaling.kind!r}; supported for Phi-3: default, longrope")
    head_dim = head_dim_of(read)
    window = None if read["sliding_window"] is None else size(read, "sliding_window")
    return same_layers(read, Rope(theta, rotated_of(read, head_dim), scaling), window=window)


def spread(fields: Mapping[str, Any]) -> Mapping[str, Any]:
    """config.json's fields, with the name and the trained length of longrope as other families have them."""
    found = dict(fields)
    for name in ("rope_scaling", "rope_parameters"):
        scaling = fields.get(name)
        if not isinstance(scaling, Mapping):
            continue
        found[name] = {key: "longrope" if key in ("type", "rope_type") and kind == "su" else kind for key, kind in scaling.items()}
        if scaling.get(LENGTH) is None and fields.get(LENGTH) is None and "short_factor" in scaling:
            found[name][LENGTH] = TRAINED
    return found


def fields_of(config: ModelConfig) -> dict[str, Any]:
    """config.json's fields of the layers. ValueError for layers that it has no words for."""
    mixer = config.layers[0].mixer
    trained = {} if mixer.rope.scaling is None else {LENGTH: mixer.rope.scaling.original_max_positions}
    return (
        same_fields(config)
        | padding(config, 32000)
        | trained
        | {
            "sliding_window": mixer.window,
            "partial_rotary_factor": rotary_fraction(mixer.rope.dim, mixer.head_dim),
        }
    )


FAMILY = Family(
    model_type="phi3",
    architecture="Phi3ForCausalLM",
    defaults=DEFAULTS
    | {
        "vocab_size": 32064,
        "hidden_size": 3072,
        "intermediate_size": 8192,
        "max_position_embeddings": 4096,
        "original_max_position_embeddings": None,
        "partial_rotary_factor": 1.0,
        "rms_norm_eps": 1e-5,
        "sliding_window": None,
        "eos_token_id": 32000,
    },
    only={"interpolate_factor": (None, 1), "lm_head_bias": (None, False), "layer_types": (None,)},
    harmless=frozenset({"full_attn_mod"}),
    spread=spread,
    rope_keys=frozenset({"partial_rotary_factor"}),
    fused={"self_attn.qkv_proj.weight": ("q", "k", "v"), "mlp.gate_up_proj.weight": ("gate", "up")},
    layers_of=layers_of,
    fields_of=fields_of,
    own_code=frozenset(CODE),
)
