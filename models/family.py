"""A model family: the config.json fields that it reads, the values that it supports, and the tensors of a layer.

llama.py, qwen2.py and qwen3.py each have one `Family`, which shows only how that family differs. The lists here are
shared.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Literal

from kvjax.model.config import ModelConfig
from kvjax.model.layers import DeltaLayer, LayerConfig, RopeScaling
from kvjax.model.protocols import Params

TENSORS = {"embed": "model.embed_tokens.weight", "final_norm": "model.norm.weight", "lm_head": "lm_head.weight"}
"""Our name of a tensor -> Hugging Face's name, outside the layers."""

LAYER_TENSORS = {
    "attn_norm": "input_layernorm.weight",
    "q": "self_attn.q_proj.weight",
    "k": "self_attn.k_proj.weight",
    "v": "self_attn.v_proj.weight",
    "o": "self_attn.o_proj.weight",
    "mlp_norm": "post_attention_layernorm.weight",
    "gate": "mlp.gate_proj.weight",
    "up": "mlp.up_proj.weight",
    "down": "mlp.down_proj.weight",
    "q_bias": "self_attn.q_proj.bias",
    "k_bias": "self_attn.k_proj.bias",
    "v_bias": "self_attn.v_proj.bias",
    "o_bias": "self_attn.o_proj.bias",
    "gate_bias": "mlp.gate_proj.bias",
    "up_bias": "mlp.up_proj.bias",
    "down_bias": "mlp.down_proj.bias",
    "q_norm": "self_attn.q_norm.weight",
    "k_norm": "self_attn.k_norm.weight",
}
"""The same inside `model.layers.N.`; `LayerConfig.shapes` says which of these a layer has."""

DELTA_TENSORS = LAYER_TENSORS | {
    "qkv": "linear_attn.in_proj_qkv.weight",
    "z": "linear_attn.in_proj_z.weight",
    "a": "linear_attn.in_proj_a.weight",
    "b": "linear_attn.in_proj_b.weight",
    "conv": "linear_attn.conv1d.weight",
    "decay_log": "linear_attn.A_log",
    "dt_bias": "linear_attn.dt_bias",
    "delta_norm": "linear_attn.norm.weight",
    "o": "linear_attn.out_proj.weight",
}
"""The same of a Gated DeltaNet layer."""

ONLY: Mapping[str, tuple[Any, ...]] = {
    "hidden_act": ("silu", "swish"),
    "attention_bias": (None, False),
    "mlp_bias": (None, False),
    "rope_interleaved": (None, False),
    "use_mrope": (None, False),
    "num_experts": (None, 0),
    "num_local_experts": (None, 0),
    "num_experts_per_tok": (None, 0),
    "quantization_config": (None,),
    "compression_config": (None,),
    "auto_map": (None, {}, []),
    "partial_rotary_factor": (None, 1.0),
    "is_encoder_decoder": (None, False),
    "add_cross_attention": (None, False),
    "pruned_heads": (None, {}),
}
"""Fields that would change the computation, with their supported values (`save` writes the first, unless it is
None)."""

REMEDIES: Mapping[str, str] = {
    "quantization_config": "load the checkpoint that it was quantized from",
    "compression_config": "load the checkpoint that it was compressed from",
    "auto_map": "if the weights are those of the plain architecture, delete it from config.json",
    "attention_bias": "this architecture does not read it: if the weights are those of the plain architecture, delete it from config.json",
    "mlp_bias": "this architecture does not read it: if the weights are those of the plain architecture, delete it from config.json",
}
"""Remedies for values that `ONLY` does not support, if there is one."""

# fmt: off
HARMLESS = frozenset({
    # What the file is, and how it was stored or trained.
    "architectures", "model_type", "_name_or_path", "_commit_hash", "transformers_version", "dtype", "torch_dtype",
    "use_bfloat16", "torchscript", "tf_legacy_loss", "initializer_range", "attention_dropout", "gradient_checkpointing",
    "unsloth_fixed", "unsloth_version",
    # How other programs run it. They all compute the same function.
    "use_cache", "_attn_implementation", "_attn_implementation_autoset", "_flash_attn_2_enabled",
    "_attn_implementation_internal", "_experts_implementation_internal", "_output_attentions", "pretraining_tp",
    "chunk_size_feed_forward", "is_decoder", "output_attentions", "output_hidden_states", "output_scores",
    "return_dict", "return_dict_in_generate", "cross_attention_hidden_size", "tie_encoder_decoder",
    "transformers.js_config",
    # For training, or for the tokenizer.
    "hidden_dropout", "hidden_dropout_prob", "attention_probs_dropout_prob", "resid_pdrop", "embd_pdrop", "attn_pdrop",
    "classifier_dropout", "neftune_noise_alpha", "model_max_length", "max_sequence_length",
    # Ids and labels that kvjax does not read.
    "pad_token_id", "sep_token_id", "cls_token_id", "mask_token_id", "unk_token_id", "decoder_start_token_id",
    "tokenizer_class", "prefix", "forced_bos_token_id", "forced_eos_token_id", "finetuning_task",
    "task_specific_params", "problem_type", "id2label", "label2id", "num_labels",
    # Defaults for sampling, which belongs to the caller.
    "max_length", "min_length", "do_sample", "early_stopping", "num_beams", "num_beam_groups", "diversity_penalty",
    "temperature", "top_k", "top_p", "typical_p", "repetition_penalty", "length_penalty", "no_repeat_ngram_size",
    "encoder_no_repeat_ngram_size", "bad_words_ids", "num_return_sequences", "remove_invalid_values",
    "exponential_decay_length_penalty", "suppress_tokens", "begin_suppress_tokens",
})
# fmt: on
"""Fields that may have any value, because they do not change what the model computes."""


@dataclasses.dataclass(frozen=True)
class Within:
    """A larger model whose text part is a family's model, in `text_config` of its config.json. prefixes: prefixes of
    its text tensors' names -> prefixes in the family's own checkpoints. fields: fields beside `text_config` that only
    other parts read. text: the model_type of a `text_config` that names none; None: it names one of a family. unread:
    prefixes of the names of other parts' tensors."""

    architecture: str
    model_type: str
    prefixes: Mapping[str, str]
    fields: frozenset[str]
    text: str | None = None
    unread: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Family:
    """One architecture of `transformers`, described by its differences from what all families share.

    defaults: the fields that it reads, each with transformers' default. If `attention_bias` (of q, k, v and o) and
    `mlp_bias` are among them they are read; otherwise stored biases are errors. only: more entries for `ONLY`.
    harmless: more entries for `HARMLESS`. qkv_bias: whether q, k and v always add biases. qk_norm: whether queries and
    keys are normalised per head, before RoPE. layers_of, fields_of: for families whose layers differ: `layers_of(fields
    with defaults, rope_theta, scaling)` gives the layers, and `fields_of(config)` their fields. norm_offset,
    centered_norms: of `ModelConfig`. norm_eps: the field of the norms' epsilon. interleaved: whether RoPE rotates pairs
    (2i, 2i + 1) (`kvjax.models.interleaving`). rope_keys: keys of rope_parameters that are ignored here, or read by
    `layers_of`. spread: for families for which transformers writes `rope_parameters` for each kind of layer: converts
    config.json's fields to those of one kind; fold: the inverse. scaled_embedding: whether embeddings are multiplied by
    the square root of the width. scales_of: for families with other factors: `scales_of(fields with defaults)` gives
    `ModelConfig`'s fields of factors by name. layer_tensors: entries that extend or replace `LAYER_TENSORS`. fused:
    matrices that checkpoints store as one, on top of each other: the stored name inside a layer -> our names, in their
    order. within: larger models that contain it as text part. unread: prefixes of tensor names that are ignored.
    windows: how `sliding_window` is read where there is no `layers_of`: "none": not at all; "switch": only where
    `use_sliding_window` is true, and from layer `max_window_layers` on; "all": in all layers; "types": in those that
    `layer_types` names. heads_divide: whether transformers opens only models whose hidden_size is a multiple of their
    heads. own_code: values of `auto_map` that name the family's own code on the Hub, which computes the same and is not
    run. text_types: other names of its `model_type` in `text_config`.
    """

    model_type: str
    architecture: str
    defaults: Mapping[str, Any]
    only: Mapping[str, tuple[Any, ...]] = dataclasses.field(default_factory=dict)
    harmless: frozenset[str] = frozenset()
    qkv_bias: bool = False
    qk_norm: bool = False
    windows: Literal["none", "switch", "all", "types"] = "none"
    heads_divide: bool = False
    layers_of: Callable[[Mapping[str, Any], float, RopeScaling | None], tuple[LayerConfig, ...]] | None = None
    fields_of: Callable[[ModelConfig], dict[str, Any]] | None = None
    spread: Callable[[Mapping[str, Any]], Mapping[str, Any]] | None = None
    fold: Callable[[dict[str, Any]], dict[str, Any]] | None = None
    norm_offset: float = 0.0
    centered_norms: bool = False
    norm_eps: str = "rms_norm_eps"
    interleaved: bool = False
    scaled_embedding: bool = False
    scales_of: Callable[[Mapping[str, Any]], dict[str, float | None]] | None = None
    layer_tensors: Mapping[str, str] = dataclasses.field(default_factory=dict)
    rope_keys: frozenset[str] = frozenset()
    fused: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)
    within: tuple[Within, ...] = ()
    unread: tuple[str, ...] = ()
    own_code: frozenset[str] = frozenset()
    text_types: tuple[str, ...] = ()

    @property
    def prefixes(self) -> tuple[tuple[str, str], ...]:
        """Prefixes of the text tensors' names in larger models, each with that in the family's own checkpoints."""
        return tuple(dict(pair for within in self.within for pair in within.prefixes.items()).items())

    def own_name(self, name: str) -> str | None:
        """A stored tensor's name in the family's own checkpoints; None for a tensor that is ignored."""
        for prefix, own in self.prefixes:
            if name.startswith(prefix):
                return own + name.removeprefix(prefix)
        unread = self.unread + tuple(prefix for within in self.within for prefix in within.unread)
        return None if name.startswith(unread) else name

    def stored_name(self, name: str) -> str:
        """The tensor that holds a parameter: of fused matrices the one that holds it with others, else `name`
        itself."""
        for stored, parts in self.fused.items():
            for own in self.own_names(parts):
                if name.endswith(own):
                    return name.removesuffix(own) + stored
        return name

    def own_names(self, parts: tuple[str, ...]) -> tuple[str, ...]:
        """The names that parameters of a layer would have by themselves, inside the layer."""
        return tuple((LAYER_TENSORS | dict(self.layer_tensors))[part] for part in parts)

    def tensor_names(self, config: ModelConfig) -> Params:
        """The parameter pytree with each tensor's Hugging Face name in its place."""
        names: dict[str, Any] = {name: TENSORS[name] for name in ("embed", "final_norm")}
        attention = LAYER_TENSORS | dict(self.layer_tensors)
        names["layers"] = tuple(
            {
                name: f"model.layers.{number}.{(DELTA_TENSORS if isinstance(layer.mixer, DeltaLayer) else attention)[name]}"
                for name in layer.shapes(config.hidden_size)
            }
            for number, layer in enumerate(config.layers)
        )
        return names if config.tie_embeddings else names | {"lm_head": TENSORS["lm_head"]}
