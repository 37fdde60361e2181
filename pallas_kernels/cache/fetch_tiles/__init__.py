"""Find listed tiles in a buffer of copies, and copy missing ones there: `place_tiles` and `copy_tiles` as one op."""

from pallas_kernels.cache.fetch_tiles.api import FetchedTiles, fetch_tiles

__all__ = ["FetchedTiles", "fetch_tiles"]
