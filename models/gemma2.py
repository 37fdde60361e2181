"""Gemma 2: Gemma with soft-caps of the logits of attention and of the model, norms before and after, and a window in
every second layer.

The scale of attention's logits is that of `query_pre_attn_scalar`. A soft-cap of attention runs in plain XLA on every
device: no kernel applies it yet (`pallas_kernels.core.soft_cap`).

Source: Gemma 2 technical report (arXiv 2408.00118); details as in transformers' `Gemma2ForCausalLM`, which the tests
compare with.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from kvjax.model.config import ModelConfig
from kvjax.model.layers import LayerConfig, Rope, RopeScaling
from kvjax.models.dense import DEFAULTS, SLIDING, flag, head_dim_of, kinds_in, kinds_of, same_fields, same_layers, window_in, with_mixers
from kvjax.models.family import Family
from kvjax.models.fields import positive, size

EVERY = 2
"""Of so many layers one has no window, unless `layer_types` says otherwise."""


def layers_of(read: Mapping[str, Any], theta: float, scaling: RopeScaling | None) -> tuple[LayerConfig, ...]:
    """The layers that config.json's fields describe. ValueError that names the field at fault."""
    types, biased, cap = kinds_of(read, EVERY), flag(read, "attention_bias"), read["attn_logit_softcapping"]
    layers = same_layers(
        read,
        Rope(theta, head_dim_of(read), scaling),
        activation="gelu_tanh",
        sm_scale=positive(read, "query_pre_attn_scalar") ** -0.5,
        softcap=None if cap is None else positive(read, "attn_logit_softcapping"),
        qkv_bias=biased,
        o_bias=biased,
    )
    layers = with_mixers(layers, window=[size(read, "sliding_window") if kind == SLIDING else None for kind in types])
    return tuple(dataclasses.replace(layer, post_norms=True) for layer in layers)


def scales_of(read: Mapping[str, Any]) -> dict[str, float | None]:
    """The soft-cap of the model's logits, by `ModelConfig`'s name."""
    return {"logits_softcap": None if read["final_logit_softcapping"] is None else positive(read, "final_logit_softcapping")}


def fields_of(config: ModelConfig) -> dict[str, Any]:
    """config.json's fields of the layers and factors. ValueError for layers that it has no words for."""
    mixer = config.layers[0].mixer
    return same_fields(config, "window") | {
        "layer_types": kinds_in(config),
        "attention_bias": mixer.o_bias,
        "query_pre_attn_scalar": float(f"{mixer.sm_scale**-2:.12g}"),
        "attn_logit_softcapping": mixer.softcap,
        "final_logit_softcapping": config.logits_softcap,
        "sliding_window": window_in(config, FAMILY.defaults["sliding_window"]),
    }


FAMILY = Family(
    model_type="gemma2",
    architecture="Gemma2ForCausalLM",
    defaults=DEFAULTS
    | {
        "vocab_size": 256000,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
        "attention_bias": False,
        "query_pre_attn_scalar": 256,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
        "sliding_window": 4096,
        "layer_types": None,
        "bos_token_id": 2,
        "eos_token_id": 1,
    },
    only={
        "hidden_act": (None,),
        "hidden_activation": ("gelu_pytorch_tanh",),
        "use_bidirectional_attention": (None, False),
    },
    harmless=frozenset({"cache_implementation", "hidden_act", "sliding_window_size"}),
    layer_tensors={
        "attn_post_norm": "post_attention_layernorm.weight",
        "mlp_norm": "pre_feedforward_layernorm.weight",
        "mlp_post_norm": "post_feedforward_layernorm.weight",
    },
    layers_of=layers_of,
    fields_of=fields_of,
    scales_of=scales_of,
    norm_offset=1.0,
    heads_divide=True,
    scaled_embedding=True,
)
