"""What each family's files say beside the shared keys, as fields of config.json.

Where a file leaves a value out, it has llama.cpp's default. Sources: `load_arch_hparams` of llama.cpp's src/models, and
its converter.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from kvjax.models.dense import FULL, SLIDING
from kvjax.models.gguf.metadata import Metadata, says_something


def layer_types(metadata: Metadata, every: int) -> list[str]:
    """The kind of each layer. every: of so many layers one has no window, unless the file says otherwise. ValueError
    for a bad pattern."""
    key = "attention.sliding_window_pattern"
    count, pattern = metadata.layers, metadata.get(key, every, lists=True)
    if isinstance(pattern, np.ndarray) and len(pattern) == count:
        return [SLIDING if each else FULL for each in pattern.tolist()]
    if not isinstance(pattern, int) or isinstance(pattern, bool) or pattern < 0:
        raise metadata.error(f"{metadata.architecture}.{key}", f"a number, or a list of {count}, one for each layer")
    return [FULL if pattern and (number + 1) % pattern == 0 else SLIDING for number in range(count)]


def window(metadata: Metadata, default: int = 0) -> int | None:
    """The sliding window; None for 0, which says that there is none."""
    return metadata.size("attention.sliding_window") if metadata.get("attention.sliding_window", default) else None


def one_theta(metadata: Metadata) -> None:
    """ValueError for layers with a window whose RoPE has a base of its own."""
    theta = metadata.number("rope.freq_base", 10000.0)
    if metadata.number("rope.freq_base_swa", theta) != theta:
        raise metadata.unsupported("rope.freq_base_swa", f"layers with a window have another base of RoPE than others, {theta}")


def gemma2(metadata: Metadata) -> dict[str, Any]:
    """llama.cpp scales the queries of the 27B model by its width."""
    one_theta(metadata)
    wide, hidden = metadata.layers == 46, metadata.size("embedding_length")
    return {
        "sliding_window": metadata.size("attention.sliding_window", 4096),
        "layer_types": layer_types(metadata, 2),
        "attn_logit_softcapping": metadata.number("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": metadata.number("final_logit_softcapping", 30.0),
        "query_pre_attn_scalar": hidden // metadata.heads if wide else metadata.head_dim,
    }


def gemma3(metadata: Metadata) -> dict[str, Any]:
    """Every sixth layer has no window, and the queries of the 27B model are scaled by its width."""
    length, head_dim = window(metadata), metadata.size("attention.key_length", 256)
    hidden, types = metadata.size("embedding_length"), layer_types(metadata, 6)
    return {
        "sliding_window": length or metadata.size("context_length"),
        "layer_types": types if length else [FULL] * len(types),
        "query_pre_attn_scalar": hidden // metadata.heads if len(types) == 62 else head_dim,
        "rope_local_base_freq": metadata.number("rope.freq_base_swa", 10000.0),
        "rope_theta": metadata.number("rope.freq_base", 1e6),
        "head_dim": head_dim,
    }


def phi3(metadata: Metadata) -> dict[str, Any]:
    """The window is that of the original model; llama.cpp does not apply it."""
    return {"sliding_window": window(metadata)}


def granite(metadata: Metadata) -> dict[str, Any]:
    """ValueError for models without RoPE, which the file says under an older name."""
    if not metadata.get("rope.scaling.finetuned", True):
        raise metadata.unsupported("rope.scaling.finetuned", "the model has no RoPE")
    return {
        "attention_multiplier": metadata.number("attention.scale", 0.0) or metadata.head_dim**-0.5,
        "embedding_multiplier": metadata.number("embedding_scale", 1.0) or 1.0,
        "residual_multiplier": metadata.number("residual_scale", 1.0) or 1.0,
        "logits_scaling": metadata.number("logit_scale"),
    }


def olmo_type(metadata: Metadata) -> str:
    """OLMo 3 is written as OLMo 2 with windows."""
    return "olmo2" if window(metadata) is None else "olmo3"


def olmo(metadata: Metadata) -> dict[str, Any]:
    """Windows of OLMo 3."""
    types = layer_types(metadata, 4)
    if window(metadata) is None:
        return {}
    theta = metadata.number("rope.freq_base", 10000.0)
    one_theta(metadata)  # llama.cpp reads the other key, and does not use it
    return {"sliding_window": window(metadata), "layer_types": types, "rope_local_base_freq": theta}


def cohere(metadata: Metadata) -> dict[str, Any]:
    """Command R+ normalises q and k."""
    return {"logit_scale": metadata.number("logit_scale", 1.0) or 1.0, "use_qk_norm": metadata.has("blk.0.attn_q_norm.weight")}


def cohere2(metadata: Metadata) -> dict[str, Any]:
    """Command R7B."""
    one_theta(metadata)
    return {
        "logit_scale": metadata.number("logit_scale") or 1.0,
        "sliding_window": metadata.size("attention.sliding_window"),
        "layer_types": layer_types(metadata, 4),
    }


def glm(metadata: Metadata) -> dict[str, Any]:
    """ValueError for the text part of GLM-4V, whose rows of q and k are in another order."""
    if says_something(metadata.get("rope.dimension_sections", 0, lists=True)):
        raise metadata.unsupported("rope.dimension_sections", "it is the text part of a model for images")
    return {"attention_bias": metadata.has("blk.0.attn_q.bias") or metadata.has("blk.0.attn_qkv.bias")}


def seed_oss(metadata: Metadata) -> dict[str, Any]:
    """Biases of q, k and v are apart from that of the output."""
    biases = {"attention_bias": "blk.0.attn_q.bias", "attention_out_bias": "blk.0.attn_output.bias"}
    return {field: metadata.has(name) for field, name in biases.items()}


def ernie(metadata: Metadata) -> dict[str, Any]:
    """One switch for all biases."""
    return {"use_bias": metadata.has("blk.0.attn_output.bias")}


def mistral3(metadata: Metadata) -> dict[str, Any]:
    """Mistral Small 3.1. ValueError for Ministral 3, which multiplies queries by a factor of their position."""
    if metadata.number("attention.temperature_scale", 0.0):
        raise metadata.unsupported("attention.temperature_scale", "queries are multiplied by a factor of their position (Ministral 3)")
    return {"sliding_window": window(metadata)}
