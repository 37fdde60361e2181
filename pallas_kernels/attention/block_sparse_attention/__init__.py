"""Prefill: each tile of queries attends to its own list of key blocks, the sinks and the local window."""

from pallas_kernels.attention.block_sparse_attention.api import block_sparse_attention

__all__ = ["block_sparse_attention"]
