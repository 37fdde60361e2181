"""DeepSeek-V3.2's attention layer as transformers names it: config.json -> `LatentConfig`, tensors -> the parameters of a layer.

There is no decoder for the whole model: its mixture of experts is not here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from kvjax.model import Params
from kvjax.models.config_json import mscale, rope_of, wrong_values
from kvjax.models.family import ONLY
from kvjax.models.latent_attention import LatentConfig, param_shapes

MODEL_TYPE = "deepseek_v32"

_SIZES = {
    "hidden_size": "hidden_size",
    "num_heads": "num_attention_heads",
    "query_rank": "q_lora_rank",
    "latent_dim": "kv_lora_rank",
    "rope_dim": "qk_rope_head_dim",
    "nope_dim": "qk_nope_head_dim",
    "value_dim": "v_head_dim",
    "index_heads": "index_n_heads",
    "index_dim": "index_head_dim",
    "index_topk": "index_topk",
}
"""Our name -> config.json's."""

_TENSORS = {
    "q_a": "q_a_proj.weight",
    "q_norm": "q_a_layernorm.weight",
    "q_b": "q_b_proj.weight",
    "kv_a": "kv_a_proj_with_mqa.weight",
    "kv_norm": "kv_a_layernorm.weight",
    "o": "o_proj.weight",
    "index_q": "indexer.wq_b.weight",
    "index_k": "indexer.wk.weight",
    "index_norm": "indexer.k_norm.weight",
    "index_norm_bias": "indexer.k_norm.bias",
    "index_weights": "indexer.weights_proj.weight",
}
"""Our name -> transformers'; `kv_b_proj.weight` makes two."""


def latent_config(fields: Mapping[str, Any]) -> LatentConfig:
    """The attention layer that config.json's `fields` describe.

    Logits are scaled by 1/sqrt(nope + rope dim), times the square of YaRN's factor for mscale_all_dim where that is given. Raises
    ValueError for another model_type, a size that is missing or null, a quantized checkpoint, and fields that would change what the layer
    computes: biases in the projections, another layout of the rotated elements, key/value heads of their own.
    """
    if fields.get("model_type") != MODEL_TYPE:
        raise ValueError(f"config.json: model_type is {fields.get('model_type')!r}; supported here: {MODEL_TYPE!r}")
    sizes = {ours: fields.get(theirs) for ours, theirs in _SIZES.items()}
    wrong = [f"{_SIZES[name]} is {size!r}" for name, size in sizes.items() if not isinstance(size, int) or size < 1]
    if wrong:
        raise ValueError(f"config.json: {', '.join(wrong)}; each must be a positive integer")
    plain = {name: values for name, values in ONLY.items() if "experts" not in name}  # they belong to the MLP, which is not read here
    only = plain | {
        "attention_bias": (None, False),
        "rope_interleave": (None, True),
        "qk_head_dim": (None, sizes["nope_dim"] + sizes["rope_dim"]),
        "num_key_value_heads": (None, sizes["num_heads"]),
    }
    wrong = wrong_values(fields, only)
    if wrong:
        quantized = any(fields.get(name) is not None for name in ("quantization_config", "compression_config"))
        remedy = "; dequantize first: this reads plain float weights, and config.json without the field" if quantized else ""
        raise ValueError(f"unsupported config.json of a {MODEL_TYPE}: {'; '.join(wrong)}{remedy}")
    read = {"rope_scaling": None, "rope_parameters": None, "rope_theta": 10000.0} | dict(fields)
    theta, scaling = rope_of(fields, read)
    if scaling is not None and scaling.most_positions is not None:
        raise ValueError(f"unsupported config.json of a {MODEL_TYPE}: rope_scaling of type {scaling.kind}; supported: linear, llama3, yarn")
    sm_scale = (sizes["nope_dim"] + sizes["rope_dim"]) ** -0.5
    given = dict(read["rope_scaling"] or {}) | dict(read["rope_parameters"] or {})
    if scaling is not None and given.get("mscale_all_dim"):
        sm_scale *= mscale(scaling.factor, given["mscale_all_dim"]) ** 2
    return LatentConfig(**sizes, rope_theta=theta, rope_scaling=scaling, sm_scale=sm_scale)


def layer_params(config: LatentConfig, tensors: Mapping[str, Any], prefix: str = "", dtype: Any = jnp.bfloat16) -> Params:
    """The parameters of `latent_attention` from a checkpoint's tensors, whose names start with `prefix` ("model.layers.0.self_attn.").

    Cast to `dtype`, but for the heads' weights of the indexer, which stay float32 as in transformers. Raises ValueError for a tensor
    that is missing or has another shape than the configuration says, for 8-bit and integer weights, and where scales of quantized weights
    stand beside them: those must be dequantized first.
    """
    names = _TENSORS | {"kv_b": "kv_b_proj.weight"}
    scales = sorted(name for name in tensors if name.startswith(prefix) and name.endswith(("_scale_inv", "_scale")))
    if scales:
        raise ValueError(f"the checkpoint is quantized, it has {', '.join(scales)}: dequantize first")
    missing = [prefix + name for name in names.values() if prefix + name not in tensors]
    if missing:
        raise ValueError(f"the checkpoint has no {', '.join(missing)}")
    params = {ours: jnp.asarray(tensors[prefix + theirs]) for ours, theirs in names.items()}
    coded = [f"{prefix}{names[name]} is {x.dtype}" for name, x in params.items() if not _plain(x.dtype)]
    if coded:
        raise ValueError(f"{', '.join(coded)}; weights must be floats of at least 16 bits: dequantize first")
    kv_b = params.pop("kv_b")
    rows = config.num_heads * (config.nope_dim + config.value_dim)
    if kv_b.shape != (rows, config.latent_dim):
        raise ValueError(f"{prefix}kv_b_proj.weight has shape {kv_b.shape}, the configuration says {(rows, config.latent_dim)}")
    of_heads = kv_b.reshape(config.num_heads, -1, config.latent_dim)
    params |= {"up_k": of_heads[:, : config.nope_dim], "up_v": of_heads[:, config.nope_dim :]}
    for name, shape in param_shapes(config).items():
        if params[name].shape != shape:
            raise ValueError(f"{prefix}{names[name]} has shape {params[name].shape}, the configuration says {shape}")
    return {name: jax.lax.convert_element_type(x, jnp.float32 if name == "index_weights" else dtype) for name, x in params.items()}


def _plain(dtype: jnp.dtype) -> bool:
    """Floats that mean what they say; shorter ones are codes, whose scales are elsewhere."""
    return jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize >= 2
