"""How values are shown in messages."""

from __future__ import annotations


def shown(value: object, limit: int = 60) -> str:
    """The value's repr, cut to `limit` characters, in one line: that of an array has several."""
    said = repr(value)
    return (said if "\n" not in said else " ".join(said.split()))[:limit]
