"""Copy tiles of a pool to other frames of it."""

from pallas_kernels.cache.copy_tiles.api import copy_tiles

__all__ = ["copy_tiles"]
