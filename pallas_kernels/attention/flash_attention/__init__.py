"""Prefill: a chunk of queries attends causally to paged keys and values."""

from pallas_kernels.attention.flash_attention.api import flash_attention

__all__ = ["flash_attention"]
