"""Cohere's Command R7B and Command A (`cohere2`): Cohere with a window in most layers, and RoPE in those alone.

Details as in transformers' `Cohere2ForCausalLM`, which the tests compare with.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvjax.layers import NO_ROPE, LayerConfig, Mlp, Rope, RopeScaling
from kvjax.model import ModelConfig
from kvjax.models.attention_layers import FULL, SLIDING, attention_of, head_dim_of, kinds_in, kinds_of, sizes_of
from kvjax.models.cohere import DEFAULTS, scales_of
from kvjax.models.family import Family
from kvjax.models.fields import boolean, size


def layers_of(read: Mapping[str, Any], theta: float, scaling: RopeScaling | None) -> tuple[LayerConfig, ...]:
    """The layers that config.json's fields describe. ValueError that names the field at fault."""
    types, biased = kinds_of(read, size(read, "sliding_window_pattern")), boolean(read, "attention_bias")
    of_kind: dict[str, tuple[int | None, Rope]] = {FULL: (None, NO_ROPE)}
    if SLIDING in types:
        of_kind[SLIDING] = size(read, "sliding_window"), Rope(theta, head_dim_of(read), scaling)
    mlp = Mlp(size(read, "intermediate_size"))

    def layer(kind: str) -> LayerConfig:
        window, rope = of_kind[kind]
        return LayerConfig(attention_of(read, rope, window=window, qkv_bias=biased, o_bias=biased), mlp, parallel=True)

    return tuple(map(layer, types))


def fields_of(config: ModelConfig) -> dict[str, Any]:
    """config.json's fields of the layers. ValueError for layers that it has no words for."""
    types, kinds = kinds_in(config, FAMILY.architecture)
    sliding = kinds.get(SLIDING)
    return sizes_of(config.layers[0]) | {
        "layer_types": types,
        "logit_scale": config.logit_scale,
        "attention_bias": config.layers[0].mixer.o_bias,
        # Without layers that have a window transformers makes the mask of one all the same, so it needs a length.
        "sliding_window": sliding.mixer.window if sliding else FAMILY.defaults["sliding_window"],
    }


FAMILY = Family(
    model_type="cohere2",
    architecture="Cohere2ForCausalLM",
    defaults={**DEFAULTS, "rope_theta": 10000.0, "sliding_window": 4096, "sliding_window_pattern": 4, "layer_types": None},
    only={"use_qk_norm": (None, False)},
    harmless=frozenset({"cache_implementation", "_sliding_window_pattern"}),
    layers_of=layers_of,
    fields_of=fields_of,
    centered_norms=True,
    norm_eps="layer_norm_eps",
    scales_of=scales_of,
    interleaved=True,
)
