"""Pack whole pages: numbers to codes and scales."""

from pallas_kernels.cache.pack_pages.api import pack_pages

__all__ = ["pack_pages"]
