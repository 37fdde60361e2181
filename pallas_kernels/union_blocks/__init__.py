"""One list of key blocks per tile of queries, from the lists of the rows measured in it."""

from pallas_kernels.union_blocks.api import union_blocks

__all__ = ["union_blocks"]
