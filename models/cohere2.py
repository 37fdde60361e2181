"""Cohere's Command R7B and Command A (`cohere2`): Cohere with a window in most layers, and RoPE in those alone.

Details as in transformers' `Cohere2ForCausalLM`, which the tests compare with.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvjax.model.config import ModelConfig
from kvjax.model.layers import NO_ROPE, LayerConfig, Rope, RopeScaling
from kvjax.models import cohere
from kvjax.models.dense import SLIDING, head_dim_of, kinds_in, kinds_of, same_fields, window_in, with_mixers
from kvjax.models.family import Family
from kvjax.models.fields import size


def layers_of(read: Mapping[str, Any], theta: float, scaling: RopeScaling | None) -> tuple[LayerConfig, ...]:
    """The layers that config.json's fields describe. ValueError that names the field at fault."""
    types = kinds_of(read, size(read, "sliding_window_pattern"))
    windows = [size(read, "sliding_window") if kind == SLIDING else None for kind in types]
    rotated = Rope(theta, head_dim_of(read), scaling)
    ropes = [rotated if kind == SLIDING else NO_ROPE for kind in types]
    return with_mixers(cohere.layers_of({**read, "use_qk_norm": False}, theta, scaling), window=windows, rope=ropes)


def fields_of(config: ModelConfig) -> dict[str, Any]:
    """config.json's fields of the layers and factors. ValueError for layers that it has no words for."""
    return same_fields(config, "window", "rope") | {
        "layer_types": kinds_in(config),
        "logit_scale": config.logit_scale,
        "attention_bias": config.layers[0].mixer.o_bias,
        "sliding_window": window_in(config, FAMILY.defaults["sliding_window"]),
    }


FAMILY = Family(
    model_type="cohere2",
    architecture="Cohere2ForCausalLM",
    defaults={**cohere.OWN, "sliding_window": 4096, "sliding_window_pattern": 4, "layer_types": None},
    only={"use_qk_norm": (None, False)},
    harmless=frozenset({"cache_implementation", "_sliding_window_pattern"}),
    layers_of=layers_of,
    fields_of=fields_of,
    centered_norms=True,
    norm_eps="layer_norm_eps",
    scales_of=cohere.scales_of,
    interleaved=True,
)
