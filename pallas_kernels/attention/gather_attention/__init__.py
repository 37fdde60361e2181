"""Decode: a few queries per sequence attend to a list of blocks of paged keys and values."""

from pallas_kernels.attention.gather_attention.api import gather_attention

__all__ = ["gather_attention"]
