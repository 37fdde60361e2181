"""fetch_tiles as two ops, each by the implementation that its own dispatch picks. Runs wherever they do."""

from __future__ import annotations

from pallas_kernels.cache.copy_tiles import copy_tiles
from pallas_kernels.cache.fetch_tiles.api import Call, FetchedTiles
from pallas_kernels.cache.place_tiles import place_tiles


def fetch_tiles(call: Call, pages, blocks, page_table, frames, lengths, tags, ages, now):
    """See `pallas_kernels.fetch_tiles`; takes no config."""
    return both(call, pages, (blocks, page_table, frames, lengths, tags, ages, now), None)


def both(call: Call, pages, lists, implementation: str | None) -> FetchedTiles:
    """`place_tiles`, then `copy_tiles`. implementation: of each; None: as dispatch picks it."""
    sizes = {"page_size": pages.page_size, "num_queries": call.num_queries, "first": call.first, "border": call.border}
    placed = place_tiles(*lists, **sizes, implementation=implementation)
    pages = copy_tiles(pages, placed.sources, placed.targets, implementation=implementation)
    return FetchedTiles(pages, placed.block_frames, placed.sources, placed.tags, placed.ages)
