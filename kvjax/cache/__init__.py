"""The paged KV cache: types, the page allocator, and pure writes."""

from kvjax.cache.allocator import OutOfPages, PageAllocator
from kvjax.cache.types import (
    FULL,
    INDEXER,
    INDEXER_SCALES,
    Cache,
    IndexSpec,
    LatentPages,
    LayerCache,
    PagedKV,
    bytes_per_page,
    empty_latents,
    empty_layer,
)
from kvjax.cache.writes import append, append_latents, copy_page, restore_pages, seal

__all__ = [
    "FULL",
    "INDEXER",
    "INDEXER_SCALES",
    "Cache",
    "IndexSpec",
    "LatentPages",
    "LayerCache",
    "OutOfPages",
    "PageAllocator",
    "PagedKV",
    "append",
    "append_latents",
    "bytes_per_page",
    "copy_page",
    "empty_latents",
    "empty_layer",
    "restore_pages",
    "seal",
]
