"""Append keys and values to their pages; build the indexes of a page that fills."""

from pallas_kernels.append_tokens.api import append_tokens

__all__ = ["append_tokens"]
