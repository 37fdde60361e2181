"""The paged KV cache: types, the page allocator, and pure writes."""

from kvjax.cache.allocator import OutOfPages, PageAllocator
from kvjax.cache.arrays import INDEXER, INDEXER_SCALES, LatentPages, LayerCache, OpenRows, PagedKV, SlotLayer, empty_latents, empty_layer
from kvjax.cache.cache import Cache, MissingPages, Residency, check_missing, frame_tables
from kvjax.cache.index_spec import IndexSpec
from kvjax.cache.spec import MAX_STEP_TOKENS, OPEN, WHOLE, CacheSpec, GroupSpec, LatentSpec, PagedSpec, RecurrentSpec, pages_of_step
from kvjax.cache.writes import append, append_latents, copy_page, seal

__all__ = [
    "INDEXER",
    "INDEXER_SCALES",
    "MAX_STEP_TOKENS",
    "OPEN",
    "WHOLE",
    "Cache",
    "CacheSpec",
    "GroupSpec",
    "IndexSpec",
    "LatentPages",
    "LatentSpec",
    "LayerCache",
    "MissingPages",
    "OpenRows",
    "OutOfPages",
    "PageAllocator",
    "PagedKV",
    "PagedSpec",
    "RecurrentSpec",
    "Residency",
    "SlotLayer",
    "append",
    "append_latents",
    "check_missing",
    "copy_page",
    "empty_latents",
    "empty_layer",
    "frame_tables",
    "pages_of_step",
    "seal",
]
