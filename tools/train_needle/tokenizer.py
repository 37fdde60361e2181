"""The needle model's tokenizer: byte-level BPE in which every digit is one token."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from kvjax.text.transformers_import import import_transformers

END_OF_TEXT = "<|endoftext|>"
PAD = "<|pad|>"


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Any:
    """A `tokenizers.Tokenizer` of `vocab_size` tokens. <|endoftext|> is 0 and <|pad|> is 1. ValueError if the text
    gives fewer tokens.

    Digits are split off before words, so " is 48213" becomes " is", " ", "4", "8", ... So a text that is cut before the
    space of a number has the same tokens as the whole.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT, PAD],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    if tokenizer.get_vocab_size() != vocab_size:
        found = tokenizer.get_vocab_size()
        raise ValueError(f"the text gives a vocabulary of {found:,} tokens, and {vocab_size:,} are needed: pass more text")
    return tokenizer


def transformers_tokenizer(path: str | Path, max_positions: int) -> Any:
    """The tokenizer file as a `transformers` tokenizer with named special tokens. It is exported with the model."""
    return import_transformers().PreTrainedTokenizerFast(
        tokenizer_file=str(path),
        eos_token=END_OF_TEXT,
        pad_token=PAD,
        model_max_length=max_positions,
        clean_up_tokenization_spaces=False,
    )
