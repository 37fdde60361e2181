"""The k best scores of each row, exactly; of equal scores the lower index. A hint may make it faster."""

from pallas_kernels.selection.top_k.api import top_k

__all__ = ["top_k"]
