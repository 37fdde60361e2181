"""Give the small arrays of each device along an axis of a mesh to all of them."""

from pallas_kernels.collectives.all_gather.api import all_gather

__all__ = ["all_gather"]
