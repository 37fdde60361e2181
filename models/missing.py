"""Families of transformers that kvjax does not have: of each the nearest that it has, and what differs. For the error
that refuses them.

The names are those of transformers 5.24's `AutoModelForCausalLM`, and what differs is read in the source of its models
(tests/models/test_missing.py has the list).
"""

from __future__ import annotations

import re
from collections.abc import Mapping

EXPERTS = "a mixture of experts in place of one MLP"
MISSING: Mapping[tuple[str, str], str] = {
    ("llama", EXPERTS): "mixtral phimoe jetmoe hunyuan_v1_moe aria_text ernie4_5_moe granitemoe granitemoeshared minimax_m2 mellum",
    ("qwen2", f"{EXPERTS}, and a shared expert"): "qwen2_moe dots1 glm4_moe hy_v3 solar_open sarvam_moe",
    ("qwen3", EXPERTS): "qwen3_moe exaone_moe kolibri1",
    ("qwen3_5_text", f"{EXPERTS} beside its Gated DeltaNet layers"): "qwen3_5_moe qwen3_5_moe_text qwen3_next qwen4_exp qwen4_exp_text",
    ("olmo2", EXPERTS): "flex_olmo olmoe",
    ("cohere2", EXPERTS): "cohere2_moe",
    ("smollm3", f"{EXPERTS}, and layers without RoPE that see chunks"): "llama4 llama4_text",
    ("ministral", f"{EXPERTS}, gates of attention and muP factors"): "afmoe laguna beam doge",
    ("ministral", f"{EXPERTS}, and attention sinks"): "gpt_oss mimo_v2_flash granitemoe_swa flint",
    ("granite", "sliding windows with attention sinks"): "granite_swa",
    ("llama", f"{EXPERTS}, and LayerNorm"): "dbrx",
    ("llama", f"{EXPERTS}, and attention that chooses blocks"): "minimax_m3_vl_text",
    ("deepseek_v32", f"{EXPERTS} and latent attention without an indexer"): (
        "deepseek_v2 deepseek_v3 axk1 axk2 glm4_moe_lite longcat_flash sarvam_mla"
    ),
    ("deepseek_v32", f"{EXPERTS}, and layers or an indexer of another kind"): "deepseek_v4 glm_moe_dsa hy_v4 dots3_note dots3_note_text",
    ("deepseek_v32", "latent attention without an indexer, and dense MLPs"): "minicpm3 youtu",
    ("qwen3_5_text", "linear attention of another kind, and a mixture of experts"): "kimi_linear bailing_hybrid minimax lara_mini zaya",
    ("olmo3", "Gated DeltaNet layers with their own convolutions"): "olmo_hybrid",
    ("llama", "Mamba layers beside attention"): "jamba bamba falcon_h1 granitemoehybrid nemotron_h zamba zamba2",
    ("llama", "short convolutions beside attention"): "lfm2 lfm2_moe lfm3 inkling_text inkling2_text inkling2_loop_text",
    ("qwen3_5_text", "a recurrent state and no attention"): "mamba mamba2 falcon_mamba rwkv xlstm",
    ("gemma2", "recurrent layers (RG-LRU) beside attention"): "recurrent_gemma",
    ("llama", "layers that run several times"): "hrm_text",
    ("gemma2", "layers that run several times, with norms without weights"): "dory",
    ("llama", "other names of its fields and tensors; save it with transformers as a LlamaForCausalLM"): "exaone iquestcoder",
    ("ministral", "the same layers under another name of its fields"): "cwm",
    ("ministral", "queries that are multiplied by a factor of their position"): "ministral3",
    ("olmo3", "q and k normalised in each head, and no RoPE in layers without a window"): "exaone4",
    ("granite", "norms after attention and MLP as well"): "hyperclovax",
    ("qwen3", "q and k normalised after RoPE"): "hunyuan_v1_dense",
    ("qwen3", "an MLP without a gate, with another activation (xIELU)"): "apertus apertus1p5_text",
    ("llama", "an MLP without a gate, with squared ReLU"): "arcee",
    ("llama", "ternary weights, squared ReLU, and norms inside attention and MLP"): "bitnet",
    ("llama", "LayerNorm with biases, and an MLP without a gate, with squared ReLU"): "nemotron jais2 persimmon",
    ("qwen3", "an MLP without a gate, norms without weights, and a soft-cap of logits"): "nanochat",
    ("llama", "differential attention"): "diffllama",
    ("llama", "LayerNorm without weights, and values of q, k and v that are clipped"): "olmo",
    ("llama", "LayerNorm, and RoPE on a part of each head"): "stablelm",
    ("qwen2", "LayerNorm with biases, and an MLP without a gate"): "starcoder2",
    ("cohere", "LayerNorm with biases, and an MLP without a gate"): "phi gptj codegen gpt_neox gpt_neox_japanese falcon",
    ("gemma2", "norms only before attention and MLP"): "vaultgemma",
    ("cohere2", "another layout of text and vision, with pooling"): "cohere_compass_text",
    ("gemma3_text", "inputs of their own in every layer, and layers that differ in size"): "gemma3n gemma3n_text gemma4 gemma4_text",
    ("gemma3_text", "images and sound as inputs of the same decoder"): "gemma4_unified gemma4_unified_text",
    ("gemma3_text", "no text of its own: it drafts tokens for another model"): "gemma4_assistant gemma4_unified_assistant",
    ("llama", "layers that attend to an image"): "mllama git fuyu emu3 got_ocr2",
    ("phi3", "weights of vision and speech (LoRA) beside those of text"): "phi4_multimodal",
    ("llama", "bytes in patches, in place of tokens"): "blt",
    ("llama", "sound as input or output"): "moshi moss_transcribe_diarize musicgen musicgen_melody whisper",
    ("llama", "learned positions in place of RoPE, LayerNorm, and an MLP without a gate"): (
        "gpt2 gpt-sw3 gpt_bigcode gpt_neo openai-gpt opt xglm biogpt ctrl trocr"
    ),
    ("llama", "ALiBi or biases of positions in place of RoPE, LayerNorm, and an MLP without a gate"): "bloom mpt cpmant",
    ("llama", "an encoder and a decoder with attention between them"): (
        "bart bigbird_pegasus blenderbot blenderbot-small marian mbart mvp pegasus plbart prophetnet"
    ),
    ("llama", "an encoder of BERT's kind, with learned positions and LayerNorm after"): (
        "bert bert-generation big_bird camembert data2vec-text electra ernie megatron-bert rembert roberta roberta-prelayernorm roc_bert "
        "roformer xlm-roberta xlm-roberta-xl xmod"
    ),
    ("llama", "attention of another kind (permutations or hashes), and LayerNorm"): "xlm xlnet reformer",
    ("gemma3_text", "LayerNorm, and an MLP with a fused GELU gate"): "modernbert-decoder",
}
"""(nearest family, what differs) -> names of families (`model_type`)."""

_OF = {name: group for group, names in MISSING.items() for name in names.split()}


def model_type_of(architecture: str) -> str | None:
    """The name of a family in `MISSING` that an architecture's name stands for; None: there is none."""
    return {_plain(name): name for name in _OF}.get(
        _plain(re.sub(r"(ForCausalLM|ForConditionalGeneration|LMHeadModel)$", "", architecture))
    )


def _plain(name: str) -> str:
    return re.sub(r"[_-]", "", name).lower()


def nearest(name: str) -> str | None:
    """What to say of a family that is missing, by its `model_type` or architecture; None for a name that is not
    known."""
    found = name if name in _OF else model_type_of(name)
    if found is None:
        return None
    family, differs = _OF[found]
    return f"the nearest supported family is {family}; a {found} has {differs}"
