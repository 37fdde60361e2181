"""SmolLM3: Llama's layers, of which every fourth has no RoPE; those may have a sliding window.

Sources: transformers' `SmolLM3ForCausalLM`, which the tests compare with; NoPE to RoPE and back (arXiv 2501.18795).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvjax.model.config import ModelConfig
from kvjax.model.layers import NO_ROPE, LayerConfig, Rope, RopeScaling
from kvjax.models.dense import DEFAULTS, FULL, SLIDING, flag, head_dim_of, padding, same_fields, same_layers, with_mixers
from kvjax.models.family import Family
from kvjax.models.fields import check_layer_types, layer_count, size


def layers_of(read: Mapping[str, Any], theta: float, scaling: RopeScaling | None) -> tuple[LayerConfig, ...]:
    """The layers that config.json's fields describe. ValueError that names the field at fault."""
    count, rotated, biased = layer_count(read), _rotated(read), flag(read, "attention_bias")
    ropes = [Rope(theta, head_dim_of(read), scaling) if each else NO_ROPE for each in rotated]
    layers = same_layers(read, ropes[0], qkv_bias=biased, o_bias=biased)
    return with_mixers(layers, rope=ropes, window=_windows(read, count, rotated))


def _rotated(read: Mapping[str, Any]) -> list[bool]:
    """Whether each layer has RoPE."""
    count, given = layer_count(read), read["no_rope_layers"]
    if given is None:
        every = size(read, "no_rope_layer_interval")
        return [(number + 1) % every != 0 for number in range(count)]
    if not isinstance(given, list) or len(given) < count or any(each not in (0, 1) for each in given):
        raise ValueError(f"config.json: no_rope_layers is {given!r:.200}; it must be a list of 0 and 1, one for each of {count} layers")
    return [bool(each) for each in given[:count]]


def _windows(read: Mapping[str, Any], count: int, rotated: list[bool]) -> list[int | None]:
    """The window of each layer. ValueError where layers are to have one and config.json has none."""
    types, on = read["layer_types"], flag(read, "use_sliding_window") and read["sliding_window"] is not None
    if types is None:
        types = [SLIDING if on and not each else FULL for each in rotated]
    check_layer_types(types, (FULL, SLIDING), count)
    if SLIDING in types and not on:
        raise ValueError(
            f"config.json: layer_types names layers of {SLIDING}, but use_sliding_window is {read['use_sliding_window']} and "
            f"sliding_window {read['sliding_window']}: give both, or name the layers {FULL}"
        )
    return [size(read, "sliding_window") if kind == SLIDING else None for kind in types]


def fields_of(config: ModelConfig) -> dict[str, Any]:
    """config.json's fields of the layers. ValueError for layers that it has no words for."""
    windows = [layer.mixer.window for layer in config.layers]
    first, lengths = config.layers[0], sorted({window for window in windows if window is not None})
    if len(lengths) > 1:
        raise ValueError(f"config.json of a SmolLM3ForCausalLM has one sliding_window for all layers, but the model has {lengths}")
    return (
        same_fields(config, "rope", "window")
        | padding(config, 128004)
        | {
            "attention_bias": first.mixer.o_bias,
            "mlp_bias": first.mlp.bias,
            "no_rope_layers": [int(layer.mixer.rope != NO_ROPE) for layer in config.layers],
            "use_sliding_window": bool(lengths),
            "sliding_window": lengths[0] if lengths else None,
            "layer_types": [FULL if window is None else SLIDING for window in windows],
        }
    )


FAMILY = Family(
    model_type="smollm3",
    architecture="SmolLM3ForCausalLM",
    defaults=DEFAULTS
    | {
        "vocab_size": 128256,
        "hidden_size": 2048,
        "num_hidden_layers": 36,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "max_position_embeddings": 32768,
        "rope_theta": 2000000.0,
        "tie_word_embeddings": True,
        "attention_bias": False,
        "mlp_bias": False,
        "no_rope_layers": None,
        "no_rope_layer_interval": 4,
        "use_sliding_window": False,
        "sliding_window": None,
        "layer_types": None,
        "bos_token_id": 128000,
        "eos_token_id": 128001,
    },
    harmless=frozenset({"max_window_layers"}),
    layers_of=layers_of,
    fields_of=fields_of,
)
