"""Regular expressions that come with checkpoints and adapters: how they are compiled and matched without end or
harm."""

from __future__ import annotations

import re
from typing import Any

MAX_CHARACTERS, MAX_DEPTH = 1000, 8
"""Of a pattern: its length, and how deep its groups are nested. `regex` takes twice the memory for each repeated group
around another. Its first search for a text of one letter takes a time that grows with the cube of the length, and no
timeout ends it: 2 s for 1,000 characters, 12 s for 1,900."""

_NO_GROUPS = re.compile(r"\\.|\(\?#[^)]*\)|\[\^?\]?(?:\\.|[^\]\\])*\]", re.DOTALL)
"""What holds parentheses that are none: escapes, comments and sets of characters."""

_VERBOSE = re.compile(r"\(\?[a-zA-Z]*x")
"""The flag with which a line may end in a comment, where parentheses are none either."""

_FUZZY = re.compile(r"\{(?!\d*,?\d*\})")
"""A brace that begins no count. Python's `re` takes it for itself; `regex` may take it for approximate matching, as in
{e<=3}, which ends long after its timeout."""


def compiled(pattern: str, form: str = "{}") -> Any:
    """A pattern of `regex`, whose matches take a `timeout`. form: what is put around it. ValueError if it is none, or
    too large."""
    import regex  # here, because few checkpoints have patterns

    depth, deepest, bare = 0, 0, _NO_GROUPS.sub("", pattern[: MAX_CHARACTERS + 1])
    for character in bare:
        depth += (character == "(") - (character == ")")
        deepest = max(deepest, depth)
    if len(pattern) > MAX_CHARACTERS or deepest > MAX_DEPTH or _VERBOSE.search(pattern):
        raise ValueError(
            f"{pattern!r:.200} is too large for a regular expression of a checkpoint: at most {MAX_CHARACTERS:,} characters and groups "
            f"nested {MAX_DEPTH} deep, without the flag x"
        )
    if _FUZZY.search(bare):
        raise ValueError(f"{pattern!r:.200} has a brace that begins no count of repetitions: write it as \\{{")
    try:
        re.compile(pattern)  # the library of peft and transformers, which has no recursion
        return regex.compile(form.format(pattern))
    except (re.error, regex.error, RecursionError, OverflowError) as error:
        raise ValueError(f"{pattern!r:.200} is no regular expression ({error})") from None
