"""Prefill: the attention mass that a chunk's queries give to each block of keys, summed over the queries."""

from pallas_kernels.selection.block_mass.api import block_mass

__all__ = ["block_mass"]
