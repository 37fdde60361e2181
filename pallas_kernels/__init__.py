"""Attention kernels over paged keys and values: arrays in, arrays out.

Every op has a folder: `from pallas_kernels.gather_attention import gather_attention`. This package imports jax and nothing of kvjax.
"""
