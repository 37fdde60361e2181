"""OLMo 3: OLMo 2's layers, three with a sliding window and then one without. RoPE scaling applies to the layers without
a window.

Source: details as in transformers' `Olmo3ForCausalLM`, which the tests compare with.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvjax.model.config import ModelConfig
from kvjax.model.layers import LayerConfig, Rope, RopeScaling
from kvjax.models import gemma3, olmo2
from kvjax.models.dense import FULL, SLIDING, head_dim_of, same_fields, with_mixers
from kvjax.models.family import Family
from kvjax.models.fields import check_layer_types, layer_count, number, size

THETA = 500000.0
"""Default base of RoPE, in both kinds of layers."""


def layers_of(read: Mapping[str, Any], theta: float, scaling: RopeScaling | None) -> tuple[LayerConfig, ...]:
    """The layers that config.json's fields describe. ValueError that names the field at fault."""
    gemma3.check_scaling(scaling, "OLMo 3")
    count, head_dim = layer_count(read), head_dim_of(read)
    types = read["layer_types"]
    if types is None:
        types = [FULL if (place + 1) % 4 == 0 else SLIDING for place in range(count)]
    check_layer_types(types, (FULL, SLIDING), count)
    of_kind = {FULL: (None, Rope(theta, head_dim, scaling))}
    if SLIDING in types:
        of_kind[SLIDING] = size(read, "sliding_window"), Rope(number(read, "rope_local_base_freq"), head_dim)
    kinds = [of_kind[kind] for kind in types]
    return with_mixers(olmo2.layers_of(read, theta, None), window=[window for window, _ in kinds], rope=[rope for _, rope in kinds])


def fields_of(config: ModelConfig) -> dict[str, Any]:
    """config.json's fields of the layers. ValueError for layers that it has no words for."""
    kinds = {layer.mixer.window is not None: layer.mixer for layer in config.layers}
    full, sliding = kinds.get(False), kinds.get(True)
    if any(kinds[layer.mixer.window is not None] != layer.mixer for layer in config.layers):
        raise ValueError("config.json of an Olmo3ForCausalLM describes one kind of layer with a window and one without, not more")
    return same_fields(config, "window", "rope") | {
        "attention_bias": config.layers[0].mixer.o_bias,
        "layer_types": [FULL if layer.mixer.window is None else SLIDING for layer in config.layers],
        "sliding_window": sliding.window if sliding else FAMILY.defaults["sliding_window"],
        "rope_theta": full.rope.theta if full else THETA,
        "rope_local_base_freq": sliding.rope.theta if sliding else THETA,
    }


def fold(fields: dict[str, Any]) -> dict[str, Any]:
    """Fields with those of RoPE for each kind of layer, as this family has them alone."""
    left_out = ("rope_theta", "rope_scaling", "rope_local_base_freq")
    return {name: value for name, value in gemma3.fold(fields).items() if name not in left_out}


FAMILY = Family(
    model_type="olmo3",
    architecture="Olmo3ForCausalLM",
    defaults=olmo2.FAMILY.defaults | {"rope_theta": THETA, "rope_local_base_freq": THETA, "sliding_window": 4096, "layer_types": None},
    layer_tensors=olmo2.NORMS,
    layers_of=layers_of,
    fields_of=fields_of,
    spread=gemma3.spread,
    fold=fold,
)
