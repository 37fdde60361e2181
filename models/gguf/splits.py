"""How byte-level vocabularies split text before merging, by `tokenizer.ggml.pre`.

llama.cpp knows each tokenizer by such a name. The expressions are those of the original tokenizers, as its source
quotes them (llama-vocab.cpp); where its own differ, they only approximate these, because its engine lacks \\p{M} and
\\p{Lu}. Names that are not here are refused: another split gives other tokens, and worse answers without a word.
"""

from __future__ import annotations

from collections.abc import Mapping

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r"|\s*[\r\n]+|\s+(?!\S)|\s+"
_PUNCTUATION = r"| ?[^\s\p{L}\p{N}]+[\r\n]*"
_CASED = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*",
)
_CASED_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*" + _REST
_WORDS = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+"

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3 = _WORDS + r"|\p{N}{1,3}" + _PUNCTUATION + _REST
QWEN2 = _WORDS + r"|\p{N}" + _PUNCTUATION + _REST
QWEN35 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*" + _REST
SEED = _WORDS + r"|\p{N}{1}| ?[^\s\p{L}\p{N}\r\n]+" + _REST
TEKKEN = "|".join(_CASED) + r"|\p{N}" + _CASED_REST
GPT4O = "|".join(f"{each}{_CONTRACTIONS}?" for each in _CASED) + r"|\p{N}{1,3}" + _CASED_REST
TINY_AYA = (r"\d{1,3}(?=(?:\d{3})*\b)", GPT4O)
DEEPSEEK3 = (
    r"\p{N}{1,3}",
    "[一-龥\u3040-ゟ\u30a0-ヿ]+",
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*""" + _REST,
)
DEEPSEEK_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥\u0800-一가-\ud7ff]+", r"\p{N}")
DIGITS = (r"\p{N}", GPT2)
DEFAULT = (r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", "[0-9][0-9][0-9]")

SPLITS: Mapping[str, tuple[str, ...]] = (
    dict.fromkeys(("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "dbrx", "smaug-bpe"), (LLAMA3,))
    | dict.fromkeys(("chatglm-bpe", "glm4"), (LLAMA3,))
    | dict.fromkeys(("qwen2", "deepseek-r1-qwen", "kormo", "megrez", "stablelm2", "hunyuan", "solar-open"), (QWEN2,))
    | dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"), DIGITS)
    | dict.fromkeys(("gpt-2", "phi-2", "olmo", "mpt", "jais", "trillion", "granite-docling", "exaone4", "a.x-4.0", "mellum"), (GPT2,))
    | dict.fromkeys(("gpt-4o", "llama4", "kanana2"), (GPT4O,))
    | dict.fromkeys(("tiny_aya", "cohere2moe"), TINY_AYA)
    | dict.fromkeys(("deepseek-v3", "hunyuan-dense"), DEEPSEEK3)
    | {"qwen35": (QWEN35,), "tekken": (TEKKEN,), "seed-coder": (SEED,), "deepseek-coder": DEEPSEEK_CODER, "default": DEFAULT}
)
"""Expressions by name: each splits what the ones before it left whole, and keeps what it matches as pieces."""

WHOLE_FIRST = frozenset({"llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "tekken", "glm4"})
"""Vocabularies in which a piece that is a token is that token, whatever merges would make of it."""

STARTS = frozenset({"llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "tekken"})
"""Vocabularies whose prompts begin with the BOS token unless the file says otherwise."""

OF_ARCHITECTURE = {"qwen2": "qwen2", "qwen3": "qwen2"}
"""The names for files of before `tokenizer.ggml.pre`, by architecture."""
