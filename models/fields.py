"""Checked reading of config.json's fields."""

from __future__ import annotations

import math
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


def boolean(fields: Mapping[str, Any], name: str) -> bool:
    """True or false. ValueError that names the field for anything else."""
    if not isinstance(fields[name], bool):
        raise ValueError(f"config.json: {name} is {fields[name]!r}; it must be true or false")
    return fields[name]
