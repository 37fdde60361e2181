"""Layers of dense families that differ from Llama's in a few points: what their files in this folder share."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from kvjax.model.config import ModelConfig
from kvjax.model.layers import Activation, AttentionLayer, LayerConfig, Mlp, Rope
from kvjax.models.fields import boolean, check_layer_types, layer_count, size

FULL, SLIDING = "full_attention", "sliding_attention"

DEFAULTS: Mapping[str, Any] = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": None,  # as many as attention heads
    "head_dim": None,  # hidden_size / num_attention_heads
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "rope_parameters": None,
    "original_max_position_embeddings": None,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
"""Fields that all of these families read, with the defaults that most of them have."""

NO_WINDOWS: Mapping[str, tuple[Any, ...]] = {
    "sliding_window": (None,),
    "layer_types": (None,),
}
"""Values of the fields of windows in families that read none: the caches of transformers would read them."""


def head_dim_of(read: Mapping[str, Any]) -> int:
    """`head_dim`, or what the width gives each head. ValueError where it does not divide."""
    if read["head_dim"] is not None:
        return size(read, "head_dim")
    hidden, heads = size(read, "hidden_size"), size(read, "num_attention_heads")
    if hidden % heads:
        raise ValueError(f"config.json: hidden_size {hidden} is not a multiple of num_attention_heads {heads}, and head_dim is not given")
    return hidden // heads


def same_layers(read: Mapping[str, Any], rope: Rope, *, activation: Activation = "silu", **attention: Any) -> tuple[LayerConfig, ...]:
    """As many equal layers as config.json's fields say. activation: of the MLP. attention: fields of `AttentionLayer`
    beside the sizes. ValueError that names the field at fault."""
    count, heads, head_dim = layer_count(read), size(read, "num_attention_heads"), head_dim_of(read)
    mixer = AttentionLayer(
        num_heads=heads,
        num_kv_heads=heads if read["num_key_value_heads"] is None else size(read, "num_key_value_heads"),
        head_dim=head_dim,
        rope=rope,
        **({"sm_scale": head_dim**-0.5} | attention),
    )
    return (LayerConfig(mixer, Mlp(size(read, "intermediate_size"), activation, flag(read, "mlp_bias"))),) * count


def kinds_of(read: Mapping[str, Any], every: int) -> list[str]:
    """The kind of each layer: as `layer_types` names them, or all with a window but every so many."""
    count, types = layer_count(read), read["layer_types"]
    if types is None:
        return [FULL if (number + 1) % every == 0 else SLIDING for number in range(count)]
    check_layer_types(types, (FULL, SLIDING), count)
    return types


def kinds_in(config: ModelConfig) -> list[str]:
    """The kind of each layer. ValueError for several kinds with a window, or without."""
    types = [FULL if layer.mixer.window is None else SLIDING for layer in config.layers]
    kinds = dict(zip(types, config.layers, strict=True))
    if any(kinds[kind] != layer for kind, layer in zip(types, config.layers, strict=True)):
        raise ValueError(
            f"config.json of family {config.family} describes one kind of layer with a window and one without; this model has more"
        )
    return types


def window_in(config: ModelConfig, default: int) -> int:
    """The window of the layers that have one. Without such layers the default: transformers makes the mask of one all
    the same."""
    return next((layer.mixer.window for layer in config.layers if layer.mixer.window is not None), default)


def with_mixers(layers: Sequence[LayerConfig], **lists: Sequence[Any]) -> tuple[LayerConfig, ...]:
    """The layers with other fields of their mixers. lists: by the field's name, its value in each layer."""
    changes = [dict(zip(lists, values, strict=True)) for values in zip(*lists.values(), strict=True)]
    return tuple(
        dataclasses.replace(layer, mixer=dataclasses.replace(layer.mixer, **each)) for layer, each in zip(layers, changes, strict=True)
    )


def flag(read: Mapping[str, Any], name: str) -> bool:
    """A field that says yes or no; absent and null are no."""
    return read.get(name) is not None and boolean(read, name)


def same_fields(config: ModelConfig, *varying: str) -> dict[str, Any]:
    """config.json's fields of what all layers have. varying: fields of mixers that may differ. ValueError for layers
    that differ otherwise."""
    first = config.layers[0]
    for layer in config.layers:
        mixer = dataclasses.replace(layer.mixer, **{name: getattr(first.mixer, name) for name in varying})
        if dataclasses.replace(layer, mixer=mixer) != first:
            may = f" but for {' and '.join(varying)}" if varying else ""
            raise ValueError(f"config.json of family {config.family} describes layers that are all alike{may}; this model has others")
    return {
        "intermediate_size": first.mlp.size,
        "num_attention_heads": first.mixer.num_heads,
        "num_key_value_heads": first.mixer.num_kv_heads,
        "head_dim": first.mixer.head_dim,
    }


def padding(config: ModelConfig, default: int) -> dict[str, Any]:
    """transformers opens no model whose padding token is beyond its vocabulary, so it has none where the family's
    default is."""
    return {} if default < config.vocab_size else {"pad_token_id": None}
