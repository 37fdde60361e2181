"""Regular expressions that come with checkpoints and adapters: how they are compiled and matched without end or harm."""

from __future__ import annotations

import re
from typing import Any

MAX_CHARACTERS, MAX_DEPTH = 2000, 8
"""Of a pattern: its length, and how deep its groups are nested. `regex` takes twice the memory for each repeated group around another."""


def compiled(pattern: str, form: str = "{}") -> Any:
    """A pattern of `regex`, whose matches take a `timeout`. form: what is put around it. ValueError if it is none, or too large."""
    import regex  # here, because few checkpoints have patterns

    depth = deepest = 0
    for character in re.sub(r"\\.", "", pattern, flags=re.DOTALL):
        depth += (character == "(") - (character == ")")
        deepest = max(deepest, depth)
    if len(pattern) > MAX_CHARACTERS or deepest > MAX_DEPTH:
        raise ValueError(
            f"{pattern!r:.200} is too large for a regular expression of a checkpoint: at most {MAX_CHARACTERS:,} characters and groups "
            f"nested {MAX_DEPTH} deep"
        )
    try:
        re.compile(pattern)  # the library of peft and transformers, which has no recursion
        return regex.compile(form.format(pattern))
    except (re.error, regex.error, RecursionError, OverflowError) as error:
        raise ValueError(f"{pattern!r:.200} is no regular expression ({error})") from None
