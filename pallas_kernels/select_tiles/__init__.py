"""Which blocks of keys each tile of queries should read: every query scored against the bounds of every earlier block."""

from pallas_kernels.select_tiles.api import select_tiles

__all__ = ["select_tiles"]
