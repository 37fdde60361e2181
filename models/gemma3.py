"""Gemma 3, the text models (1B, 270M) and the text part of the larger ones: layers with a sliding window between layers
without.

Each kind has its own base of RoPE. RoPE scaling applies to the layers without a window. Norms multiply by 1 + w, and
come before and after attention and MLP. Heads of q and k are normalised. The embedding is multiplied by the square root
of the width.

Source: Gemma 3 Technical Report (arXiv 2503.19786); details as in transformers' `Gemma3ForCausalLM`, which the tests
compare with.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from kvjax.model.config import ModelConfig
from kvjax.model.layers import AttentionLayer, LayerConfig, Mlp, Rope, RopeScaling
from kvjax.models.family import Family
from kvjax.models.fields import boolean, check_layer_types, layer_count, number, size
from kvjax.models.wrappers import GEMMA3

logger = logging.getLogger(__name__)

FULL, SLIDING = "full_attention", "sliding_attention"
THETA, LOCAL_THETA = 1e6, 1e4
"""Default bases of RoPE in layers without and with a window."""


def spread(fields: Mapping[str, Any]) -> Mapping[str, Any]:
    """config.json's fields, with those of RoPE as in transformers 4. (transformers 5 has an object for each kind of
    layer.)"""
    given = fields.get("rope_parameters")
    if given is None:
        _say_type(fields.get("rope_scaling"))
        return fields
    if not isinstance(given, Mapping) or not given.keys() <= {FULL, SLIDING}:
        raise ValueError(f"config.json: rope_parameters is {given!r:.200}; it must have an object for each of {FULL} and {SLIDING}")
    local = given.get(SLIDING) or {}
    kinds = {local.get(name, "default") for name in ("rope_type", "type")} if _is_named(local) else None
    if kinds != {"default"} or local.keys() - {"rope_type", "type", "rope_theta"}:
        raise ValueError(f"config.json: rope_parameters of {SLIDING} is {local!r:.200}; supported: rope_type 'default' and a rope_theta")
    theta, stated = local.get("rope_theta", fields.get("rope_local_base_freq")), fields.get("rope_local_base_freq")
    if stated is not None and theta != stated:
        raise ValueError(f"config.json: rope_local_base_freq is {stated}, and rope_theta of {SLIDING} is {theta}; they must agree")
    return dict(fields) | {"rope_parameters": given.get(FULL)} | ({} if theta is None else {"rope_local_base_freq": theta})


def _is_named(rope: Any) -> bool:
    """Whether RoPE's fields are an object whose types, if there are any, are names."""
    return isinstance(rope, Mapping) and all(isinstance(rope.get(name, ""), str) for name in ("rope_type", "type"))


def _say_type(scaling: Any) -> None:
    """A warning where releases of transformers read `rope_scaling` differently."""
    if _is_named(scaling) and "rope_type" not in scaling and scaling.get("type", "default") != "default":
        logger.warning(
            "config.json: rope_scaling has type %r and no rope_type: type is read, as in transformers 4; transformers 5 reads no scaling "
            "(write rope_type to say which is right)",
            scaling["type"],
        )


def fold(fields: dict[str, Any]) -> dict[str, Any]:
    """Fields with those of RoPE in both spellings."""
    full = fields["rope_parameters"] | {"rope_theta": fields["rope_theta"]}
    local = {"rope_type": "default", "rope_theta": fields["rope_local_base_freq"]}
    return fields | {"rope_parameters": {FULL: full, SLIDING: local}}


def layers_of(read: Mapping[str, Any], theta: float, scaling: RopeScaling | None) -> tuple[LayerConfig, ...]:
    """The layers that config.json's fields describe. ValueError that names the field at fault."""
    types, head_dim, biased = _types(read), size(read, "head_dim"), boolean(read, "attention_bias")
    check_scaling(scaling, "Gemma 3")
    local, scalar = number(read, "rope_local_base_freq"), number(read, "query_pre_attn_scalar")
    if scalar <= 0:
        raise ValueError(f"config.json: query_pre_attn_scalar is {scalar}; it must be above 0")
    of_kind = {FULL: (None, Rope(theta, head_dim, scaling))}
    if SLIDING in types:
        of_kind[SLIDING] = size(read, "sliding_window"), Rope(local, head_dim)

    def layer(kind: str) -> LayerConfig:
        window, rope = of_kind[kind]
        mixer = AttentionLayer(
            num_heads=size(read, "num_attention_heads"),
            num_kv_heads=size(read, "num_key_value_heads"),
            head_dim=head_dim,
            rope=rope,
            sm_scale=scalar**-0.5,
            window=window,
            qkv_bias=biased,
            o_bias=biased,
            qk_norm=True,
        )
        return LayerConfig(mixer, Mlp(size(read, "intermediate_size"), "gelu_tanh"), post_norms=True)

    return tuple(map(layer, types))


def check_scaling(scaling: RopeScaling | None, name: str) -> None:
    """ValueError for a scaling that transformers does not read, or reads otherwise, where each kind of layer has its
    own RoPE."""
    if scaling is not None and scaling.kind in ("dynamic", "longrope"):
        raise ValueError(f"config.json: RoPE has rope_type {scaling.kind!r}; supported for {name}: default, linear, llama3, yarn")
    if scaling is not None and not scaling.truncate:
        raise ValueError(f"config.json: RoPE of type yarn has truncate false, which transformers does not read for {name}: delete it")


def _types(read: Mapping[str, Any]) -> list[str]:
    """The kind of each layer: as named, or without a window every sixth layer, or as often as config.json says."""
    count, types = layer_count(read), read["layer_types"]
    if types is None:
        every = size(read, "sliding_window_pattern")
        return [FULL if (number + 1) % every == 0 else SLIDING for number in range(count)]
    check_layer_types(types, (FULL, SLIDING), count)
    return types


def fields_of(config: ModelConfig) -> dict[str, Any]:
    """config.json's fields of the layers. ValueError for layers that it has no words for."""
    types = [FULL if layer.mixer.window is None else SLIDING for layer in config.layers]
    kinds = dict(zip(types, config.layers, strict=True))
    if any(kinds[kind] != layer for kind, layer in zip(types, config.layers, strict=True)):
        raise ValueError(
            "config.json of a Gemma3ForCausalLM describes one kind of layer with a window and one without; this model has more"
        )
    full, sliding = kinds.get(FULL), kinds.get(SLIDING)
    first = config.layers[0]
    return {
        "layer_types": types,
        "intermediate_size": first.mlp.size,
        "num_attention_heads": first.mixer.num_heads,
        "num_key_value_heads": first.mixer.num_kv_heads,
        "head_dim": first.mixer.head_dim,
        "attention_bias": first.mixer.o_bias,
        "query_pre_attn_scalar": float(f"{first.mixer.sm_scale**-2:.12g}"),
        # Without layers that have a window transformers makes the mask of one all the same, so it needs a length.
        "sliding_window": sliding.mixer.window if sliding else FAMILY.defaults["sliding_window"],
        "rope_theta": full.mixer.rope.theta if full else THETA,
        "rope_local_base_freq": sliding.mixer.rope.theta if sliding else LOCAL_THETA,
    }


FAMILY = Family(
    model_type="gemma3_text",
    architecture="Gemma3ForCausalLM",
    defaults={
        "vocab_size": 262208,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-6,
        "rope_theta": THETA,
        "rope_local_base_freq": LOCAL_THETA,
        "rope_scaling": None,
        "rope_parameters": None,
        "original_max_position_embeddings": None,
        "tie_word_embeddings": True,
        "attention_bias": False,
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "sliding_window_pattern": 6,
        "layer_types": None,
        "bos_token_id": 2,
        "eos_token_id": 1,
    },
    only={
        "hidden_act": (None,),
        "hidden_activation": ("gelu_pytorch_tanh",),
        "attn_logit_softcapping": (None,),
        "final_logit_softcapping": (None,),
        "use_bidirectional_attention": (None, False),
    },
    harmless=frozenset({"cache_implementation", "_sliding_window_pattern", "hidden_act"}),
    layer_tensors={
        "attn_post_norm": "post_attention_layernorm.weight",
        "mlp_norm": "pre_feedforward_layernorm.weight",
        "mlp_post_norm": "post_feedforward_layernorm.weight",
    },
    layers_of=layers_of,
    fields_of=fields_of,
    spread=spread,
    fold=fold,
    norm_offset=1.0,
    heads_divide=True,
    scaled_embedding=True,
    within=(GEMMA3,),
)
