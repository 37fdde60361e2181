"""Checked reading of config.json's fields."""

from __future__ import annotations

import numbers
from collections.abc import Mapping, Sequence
from typing import Any

BELOW = 2**31
"""Sizes and ids are below this."""

LARGEST = 1e30
"""The largest number that is read, so that products of several stay finite."""

MAX_LAYERS = 10_000
"""Layers that a model may have: each costs memory before any of its tensors is looked at."""


def integer(fields: Mapping[str, Any], name: str) -> int:
    """An integer, of 32 bits. ValueError that names the field for anything else."""
    value = fields.get(name)
    if not isinstance(value, int) or isinstance(value, bool):
        raise ValueError(f"config.json: {name} is {value!r:.200}; it must be an integer")
    if not -BELOW <= value < BELOW:
        raise ValueError(f"config.json: {name} is {value!r:.200}; it must be below {BELOW}")
    return value


def layer_count(fields: Mapping[str, Any]) -> int:
    """`num_hidden_layers`: a positive integer, at most `MAX_LAYERS`. ValueError for anything else."""
    count = size(fields, "num_hidden_layers")
    if count > MAX_LAYERS:
        raise ValueError(f"config.json: num_hidden_layers is {count}; at most {MAX_LAYERS} layers can be read")
    return count


def size(fields: Mapping[str, Any], name: str) -> int:
    """A positive integer. ValueError that names the field for anything else."""
    value = integer(fields, name)
    if value < 1:
        raise ValueError(f"config.json: {name} is {value}; it must be a positive integer")
    return value


def check_layer_types(types: Any, kinds: Sequence[str], count: int) -> None:
    """ValueError unless `layer_types` names one of `kinds` for each of `count` layers."""
    if not isinstance(types, list) or len(types) != count or any(kind not in kinds for kind in types):
        known = " or ".join(map(repr, kinds))
        raise ValueError(f"config.json: layer_types is {types!r:.200}; it must be a list of {known}, one for each of {count} layers")


def number(fields: Mapping[str, Any], name: str) -> float:
    """A finite number, of at most `LARGEST`. ValueError that names the field for anything else."""
    value = fields.get(name)
    if not isinstance(value, int | float) or isinstance(value, bool) or not -LARGEST <= value <= LARGEST:
        raise ValueError(f"config.json: {name} is {value!r:.200}; it must be a number of at most {LARGEST}")
    return float(value)


def positive(fields: Mapping[str, Any], name: str) -> float:
    """A number above 0, of at most `LARGEST`. ValueError that names the field for anything else."""
    if (value := number(fields, name)) <= 0:
        raise ValueError(f"config.json: {name} is {value}; it must be above 0")
    return value


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
    """A field's value as config.json holds it: a number has the type of `default`, which is the type that the family's
    configuration class in transformers declares. ValueError for a number with a fraction where a whole number is
    declared."""
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
        raise ValueError(f"config.json: {name} is {fields[name]!r:.200}; it must be true or false")
    return fields[name]
