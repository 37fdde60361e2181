"""How the Mosaic GPU kernel of `top_k` shares out a row, and what it keeps in shared memory: sizes, used by the kernel and its replay."""

from __future__ import annotations

import dataclasses

from pallas_kernels import clusters, lanes
from pallas_kernels.select_blocks import choose

GROUP = 128
"""Scores that a warp looks at in one go, and whose answers are four words of a mask."""

UNROLLED = 8
"""Groups that a warp has on their way."""

MOST_K = 4096
MOST_CAPACITY = 12288

FEW = 4096
"""Candidates up to which a thread looks at 8."""
MOST_SECANTS = 5
"""Passes that look for a threshold by interpolation before digits do."""

STARTS = ("sample", "hint")


@dataclasses.dataclass(frozen=True)
class Config:
    """Choices that change the time, never the answer.

    start: where the first threshold comes from, "sample" (scores from all over the row) or "hint" (the mean of the hinted scores).
    capacity: candidates that are refined at most, a multiple of 512; None: by k. sample: scores looked at, a multiple of 512; None: by
    the length of a row. ctas: of the cluster that serves a row, at most 16; None: by the batch. (Fewer threads a CTA are no choice: the
    stages are bound by what a multiprocessor issues.)
    Raises ValueError for other values.
    """

    start: str = "sample"
    capacity: int | None = None
    sample: int | None = None
    ctas: int | None = None

    def __post_init__(self):
        if self.start not in STARTS:
            raise ValueError(f"start must be one of {', '.join(STARTS)}, got {self.start!r}")
        for name, most in (("capacity", MOST_CAPACITY), ("sample", 16384)):
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
    def most_candidates(self) -> tuple[int, ...]:
        """Numbers of candidates that there is code for: what a thread does for one that is not there takes time, too."""
        return (FEW, self.capacity) if self.capacity > FEW else (self.capacity,)

    @property
    def groups(self) -> int:
        """Groups of `GROUP` scores of a CTA, at most."""
        return -(-self.row // (GROUP * self.ctas))

    @property
    def groups_per_thread(self) -> int:
        """Consecutive groups whose masks a thread adds up."""
        return -(-self.groups // self.threads)

    @property
    def turn(self) -> int:
        """Groups that a CTA's warps look at in one turn."""
        return min(UNROLLED, -(-self.groups // self.warps)) * self.warps

    def scratch_words(self) -> dict[str, int]:
        """Words of shared memory. candidates_s: (key, place in the row); before, the digits' counts of every CTA. list_s: places in the
        share. masks_s: a bit per score of the share. before_s: candidates before each group. totals_s: of every CTA, for two passes in
        turn. data_s: the first `staged` groups of the share."""
        words = {"candidates_s": max(2 * self.capacity, choose.BINS * self.ctas), "counts_s": choose.SCRATCH_WORDS, "notes_s": 64}
        if not self.whole:
            words |= {"list_s": self.capacity, "masks_s": 4 * self.groups, "before_s": 4 * -(-self.groups // 4), "totals_s": 32}
            room = (lanes.SHARED_WORDS - sum(words.values())) // GROUP
            staged = self.groups if room >= self.groups else room // self.turn * self.turn
            words["data_s"] = GROUP * max(staged, 1)
        return words

    @property
    def staged(self) -> int:
        """Groups that a CTA keeps in shared memory: all, if they fit; the others come from the L2 cache."""
        staged = 0 if self.whole else self.scratch_words()["data_s"] // GROUP
        return staged if staged > 1 or self.groups == 1 else 0


def shape_of(batch: int, row: int, k: int, config: Config, *, has_lengths: bool, counted: bool) -> Shape:
    """The sizes of a call."""
    capacity = config.capacity or _capacity(k)
    ctas = 1 if row <= capacity else config.ctas or clusters.ctas_per_unit(batch)
    sample = config.sample or min(max(2048, _power_of_two(row // 128)), 16384)
    return Shape(batch, row, k, config.start, capacity, sample, ctas, has_lengths, counted)


def _capacity(k: int) -> int:
    """Three times k, rounded up to a power of two, at least 4,096."""
    return min(max(4096, _power_of_two(3 * k)), MOST_CAPACITY)


def _power_of_two(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()
