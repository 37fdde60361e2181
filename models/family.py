"""What a model family is: the config.json fields it reads, the values it can do, and the tensors of a layer.

llama.py, qwen2.py and qwen3.py each hold one `Family` that shows only how that family differs. The lists here are what they share.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from kvjax.model import ModelConfig, Params

TENSORS = {"embed": "model.embed_tokens.weight", "final_norm": "model.norm.weight", "lm_head": "lm_head.weight"}
"""Our name -> Hugging Face's, outside the layers."""

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
}
"""The same inside `model.layers.N.`, of every family."""

OPTIONAL_TENSORS: Mapping[str, Mapping[str, str]] = {
    "qkv_bias": {"q_bias": "self_attn.q_proj.bias", "k_bias": "self_attn.k_proj.bias", "v_bias": "self_attn.v_proj.bias"},
    "o_bias": {"o_bias": "self_attn.o_proj.bias"},
    "mlp_bias": {"gate_bias": "mlp.gate_proj.bias", "up_bias": "mlp.up_proj.bias", "down_bias": "mlp.down_proj.bias"},
    "qk_norm": {"q_norm": "self_attn.q_norm.weight", "k_norm": "self_attn.k_norm.weight"},
}
"""The same of layers for which the configuration says so: its field -> names."""

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
    "auto_map": (None,),
    "partial_rotary_factor": (None, 1.0),
    "is_encoder_decoder": (None, False),
    "add_cross_attention": (None, False),
    "pruned_heads": (None, {}),
}
"""Fields that would change what is computed, and the only values that are supported (`save` writes the first, unless it is None)."""

REMEDIES: Mapping[str, str] = {
    "quantization_config": "load the checkpoint that it was quantized from",
    "compression_config": "load the checkpoint that it was compressed from",
    "auto_map": "if the weights are those of the plain architecture, delete it from config.json",
    "attention_bias": "this architecture does not read it: if the weights are those of the plain architecture, delete it from config.json",
    "mlp_bias": "this architecture does not read it: if the weights are those of the plain architecture, delete it from config.json",
}
"""What to do about a value of `ONLY` that is not supported, where something can be done."""

# fmt: off
HARMLESS = frozenset({
    # What the file is, and how it was stored or trained.
    "architectures", "model_type", "_name_or_path", "_commit_hash", "transformers_version", "dtype", "torch_dtype",
    "use_bfloat16", "torchscript", "tf_legacy_loss", "initializer_range", "attention_dropout", "gradient_checkpointing",
    "unsloth_fixed", "unsloth_version",
    # How other programs run it: all compute the same function.
    "use_cache", "_attn_implementation", "_attn_implementation_autoset", "_flash_attn_2_enabled",
    "_attn_implementation_internal", "_experts_implementation_internal", "_output_attentions", "pretraining_tp",
    "chunk_size_feed_forward", "is_decoder", "output_attentions", "output_hidden_states", "output_scores",
    "return_dict", "return_dict_in_generate", "cross_attention_hidden_size", "tie_encoder_decoder",
    "transformers.js_config",
    # Of training, or of the tokenizer.
    "hidden_dropout", "hidden_dropout_prob", "attention_probs_dropout_prob", "resid_pdrop", "embd_pdrop", "attn_pdrop",
    "classifier_dropout", "neftune_noise_alpha", "model_max_length", "max_sequence_length",
    # Ids and labels that nothing here reads.
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
"""Fields that may hold anything: none of them changes what the model computes."""


@dataclasses.dataclass(frozen=True)
class Family:
    """One architecture of `transformers`, as differences from what all families share.

    defaults: the fields it reads, each with the value transformers takes when config.json leaves it out.
    `attention_bias` (of q, k, v and o) and `mlp_bias` are read where they are among them, and stored biases that nothing reads are errors.
    only: more entries for `ONLY`. harmless: more entries for `HARMLESS`. qkv_bias: whether q, k and v always add biases. qk_norm: whether
    queries and keys are normalised per head, before RoPE.
    window_switch: whether `sliding_window` holds only where `use_sliding_window` is true, and from layer `max_window_layers` on.
    """

    model_type: str
    architecture: str
    defaults: Mapping[str, Any]
    only: Mapping[str, tuple[Any, ...]] = dataclasses.field(default_factory=dict)
    harmless: frozenset[str] = frozenset()
    qkv_bias: bool = False
    qk_norm: bool = False
    window_switch: bool = False

    def tensor_names(self, config: ModelConfig) -> Params:
        """The parameter pytree with each tensor's Hugging Face name in its place."""
        layer = dict(LAYER_TENSORS)
        for field, tensors in OPTIONAL_TENSORS.items():
            layer |= tensors if getattr(config, field) else {}
        names: dict[str, Any] = {name: TENSORS[name] for name in ("embed", "final_norm")}
        names["layers"] = tuple({k: f"model.layers.{n}.{v}" for k, v in layer.items()} for n in range(config.num_layers))
        return names if config.tie_embeddings else names | {"lm_head": TENSORS["lm_head"]}
