"""The tokenizer in a GGUF file's metadata, built with the `tokenizers` library as the original one is.

Byte-level vocabularies (`tokenizer.ggml.model` "gpt2") bring their merges; how they split text says `splits`.
SentencePiece's ("llama") bring scores, from which the merges follow: the best-scored token is merged first. Sources:
llama.cpp's llama-vocab.cpp, whose results the tests compare with; transformers' integrations.gguf, which knows fewer
splits.
"""

from __future__ import annotations

import logging
from typing import Any

import numpy as np

from kvjax.models.gguf.header import Header
from kvjax.models.gguf.splits import OF_ARCHITECTURE, SPLITS, STARTS, WHOLE_FIRST
from kvjax.text.checkpoint_files import first_line
from kvjax.text.transformers_import import import_transformers
from pallas_kernels.core.messages import shown

logger = logging.getLogger(__name__)

UNKNOWN, CONTROL, USER_DEFINED, BYTE = 2, 3, 4, 6
"""`tokenizer.ggml.token_type`, of which 1 is a normal token and 5 an unused one."""

MAX_TOKEN = 1024
"""Characters of a token, beyond which it has no merges: pieces of it are tried at every place."""

MAX_MERGED = 2**25
"""Characters of all merges of a vocabulary. Those of Gemma 3 have 3 million."""

REMEDY = "in Python, tokenizer=False loads the model alone"


def read_vocabulary(header: Header) -> Any:
    """The tokenizer of a file, with its chat templates, as transformers has it. ValueError for one that is missing,
    unknown or damaged."""
    kind = header.metadata.get("tokenizer.ggml.model")
    if kind is None:
        raise ValueError(f"{header.file} holds no tokenizer (no tokenizer.ggml.model): take a file that has one")
    if kind not in ("gpt2", "llama"):
        raise ValueError(f"{header.file}: tokenizer.ggml.model is {shown(kind, 200)}; supported: gpt2 and llama")
    vocabulary = _Vocabulary(header)
    try:
        tokenizer = vocabulary.byte_level() if kind == "gpt2" else vocabulary.sentencepiece()
        return vocabulary.wrapped(tokenizer, kind)
    except (KeyboardInterrupt, SystemExit, GeneratorExit, MemoryError, ValueError):
        raise
    except BaseException as error:  # the libraries below raise bare Exception, and Rust's PanicException
        raise ValueError(f"{header.file}: no tokenizer can be made of its metadata ({first_line(error)}); download it again") from error


class _Vocabulary:
    """What the metadata says of tokens, checked."""

    def __init__(self, header: Header):
        self.header, self.metadata = header, header.metadata
        self.tokens = self.strings("tokens")
        if not self.tokens:
            raise self.error("tokens", "a list of names, none missing")
        self.types = self.numbers("token_type", np.ones(len(self.tokens), np.int32))
        self.ids = {token: number for number, token in enumerate(self.tokens)}
        if twice := len(self.tokens) - len(self.ids):
            logger.warning("%s: %d tokens have the text of another, and no prompt is given their ids", header.file, twice)

    def error(self, key: str, needs: str) -> ValueError:
        value = self.metadata.get(f"tokenizer.ggml.{key}")
        said = shown(value, 100)
        return ValueError(f"{self.header.file}: tokenizer.ggml.{key} is {said}; it must be {needs}: download the file again")

    def strings(self, key: str) -> list[str]:
        found = self.metadata.get(f"tokenizer.ggml.{key}", [])
        if not isinstance(found, list):
            raise self.error(key, "a list of strings")
        return found

    def numbers(self, key: str, default: np.ndarray) -> np.ndarray:
        """One number for each token."""
        found = self.metadata.get(f"tokenizer.ggml.{key}", default)
        if not isinstance(found, np.ndarray) or len(found) != len(self.tokens):
            raise self.error(key, f"a list of {len(self.tokens)} numbers, one for each token")
        return found

    def flag(self, key: str, default: bool) -> bool:
        found = self.metadata.get(f"tokenizer.ggml.{key}", default)
        if not isinstance(found, bool):
            raise self.error(key, "true or false")
        return found

    def token(self, name: str) -> str | None:
        """The text of a special token; None if there is none, or no such token."""
        number = self.metadata.get(f"tokenizer.ggml.{name}_token_id")
        if number is None:
            return None
        if not isinstance(number, int) or isinstance(number, bool):
            raise self.error(f"{name}_token_id", "a token's id")
        return self.tokens[number] if 0 <= number < len(self.tokens) else None

    def byte_level(self) -> Any:
        """The tokenizer of a byte-level vocabulary."""
        from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

        name = self.pre()
        merges = [tuple(merge.split(" ")) if " " not in merge[:1] else (" ", merge[2:]) for merge in self.strings("merges")]
        if not merges or any(len(pair) != 2 for pair in merges):
            raise self.error("merges", "a list of pairs of tokens")
        known = self.ids.keys()
        absent = next((pair for pair in merges if pair[0] not in known or pair[1] not in known or "".join(pair) not in known), None)
        if absent is not None:
            raise ValueError(
                f"{self.header.file}: a merge of {shown(absent, 200)} names no token of the vocabulary: download the file again"
            )
        tokenizer = Tokenizer(models.BPE(vocab=self.ids, merges=merges, ignore_merges=name in WHOLE_FIRST))
        splits = [pre_tokenizers.Split(Regex(each), behavior="isolated") for each in SPLITS[name]]
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
        tokenizer.decoder = decoders.ByteLevel()
        return tokenizer

    def pre(self) -> str:
        """The name of the split. ValueError for one that is not known."""
        name, architecture = self.metadata.get("tokenizer.ggml.pre"), self.metadata.get("general.architecture")
        if name is None:
            name = OF_ARCHITECTURE.get(architecture, "default")
            logger.warning("%s does not say how its tokenizer splits text (tokenizer.ggml.pre): %s is taken", self.header.file, name)
        if name not in SPLITS:
            known = ", ".join(sorted(SPLITS))
            raise ValueError(
                f"{self.header.file}: its tokenizer splits text as {shown(name, 200)} (tokenizer.ggml.pre), which is not known; known: "
                f"{known}. "
                f"Another split would give other tokens: {REMEDY}"
            )
        return name

    def sentencepiece(self) -> Any:
        """The tokenizer of a SentencePiece vocabulary."""
        from tokenizers import Tokenizer, decoders, models, normalizers

        unknown = self.token("unknown")
        model = models.BPE(vocab=self.ids, merges=self.merges(), unk_token=unknown, fuse_unk=True, byte_fallback=True)
        tokenizer = Tokenizer(model)
        prefix = self.flag("add_space_prefix", True)
        spaces = normalizers.Replace(" ", "\u2581")
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), spaces]) if prefix else spaces
        steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
        tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix else steps)
        return tokenizer

    def merges(self) -> list[tuple[str, str]]:
        """The merges that scores imply: pairs of tokens that make a token, the best-scored first."""
        scores = self.numbers("scores", np.zeros(len(self.tokens), np.float32))
        given = [tuple(merge.split(" ", 1)) for merge in self.strings("merges")]
        if given and (scores == scores[0]).all():  # a converter that had no scores
            if any(len(pair) != 2 for pair in given):
                raise self.error("merges", "a list of pairs of tokens")
            return given
        never = {token for token, kind in zip(self.tokens, self.types, strict=True) if kind in (UNKNOWN, CONTROL, BYTE)}
        texts = {token: number for token, number in self.ids.items() if token not in never and len(token) <= MAX_TOKEN}
        found, characters = [], 0
        for token, number in texts.items():
            for cut in range(1, len(token)):
                first, second = texts.get(token[:cut]), texts.get(token[cut:])
                if first is None or second is None:
                    continue
                found.append((-float(scores[number]), cut, first, second))
                characters += len(token)
            if characters > MAX_MERGED:
                raise self.error("tokens", f"tokens whose merges have at most {MAX_MERGED:,} characters together")
        return [(self.tokens[first], self.tokens[second]) for _, _, first, second in sorted(found, key=lambda each: each[:2])]

    def wrapped(self, tokenizer: Any, kind: str) -> Any:
        """The tokenizer with special tokens, BOS and EOS as the file says, and chat templates."""
        from tokenizers import AddedToken, processors

        for number, token in enumerate(self.tokens):
            if self.types[number] in (CONTROL, UNKNOWN) and token:
                tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True)])
        users = [token for token, of in zip(self.tokens, self.types, strict=True) if of == USER_DEFINED and token]
        tokenizer.add_tokens([AddedToken(token, normalized=False, special=False) for token in users])
        bos, eos = self.token("bos"), self.token("eos")
        first = bos if self.flag("add_bos_token", kind == "llama" or self.metadata.get("tokenizer.ggml.pre") in STARTS) else None
        last = eos if self.flag("add_eos_token", False) else None
        if first or last:
            one = [token for token in (first, "$A", last) if token]
            two = one + [token.replace("$A", "$B:1") for token in one]
            named = [(token, self.ids[token]) for token in dict.fromkeys(each for each in (first, last) if each)]
            tokenizer.post_processor = processors.TemplateProcessing(single=one, pair=two, special_tokens=named)
        context = self.metadata.get(f"{self.metadata.get('general.architecture')}.context_length")
        special = {"bos_token": bos, "eos_token": eos, "unk_token": self.token("unknown"), "pad_token": self.token("padding")}
        return import_transformers().PreTrainedTokenizerFast(
            tokenizer_object=tokenizer,
            clean_up_tokenization_spaces=False,
            chat_template=self.templates(),
            **({"model_max_length": context} if isinstance(context, int) else {}),
            **{name: token for name, token in special.items() if token},
        )

    def templates(self) -> str | dict[str, str] | None:
        """The chat template, or the templates by name if there are several."""
        default, names = self.metadata.get("tokenizer.chat_template"), self.metadata.get("tokenizer.chat_templates", [])
        found = {"default": default} if default is not None else {}
        for name in names if isinstance(names, list) else [names]:
            text = self.metadata.get(f"tokenizer.chat_template.{name}")
            if text is not None:
                found[str(name)] = text
        for name, text in found.items():
            if not isinstance(text, str):
                raise ValueError(f"{self.header.file}: the chat template {name:.200} is {shown(text, 100)}; it must be text")
        return found or None if len(found) > 1 else found.get("default")
