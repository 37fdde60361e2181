"""How many CTAs may work together on one (sequence, KV head) so that all clusters of a launch run at once.

A cluster runs inside one GPC, and some cluster sizes do not divide a GPC's multiprocessors well: 32 clusters of 4 CTAs need 128 of an
H200's 132 multiprocessors, but only 30 clusters fit. With one cluster too many, the launch takes a second round.
"""

from __future__ import annotations

from pallas_kernels import dispatch

MULTIPROCESSORS = 132
"""Multiprocessors of an H200. A launch of as many CTAs fills the chip once. Other chips give the same results."""

RESIDENT = {16: 7, 8: 15, 6: 17, 5: 22, 4: 30, 3: 39, 2: 66}
"""CTAs per cluster -> clusters that run at once, with one CTA per multiprocessor. Measured on one H200: every CTA waits, and launches of
more and more clusters are timed. Other H200 chips may have other multiprocessors switched off."""


def largest() -> int:
    """Most CTAs of a cluster: 16 on the GPUs of data centres, elsewhere the 8 that every GPU with clusters can launch."""
    return 8 if dispatch.compute_capability()[:1] == (12,) else 16


def ctas_per_unit(units: int) -> int:
    """CTAs for each of `units` (sequence, KV head) pairs: the largest cluster with which all clusters run at once."""
    return next((ctas for ctas, clusters in RESIDENT.items() if clusters >= units and ctas <= largest()), 1)
