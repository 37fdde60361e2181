"""The memories of a TPU core: what kernels may take of them, and the tiles in which they lie."""

from __future__ import annotations

SMEM_BYTES = 768 * 1024
"""Of the scalar memory (1 MiB), what page tables, lengths and lists may take."""
VMEM_BYTES = 12 * 1024 * 1024
"""Of the vector memory that a kernel gets by default (16 MiB), what buffers may take; the rest is the compiler's."""
LANES, SUBLANES = 128, 8
"""Columns and rows (of 32 bits) of a tile of vector memory."""
QUERY_TILE = 16
"""Rows of queries are padded to whole tiles: 8 sublanes, two bfloat16 rows each."""


def padded(n: int, multiple: int) -> int:
    """n rounded up to a multiple."""
    return -(-n // multiple) * multiple
