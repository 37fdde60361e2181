"""Prefill: every gamma-th query attends to all its keys, and lists the key blocks that matter to it on the way."""

from pallas_kernels.query_sparse_attention.api import query_sparse_attention

__all__ = ["query_sparse_attention"]
