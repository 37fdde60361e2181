"""The index that a selector scans instead of keys: elementwise bounds or the mean of each block, or its keys in few
bits."""

from pallas_kernels.selection.page_index.api import page_index
from pallas_kernels.selection.page_index.codes import CODED, INDEX_KINDS, INDEX_ROWS, code_errors, coded_keys, index_dtype, index_shape

__all__ = ["CODED", "INDEX_KINDS", "INDEX_ROWS", "code_errors", "coded_keys", "index_dtype", "index_shape", "page_index"]
