"""How many CTAs may work together on one (sequence, KV head) so that all clusters of a launch run at once; and, without
clusters, on one tile of queries of prefill.

A cluster runs inside one GPC, and some cluster sizes do not divide a GPC's multiprocessors well: 32 clusters of 4 CTAs
need 128 of an H200's 132 multiprocessors, but only 30 clusters fit. With one cluster too many, the launch takes a
second round.
"""

from __future__ import annotations

from pallas_kernels.core import dispatch

RESIDENT = {16: 7, 8: 15, 6: 17, 5: 22, 4: 30, 3: 39, 2: 66}
"""CTAs per cluster -> clusters that run at once, with one CTA per multiprocessor. Measured on one H200: every CTA
waits, and launches of more and more clusters are timed. Other H200 chips may have other multiprocessors switched off.
`resident` scales it to other GPUs."""

FULL = 0.75
"""The share of multiprocessors from which tiles of queries are not split: with short histories, parts cost more than
they gain."""

MAX_SPLITS = 32
"""CTAs among which the keys of a tile of queries are split, at most. Every part is written and read again."""

FILLED = 0.95
"""The share of multiprocessors, over all rounds of a launch, with which more splits gain too little for the parts that
they add."""


def largest() -> int:
    """Most CTAs of a cluster: 16 on the GPUs of data centres, elsewhere the 8 that every GPU with clusters can
    launch."""
    return 8 if dispatch.compute_capability()[:1] == (12,) else 16


def resident(ctas: int, multiprocessors: int) -> int:
    """Clusters of so many CTAs that run at once: as measured on 132 multiprocessors, of others as many in proportion,
    rounded down."""
    return RESIDENT[ctas] * multiprocessors // dispatch.H200_MULTIPROCESSORS


def ctas_per_unit(units: int, multiprocessors: int | None = None) -> int:
    """CTAs for each of `units` (sequence, KV head) pairs: the largest cluster with which all clusters run at once.
    multiprocessors: of the GPU; None: of this process's."""
    number = multiprocessors or dispatch.multiprocessors()
    return next((ctas for ctas in RESIDENT if resident(ctas, number) >= units and ctas <= largest()), 1)


def splits_of(num_heads: int, num_tiles: int, multiprocessors: int | None = None) -> int:
    """CTAs among which the keys of each tile of queries are split: 1 where heads and tiles are `FULL` of the
    multiprocessors, or more.

    Otherwise it depends on the heads alone: the smallest number with which the parts of one tile of queries occupy
    `FILLED` of the multiprocessors, or the number up to `MAX_SPLITS` that occupies most. So all chunks that are split
    give a row the same bits, and the last chunk of a prompt, of which some tiles are empty, fills the device too. Those
    of other sequences of a batch are not counted. multiprocessors: of the GPU; None: of this process's.
    """
    number = multiprocessors or dispatch.multiprocessors()
    if num_heads * num_tiles >= FULL * number:
        return 1

    def filled(splits: int) -> float:
        ctas = num_heads * splits
        return ctas / (-(-ctas // number) * number)

    numbers = range(1, MAX_SPLITS + 1)
    return next((splits for splits in numbers if filled(splits) >= FILLED), max(numbers, key=filled))
