"""Find listed tiles in a buffer of copies, and give missing ones a place there."""

from pallas_kernels.cache.place_tiles.api import WAYS, place_tiles

__all__ = ["WAYS", "place_tiles"]
