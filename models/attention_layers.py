"""Layers of grouped-query attention from config.json's fields, and back: what families with `layers_of` share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvjax.layers import AttentionLayer, LayerConfig, Rope
from kvjax.model import ModelConfig
from kvjax.models.fields import boolean, check_layer_types, layer_count, size

FULL, SLIDING = "full_attention", "sliding_attention"


def head_dim_of(read: Mapping[str, Any]) -> int:
    """`head_dim`, or the width divided by the heads. ValueError if that is no whole number."""
    if read.get("head_dim") is not None:
        return size(read, "head_dim")
    hidden, heads = size(read, "hidden_size"), size(read, "num_attention_heads")
    if hidden % heads:
        raise ValueError(f"config.json: hidden_size {hidden} is not a multiple of num_attention_heads {heads}, and head_dim is not given")
    return hidden // heads


def attention_of(read: Mapping[str, Any], rope: Rope, **changes: Any) -> AttentionLayer:
    """A layer with the usual scale of logits. changes: more arguments of `AttentionLayer`."""
    heads, head_dim = size(read, "num_attention_heads"), head_dim_of(read)
    kv_heads = heads if read["num_key_value_heads"] is None else size(read, "num_key_value_heads")
    usual = {"num_heads": heads, "num_kv_heads": kv_heads, "head_dim": head_dim, "sm_scale": head_dim**-0.5}
    return AttentionLayer(**(usual | {"rope": rope} | changes))


def said(read: Mapping[str, Any], name: str) -> bool:
    """A field that may be null, which is false."""
    return read[name] is not None and boolean(read, name)


def kinds_of(read: Mapping[str, Any], every: int) -> list[str]:
    """The kind of each layer: as `layer_types` names them, or all with a window but every so many."""
    count, types = layer_count(read), read["layer_types"]
    if types is None:
        return [FULL if (number + 1) % every == 0 else SLIDING for number in range(count)]
    check_layer_types(types, (FULL, SLIDING), count)
    return types


def kinds_in(config: ModelConfig, architecture: str) -> tuple[list[str], dict[str, LayerConfig]]:
    """The kind of each layer, and the layer of each kind. ValueError for layers that config.json has no words for."""
    types = [FULL if layer.mixer.window is None else SLIDING for layer in config.layers]
    kinds = dict(zip(types, config.layers, strict=True))
    if any(kinds[kind] != layer for kind, layer in zip(types, config.layers, strict=True)):
        raise ValueError(f"config.json of a {architecture} describes one kind of layer with a window and one without; this model has more")
    return types, kinds


def only_layer(config: ModelConfig, architecture: str) -> LayerConfig:
    """The one kind of layer that a model has. ValueError if it has more, or a window."""
    first = config.layers[0]
    if any(layer != first for layer in config.layers) or first.mixer.window is not None:
        raise ValueError(f"config.json of a {architecture} describes one kind of layer, but this model has others")
    return first


def sizes_of(layer: LayerConfig) -> dict[str, Any]:
    """config.json's fields of a layer's sizes."""
    return {
        "intermediate_size": layer.mlp.size,
        "num_attention_heads": layer.mixer.num_heads,
        "num_key_value_heads": layer.mixer.num_kv_heads,
        "head_dim": layer.mixer.head_dim,
    }
