"""Add the parts of all devices along an axis of a mesh."""

from pallas_kernels.collectives.all_reduce.api import all_reduce

__all__ = ["all_reduce"]
