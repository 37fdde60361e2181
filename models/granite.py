"""Granite 3 (dense): Llama's layers with factors of embeddings, attention, what each half of a layer adds, and
logits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvjax.model.config import ModelConfig
from kvjax.model.layers import LayerConfig, Rope, RopeScaling
from kvjax.models.dense import DEFAULTS, NO_WINDOWS, flag, head_dim_of, same_fields, same_layers
from kvjax.models.family import Family
from kvjax.models.fields import number, positive


def layers_of(read: Mapping[str, Any], theta: float, scaling: RopeScaling | None) -> tuple[LayerConfig, ...]:
    """The layers that config.json's fields describe. ValueError that names the field at fault."""
    biased = flag(read, "attention_bias")
    scale = positive(read, "attention_multiplier")
    return same_layers(read, Rope(theta, head_dim_of(read), scaling), sm_scale=scale, qkv_bias=biased, o_bias=biased)


def scales_of(read: Mapping[str, Any]) -> dict[str, float | None]:
    """The factors outside attention; None where they change nothing."""
    found = {
        "embed_scale": number(read, "embedding_multiplier"),
        "residual_scale": number(read, "residual_multiplier"),
        "logit_scale": 1 / positive(read, "logits_scaling"),
    }
    return {name: None if value == 1 else value for name, value in found.items()}


def fields_of(config: ModelConfig) -> dict[str, Any]:
    """config.json's fields of the layers and factors. ValueError for layers that it has no words for."""
    first = config.layers[0]
    return same_fields(config) | {
        "attention_bias": first.mixer.o_bias,
        "mlp_bias": first.mlp.bias,
        "attention_multiplier": first.mixer.sm_scale,
        "embedding_multiplier": 1.0 if config.embed_scale is None else config.embed_scale,
        "residual_multiplier": 1.0 if config.residual_scale is None else config.residual_scale,
        "logits_scaling": 1.0 if config.logit_scale is None else _inverse(config.logit_scale),
    }


def _inverse(scale: float) -> float:
    """The number whose inverse this is, without the digits that the inverse has lost."""
    short = float(f"{1 / scale:.12g}")
    return short if 1 / short == scale else 1 / scale


FAMILY = Family(
    model_type="granite",
    architecture="GraniteForCausalLM",
    defaults=DEFAULTS
    | {
        "attention_bias": False,
        "mlp_bias": False,
        "embedding_multiplier": 1.0,
        "attention_multiplier": 1.0,
        "residual_multiplier": 1.0,
        "logits_scaling": 1.0,
    },
    only=NO_WINDOWS,
    layers_of=layers_of,
    fields_of=fields_of,
    scales_of=scales_of,
)
