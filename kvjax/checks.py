"""Checks of arguments that several modules take."""

from __future__ import annotations

import numbers
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from pallas_kernels.core.messages import shown


def whole_number(name: str, value: object, least: int = 0, below: int = 2**31) -> int:
    """The value as an int; ValueError unless it is a whole number in [least, below). True and False do not count as numbers."""
    if not isinstance(value, numbers.Integral) or isinstance(value, bool):
        raise ValueError(f"{name} must be a whole number, got {shown(value)}")
    if value < least:
        raise ValueError(f"{name} must be at least {least}, got {value}")
    if value >= below:
        raise ValueError(f"{name} must be at most {below - 1}, got {shown(value)}")
    return int(value)


def check_amount(name: str, value: object, *, above_zero: bool = False) -> None:
    """ValueError unless the value is a finite number that is not negative, and not 0 either with `above_zero`."""
    number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if not (number and 0 <= value <= sys.float_info.max and (value or not above_zero)):
        raise ValueError(f"{name} must be a finite number{' above 0' if above_zero else ', 0 or more'}, got {shown(value)}")


def check_text(name: str, value: object) -> None:
    """ValueError unless the value is text that UTF-8 can hold."""
    if not isinstance(value, str) or value.encode(errors="ignore").decode() != value:
        raise ValueError(f"{name} must be text, got {shown(value)}")


def check_rows(name: str, rows: Iterable[object], width: int) -> None:
    """ValueError unless each row is a tuple of so many whole numbers above 0."""
    for row in rows:
        if not isinstance(row, tuple) or len(row) != width:
            raise ValueError(f"each row of {name} must be {width} whole numbers, got {shown(row)}")
        for number in row:
            whole_number(f"each number in {name}", number, 1)


def check_fields(what: str, names: Iterable[str], given: object) -> dict[str, Any]:
    """What was given; ValueError unless it is an object with these fields and no others."""
    if not isinstance(given, dict) or set(given) != set(names):
        found = f"different here: {', '.join(sorted(set(names) ^ set(given)))}" if isinstance(given, dict) else f"got {shown(given)}"
        raise ValueError(f"{what} has the fields {', '.join(sorted(names))}; {found}")
    return given


def optional_function(name: str, value: object) -> None:
    """ValueError unless the value is a function, or None."""
    if value is not None and not callable(value):
        raise ValueError(f"{name} must be a function, or None, got {shown(value)}")


def file_path(path: object, what: str = "file") -> Path:
    """The path of a file, `~` expanded; ValueError for anything that is no path. what: for the message, what it leads to."""
    text = os.fspath(path) if isinstance(path, str | os.PathLike) else None
    if not isinstance(text, str) or not text or "\0" in text:
        raise ValueError(f"the path of a {what} is needed, as a string or a pathlib.Path, got {shown(path)}")
    try:
        return Path(path).expanduser()
    except RuntimeError as error:  # ~ of an unknown user
        raise ValueError(f"{str(path)!r} names no home directory that is known: {error}") from None


def check_salt(salt: object) -> None:
    """ValueError unless a cache_salt is text that UTF-8 can hold, or None."""
    try:
        if salt is None or (isinstance(salt, str) and salt.encode()):
            return
    except UnicodeEncodeError as error:
        raise ValueError(f"cache_salt holds half of a surrogate pair at character {error.start}, which is not text") from None
    raise ValueError(f"cache_salt must be text of at least one character, or None, got {shown(salt)}")


def check_model(model: object, caller: str) -> None:
    """ValueError if `model` is not a model, but a model's name, for instance. caller: the function of kvjax that got it."""
    if isinstance(model, str | Path):
        raise ValueError(
            f"{str(model)!r} is a name, but kvjax.{caller} needs the model itself: kvjax.{caller}(kvjax.load({str(model)!r}), ...)"
        )
    if not all(hasattr(model, name) for name in ("decoder", "config", "params", "tokenizer")):
        raise ValueError(f"kvjax.{caller} needs a model as kvjax.load(folder or Hub id) returns it, got {type(model).__name__}")


PROMPTS_REMEDY = "prefill([ids]) for one prompt, and of what a tokenizer returned give its ['input_ids']"


def listed(given: object, what: str, remedy: str) -> list:
    """The items of a list or other iterable. ValueError for anything else, and for text and mappings. what: of what it is a list."""
    if isinstance(given, str | bytes | Mapping) or not isinstance(given, Iterable):
        raise ValueError(f"a list of {what} is needed, got {shown(given)}: {remedy}")
    return list(given)


def check_unmasked(tokens: object) -> None:
    """ValueError for a numpy array some of whose entries are masked: reading it would bring them back."""
    if isinstance(tokens, np.ma.MaskedArray) and np.ma.is_masked(tokens):
        raise ValueError(f"{int(np.ma.count_masked(tokens))} of {tokens.size} token ids are masked: give tokens.compressed(), the others")


def token_ids(tokens: Sequence[int], vocab_size: int) -> list[int]:
    """Token ids as Python ints; ValueError for anything that is not a row of ids in the vocabulary. True and False are not ids."""
    if isinstance(tokens, str):
        raise ValueError(f"an engine takes token ids, got text, {shown(tokens)}: engine.model.tokenizer(text)['input_ids'] gives them")
    if isinstance(tokens, Mapping):
        raise ValueError(f"an engine takes token ids, got a mapping with {', '.join(map(repr, tokens)):.60}: give its ['input_ids']")
    check_unmasked(tokens)
    ids = np.asarray(tokens)
    if ids.ndim == 0:
        raise ValueError(f"token ids must be a list, got {shown(tokens)}: one prompt among several is [ids], as in prefill([ids])")
    listed = () if isinstance(tokens, np.ndarray | jax.Array) else tokens  # [1, True] makes an array of ints
    number = not ids.size or np.issubdtype(ids.dtype, np.integer)
    if ids.ndim != 1 or not number or any(isinstance(each, bool | np.bool_) for each in listed):
        raise ValueError(f"token ids must be a list of whole numbers, got {shown(tokens)}")
    if not ids.size:
        raise ValueError("no tokens: a prompt needs at least one (add the model's beginning-of-sequence token)")
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= vocab_size:
        raise ValueError(f"token {low if low < 0 else high} is outside the vocabulary of {vocab_size}")
    return ids.tolist()


def engine_sizes(page_size: int, prefill_chunk: int, batch_buckets: Sequence[int]) -> tuple[int, int, tuple[int, ...]]:
    """The sizes of an engine, in tokens and in sequences; ValueError unless they fit together."""
    page_size, prefill_chunk = whole_number("page_size", page_size, 1), whole_number("prefill_chunk", prefill_chunk, 1)
    if prefill_chunk % page_size:
        raise ValueError(f"prefill_chunk {prefill_chunk} must be a multiple of page_size {page_size}")
    sizes = batch_buckets if isinstance(batch_buckets, Iterable) else ()
    buckets = tuple(whole_number("each size in batch_buckets", size, 1) for size in sizes)
    if not buckets or sorted(set(buckets)) != list(buckets):
        raise ValueError(f"batch_buckets must be sizes in ascending order, as (1, 2, 4), got {batch_buckets}")
    return page_size, prefill_chunk, buckets
