"""Page tables on the host: which pages hold each sequence of a batch."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from jaxtyping import Int

MIN_TABLE_PAGES = 16


def table_width(pages: int) -> int:
    """Columns of a page table for sequences of up to so many pages: the next power of two, so that few programs are compiled."""
    return max(MIN_TABLE_PAGES, 1 << (pages - 1).bit_length() if pages else 0)


def page_table(rows: Sequence[Sequence[int]]) -> Int[np.ndarray, "B M"]:
    """The pages of every row (empty for an empty slot), -1 behind them."""
    table = np.full((len(rows), table_width(max(map(len, rows), default=0))), -1, np.int32)
    for row, pages in zip(table, rows, strict=True):
        row[: len(pages)] = pages
    return table
