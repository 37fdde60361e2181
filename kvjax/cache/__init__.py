"""The paged KV cache: types, the page allocator, and pure writes."""

from kvjax.cache.allocator import OutOfPages, PageAllocator
from kvjax.cache.types import FULL, Cache, IndexSpec, PagedKV, bytes_per_page, empty_layer
from kvjax.cache.writes import append, copy_page, seal

__all__ = [
    "FULL",
    "Cache",
    "IndexSpec",
    "OutOfPages",
    "PageAllocator",
    "PagedKV",
    "append",
    "bytes_per_page",
    "copy_page",
    "empty_layer",
    "seal",
]
