"""Page tables on the host: which pages hold each sequence of a batch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from jaxtyping import Int

MIN_TABLE_PAGES = 16
GROWTH = 4
"""Factor between widths of page tables. It is large, so that few programs are compiled."""


def table_width(pages: int) -> int:
    """Columns of a page table for sequences of up to so many pages: 16, 64, 256, ..."""
    width = MIN_TABLE_PAGES
    while width < pages:
        width *= GROWTH
    return width


def narrower(width: int) -> int:
    """The next smaller width: up to so many pages a narrower table is enough. 0 if there is none."""
    return 0 if width == MIN_TABLE_PAGES else width // GROWTH


def table_widths(pages: int) -> Iterator[int]:
    """Every width of table that a sequence needs while it grows to `pages` pages."""
    width = MIN_TABLE_PAGES
    yield width
    while width < pages:
        width *= GROWTH
        yield width


def page_table(rows: Sequence[Sequence[int]], width: int | None = None) -> Int[np.ndarray, "B M"]:
    """The pages of every row (none for an empty slot), then -1. width: columns; None: as many as all pages need. Pages
    beyond the last column are left out."""
    table = np.full((len(rows), width or table_width(max(map(len, rows), default=0))), -1, np.int32)
    for row, pages in zip(table, rows, strict=True):
        known = pages[: table.shape[1]]
        row[: len(known)] = known
    return table


def staged_width(pages: int) -> int:
    """Rows for so many pages that are copied (`kvjax.cache.host_pool.prefill_prefetch`,
    `kvjax.engine.paged_attention.bring`): few different numbers, so that few programs are compiled, but not many more
    than needed, because they are copied and take memory."""
    step = _step(table_width(pages))
    return -(-pages // step) * step


def staged_widths(pages: int) -> Iterator[int]:
    """Every `staged_width` that a sequence needs while it grows to `pages` pages."""
    before, last = 0, staged_width(pages)
    for width in table_widths(pages):
        step = _step(width)
        yield from range((before // step + 1) * step, min(width, last) + 1, step)
        before = width


def _step(width: int) -> int:
    return max(512, width // 16) if width > 1024 else width
