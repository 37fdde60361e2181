"""Token ids of prompts in every form that users give: text, token ids, chat messages, or the output of a tokenizer."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

Prompt = str | Sequence[int] | Sequence[Mapping[str, str]] | Mapping[str, Any]
"""Text; token ids; chat messages, each with role and content; or what a Hugging Face tokenizer returns for one text."""


def encode(tokenizer: Any, prompt: Prompt, template_options: Mapping[str, Any] | None = None) -> list[int]:
    """Token ids of a prompt. Ids stay as they are; messages go through the chat template (`chat_ids`).

    ValueError for anything else, and for text or messages that the model's tokenizer cannot read.
    """
    if isinstance(prompt, Mapping):
        prompt = _rows(prompt)
    if template_options is not None and not isinstance(template_options, Mapping):
        raise ValueError(f"chat_template_kwargs must be a mapping, as {{'enable_thinking': False}}, got {template_options!r:.60}")
    if _is_chat(prompt):
        return list(chat_ids(prompt, tokenizer, template_options or {}))
    if isinstance(prompt, bytes | bytearray):  # its items are numbers, but not token ids
        raise ValueError(f"a prompt is text or a list of token ids, got bytes, {prompt!r:.60}: prompt.decode() makes text of them")
    if template_options:
        raise ValueError(f"chat_template_kwargs are for chat messages, and this prompt has none: {prompt!r:.60}")
    if not isinstance(prompt, str):
        try:
            if not hasattr(prompt, "__getitem__"):
                raise TypeError(f"{type(prompt).__name__} has no order, or can be read only once")
            if any(isinstance(token, bool | np.bool_) for token in prompt):
                raise TypeError("True and False are not token ids")
            return [operator.index(token) for token in prompt]
        except TypeError as error:
            raise ValueError(f"a prompt is text or a list of token ids, got {prompt!r:.60}") from error
    if tokenizer is None:
        raise ValueError("the model has no tokenizer: pass token ids instead of text")
    try:
        prompt.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"the prompt holds half of a surrogate pair at character {error.start}, which is not text") from None
    try:
        return list(tokenizer(prompt)["input_ids"])
    except Exception as error:  # a tokenizer may raise anything; it concerns only this prompt
        raise ValueError(f"the tokenizer cannot read the prompt: {error}") from error


def chat_ids(messages: Iterable[Mapping[str, str]], tokenizer: Any, template_options: Mapping[str, Any]) -> tuple[int, ...]:
    """Token ids of a conversation, rendered by the model's chat template up to where the assistant's answer begins.

    template_options: variables of the template, such as {"enable_thinking": False}. ValueError for an option that is an argument of
    `apply_chat_template` itself, and for messages that the template does not accept.
    """
    if tokenizer is None:
        raise ValueError("the model has no tokenizer: give prompt as token ids")
    if getattr(tokenizer, "chat_template", None) is None:
        raise ValueError("the model has no chat template for messages: give prompt, or put a chat_template.jinja in the model's folder")
    for name in inspect.signature(tokenizer.apply_chat_template).parameters.keys() & template_options.keys():
        raise ValueError(f"chat_template_kwargs may hold only variables of the model's chat template, and {name!r} is not one")
    given = [dict(message) if isinstance(message, Mapping) else message for message in messages]
    wrong = next((message for message in given if not isinstance(message, dict) or not {"role", "content"} <= message.keys()), None)
    if wrong is not None:
        raise ValueError(f"a message has a role and a content, got {wrong!r:.60}")
    try:
        text = tokenizer.apply_chat_template(given, tokenize=False, add_generation_prompt=True, **template_options)
    except ImportError:  # jinja2 is missing, so the record is not at fault
        raise
    except Exception as error:  # templates are programs that come with the model, and may raise anything
        raise ValueError(f"the model's chat template does not take these messages: {error}") from error
    # The template writes the special tokens itself.
    return tuple(tokenizer(text, add_special_tokens=False)["input_ids"])


def one_by_one(prompts: Prompt | Sequence[Prompt]) -> tuple[list[Prompt], bool]:
    """The prompts as a list, and whether a single one was given. ValueError for anything else."""
    if isinstance(prompts, Mapping):
        prompts = _rows(prompts)
    single = isinstance(prompts, str | bytes | bytearray) or _is_chat(prompts)
    if not single and not (hasattr(prompts, "__len__") and hasattr(prompts, "__getitem__")):  # None, a number, a generator, a set
        raise ValueError(f"a prompt is text or a list of token ids, and several are a list of them, got {prompts!r:.60}")
    single = single or (len(prompts) > 0 and not isinstance(prompts[0], str | bytes | bytearray | Mapping) and np.ndim(prompts[0]) == 0)
    return ([prompts], True) if single else (list(prompts), False)


def _is_chat(prompt: Any) -> bool:
    return isinstance(prompt, list | tuple) and len(prompt) > 0 and isinstance(prompt[0], Mapping) and "input_ids" not in prompt[0]


def _rows(encoding: Mapping[str, Any]) -> list:
    """The token ids that a tokenizer returned for one text or several, without padding (by its attention mask)."""
    if "input_ids" not in encoding:
        raise ValueError(f"a prompt is text, token ids, or a list of messages, got a mapping with {', '.join(map(repr, encoding)):.60}")
    ids = encoding["input_ids"]
    mask = encoding.get("attention_mask")
    if mask is None:
        return list(ids)
    if len(ids) and np.ndim(ids[0]) == 0:
        return [token for token, real in zip(ids, mask, strict=True) if real]
    return [[token for token, real in zip(*row, strict=True) if real] for row in zip(ids, mask, strict=True)]
