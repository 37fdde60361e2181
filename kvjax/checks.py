"""Checks of arguments that several modules take."""

from __future__ import annotations

import numbers
import operator
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from pallas_kernels.core.messages import shown


def whole_number(name: str, value: object, least: int = 0, below: int = 2**31) -> int:
    """The value as an int; ValueError unless it is a whole number in [least, below). True and False do not count as
    numbers."""
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


def check_flag(name: str, value: object) -> None:
    """ValueError unless the value is True or False."""
    if not isinstance(value, bool):
        raise ValueError(f"{name} must be True or False, got {shown(value)}")


def optional_function(name: str, value: object) -> None:
    """ValueError unless the value is a function, or None."""
    if value is not None and not callable(value):
        raise ValueError(f"{name} must be a function, or None, got {shown(value)}")


def check_iterable(value: object, caller: str, needed: str) -> None:
    """TypeError unless the value can be iterated over. caller: the function of kvjax that got it. needed: what it takes
    in place of it, and how that is written."""
    try:
        iter(value)
    except TypeError:
        raise TypeError(f"{caller} takes {needed}, got {shown(value)}") from None


def file_path(path: object, what: str = "file") -> Path:
    """The path of a file, `~` expanded; ValueError for anything that is no path. what: for the message, what it leads
    to."""
    text = os.fspath(path) if isinstance(path, str | os.PathLike) else None
    if not isinstance(text, str) or not text or "\0" in text:
        raise ValueError(f"the path of a {what} is needed, as a string or a pathlib.Path, got {shown(path)}")
    try:
        os.fsencode(text)
        return Path(path).expanduser()
    except UnicodeEncodeError:
        raise ValueError(f"the path of a {what} cannot hold half of a surrogate pair, got {shown(path)}; choose another") from None
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
    """ValueError if `model` is not a model, but a model's name, for instance. caller: the function of kvjax that got
    it."""
    if isinstance(model, str | Path):
        raise ValueError(
            f"{str(model)!r} is a name, but kvjax.{caller} needs the model itself: kvjax.{caller}(kvjax.load({str(model)!r}), ...)"
        )
    if not all(hasattr(model, name) for name in ("decoder", "config", "params", "tokenizer")):
        raise ValueError(f"kvjax.{caller} needs a model as kvjax.load(folder or Hub id) returns it, got {type(model).__name__}")


PROMPTS_REMEDY = "prefill([ids]) for one prompt, and of what a tokenizer returned give its ['input_ids']"


def listed(given: object, what: str, remedy: str) -> list:
    """The items of a list or other iterable. ValueError for anything else, and for text and mappings. what: of what it
    is a list."""
    if isinstance(given, str | bytes | Mapping) or not isinstance(given, Iterable) or getattr(given, "ndim", 1) == 0:
        raise ValueError(f"a list of {what} is needed, got {shown(given)}: {remedy}")
    return list(given)


def check_unmasked(tokens: object) -> None:
    """ValueError for a numpy array some of whose entries are masked: reading it would bring them back."""
    if isinstance(tokens, np.ma.MaskedArray) and np.ma.is_masked(tokens):
        raise ValueError(f"{int(np.ma.count_masked(tokens))} of {tokens.size} token ids are masked: give tokens.compressed(), the others")


class TokenIds(Sequence[int]):
    """A row of whole numbers that were looked at once, in an array that nobody writes to: token ids, up to the size of
    the vocabulary.

    `kvjax.text.tokenization.encode` and `token_ids` make it of what a caller gives, and take it at once. A slice is a
    view. array: int32; a wider type, or object, only where a number does not fit, which no vocabulary has. Equal to
    another one of the same ids, and to a list.
    """

    __slots__ = ("_bounds", "array")

    def __init__(self, array: np.ndarray, bounds: tuple[int, int] | None = None):
        low, high = bounds or (int(array.min(initial=0)), int(array.max(initial=0)))
        if low >= -(2**31) and high < 2**31:
            array = array.astype(np.int32, copy=False)
        array.flags.writeable = False
        self.array, self._bounds = array, (low, high)  # no id lies outside; those of a slice may be narrower

    @classmethod
    def read(cls, tokens: Any) -> TokenIds | None:
        """The ids of a row of whole numbers in an order; None for anything else. True and False are no ids."""
        if isinstance(tokens, cls):
            return tokens
        if isinstance(tokens, np.ndarray | jax.Array):
            array = np.array(tokens) if np.issubdtype(tokens.dtype, np.integer) or not tokens.size else None
            return cls(array) if array is not None and array.ndim == 1 else None
        # The items of bytes are numbers, but not ids.
        if isinstance(tokens, bytes | bytearray | memoryview) or not hasattr(tokens, "__getitem__"):
            return None
        try:
            kinds = set(map(type, tokens))
            if kinds & {bool, np.bool_} or any(issubclass(kind, np.ma.MaskedArray) for kind in kinds):
                return None
            numbers = tokens if kinds <= {int} else [operator.index(token) for token in tokens]
            array = np.array(numbers if len(numbers) else (), None if len(numbers) else np.int32)
        except TypeError:
            return None
        return cls(array if array.dtype.kind in "iu" else np.array(numbers, object))

    def inside(self, vocab_size: int) -> TokenIds:
        """These ids; ValueError unless there are some, all in the vocabulary."""
        if not len(self):
            raise ValueError("no tokens: a prompt needs at least one (add the model's beginning-of-sequence token)")
        low, high = self._bounds
        if low < 0 or high >= vocab_size:
            low, high = int(self.array.min()), int(self.array.max())
        if low < 0 or high >= vocab_size:
            raise ValueError(f"token {low if low < 0 else high} is outside the vocabulary of {vocab_size}")
        return self

    def tolist(self) -> list[int]:
        return self.array.tolist()

    def __len__(self) -> int:
        return len(self.array)

    def __getitem__(self, place: Any) -> Any:
        found = self.array[place]
        return TokenIds(found, self._bounds) if isinstance(place, slice) else int(found)

    def __iter__(self) -> Iterator[int]:
        return iter(self.array.tolist())

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.array(self.array, dtype, copy=copy)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, list):
            return self.array.tolist() == other
        return np.array_equal(self.array, other.array) if isinstance(other, TokenIds) else NotImplemented

    def __hash__(self) -> int:
        return hash(self.array.tobytes())

    def __repr__(self) -> str:
        return f"[{', '.join(map(str, self.array[:8]))}{', ...' if len(self) > 8 else ''}]"

    def __reduce__(self) -> tuple[Any, ...]:
        return TokenIds, (self.array, self._bounds)


def token_ids(tokens: Sequence[int] | TokenIds, vocab_size: int) -> TokenIds:
    """Token ids, looked at once; ValueError for anything that is not a row of ids in the vocabulary. True and False are
    not ids."""
    if isinstance(tokens, TokenIds):
        return tokens.inside(vocab_size)
    if isinstance(tokens, str):
        raise ValueError(f"an engine takes token ids, got text, {shown(tokens)}: engine.model.tokenizer(text)['input_ids'] gives them")
    if isinstance(tokens, Mapping):
        raise ValueError(f"an engine takes token ids, got a mapping with {', '.join(map(repr, tokens)):.60}: give its ['input_ids']")
    check_unmasked(tokens)
    if (ids := TokenIds.read(tokens)) is not None:
        return ids.inside(vocab_size)
    if isinstance(tokens, list | tuple) and any(isinstance(token, np.ma.MaskedArray) for token in tokens):
        raise ValueError(f"token ids must be a list of whole numbers, none of them from a masked array, got {shown(tokens)}")
    if np.ndim(tokens) == 0:
        raise ValueError(f"token ids must be a list, got {shown(tokens)}: one prompt among several is [ids], as in prefill([ids])")
    raise ValueError(f"token ids must be a list of whole numbers, got {shown(tokens)}")


def engine_sizes(page_size: int, prefill_chunk: int, batch_buckets: Sequence[int]) -> tuple[int, int, tuple[int, ...]]:
    """The sizes of an engine, in tokens and in sequences; ValueError unless they fit together."""
    page_size, prefill_chunk = whole_number("page_size", page_size, 1), whole_number("prefill_chunk", prefill_chunk, 1)
    if prefill_chunk % page_size:
        raise ValueError(f"prefill_chunk {prefill_chunk} must be a multiple of page_size {page_size}")
    sizes = batch_buckets if isinstance(batch_buckets, list | tuple | range) or getattr(batch_buckets, "ndim", 0) == 1 else ()
    buckets = tuple(whole_number("each size in batch_buckets", size, 1) for size in sizes)
    if not buckets or sorted(set(buckets)) != list(buckets):
        raise ValueError(f"batch_buckets must be sizes in ascending order, as (1, 2, 4), got {batch_buckets}")
    return page_size, prefill_chunk, buckets
