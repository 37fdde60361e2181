"""llama.cpp's architectures: how a file's metadata becomes config.json's fields, and its tensors Hugging Face's.

A new family is an entry of `ARCHITECTURES`: its model_type, the leaves of its tensors' names that differ from `LAYER`, and what llama.cpp's
converter does to its numbers. Sources: llama.cpp's convert_hf_to_gguf.py, transformers' modeling_gguf_pytorch_utils and integrations.gguf.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from kvjax.models.families import FAMILIES
from kvjax.models.gguf import qwen35
from kvjax.models.gguf.header import Entry, Header
from kvjax.models.gguf.metadata import Metadata
from kvjax.models.gguf.tensors import GgufTensor

OUTSIDE = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight", "output.weight": "lm_head.weight"}
"""Name of a tensor outside the layers -> its name in Hugging Face's checkpoints."""

LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
"""The same of `blk.N.` and `model.layers.N.`, without `.weight` and `.bias`."""

ROPE_FACTORS = "rope_freqs.weight"
"""What the frequencies of RoPE are divided by: how llama.cpp stores the scaling `llama3`."""

_NAME = re.compile(r"blk\.(\d{1,6})\.(.+?)(\.weight|\.bias|)")


@dataclasses.dataclass(frozen=True)
class Architecture:
    """One architecture of llama.cpp.

    model_type: of the family (`kvjax.models.families`). layer: entries that extend or replace `LAYER`. paired: whether rows of q and k are
    stored so that RoPE turns neighbours: they are put back into two halves. norm_offset: what the file's norms have on top of Hugging
    Face's. fields: config.json's fields beside the shared ones. layers: how many there are; blocks after them are not read. tensor: what
    else is done to a tensor of Hugging Face's name, if anything. ignored: an expression of names that are not read.
    """

    model_type: str
    layer: Mapping[str, str] = dataclasses.field(default_factory=dict)
    paired: bool = False
    norm_offset: float = 0.0
    fields: Callable[[Metadata], dict[str, Any]] | None = None
    layers: Callable[[Metadata], int] = lambda metadata: metadata.size("block_count")
    tensor: Callable[[Metadata, str, GgufTensor], GgufTensor] | None = None
    ignored: str = r"rope_factors_(long|short)\.weight"

    def hf_name(self, name: str) -> str | None:
        """A tensor's name in Hugging Face's checkpoints; None for one that is not read, and the file's name for an unknown one."""
        if name == ROPE_FACTORS or re.fullmatch(self.ignored, name):
            return None
        if name in OUTSIDE:
            return OUTSIDE[name]
        found = _NAME.fullmatch(name)
        leaves = LAYER | dict(self.layer)
        if found is None or (found[2] + found[3] not in leaves and found[2] not in leaves):
            return name
        leaf = leaves.get(found[2] + found[3]) or leaves[found[2]] + found[3]
        return f"model.layers.{int(found[1])}.{leaf}"


def architecture_of(header: Header) -> tuple[Architecture, Metadata]:
    """The architecture of a file. ValueError, with a remedy, for one that is not supported, and for files that hold no language model."""
    metadata = Metadata(header)
    name, kind = metadata.architecture, header.metadata.get("general.type", "model")
    if kind in OTHER_KINDS or name in OTHER_KINDS:
        what = OTHER_KINDS.get(kind) or OTHER_KINDS[name]
        raise ValueError(f"{header.file} holds {what}, and no language model: give the model's own GGUF file")
    if not isinstance(name, str):
        raise ValueError(f"{header.file} has no general.architecture: it is no model, or damaged; download it again")
    if name not in ARCHITECTURES:
        raise ValueError(
            f"{header.file} holds a model of architecture {name!r:.200}; supported: {', '.join(sorted(ARCHITECTURES))}. "
            "If transformers has the model, give its original checkpoint: its family may be supported there"
        )
    return ARCHITECTURES[name], metadata


OTHER_KINDS = {
    "adapter": "an adapter (LoRA)",
    "mmproj": "the projector of a multimodal model",
    "clip": "the vision encoder of a multimodal model",
    "imatrix": "statistics for quantization",
}
"""`general.type`, or `general.architecture`, of files that are no models."""


def fields_of(header: Header) -> dict[str, Any]:
    """config.json's fields, as far as the file says them; what it does not say has llama.cpp's default. ValueError that names the key."""
    architecture, metadata = architecture_of(header)
    if "token_embd.weight" not in header.tensors:
        what = "a vocabulary only" if not header.tensors else "no token_embd.weight"
        raise ValueError(f"{header.file} holds {what}, and no whole model: give the file with its weights (of several, the first)")
    if metadata.get("expert_count"):
        raise ValueError(f"{header.file} holds a mixture of experts, which is not supported: give a dense model")
    hidden, heads = metadata.size("embedding_length"), metadata.size("attention.head_count")
    theta = metadata.number("rope.freq_base", 10000.0)
    head_dim = metadata.size("attention.key_length", max(1, hidden // heads))
    if metadata.size("attention.value_length", head_dim) != head_dim:
        raise metadata.error(f"{metadata.architecture}.attention.value_length", f"the key's length, {head_dim}")
    stops = [metadata.token(name) for name in ("eos", "eot", "eom")]
    fields = {
        "model_type": architecture.model_type,
        "architectures": [FAMILIES[architecture.model_type].architecture],
        "vocab_size": header.tensors["token_embd.weight"].shape[0],
        "max_position_embeddings": metadata.size("context_length"),
        "num_hidden_layers": architecture.layers(metadata),
        "hidden_size": hidden,
        "intermediate_size": metadata.size("feed_forward_length"),
        "num_attention_heads": heads,
        "num_key_value_heads": metadata.size("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "rms_norm_eps": metadata.number("attention.layer_norm_rms_epsilon"),
        "rope_theta": theta,
        "rope_scaling": _rope_scaling(header, metadata, theta, head_dim),
        "tie_word_embeddings": "output.weight" not in header.tensors,
        "bos_token_id": metadata.token("bos"),
        "eos_token_id": list(dict.fromkeys(each for each in stops if each is not None)) or None,
    }
    family = FAMILIES[architecture.model_type]
    biased = {"attention_bias": "blk.0.attn_output.bias", "mlp_bias": "blk.0.ffn_down.bias"}
    fields |= {field: name in header.tensors for field, name in biased.items() if field in family.defaults}
    rotated = metadata.size("rope.dimension_count", head_dim)
    if rotated != head_dim or "partial_rotary_factor" in family.defaults:
        fields["partial_rotary_factor"] = rotated / head_dim
    return fields | (architecture.fields(metadata) if architecture.fields else {})


def tensors_of(header: Header) -> dict[str, GgufTensor]:
    """The tensors by their names in Hugging Face's checkpoints; unknown ones keep the file's names."""
    architecture, metadata = architecture_of(header)
    layers, heads = architecture.layers(metadata), metadata.size("attention.head_count")
    counts = {"q_proj": heads, "k_proj": metadata.size("attention.head_count_kv", heads)}
    found: dict[str, GgufTensor] = {}
    for entry in header.tensors.values():
        name, block = architecture.hf_name(entry.name), _NAME.fullmatch(entry.name)
        if name is None or (block and layers <= int(block[1]) < metadata.size("block_count")):
            continue
        if name in found:
            raise ValueError(f"{header.file} holds {entry.name} and {found[name].name}, which are one tensor; download it again")
        module = name.rsplit(".", 2)[-2] if name.count(".") >= 2 else ""
        tensor = GgufTensor(entry, entry.shape)
        if architecture.paired and module in counts:
            tensor = dataclasses.replace(tensor, order=_halves(entry, counts[module]))
        if architecture.norm_offset and name.endswith("norm.weight") and not name.endswith("linear_attn.norm.weight"):
            tensor = dataclasses.replace(tensor, change=functools.partial(np.add, -np.float32(architecture.norm_offset)))
        found[name] = architecture.tensor(metadata, name, tensor) if architecture.tensor else tensor
    return found


def _halves(entry: Entry, heads: int) -> np.ndarray:
    """The file's row of each row: the two numbers that RoPE turns lie side by side there, and half a head apart here."""
    rows = entry.shape[0]
    if rows % (2 * heads):
        raise ValueError(f"{entry.file}: {entry.name} has {rows} rows, which are not {heads} heads of even size; download it again")
    return np.arange(rows).reshape(heads, rows // heads // 2, 2).swapaxes(1, 2).reshape(-1)


def _rope_scaling(header: Header, metadata: Metadata, theta: float, head_dim: int) -> dict[str, Any] | None:
    """RoPE's scaling, from the metadata or from the factors that llama.cpp stores for `llama3`."""
    kind, factors = metadata.get("rope.scaling.type"), header.tensors.get(ROPE_FACTORS)
    if factors is not None:
        return _llama3(factors, theta, head_dim)
    if kind in (None, "none"):
        return None
    if kind == "linear":
        return {"rope_type": "linear", "factor": metadata.number("rope.scaling.factor")}
    if kind == "yarn":
        fields = {"rope_type": "yarn", "factor": metadata.number("rope.scaling.factor")}
        fields["original_max_position_embeddings"] = metadata.size("rope.scaling.original_context_length", metadata.size("context_length"))
        return fields | {
            field: metadata.number(f"rope.scaling.{key}")
            for key, field in (("yarn_beta_fast", "beta_fast"), ("yarn_beta_slow", "beta_slow"))
            if metadata.get(f"rope.scaling.{key}") is not None
        }
    raise metadata.error(f"{metadata.architecture}.rope.scaling.type", "none, linear or yarn")


def _llama3(entry: Entry, theta: float, head_dim: int) -> dict[str, Any] | None:
    """The scaling `llama3` whose factors these are. ValueError if they are those of no such scaling.

    The converter wrote 1 for short waves, the factor for long ones, and 1 / ((1 - s) / factor + s) between, where s is linear in
    the inverse of the wave's length: s = (length / wave - low) / (high - low).
    """
    if len(entry.shape) != 1 or entry.shape[0] != head_dim // 2:
        raise ValueError(f"{entry.file}: {entry.name} is {list(entry.shape)}, must be [{head_dim // 2}]; download it again")
    stored = GgufTensor(entry, entry.shape).read(0, entry.shape[0]).astype(np.float64)
    factor = float(str(np.float32(stored.max())))
    if (stored <= 0).any():
        raise ValueError(f"{entry.file}: {entry.name} holds {stored.min()}; its numbers must be above 0: download it again")
    if factor == 1 and (stored == 1).all():
        return None
    inverse = theta ** (-np.arange(0, head_dim, 2) / head_dim) / (2 * np.pi)
    between = (stored > 1 + 1e-6) & (stored < factor * (1 - 1e-6))
    smooth = (1 / stored - 1 / factor) / (1 - 1 / factor) if factor > 1 else stored
    candidates = [(1.0, 4.0, 8192)]
    if between.sum() >= 2:
        slope, intercept = np.polyfit(inverse[between], smooth[between], 1)
        if slope > 0 > intercept:
            width = -1 / intercept  # with low_freq_factor 1: only ratios of the three numbers count
            candidates.append((1.0, float(str(np.float32(1 + width))), max(1, round(slope * width))))
    for low, high, original in candidates:
        s = (original * inverse - low) / (high - low)
        made = np.where(s > 1, 1.0, np.where(s < 0, factor, 1 / ((1 - s) / factor + s)))
        if np.allclose(made, stored, rtol=1e-4):
            fields = {"rope_type": "llama3", "factor": factor, "low_freq_factor": low, "high_freq_factor": high}
            return fields | {"original_max_position_embeddings": original}
    raise ValueError(f"{entry.file}: the factors in {entry.name} are not those of RoPE scaling llama3, the only one that is supported")


def _gemma3(metadata: Metadata) -> dict[str, Any]:
    """llama.cpp has every sixth layer without a window, and heads of the 27B model scaled by its width."""
    layers, head_dim = metadata.size("block_count"), metadata.size("attention.key_length", 256)
    hidden, heads = metadata.size("embedding_length"), metadata.size("attention.head_count")
    return {
        "sliding_window": metadata.size("attention.sliding_window"),
        "query_pre_attn_scalar": hidden // heads if layers == 62 else head_dim,
        "rope_local_base_freq": metadata.number("rope.freq_base_swa", 10000.0),
        "rope_theta": metadata.number("rope.freq_base", 1e6),
        "head_dim": head_dim,
    }


ARCHITECTURES: Mapping[str, Architecture] = {
    "llama": Architecture("llama", paired=True),
    "qwen2": Architecture("qwen2"),
    "qwen3": Architecture("qwen3"),
    "qwen35": Architecture(
        "qwen3_5_text", qwen35.NAMES, norm_offset=1.0, fields=qwen35.fields_of, layers=qwen35.layers_of, tensor=qwen35.tensor_of
    ),
    "gemma3": Architecture(
        "gemma3_text",
        {
            "post_attention_norm": "post_attention_layernorm",
            "ffn_norm": "pre_feedforward_layernorm",
            "post_ffw_norm": "post_feedforward_layernorm",
        },
        norm_offset=1.0,
        fields=_gemma3,
    ),
}
"""By `general.architecture`."""
