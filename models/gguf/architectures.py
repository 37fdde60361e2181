"""llama.cpp's architectures: how a file's metadata becomes config.json's fields, and its tensors Hugging Face's.

A new family is an entry of `ARCHITECTURES`: its model_type, the leaves of its tensors' names that differ from `LAYER`,
and what llama.cpp's converter does to its numbers. Sources: llama.cpp's convert_hf_to_gguf.py, transformers'
modeling_gguf_pytorch_utils and integrations.gguf.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from kvjax.models.families import FAMILIES
from kvjax.models.gguf import families, qwen35, rope
from kvjax.models.gguf.header import Header
from kvjax.models.gguf.metadata import Metadata
from kvjax.models.gguf.tensors import GgufTensor
from kvjax.models.missing import nearest
from kvjax.models.partial_rope import rotary_fraction
from pallas_kernels.core.messages import shown

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

APART = {
    "self_attn.qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"),
}
"""Matrices that a file stores as one, with the parts that they are cut into: rows are cut, so that blocks stay
packed."""

_NAME = re.compile(r"blk\.(\d{1,6})\.(.+?)(\.weight|\.bias|)")


@dataclasses.dataclass(frozen=True)
class Architecture:
    """One architecture of llama.cpp.

    model_type: of the family (`kvjax.models.families`). layer: entries that extend or replace `LAYER`. paired: whether
    rows of q and k are stored so that RoPE turns neighbours: they are put back into two halves. norm_offset: what the
    file's norms have on top of Hugging Face's. fields: config.json's fields beside the shared ones. layers: how many
    there are; blocks after them are not read. tensor: what else is done to a tensor of Hugging Face's name, if
    anything. type_of: the family, where the metadata chooses between several.
    """

    model_type: str
    layer: Mapping[str, str] = dataclasses.field(default_factory=dict)
    paired: bool = False
    norm_offset: float = 0.0
    fields: Callable[[Metadata], dict[str, Any]] | None = None
    layers: Callable[[Metadata], int] = lambda metadata: metadata.layers
    tensor: Callable[[Metadata, str, GgufTensor], GgufTensor] | None = None
    type_of: Callable[[Metadata], str] | None = None

    def hf_name(self, name: str) -> str | None:
        """A tensor's name in Hugging Face's checkpoints; None for one that is not read, and the file's name for an
        unknown one."""
        if name in (rope.FACTORS, rope.LONG, rope.SHORT):
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
    """The architecture of a file. ValueError, with a remedy, for one that is not supported, and for files that hold no
    language model."""
    metadata = Metadata(header)
    name, kind = metadata.architecture, header.metadata.get("general.type", "model")
    if kind in OTHER_KINDS or name in OTHER_KINDS:
        what = OTHER_KINDS.get(kind) or OTHER_KINDS[name]
        raise ValueError(f"{header.file} holds {what}, and no language model: give the model's own GGUF file")
    if not isinstance(name, str):
        raise ValueError(f"{header.file} has no general.architecture: it is no model, or damaged; download it again")
    if name not in ARCHITECTURES:
        known, near = ", ".join(sorted(ARCHITECTURES)), nearest(name)
        advice = (
            f"{near}: take a model of a supported family"
            if near
            else ("If transformers has the model, give its original checkpoint: its family may be supported there")
        )
        raise ValueError(
            f"{header.file} holds a model of architecture {shown(name, 200)}; supported: {known}. {advice[0].upper()}{advice[1:]}"
        )
    found = ARCHITECTURES[name]
    return found if found.type_of is None else dataclasses.replace(found, model_type=found.type_of(metadata)), metadata


OTHER_KINDS = {
    "adapter": "an adapter (LoRA)",
    "mmproj": "the projector of a multimodal model",
    "clip": "the vision encoder of a multimodal model",
    "imatrix": "statistics for quantization",
}
"""`general.type`, or `general.architecture`, of files that are no models."""


def fields_of(header: Header) -> dict[str, Any]:
    """config.json's fields, as far as the file says them; what it does not say has llama.cpp's default. ValueError that
    names the key."""
    architecture, metadata = architecture_of(header)
    if "token_embd.weight" not in header.tensors:
        what = "a vocabulary only" if not header.tensors else "no token_embd.weight"
        raise ValueError(f"{header.file} holds {what}, and no whole model: give the file with its weights (of several, the first)")
    if metadata.get("expert_count"):
        raise ValueError(f"{header.file} holds a mixture of experts, which is not supported: give a dense model")
    theta, head_dim = metadata.number("rope.freq_base", 10000.0), metadata.head_dim
    if metadata.size("attention.value_length", head_dim) != head_dim:
        raise metadata.error(f"{metadata.architecture}.attention.value_length", f"the key's length, {head_dim}")
    if metadata.get("attention.causal", True) is not True:
        raise metadata.unsupported("attention.causal", "its tokens see later ones")
    rotated, family = metadata.size("rope.dimension_count", head_dim), FAMILIES[architecture.model_type]
    epsilon = {"rms_norm_eps": "layer_norm_rms_epsilon", "layer_norm_eps": "layer_norm_epsilon"}[family.norm_eps]
    stops = [metadata.token(name) for name in ("eos", "eot", "eom")]
    fields = {
        "model_type": architecture.model_type,
        "architectures": [family.architecture],
        "vocab_size": header.tensors["token_embd.weight"].shape[0],
        "max_position_embeddings": metadata.size("context_length"),
        "num_hidden_layers": architecture.layers(metadata),
        "hidden_size": metadata.size("embedding_length"),
        "intermediate_size": metadata.size("feed_forward_length"),
        "num_attention_heads": metadata.heads,
        "num_key_value_heads": metadata.kv_heads,
        "head_dim": head_dim,
        family.norm_eps: metadata.number(f"attention.{epsilon}"),
        "rope_theta": theta,
        "rope_scaling": rope.scaling_of(header, metadata, theta, rotated),
        "tie_word_embeddings": "output.weight" not in header.tensors,
        "bos_token_id": metadata.token("bos"),
        "eos_token_id": list(dict.fromkeys(each for each in stops if each is not None)) or None,
    }
    biased = {"attention_bias": "blk.0.attn_output.bias", "mlp_bias": "blk.0.ffn_down.bias"}
    fields |= {field: metadata.has(name) for field, name in biased.items() if field in family.defaults}
    if rotated != head_dim and "partial_rotary_factor" not in family.defaults:
        raise metadata.unsupported("rope.dimension_count", f"RoPE rotates a part of each head of {head_dim} in this family")
    if "partial_rotary_factor" in family.defaults:
        fields["partial_rotary_factor"] = rotary_fraction(rotated, head_dim)
    fields |= architecture.fields(metadata) if architecture.fields else {}
    metadata.check_all_read()
    return fields


def tensors_of(header: Header) -> dict[str, GgufTensor]:
    """The tensors by their names in Hugging Face's checkpoints; unknown ones keep the file's names."""
    architecture, metadata = architecture_of(header)
    layers = architecture.layers(metadata)
    counts = {"q_proj": metadata.heads, "k_proj": metadata.kv_heads}
    found: dict[str, GgufTensor] = {}
    for entry in header.tensors.values():
        stored, block = architecture.hf_name(entry.name), _NAME.fullmatch(entry.name)
        if stored is None or (block and layers <= int(block[1]) < metadata.layers):
            continue
        for name, tensor in _apart(architecture, metadata, stored, GgufTensor(entry, entry.shape)).items():
            if name in found:
                raise ValueError(f"{header.file} holds {entry.name} and {found[name].name}, which are one tensor; download it again")
            module = name.rsplit(".", 2)[-2] if name.count(".") >= 2 else ""
            if architecture.paired and module in counts:
                tensor = _halved(tensor, counts[module])
            if architecture.norm_offset and name.endswith("norm.weight") and not name.endswith("linear_attn.norm.weight"):
                tensor = dataclasses.replace(tensor, change=functools.partial(np.add, -np.float32(architecture.norm_offset)))
            found[name] = architecture.tensor(metadata, name, tensor) if architecture.tensor else tensor
    return found


def _apart(architecture: Architecture, metadata: Metadata, name: str, tensor: GgufTensor) -> dict[str, GgufTensor]:
    """The tensors that a stored one holds on top of each other: itself, unless it is one of `APART` that the family's
    own checkpoints do not have (`kvjax.models.fused` cuts those). ValueError for other sizes."""
    fused = next((each for each in APART if re.search(rf"\.{each}\.(weight|bias)$", name)), None)
    if fused is None:
        return {name: tensor}
    kv = metadata.kv_heads * metadata.head_dim
    sizes = (metadata.heads * metadata.head_dim, kv, kv) if len(APART[fused]) == 3 else (metadata.size("feed_forward_length"),) * 2
    if tensor.shape[0] != sum(sizes):
        raise ValueError(f"{tensor.entry.file}: {tensor.name} has {tensor.shape[0]} rows, must have {sum(sizes)}; download the file again")
    if f"{fused}.weight" in FAMILIES[architecture.model_type].fused:
        return {name: tensor}
    ends = np.cumsum(sizes).tolist()
    return {
        name.replace(fused, part): dataclasses.replace(tensor, order=np.arange(end - size, end), shape=(size, *tensor.shape[1:]))
        for part, size, end in zip(APART[fused], sizes, ends, strict=True)
    }


def _halved(tensor: GgufTensor, heads: int) -> GgufTensor:
    """With rows in Hugging Face's order: the two numbers that RoPE turns lie side by side in the file, and half a head
    apart here."""
    rows = tensor.shape[0]
    if rows % (2 * heads):
        raise ValueError(f"{tensor.entry.file}: {tensor.name} has {rows} rows, which are not {heads} heads of even size; download it again")
    order = np.arange(rows) if tensor.order is None else tensor.order
    return dataclasses.replace(tensor, order=order.reshape(heads, rows // heads // 2, 2).swapaxes(1, 2).reshape(-1))


_AROUND = {"post_attention_norm": "post_attention_layernorm", "post_ffw_norm": "post_feedforward_layernorm"}
_GEMMA = _AROUND | {"ffn_norm": "pre_feedforward_layernorm"}
_GLM = {"ffn_up": "mlp.gate_up_proj"}
_GLM4 = _GLM | {"post_attention_norm": "post_self_attn_layernorm", "post_ffw_norm": "post_mlp_layernorm"}

ARCHITECTURES: Mapping[str, Architecture] = {
    "llama": Architecture("llama", paired=True),
    "mistral3": Architecture("mistral", paired=True, fields=families.mistral3),
    "qwen2": Architecture("qwen2"),
    "qwen3": Architecture("qwen3"),
    "qwen35": Architecture(
        "qwen3_5_text", qwen35.NAMES, norm_offset=1.0, fields=qwen35.fields_of, layers=qwen35.layers_of, tensor=qwen35.tensor_of
    ),
    "gemma": Architecture("gemma", norm_offset=1.0),
    "gemma2": Architecture("gemma2", _GEMMA, norm_offset=1.0, fields=families.gemma2),
    "gemma3": Architecture("gemma3_text", _GEMMA, norm_offset=1.0, fields=families.gemma3),
    "phi3": Architecture("phi3", {"ffn_up": "mlp.gate_up_proj"}, fields=families.phi3),
    "granite": Architecture("granite", paired=True, fields=families.granite),
    "smollm3": Architecture("smollm3", paired=True),
    "olmo2": Architecture("olmo2", _AROUND, fields=families.olmo, type_of=families.olmo_type),
    "command-r": Architecture("cohere", fields=families.cohere),
    "cohere2": Architecture("cohere2", fields=families.cohere2),
    "chatglm": Architecture("glm", _GLM, fields=families.glm),
    "glm4": Architecture("glm4", _GLM4, fields=families.glm, layers=qwen35.layers_of),
    "seed_oss": Architecture("seed_oss", {"post_attention_norm": "post_attention_layernorm"}, fields=families.seed_oss),
    "ernie4_5": Architecture("ernie4_5", fields=families.ernie),
}
"""By `general.architecture`."""
