"""DeepSeek-V3.2: latent attention, in which every query reads the tokens that a lightning indexer scores best, and
gated MLPs.

The released models have a mixture of experts in all layers except the first ones. kvjax has none, so their config.json
is refused; the error names the field. Only models whose MLPs are all dense can be read (`first_k_dense_replace`, or
`mlp_layer_types`).

Sources: DeepSeek-V3.2-Exp technical report (DeepSeek-AI, 2025); details as in transformers' `DeepseekV32ForCausalLM`,
which the tests compare with.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from kvjax.model.config import ModelConfig
from kvjax.model.layers import LatentLayer, LayerConfig, Mlp, Rope, RopeScaling
from kvjax.model.rope import mscale
from kvjax.models.family import Family
from kvjax.models.fields import check_layer_types, integer, layer_count, size

ATTENTION, DENSE = "deepseek_sparse_attention", "dense"
NAMES = (ATTENTION, "indexed_attention")
"""Names of the attention in `layer_types`: that of transformers 5.17, which later releases read, too, and that which
they write."""
SIZES = {
    "num_heads": "num_attention_heads",
    "query_rank": "q_lora_rank",
    "latent_dim": "kv_lora_rank",
    "nope_dim": "qk_nope_head_dim",
    "value_dim": "v_head_dim",
    "index_heads": "index_n_heads",
    "index_dim": "index_head_dim",
    "index_topk": "index_topk",
}
"""Fields of `LatentLayer` -> fields of config.json."""


def layers_of(read: Mapping[str, Any], theta: float, scaling: RopeScaling | None) -> tuple[LayerConfig, ...]:
    """The layers that config.json's fields describe. The ValueError names the field at fault.

    Logits are scaled by 1/sqrt(nope + rope dim) and, if mscale_all_dim is given, by the square of YaRN's factor for it.
    """
    count, sizes = layer_count(read), {ours: size(read, theirs) for ours, theirs in SIZES.items()}
    if scaling is not None and scaling.kind in ("dynamic", "longrope"):
        raise ValueError(f"config.json: RoPE has rope_type {scaling.kind!r}; supported for DeepSeek-V3.2: default, linear, llama3, yarn")
    _check_dense(read, count)
    types = read["layer_types"]
    if types is not None:
        check_layer_types(types, NAMES, count)
    rotated = size(read, "qk_rope_head_dim")
    whole = sizes["nope_dim"] + rotated
    for name, value in (("qk_head_dim", whole), ("head_dim", rotated), ("num_key_value_heads", sizes["num_heads"])):
        if read[name] not in (None, value):
            raise ValueError(f"config.json: {name} is {read[name]!r:.200}; supported: null or {value}, as the other sizes say")
    given = dict(read["rope_scaling"] or {}) | dict(read["rope_parameters"] or {})
    more = mscale(scaling.factor, given["mscale_all_dim"]) ** 2 if scaling is not None and given.get("mscale_all_dim") else 1.0
    mixer = LatentLayer(**sizes, rope=Rope(theta, rotated, scaling), sm_scale=whole**-0.5 * more)
    return (LayerConfig(mixer, Mlp(size(read, "intermediate_size"))),) * count


def _check_dense(read: Mapping[str, Any], count: int) -> None:
    """ValueError for layers with a mixture of experts. It names the field."""
    kinds, first = read["mlp_layer_types"], integer(read, "first_k_dense_replace")
    if kinds is not None and kinds != [DENSE] * count:
        raise ValueError(
            f"config.json: mlp_layer_types is {kinds!r:.200}; supported: {DENSE!r} for each of {count} layers, no mixture of experts"
        )
    if kinds is None and first < count:
        raise ValueError(
            f"config.json: first_k_dense_replace is {first}: {count - max(0, first)} of {count} layers would have a mixture of experts, "
            f"which is not supported; supported: {count} or more"
        )


def fields_of(config: ModelConfig) -> dict[str, Any]:
    """config.json's fields of the layers. ValueError for layers that it cannot describe."""
    first, count = config.layers[0], config.num_layers
    if len(set(config.layers)) > 1 or not isinstance(first.mixer, LatentLayer):
        raise ValueError("config.json of a DeepseekV32ForCausalLM describes one kind of layer, of latent attention; this model has others")
    mixer = first.mixer
    whole = mixer.nope_dim + mixer.rope.dim
    fields = {theirs: getattr(mixer, ours) for ours, theirs in SIZES.items()} | {
        "intermediate_size": first.mlp.size,
        "qk_rope_head_dim": mixer.rope.dim,
        "qk_head_dim": whole,
        "head_dim": mixer.rope.dim,
        "num_key_value_heads": mixer.num_heads,
        "first_k_dense_replace": count,
        "mlp_layer_types": [DENSE] * count,
        "layer_types": [ATTENTION] * count,
    }
    more = math.sqrt(mixer.sm_scale * whole**0.5)
    scaling = mixer.rope.scaling
    if scaling is not None and scaling.kind == "yarn" and scaling.factor > 1 and abs(more - 1) > 1e-9:
        fields["mscale_all_dim"] = round((more - 1) / (0.1 * math.log(scaling.factor)), 9)
    elif abs(more - 1) > 1e-9:
        raise ValueError(f"config.json of a DeepseekV32ForCausalLM scales logits by {whole**-0.5} without YaRN, not by {mixer.sm_scale}")
    return fields


def fold(fields: dict[str, Any]) -> dict[str, Any]:
    """Fields with mscale_all_dim beside the other fields of RoPE. Its effect on cos and sin is in attention_factor."""
    found = {name: value for name, value in fields.items() if name != "mscale_all_dim"}
    if "mscale_all_dim" not in fields:
        return found
    return found | {name: found[name] | {"mscale_all_dim": fields["mscale_all_dim"]} for name in ("rope_scaling", "rope_parameters")}


FAMILY = Family(
    model_type="deepseek_v32",
    architecture="DeepseekV32ForCausalLM",
    defaults={
        "vocab_size": 129280,
        "hidden_size": 7168,
        "intermediate_size": 18432,
        "num_hidden_layers": 61,
        "num_attention_heads": 128,
        "num_key_value_heads": None,
        "head_dim": None,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 128,
        "qk_head_dim": None,
        "v_head_dim": 128,
        "index_n_heads": 64,
        "index_head_dim": 128,
        "index_topk": 2048,
        "max_position_embeddings": 163840,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "rope_scaling": None,
        "rope_parameters": None,
        "original_max_position_embeddings": None,
        "tie_word_embeddings": False,
        "first_k_dense_replace": 3,
        "mlp_layer_types": None,
        "layer_types": None,
        "bos_token_id": 0,
        "eos_token_id": 1,
    },
    only={"rope_interleave": (None, True)},
    # Fields of a mixture of experts, which no layer has, and of the layer that predicts several tokens, which is not
    # read.
    harmless=frozenset({"moe_intermediate_size", "n_shared_experts", "n_routed_experts", "num_experts_per_tok", "routed_scaling_factor"})
    | {"n_group", "topk_group", "topk_method", "norm_topk_prob", "scoring_func", "moe_layer_freq", "ep_size", "aux_loss_alpha", "seq_aux"}
    | {"num_nextn_predict_layers", "output_router_logits"},
    layers_of=layers_of,
    fields_of=fields_of,
    fold=fold,
    layer_tensors={
        "q_a": "self_attn.q_a_proj.weight",
        "q_norm": "self_attn.q_a_layernorm.weight",
        "q_b": "self_attn.q_b_proj.weight",
        "kv_a": "self_attn.kv_a_proj_with_mqa.weight",
        "kv_norm": "self_attn.kv_a_layernorm.weight",
        "kv_b": "self_attn.kv_b_proj.weight",
        "index_q": "self_attn.indexer.wq_b.weight",
        "index_k": "self_attn.indexer.wk.weight",
        "index_norm": "self_attn.indexer.k_norm.weight",
        "index_norm_bias": "self_attn.indexer.k_norm.bias",
        "index_weights": "self_attn.indexer.weights_proj.weight",
    },
)
