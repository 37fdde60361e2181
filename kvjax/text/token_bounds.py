"""How many tokens a text has at least, without tokenizing it: a tokenizer takes minutes for a text of 30 MB. And how
much longer a tokenizer makes a text, and how large its ids are."""

from __future__ import annotations

import base64
import functools
import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from kvjax.text.checkpoint_files import AGAIN
from pallas_kernels.core.messages import shown

LONG = 2**20
"""Characters from which tokenizing a text takes a second or more."""
MAX_GROWTH = 64
"""How many times longer a tokenizer may make a text. The replacements of a tokenizer.json multiply."""
MAX_WORD = 1000
"""The longest word in characters that a tokenizer of WordPiece may look into: its time grows with their third power.
The usual ones stop at 100."""
MAX_HOLES = 2**20
"""How far the ids of a vocabulary may go beyond the number of its tokens. Each id without a token takes some bytes when
the vocabulary is written as JSON, as transformers does for every tokenizer. The usual vocabularies have less than a
thousand."""
_SHRINKS = {"NFC": 4, "ByteLevel": 1, "Prepend": 1}
"""Normalizers, and how many times longer a text may be than what they make of it. Hangul syllables are a third of their
letters."""
_KEEPING = ("ByteLevel", "Digits", "Metaspace", "Punctuation", "Split")
"""Pre-tokenizers that leave out no character (`Split`: unless it removes what it finds)."""


def check_text(tokenizer: Any, text: str, positions: int) -> None:
    """ValueError if a text has more tokens than `positions`, as far as its length alone tells: a token has so many
    bytes at most."""
    if len(text) * 4 <= positions:
        return
    size = len(text.encode(errors="replace"))
    if size <= positions or (longest := longest_token(tokenizer)) is None:
        return
    least = _least(text, longest)
    if least > positions:
        raise ValueError(
            f"the prompt has {size:,} bytes, which are at least {least:,} tokens, because a token of this tokenizer has at most "
            f"{longest.bytes:,}: more than the model's {positions:,} positions"
        )


def least_tokens(tokenizer: Any, text: str) -> int:
    """So many tokens a text has, or more; 0 where the tokenizer's parts do not tell."""
    longest = longest_token(tokenizer)
    return 0 if longest is None else _least(text, longest)


class LongestToken:
    """The most bytes of a text that one token stands for. spaces: whether a token may take any number of spaces beside
    it as well."""

    def __init__(self, size: int, spaces: bool):
        self.bytes, self.spaces = size, spaces


@functools.lru_cache(maxsize=8)
def longest_token(tokenizer: Any) -> LongestToken | None:
    """Of a tokenizer of transformers; None where one token may stand for any number of bytes, or nobody knows."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return None
    parts = json.loads(backend.to_str())
    model, added = parts["model"], parts.get("added_tokens") or []
    normalizers, cutters = list(_flat(parts.get("normalizer"), "normalizers")), list(_flat(parts.get("pre_tokenizer"), "pretokenizers"))
    shrinks = 1
    for each in normalizers:
        if (factor := _factor(each)) is None:
            return None
        shrinks *= factor
    if not all(each["type"] in _KEEPING and each.get("behavior") != "Removed" for each in cutters):
        return None
    of_bytes = any(each["type"] == "ByteLevel" for each in (*normalizers, *cutters))
    if not _reads_everything(model, of_bytes):
        return None
    texts = model["vocab"] if isinstance(model["vocab"], Mapping) else [piece for piece, _ in model["vocab"]]
    own = max(map(len, texts)) if of_bytes else max(len(text.replace("▁", " ").encode()) for text in texts)
    named = max((len(each["content"].encode()) for each in added), default=0)
    return LongestToken(shrinks * max(own, named, 4), any(each.get("lstrip") or each.get("rstrip") for each in added))


def check_growth(tokenizer: Any) -> None:
    """ValueError if a tokenizer makes a text, or its tokens, more than `MAX_GROWTH` times longer: its normalizers and
    its post-processors together, or its decoders; and if a word may take it minutes."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if (longest := getattr(getattr(backend, "model", None), "max_input_chars_per_word", 0)) > MAX_WORD:
        raise ValueError(
            f"its model has max_input_chars_per_word {longest:,}, and {MAX_WORD:,} is the most: longer words would take minutes"
        )
    total = 1.0
    for name, inside in (("normalizer", "normalizers"), ("post_processor", "processors"), ("decoder", "decoders")):
        part = getattr(backend, name, None)
        if part is None:
            continue
        growth = math.prod(map(_growth, _flat(json.loads(part.__getstate__()), inside)))
        if growth > MAX_GROWTH:
            raise ValueError(f"its {name} may make a text {growth:.3g} times longer, and {MAX_GROWTH} times is the most")
        total *= 1.0 if name == "decoder" else growth
        if total > MAX_GROWTH:
            raise ValueError(
                f"its normalizer and post_processor together may make a text {total:.3g} times longer, and {MAX_GROWTH} times is the most"
            )


def check_ids(vocab: Mapping[str, Any], file: Path) -> None:
    """ValueError if a vocabulary (token: id), which comes from this file, has ids far beyond the number of its tokens.
    What is no whole number is left to the tokenizer."""
    token, last = max(((token, each) for token, each in vocab.items() if isinstance(each, int)), key=lambda pair: pair[1], default=("", 0))
    if last >= len(vocab) + MAX_HOLES:
        raise ValueError(
            f"{file} gives token {shown(token)} the id {shown(last)}, and has {len(vocab):,} tokens: its ids may go up to "
            f"{len(vocab) + MAX_HOLES - 1:,}, because missing ones take memory, too; {AGAIN}"
        )


def _growth(part: Mapping[str, Any]) -> float:
    """How many times longer a normalizer, post-processor or decoder may make a text or its tokens."""
    if part["type"] == "TemplateProcessing":
        return _template_growth(part)
    if part["type"] == "Precompiled":
        return _map_growth(part)
    if part["type"] in ("Prepend", "Replace") and len(part.get("prepend", part.get("content"))) > LONG:
        return math.inf
    if part["type"] != "Replace":
        return 1.0
    ((kind, pattern),) = part["pattern"].items()
    # What an expression matches may be empty, beside each character.
    return max(1.0, len(part["content"]) / len(pattern)) if kind == "String" and pattern else 1.0 + len(part["content"])


def _template_growth(part: Mapping[str, Any]) -> float:
    """How often a template writes the tokens of a text; infinite if it writes more than `LONG` tokens beside them."""
    special = part["special_tokens"]
    names = [piece["SpecialToken"]["id"] for piece in part["single"] if "SpecialToken" in piece]
    if sum(len(special[name]["ids"]) for name in names if name in special) > LONG:
        return math.inf
    return max(1.0, float(sum("Sequence" in piece for piece in part["single"])))


def _map_growth(part: Mapping[str, Any]) -> float:
    """How many characters SentencePiece's map of characters writes for one: texts that end in a zero byte, after a trie
    whose size is in the first four bytes. In the usual maps it is 18, of U+FDFA."""
    charsmap = part["precompiled_charsmap"]
    stored = base64.b64decode(charsmap) if isinstance(charsmap, str) else bytes(charsmap)
    texts = stored[4 + int.from_bytes(stored[:4], "little") :]
    return float(max(1, *(len(text.decode(errors="replace")) for text in texts.split(b"\0"))))


def _least(text: str, longest: LongestToken) -> int:
    counted = "".join(text.split()) if longest.spaces else text
    return -(-len(counted.encode(errors="replace")) // longest.bytes)


def _flat(part: Mapping[str, Any] | None, inside: str) -> Iterator[Mapping[str, Any]]:
    """The parts of a sequence of parts, or the part itself; none if there is none."""
    if part is not None:
        yield from (each for inner in part[inside] for each in _flat(inner, inside)) if part["type"] == "Sequence" else (part,)


def _factor(normalizer: Mapping[str, Any]) -> int | None:
    """How many times longer a text may be than what a normalizer makes of it; None if any number of times."""
    if normalizer["type"] == "Replace":  # the mark of SentencePiece has more bytes than a space, and counts as one below
        return 1 if normalizer["pattern"] == {"String": " "} and normalizer["content"] == "▁" else None
    return _SHRINKS.get(normalizer["type"])


def _reads_everything(model: Mapping[str, Any], of_bytes: bool) -> bool:
    """Whether each character of a text becomes a part of a token: none is left out, and unknown ones in a row are not
    one token."""
    if of_bytes:
        return model["type"] == "BPE" and len(model["vocab"]) >= 256 and not _affixes(model)
    if model["type"] == "BPE":
        return not _affixes(model) and (_has_bytes(model) or (model.get("unk_token") is not None and not model.get("fuse_unk")))
    return model["type"] == "Unigram" and _has_bytes(model)


def _has_bytes(model: Mapping[str, Any]) -> bool:
    texts = model["vocab"] if isinstance(model["vocab"], Mapping) else {piece for piece, _ in model["vocab"]}
    return bool(model.get("byte_fallback")) and all(f"<0x{byte:02X}>" in texts for byte in range(256))


def _affixes(model: Mapping[str, Any]) -> bool:
    """Whether pieces carry marks of their place in a word, which are no part of the text."""
    return bool(model.get("continuing_subword_prefix") or model.get("end_of_word_suffix"))
