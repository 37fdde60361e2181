"""Prefill: every gamma-th query attends to all its keys, and in the same pass lists the key blocks that score best."""

from pallas_kernels.attention.query_sparse_attention.api import query_sparse_attention

__all__ = ["query_sparse_attention"]
