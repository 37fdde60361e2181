"""Prompts as people give them - text, token ids, chat messages, what a tokenizer returns - as token ids."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

Prompt = str | Sequence[int]


def encode(tokenizer: Any, prompt: Prompt) -> list[int]:
    """Token ids of a prompt; ids stay as they are. ValueError for neither text nor ids, and for text without a tokenizer that reads it."""
    if not isinstance(prompt, str):
        try:
            return [operator.index(token) for token in prompt]
        except TypeError as error:
            raise ValueError(f"a prompt is text or a list of token ids, got {prompt!r:.60}") from error
    if tokenizer is None:
        raise ValueError("the model has no tokenizer: pass token ids instead of text")
    try:
        return list(tokenizer(prompt)["input_ids"])
    except Exception as error:  # whatever a tokenizer raises is about this prompt, and others may go on
        raise ValueError(f"the tokenizer cannot read the prompt: {error}") from error


def chat_ids(messages: Iterable[Mapping[str, str]], tokenizer: Any, template_options: Mapping[str, Any]) -> tuple[int, ...]:
    """Token ids of a conversation, rendered by the model's chat template and opened for the assistant's answer.

    template_options: variables of the template, such as {"enable_thinking": False}; ValueError for one that is an argument of
    `apply_chat_template` itself, which says how to render, and for messages that the template does not take.
    """
    if tokenizer is None:
        raise ValueError("the model has no tokenizer: give prompt as token ids")
    if getattr(tokenizer, "chat_template", None) is None:
        raise ValueError("the model has no chat template for messages: give prompt, or put a chat_template.jinja in the model's folder")
    for name in inspect.signature(tokenizer.apply_chat_template).parameters.keys() & template_options.keys():
        raise ValueError(f"chat_template_kwargs may hold only variables of the model's chat template, and {name!r} is none")
    given = [dict(message) for message in messages]
    try:
        text = tokenizer.apply_chat_template(given, tokenize=False, add_generation_prompt=True, **template_options)
    except ImportError:  # jinja2 is missing, which is no record's fault
        raise
    except Exception as error:  # templates are programs of the model's makers and raise what they like
        raise ValueError(f"the model's chat template does not take these messages: {error}") from error
    # The template writes the special tokens itself.
    return tuple(tokenizer(text, add_special_tokens=False)["input_ids"])


def is_single(prompts: Prompt | Sequence[Prompt]) -> bool:
    """Whether this is one prompt (text, or a row of token ids) rather than several."""
    return isinstance(prompts, str) or (len(prompts) > 0 and not isinstance(prompts[0], str) and np.ndim(prompts[0]) == 0)
