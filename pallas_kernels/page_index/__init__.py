"""The index that a selector scans instead of keys: elementwise bounds or the mean of each block."""

from pallas_kernels.page_index.api import INDEX_ROWS, page_index

__all__ = ["INDEX_ROWS", "page_index"]
