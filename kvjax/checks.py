"""Checks of arguments that several modules take."""

from __future__ import annotations

import numbers


def whole_number(name: str, value: object, least: int = 0, below: int = 2**31) -> int:
    """The value as an int; ValueError unless it is a whole number in [least, below). True and False are no numbers."""
    if not isinstance(value, numbers.Integral) or isinstance(value, bool):
        raise ValueError(f"{name} must be a whole number, got {value!r:.60}")
    if value < least:
        raise ValueError(f"{name} must be at least {least}, got {value}")
    if value >= below:
        raise ValueError(f"{name} must be at most {below - 1}, got {value!r:.60}")
    return int(value)
