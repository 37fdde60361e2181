"""What llama.cpp's converter does to Qwen3.5, undone: value heads in another order, decays as numbers below 0,
convolutions of two axes.

Its Gated DeltaNet layers repeat keys for value heads as ggml repeats rows: the value heads of all keys in turn (v0 of
k0, v0 of k1, v1 of k0, ...), where Hugging Face has those of one key together. Source: `_LinearAttentionVReorderBase`
of llama.cpp's converter.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from kvjax.models.gguf.metadata import Metadata
from kvjax.models.gguf.tensors import GgufTensor

NAMES = {
    "post_attention_norm": "post_attention_layernorm",
    "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z",
    "ssm_alpha": "linear_attn.in_proj_a",
    "ssm_beta": "linear_attn.in_proj_b",
    "ssm_conv1d": "linear_attn.conv1d",
    "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
    "ssm_a": "linear_attn.A_log",
    "ssm_dt.bias": "linear_attn.dt_bias",
}
"""Entries for `architectures.LAYER`."""


def fields_of(metadata: Metadata) -> dict[str, Any]:
    """config.json's fields beside the shared ones. Layers of multi-token prediction, which the file counts too, are not
    read."""
    values, inner = metadata.size("ssm.time_step_rank"), metadata.size("ssm.inner_size")
    metadata.get("rope.dimension_sections", lists=True)  # which axis of an image turns which pair: of a text all are alike
    if inner % values:
        raise metadata.error(f"{metadata.architecture}.ssm.inner_size", f"a multiple of the {values} value heads")
    return {
        "num_hidden_layers": layers_of(metadata),
        "full_attention_interval": metadata.size("full_attention_interval", 4),
        "linear_conv_kernel_dim": metadata.size("ssm.conv_kernel"),
        "linear_key_head_dim": metadata.size("ssm.state_size"),
        "linear_num_key_heads": metadata.size("ssm.group_count"),
        "linear_num_value_heads": values,
        "linear_value_head_dim": inner // values,
    }


def layers_of(metadata: Metadata) -> int:
    """Layers of the model itself. ValueError where there is none beside those of multi-token prediction."""
    more = metadata.get("nextn_predict_layers", 0)
    count = metadata.layers - (more if isinstance(more, int) else 0)
    if count < 1 or not isinstance(more, int):
        raise metadata.error(f"{metadata.architecture}.nextn_predict_layers", "fewer than all layers")
    return count


def tensor_of(metadata: Metadata, name: str, tensor: GgufTensor) -> GgufTensor:
    """A tensor as Hugging Face has it."""
    kind = name.partition(".linear_attn.")[2]
    if not kind:
        return tensor
    fields = fields_of(metadata)
    keys, values = fields["linear_num_key_heads"], fields["linear_num_value_heads"]
    if values % keys:
        raise metadata.error(f"{metadata.architecture}.ssm.time_step_rank", f"a multiple of the {keys} key heads")
    beside = 2 * keys * fields["linear_key_head_dim"]  # q and k, before v
    size = {
        "A_log": (0, 1),
        "dt_bias": (0, 1),
        "in_proj_a.weight": (0, 1),
        "in_proj_b.weight": (0, 1),
        "in_proj_z.weight": (0, fields["linear_value_head_dim"]),
        "in_proj_qkv.weight": (beside, fields["linear_value_head_dim"]),
        "conv1d.weight": (beside, fields["linear_value_head_dim"]),
        "out_proj.weight": (0, fields["linear_value_head_dim"]),
    }.get(kind)
    if size is None:
        return tensor
    before, head = size
    axis = -1 if kind == "out_proj.weight" else 0
    if tensor.shape[axis] != before + values * head:
        needs = f"axis {axis} must have {before + values * head}"
        raise ValueError(f"{tensor.entry.file}: {tensor.name} is {list(tensor.shape)}, and {needs}; download it again")
    if keys != values:
        # tiled[n]: the head that lies n-th in the file, counted as Hugging Face does.
        tiled = np.arange(values * head).reshape(keys, values // keys, head).swapaxes(0, 1).reshape(-1)
        order = np.concatenate([np.arange(before), before + np.argsort(tiled)])
        tensor = dataclasses.replace(tensor, **({"columns": order} if axis else {"order": order}))
    if kind == "A_log":
        return dataclasses.replace(tensor, change=_log_of_negative)
    if kind == "conv1d.weight" and len(tensor.shape) == 2:
        return dataclasses.replace(tensor, shape=(tensor.shape[0], 1, tensor.shape[1]))
    return tensor


def _log_of_negative(decays: np.ndarray) -> np.ndarray:
    """log(-x). ValueError for numbers that are not below 0."""
    if not (decays < 0).all():
        raise ValueError(f"a Gated DeltaNet layer has a decay of {decays.max()}, and all must be below 0: download the file again")
    return np.log(-decays)
