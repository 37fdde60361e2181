"""Records that files hold: dataclasses that are checked, and read from JSON, by the types of their fields.

A field is text, a number, a record, one of these or None, or a tuple. A tuple of pairs is an object in JSON, other
tuples are lists.
"""

from __future__ import annotations

import dataclasses
import functools
import typing
from types import NoneType
from typing import Any, NewType

from kvjax.checks import check_amount, check_text, whole_number
from pallas_kernels.core.messages import shown

Count = NewType("Count", int)
"""A whole number above 0. An `int` may be 0, too."""
Rate = NewType("Rate", float)
"""A number above 0. A `float` may be 0, too."""

LIMIT = 2**63
CHECKS = {
    str: check_text,
    int: functools.partial(whole_number, below=LIMIT),
    Count: functools.partial(whole_number, least=1, below=LIMIT),
    float: check_amount,
    Rate: functools.partial(check_amount, above_zero=True),
}
types_of = functools.cache(typing.get_type_hints)


def check_record(record: Any, what: str) -> None:
    """ValueError for a field whose value is not of its type, which it names. what: the record, in words."""
    for name, kind in types_of(type(record)).items():
        given = getattr(record, name)
        if _value(f"{name} of {what}", kind, given) != given:
            raise ValueError(f"{name} of {what} must be tuples, got {shown(given)}")


def from_json[T](kind: type[T], given: object, what: str) -> T:
    """A record from its JSON object. ValueError names a field that is missing, unknown or of another type. what: the
    record, in words."""
    names = types_of(kind)
    if not isinstance(given, dict) or set(given) != set(names):
        found = f"different here: {', '.join(sorted(set(names) ^ set(given)))}" if isinstance(given, dict) else f"got {shown(given)}"
        raise ValueError(f"{what} has the fields {', '.join(sorted(names))}; {found}")
    return kind(**{name: _value(f"{name} of {what}", each, given[name]) for name, each in names.items()})


def to_json(value: Any, kind: Any = None) -> Any:
    """A record as `from_json` reads it."""
    kind = type(value) if kind is None else _one(kind)
    if value is not None and dataclasses.is_dataclass(kind):
        return {name: to_json(getattr(value, name), each) for name, each in types_of(kind).items()}
    if value is not None and (pair := _pair(kind)):
        return {str(key): to_json(each, pair[1]) for key, each in value}
    return value


def _one(kind: Any) -> Any:
    """The type of a value that may also be None."""
    return typing.get_args(kind)[0] if NoneType in typing.get_args(kind) else kind


def _pair(kind: Any) -> tuple[Any, ...]:
    """The types of key and value of a tuple of pairs; () for any other type."""
    inner = typing.get_args(kind)
    pair = typing.get_args(inner[0]) if inner and inner[-1] is Ellipsis else ()
    return pair if len(pair) == 2 and Ellipsis not in pair else ()


def _value(name: str, kind: Any, given: Any) -> Any:
    """A value of this type; ValueError if it is none. name: of the value, for the message."""
    if given is None and NoneType in typing.get_args(kind):
        return None
    kind = _one(kind)
    if kind in CHECKS:
        CHECKS[kind](name, given)
        return given
    if dataclasses.is_dataclass(kind):
        if not isinstance(given, kind):
            return from_json(kind, given, name)
        check_record(given, name)
        return given
    inner = typing.get_args(kind)
    if pair := _pair(kind):
        if not isinstance(given, dict | tuple):
            raise ValueError(f"{name} must be an object, got {shown(given)}")
        items = given.items() if isinstance(given, dict) else given
        return tuple((_key(name, pair[0], key), _value(f"{key} in {name}", pair[1], each)) for key, each in items)
    if not isinstance(given, list | tuple):
        raise ValueError(f"{name} must be a list, got {shown(given)}")
    if inner[-1] is Ellipsis:
        return tuple(_value(f"each of {name}", inner[0], each) for each in given)
    if len(given) != len(inner):
        raise ValueError(f"{name} must be {len(inner)} values, got {shown(given)}")
    return tuple(_value(name, each, one) for each, one in zip(inner, given, strict=True))


def _key(name: str, kind: Any, key: Any) -> Any:
    number = kind is not str and isinstance(key, str) and key.isdecimal() and len(key) < 20
    return _value(f"each key of {name}", kind, int(key) if number else key)
