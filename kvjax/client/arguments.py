"""Checks of what callers give to sessions and clients, in process and over the wire: before anything is queued, sent or
changed.

They import no JAX, so that a client needs none. All raise InvalidArgument, which names the argument and the value.
"""

from __future__ import annotations

import math
import numbers
import operator
from collections.abc import Iterable, Mapping, Set
from typing import Any

from kvjax.client.errors import InvalidArgument
from pallas_kernels.core.messages import shown

MAX_TOKEN_ID = 2**32 - 1
"""The largest token id that a message holds."""


def seconds(name: str, value: Any) -> float | None:
    """A time to wait, in seconds: a number from 0 on, infinity too; None: no limit."""
    if value is None or (is_number(value) and value >= 0):
        return None if value is None else float(value)
    raise InvalidArgument(f"{name} must be a number of seconds, 0 or more, or None for no limit, got {shown(value)}", field=name)


def is_number(value: Any) -> bool:
    """Whether it is a real number that a float holds, other than NaN; True and False are none."""
    if not isinstance(value, numbers.Real) or isinstance(value, bool):
        return False
    try:
        return not math.isnan(float(value))
    except OverflowError:
        return False


def whole(name: str, value: Any, least: int = 0) -> int:
    """A whole number from `least` on, as an int."""
    if not isinstance(value, numbers.Integral) or isinstance(value, bool) or value < least:
        raise InvalidArgument(f"{name} must be a whole number from {least} on, got {shown(value)}", field=name)
    return int(value)


def yes_or_no(name: str, value: Any) -> bool:
    """True or False. "false" is no False."""
    if not isinstance(value, bool):
        raise InvalidArgument(f"{name} must be True or False, got {shown(value)}", field=name)
    return value


def session_id(value: Any) -> str:
    """The id of a session."""
    if not is_text(value):
        raise InvalidArgument(f"a session id is text, as session.id is, got {shown(value)}", field="session_id")
    return value


def is_text(value: Any) -> bool:
    """Whether it is text that a message holds: half of a surrogate pair is none."""
    try:
        return isinstance(value, str) and value.encode() is not None
    except UnicodeEncodeError:
        return False


def instance(name: str, value: Any, kinds: tuple[type, ...], said: str) -> Any:
    """An instance of one of `kinds`, or None. said: what it must be."""
    if value is None or isinstance(value, kinds):
        return value
    raise InvalidArgument(f"{name} must be {said}, or None, got {shown(value)}", field=name)


def listed(name: str, value: Any) -> list[Any]:
    """The items of a list, an array or another iterable. Text, mappings and sets are none: their items are no row of
    token ids."""
    if isinstance(value, str | bytes | bytearray | Mapping | Set) or not isinstance(value, Iterable):
        raise InvalidArgument(f"{name} must be a list of token ids, got {shown(value)}", field=name)
    try:
        return list(value)
    except TypeError:  # an array of no dimension says that it is iterable
        raise InvalidArgument(f"{name} must be a list of token ids, got {shown(value)}", field=name) from None


def token_ids(name: str, value: Any) -> list[int]:
    """Token ids as a list of ints. The server knows its vocabulary; here they must be what a message holds."""
    found = listed(name, value)
    if all([type(each) is int and 0 <= each <= MAX_TOKEN_ID for each in found]):  # noqa: C419 - a list is faster
        return found
    return [_token_id(name, place, each) for place, each in enumerate(found)]


def _token_id(name: str, place: int, value: Any) -> int:
    try:
        token = -1 if getattr(value, "mask", False) else operator.index(value)  # numpy's and torch's numbers, too
    except (TypeError, ValueError):
        token = -1
    if isinstance(value, bool) or not 0 <= token <= MAX_TOKEN_ID:
        said = f"must be whole numbers from 0 to {MAX_TOKEN_ID}, and number {place} of them is {shown(value)}"
        raise InvalidArgument(f"{name} {said}", field=name)
    return token
