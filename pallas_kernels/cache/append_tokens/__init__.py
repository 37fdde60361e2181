"""Append keys and values to their pages, and build the indexes of each page that fills."""

from pallas_kernels.cache.append_tokens.api import append_tokens

__all__ = ["append_tokens"]
