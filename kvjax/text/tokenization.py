"""Token ids of prompts in every form that users give: text, token ids, chat messages, or the output of a tokenizer."""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from kvjax.checks import TokenIds, check_flag, check_unmasked
from kvjax.text.messages import chat_ids
from kvjax.text.plain_texts import tokenized
from pallas_kernels.core.messages import shown

logger = logging.getLogger(__name__)

Prompt = str | Sequence[int] | Sequence[Mapping[str, str]] | Mapping[str, Any]
"""Text; token ids; chat messages, each with role and content; or what a Hugging Face tokenizer returns for one text."""


def encode(tokenizer: Any, prompt: Prompt, template_options: Mapping[str, Any] | None = None, *, parse_special: bool = False) -> TokenIds:
    """Token ids of a prompt. `TokenIds` stay as they are, other ids are looked at once, and messages go through the
    chat template (`kvjax.text.messages.chat_ids`).

    parse_special: whether special tokens in the contents of messages are control tokens, and not plain text; in a text
    they always are. Logs a warning if a text begins with the beginning-of-sequence token and the tokenizer adds
    another. ValueError for anything else, and for text or messages that the model's tokenizer cannot read.
    """
    check_flag("parse_special", parse_special)
    if isinstance(prompt, Mapping):
        prompt = _rows(prompt)
    if template_options is not None and not isinstance(template_options, Mapping):
        raise ValueError(f"chat_template_kwargs must be a mapping, as {{'enable_thinking': False}}, got {shown(template_options)}")
    if _is_chat(prompt):
        return _looked_at(chat_ids(prompt, tokenizer, template_options or {}, parse_special=parse_special))
    if isinstance(prompt, bytes | bytearray):  # its items are numbers, but not token ids
        raise ValueError(f"a prompt is text or a list of token ids, got bytes, {shown(prompt)}: prompt.decode() makes text of them")
    if template_options:
        raise ValueError(f"chat_template_kwargs are for chat messages, and this prompt has none: {shown(prompt)}")
    if not isinstance(prompt, str):
        check_unmasked(prompt)
        return _looked_at(prompt)
    if tokenizer is None:
        raise ValueError("the model has no tokenizer: pass token ids instead of text")
    ids = _looked_at(list(tokenized(tokenizer, prompt)["input_ids"]))
    if len(ids) > 1 and ids[0] == ids[1] == getattr(tokenizer, "bos_token_id", None):
        _warn_of_two_beginnings(tokenizer)
    return ids


def _looked_at(ids: Any) -> TokenIds:
    if (found := TokenIds.read(ids)) is None:
        raise ValueError(f"a prompt is text or a list of token ids, got {shown(ids)}")
    return found


@functools.lru_cache(maxsize=16)
def _warn_of_two_beginnings(tokenizer: Any) -> None:
    """Say it once for a tokenizer: a job may have a million such prompts."""
    logger.warning(
        "a prompt begins with %r, and the tokenizer adds another one: give messages instead of a rendered chat, or cut it",
        tokenizer.bos_token,
    )


def one_by_one(prompts: Prompt | Sequence[Prompt]) -> tuple[list[Prompt], bool]:
    """The prompts as a list, and whether a single one was given. ValueError for anything else."""
    if isinstance(prompts, Mapping):
        prompts = _rows(prompts)
    single = isinstance(prompts, str | bytes | bytearray) or _is_chat(prompts)
    if not single and not _is_listed(prompts):
        raise ValueError(f"a prompt is text or a list of token ids, and several are a list of them, got {shown(prompts)}")
    single = single or (len(prompts) > 0 and not isinstance(prompts[0], str | bytes | bytearray | Mapping) and np.ndim(prompts[0]) == 0)
    return ([prompts], True) if single else (list(prompts), False)


def _is_listed(prompts: Any) -> bool:
    """Whether there are items in an order: not so for None, a number, a generator, a set, and an array of no
    dimension."""
    try:
        return len(prompts) >= 0 and hasattr(prompts, "__getitem__")
    except TypeError:  # an array of no dimension has the method, too
        return False


def _is_chat(prompt: Any) -> bool:
    return isinstance(prompt, list | tuple) and len(prompt) > 0 and isinstance(prompt[0], Mapping) and "input_ids" not in prompt[0]


def _rows(encoding: Mapping[str, Any]) -> list:
    """The token ids that a tokenizer returned for one text or several, without padding (by its attention mask)."""
    if "input_ids" not in encoding:
        raise ValueError(f"a prompt is text, token ids, or a list of messages, got a mapping with {', '.join(map(repr, encoding)):.60}")
    ids = encoding["input_ids"]
    if isinstance(ids, str | bytes) or not hasattr(ids, "__getitem__") or getattr(ids, "ndim", 1) == 0:
        raise ValueError(f"the input_ids of a prompt must be a list of token ids, got {shown(ids)}")
    mask = encoding.get("attention_mask")
    if mask is None:
        return list(ids)
    if len(ids) and np.ndim(ids[0]) == 0:
        return [token for token, real in zip(ids, mask, strict=True) if real]
    return [[token for token, real in zip(*row, strict=True) if real] for row in zip(ids, mask, strict=True)]
