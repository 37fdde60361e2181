"""fetch_tiles by definition: the definitions of both ops, one after the other. Not for use under jit."""

from __future__ import annotations

from pallas_kernels.cache.fetch_tiles.api import Call
from pallas_kernels.cache.fetch_tiles.composed import both


def fetch_tiles(call: Call, pages, blocks, page_table, frames, lengths, tags, ages, now):
    """See `pallas_kernels.fetch_tiles`; takes no config."""
    return both(call, pages, (blocks, page_table, frames, lengths, tags, ages, now), "reference")
