"""Checked reading of config.json's fields."""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping
from typing import Any


def integer(fields: Mapping[str, Any], name: str) -> int:
    """An integer. ValueError that names the field for anything else."""
    value = fields.get(name)
    if not isinstance(value, int) or isinstance(value, bool):
        raise ValueError(f"config.json: {name} is {value!r}; it must be an integer")
    return value


def size(fields: Mapping[str, Any], name: str) -> int:
    """A positive integer. ValueError that names the field for anything else."""
    value = integer(fields, name)
    if value < 1:
        raise ValueError(f"config.json: {name} is {value}; it must be a positive integer")
    return value


def number(fields: Mapping[str, Any], name: str) -> float:
    """A finite number. ValueError that names the field for anything else."""
    value = fields.get(name)
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
        raise ValueError(f"config.json: {name} is {value!r}; it must be a number")
    return float(value)


def plain(value: Any) -> Any:
    """A value of config.json with Python's own numbers, also inside lists and objects. NumPy's cannot be written."""
    if isinstance(value, Mapping):
        return {name: plain(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        return value
    return int(value) if isinstance(value, numbers.Integral) else float(value)


def declared(value: Any, default: Any, name: str, architecture: str) -> Any:
    """A field's value as config.json holds it: a number has the type of `default`, which is the type that the family's configuration class
    in transformers declares. ValueError for a number with a fraction where a whole number is declared."""
    value = plain(value)
    if isinstance(default, bool) or isinstance(value, bool) or not isinstance(value, int | float) or not isinstance(default, int | float):
        return value
    if isinstance(default, int) and value != int(value):
        raise ValueError(
            f"config.json of a {architecture} holds {name} as a whole number, and this model has {value!r}: transformers would not open it"
        )
    return type(default)(value)


def boolean(fields: Mapping[str, Any], name: str) -> bool:
    """True or false. ValueError that names the field for anything else."""
    if not isinstance(fields[name], bool):
        raise ValueError(f"config.json: {name} is {fields[name]!r}; it must be true or false")
    return fields[name]
