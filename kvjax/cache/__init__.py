"""The paged KV cache: types, the page allocator, and pure writes."""

from kvjax.cache.allocator import OutOfPages, PageAllocator
from kvjax.cache.spec import CacheSpec, GroupSpec, LatentSpec, PagedSpec
from kvjax.cache.types import (
    INDEXER,
    INDEXER_SCALES,
    Cache,
    IndexSpec,
    LatentPages,
    LayerCache,
    PagedKV,
    empty_latents,
    empty_layer,
)
from kvjax.cache.writes import append, append_latents, copy_page, restore_pages, seal

__all__ = [
    "INDEXER",
    "INDEXER_SCALES",
    "Cache",
    "CacheSpec",
    "GroupSpec",
    "IndexSpec",
    "LatentPages",
    "LatentSpec",
    "LayerCache",
    "OutOfPages",
    "PageAllocator",
    "PagedKV",
    "PagedSpec",
    "append",
    "append_latents",
    "copy_page",
    "empty_latents",
    "empty_layer",
    "restore_pages",
    "seal",
]
