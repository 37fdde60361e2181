"""The k best scores of each row, exactly, by value and of equal values by place; a hint may make it faster."""

from pallas_kernels.top_k.api import top_k

__all__ = ["top_k"]
