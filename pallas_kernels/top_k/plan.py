"""How the Mosaic GPU kernel of `top_k` shares out a row, and what it keeps in shared memory: numbers only, used by the kernel and its replay."""

from __future__ import annotations

import dataclasses

from pallas_kernels import clusters, lanes
from pallas_kernels.select_blocks import choose

GROUP = 128
"""Scores that a warp looks at in one go, and whose answers are four words of a mask."""

MOST_K = 4096
MOST_SECANTS = 5
"""Passes that look for a threshold by interpolation before digits do."""

STARTS = ("sample", "hint")


@dataclasses.dataclass(frozen=True)
class Config:
    """Choices that change the time, never the answer.

    start: where the first threshold comes from, "sample" (scores from all over the row) or "hint" (the mean of the hinted scores).
    capacity: candidates that are refined at most, a multiple of 512; None: by k. sample: scores looked at, a multiple of 512; None: by
    the length of a row. ctas: of the cluster that serves a row, at most 16; None: by the batch.
    Raises ValueError for other values.
    """

    start: str = "sample"
    capacity: int | None = None
    sample: int | None = None
    ctas: int | None = None

    def __post_init__(self):
        if self.start not in STARTS:
            raise ValueError(f"start must be one of {', '.join(STARTS)}, got {self.start!r}")
        for name, most in (("capacity", 16384), ("sample", 16384)):
            value = getattr(self, name)
            if value is not None and (value % 512 or not 512 <= value <= most):
                raise ValueError(f"{name} must be a multiple of 512 up to {most}, got {value}")
        if self.ctas is not None and not 1 <= self.ctas <= 16:
            raise ValueError(f"ctas must be 1 to 16, got {self.ctas}")


@dataclasses.dataclass(frozen=True)
class Shape:
    """What the kernel's code depends on. row: scores of a row, a multiple of 4. ctas: of the cluster that serves a row."""

    batch: int
    row: int
    k: int
    start: str
    capacity: int
    sample: int
    ctas: int
    has_lengths: bool
    counted: bool
    threads: int = 512

    @property
    def warps(self) -> int:
        """Warps of a CTA."""
        return self.threads // 32

    @property
    def whole(self) -> bool:
        """Whether all scores of a row are candidates: one CTA, no threshold."""
        return self.row <= self.capacity

    @property
    def groups(self) -> int:
        """Groups of `GROUP` scores of a CTA, at most."""
        return -(-(-(-self.row // GROUP)) // self.ctas)

    @property
    def groups_per_thread(self) -> int:
        """Consecutive groups whose masks a thread adds up."""
        return -(-self.groups // self.threads)

    def scratch_words(self) -> dict[str, int]:
        """Words of shared memory. candidates_s: (score's bits, place in the row), as (key's digits' counts of every CTA) while digits are
        counted. masks_s: a bit per score of this CTA's share. before_s: candidates before each group. totals_s: of every CTA, for two
        passes in turn. data_s: the share itself, if it fits."""
        words = {"candidates_s": 2 * self.capacity, "counts_s": choose.SCRATCH_WORDS, "notes_s": 64}
        if not self.whole:
            words |= {"masks_s": 4 * self.groups, "before_s": 4 * -(-self.groups // 4), "totals_s": 32, "data_s": 4}
            share = GROUP * self.groups
            if sum(words.values()) + share <= lanes.SHARED_WORDS:
                words["data_s"] = share
        return words

    @property
    def staged(self) -> bool:
        """Whether a CTA keeps its share of the row in shared memory."""
        return not self.whole and self.scratch_words()["data_s"] == GROUP * self.groups


def shape_of(batch: int, row: int, k: int, config: Config, *, has_lengths: bool, counted: bool) -> Shape:
    """The sizes of a call."""
    capacity = config.capacity or _capacity(k)
    ctas = 1 if row <= capacity else config.ctas or clusters.ctas_per_unit(batch)
    sample = config.sample or min(max(4096, _power_of_two(row // 128)), 16384)
    return Shape(batch, row, k, config.start, capacity, sample, ctas, has_lengths, counted)


def _capacity(k: int) -> int:
    """Three times k, rounded up to a power of two, at least 2,048."""
    return max(2048, _power_of_two(3 * k))


def _power_of_two(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()
