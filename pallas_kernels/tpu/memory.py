"""The memories of a TPU core: how much of them kernels may use, and the tiles in which their arrays lie."""

from __future__ import annotations

SMEM_BYTES = 768 * 1024
"""Most bytes of scalar memory (1 MiB) for page tables, lengths and lists."""
VMEM_BYTES = 12 * 1024 * 1024
"""Most bytes of vector memory (16 MiB per kernel by default) for buffers; the compiler uses the rest."""
LANES, SUBLANES = 128, 8
"""Columns and rows (of 32 bits) of a tile of vector memory."""
QUERY_TILE = 16
"""Rows of queries are padded to whole tiles: 8 sublanes, two bfloat16 rows each."""


def padded(n: int, multiple: int) -> int:
    """n rounded up to a multiple."""
    return -(-n // multiple) * multiple
