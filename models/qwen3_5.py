"""Qwen3.5, the text part of the dense models: Gated DeltaNet layers, and between them gated attention with RoPE on part
of each head.

Of `Qwen3_5ForConditionalGeneration` checkpoints only the text part is read: `text_config` of config.json, and the
tensors of the language model. Tensors of the vision model and of multi-token prediction are ignored.
`kvjax.models.saving` writes `Qwen3_5ForCausalLM`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvjax.model.config import ModelConfig
from kvjax.model.layers import AttentionLayer, DeltaLayer, LayerConfig, Mlp, Rope, RopeScaling
from kvjax.models.family import Family, Within
from kvjax.models.fields import boolean, check_layer_types, layer_count, size
from kvjax.models.partial_rope import rotary_fraction, rotated_of

KINDS = ("linear_attention", "full_attention")
DELTA_FIELDS = {
    "key_heads": "linear_num_key_heads",
    "value_heads": "linear_num_value_heads",
    "key_dim": "linear_key_head_dim",
    "value_dim": "linear_value_head_dim",
    "conv_width": "linear_conv_kernel_dim",
}
"""Fields of `DeltaLayer` -> fields of config.json."""


def layers_of(read: Mapping[str, Any], theta: float, scaling: RopeScaling | None) -> tuple[LayerConfig, ...]:
    """The layers that config.json's fields describe. ValueError that names the field at fault."""
    count, head_dim = layer_count(read), size(read, "head_dim")
    biased = read["attention_bias"] is not None and boolean(read, "attention_bias")
    attention = AttentionLayer(
        num_heads=size(read, "num_attention_heads"),
        num_kv_heads=size(read, "num_key_value_heads"),
        head_dim=head_dim,
        rope=Rope(theta, rotated_of(read, head_dim), scaling),
        sm_scale=head_dim**-0.5,
        qkv_bias=biased,
        o_bias=biased,
        qk_norm=True,
        gate=True,
    )
    delta = DeltaLayer(**{ours: size(read, theirs) for ours, theirs in DELTA_FIELDS.items()})
    mixers, mlp = {"linear_attention": delta, "full_attention": attention}, Mlp(size(read, "intermediate_size"))
    return tuple(LayerConfig(mixers[kind], mlp) for kind in _kinds(read, count))


def _kinds(read: Mapping[str, Any], count: int) -> list[str]:
    types = read["layer_types"]
    if types is None:
        every = size(read, "full_attention_interval")
        return [KINDS[(number + 1) % every == 0] for number in range(count)]
    check_layer_types(types, KINDS, count)
    return types


def fields_of(config: ModelConfig) -> dict[str, Any]:
    """config.json's fields of the layers. ValueError for layers that it has no words for."""
    mixers = [layer.mixer for layer in config.layers]
    attention = next((mixer for mixer in mixers if isinstance(mixer, AttentionLayer)), None)
    delta = next((mixer for mixer in mixers if isinstance(mixer, DeltaLayer)), None)
    described = {type(mixer): mixer for mixer in mixers if mixer is not None}
    if any(mixer != described[type(mixer)] for mixer in mixers) or len({layer.mlp for layer in config.layers}) > 1:
        known = "one kind of attention, one of Gated DeltaNet and one MLP"
        raise ValueError(f"config.json of a Qwen3_5ForCausalLM describes {known}; this model has more")
    if attention is None:
        raise ValueError("config.json of a Qwen3_5ForCausalLM describes layers of attention, and this model has none")
    fields = {
        "layer_types": [KINDS[isinstance(mixer, AttentionLayer)] for mixer in mixers],
        "intermediate_size": config.layers[0].mlp.size,
        "num_attention_heads": attention.num_heads,
        "num_key_value_heads": attention.num_kv_heads,
        "head_dim": attention.head_dim,
        "attention_bias": attention.o_bias,
        "partial_rotary_factor": rotary_fraction(attention.rope.dim, attention.head_dim),
    }
    return fields | ({theirs: getattr(delta, ours) for ours, theirs in DELTA_FIELDS.items()} if delta else {})


FAMILY = Family(
    model_type="qwen3_5_text",
    architecture="Qwen3_5ForCausalLM",
    defaults={
        "vocab_size": 248320,
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 32,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "rope_scaling": None,
        "rope_parameters": None,
        "original_max_position_embeddings": None,
        "partial_rotary_factor": 0.25,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "bos_token_id": None,
        "eos_token_id": None,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "layer_types": None,
        "full_attention_interval": 4,
    },
    only={"attn_output_gate": (None, True), "mamba_ssm_dtype": (None, "float32")},
    harmless=frozenset({"mtp_num_hidden_layers", "mtp_use_dedicated_embeddings", "mlp_only_layers"}),
    rope_keys=frozenset({"partial_rotary_factor", "mrope_section", "mrope_interleaved"}),
    norm_offset=1.0,
    layers_of=layers_of,
    fields_of=fields_of,
    within=(
        Within(
            "Qwen3_5ForConditionalGeneration",
            "qwen3_5",
            {"model.language_model.": "model."},
            frozenset({"vision_config", "image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id"}),
        ),
    ),
    unread=("model.visual.", "mtp."),
)
