"""How reports write tables and numbers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def markdown(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table, the first column to the left and the others to the right."""
    lines = [columns, ["---"] + ["---:"] * (len(columns) - 1), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def tokens_text(n: int) -> str:
    """A number of tokens: 128K, 1M, 1,000."""
    return f"{n // 2**20}M" if n % 2**20 == 0 else f"{n // 2**10}K" if n % 2**10 == 0 else f"{n:,}"
