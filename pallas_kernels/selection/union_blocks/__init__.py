"""One list of key blocks per tile of queries, from the lists of the measured rows in that tile."""

from pallas_kernels.selection.union_blocks.api import union_blocks

__all__ = ["union_blocks"]
