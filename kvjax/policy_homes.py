"""Where built-in policies live that are imported when first named. The front door imports this, so it imports
nothing."""

from __future__ import annotations

homes: dict[tuple[str, str], tuple[str, str]] = {}
"""Module and class of each, by kind and first word of the name."""


def lives_in(kind: str, word: str, module: str, name: str) -> None:
    """Let `word` and `word:ARGS` of one kind of policy stand for `name()` and `name("ARGS")` of a module, imported when
    first named."""
    homes[kind, word] = module, name
