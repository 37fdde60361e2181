"""List the key blocks that each tile of queries should read: every query is scored against the bounds of every earlier
block."""

from pallas_kernels.selection.select_tiles.api import select_tiles

__all__ = ["select_tiles"]
