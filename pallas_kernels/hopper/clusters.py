"""How many CTAs may work together on one (sequence, KV head) so that all clusters of a launch run at once.

Clusters live inside a GPC, whose multiprocessors some clusters divide badly: 32 clusters of 4 need 128 of an H200's 132, but only 30 fit.
A cluster too many waits for a whole round.
"""

from __future__ import annotations

MULTIPROCESSORS = 132
"""Of an H200. A launch of as many CTAs fills the chip once; on another chip it still gives the same results."""

RESIDENT = {16: 7, 8: 15, 6: 17, 5: 22, 4: 30, 3: 39, 2: 66}
"""CTAs per cluster -> clusters that run at once, with one CTA per multiprocessor. Counted on an H200 by making each CTA wait and
timing more and more of them; other chips of the kind may have other multiprocessors switched off."""


def ctas_per_unit(units: int) -> int:
    """CTAs for each of `units` (sequence, KV head) pairs: the most with which all clusters run at once."""
    return next((ctas for ctas, clusters in RESIDENT.items() if clusters >= units), 1)
