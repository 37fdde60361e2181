"""How the Mosaic GPU kernel of `top_k` shares out a row, and what it keeps in shared memory: sizes, used by the kernel and its replay."""

from __future__ import annotations

import dataclasses

from pallas_kernels.hopper import clusters, lane_copies, lanes
from pallas_kernels.select_blocks import choose

GROUP = 128
"""Scores that a warp looks at in one go, and whose answers are four words of a mask."""

UNROLLED = 8
"""Loads that a thread has on their way at once."""

CHUNK = 4
"""Groups that a warp takes at a time, if it has as many."""

MOST_COPIES = 4
"""Chunks of a warp that are on their way at once, and of a share that stays in shared memory."""

TOGETHER = 4
"""Neighbouring scores of a sample that are read at once: 16 bytes, because memory is slow with scattered words."""

MOST_K = 4096
MOST_CAPACITY = 12288
MOST_CTAS = 16

WHOLE = 8192
"""A row of up to so many scores is all candidates, whatever k is: to look for a threshold first takes longer."""

LEAST_SHARE = 4096
"""Scores that a CTA of a cluster gets at least: fewer CTAs agree sooner."""

SHORT_ROW = 32768
"""Up to so many scores half the usual sample will do."""

MOST_SECANTS = 5
"""Passes that look for a threshold by interpolation before digits do."""

STARTS = ("sample", "hint")


@dataclasses.dataclass(frozen=True)
class Config:
    """Choices that change the time, never the answer.

    start: where the first threshold comes from, "sample" (scores from all over the row) or "hint" (the mean of the hinted scores).
    capacity: candidates that are refined at most, a multiple of 512; None: by k, and what a short row has. sample: scores looked at, a
    multiple of 2,048; None: by the length of a row. ctas: of the cluster that serves a row, at most 16; None: by the batch and the length
    of a row. A row of at most `capacity` scores is all candidates: there is no threshold, and one CTA.
    Raises ValueError for other values.
    """

    start: str = "sample"
    capacity: int | None = None
    sample: int | None = None
    ctas: int | None = None

    def __post_init__(self):
        if self.start not in STARTS:
            raise ValueError(f"start must be one of {', '.join(STARTS)}, got {self.start!r}")
        for name, unit, most in (("capacity", 512, MOST_CAPACITY), ("sample", 2048, 16384)):
            value = getattr(self, name)
            if value is not None and (value % unit or not unit <= value <= most):
                raise ValueError(f"{name} must be a multiple of {unit} up to {most}, got {value}")
        if self.ctas is not None and not 1 <= self.ctas <= MOST_CTAS:
            raise ValueError(f"ctas must be 1 to {MOST_CTAS}, got {self.ctas}")


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
        steps = {max(1024, -(-(self.k * quarters) // 2048) * 512) for quarters in (7, 9)}  # 1.75 k is usual, 2.25 k is rare
        return (*sorted(step for step in steps if step < self.capacity), self.capacity)

    @property
    def crowded(self) -> bool:
        """Whether so many samples belong to the k best that most threads have one or more of them."""
        return 4 * self.k * self.sample > self.row * self.threads

    @property
    def groups(self) -> int:
        """Groups of `GROUP` scores of a CTA, at most."""
        return -(-self.row // (GROUP * self.ctas))

    @property
    def groups_per_thread(self) -> int:
        """Consecutive groups whose masks a thread adds up."""
        return -(-self.groups // self.threads)

    @property
    def chunk(self) -> int:
        """Consecutive groups that a warp takes at a time."""
        return min(CHUNK, -(-self.groups // self.warps))

    @property
    def chunks(self) -> int:
        """Chunks of a warp, at most: one in `warps`."""
        return -(-self.groups // (self.warps * self.chunk))

    @property
    def turn_words(self) -> int:
        """Scores in a chunk of every warp."""
        return GROUP * self.chunk * self.warps

    @property
    def small_words(self) -> dict[str, int]:
        """Words of shared memory beside `pool_s`. arrivals_s: of each warp's chunks on their way. masks_s: a bit per score
        of the share. before_s: candidates before each group. totals_s: of every CTA, for two passes in turn."""
        words = {"counts_s": choose.SCRATCH_WORDS, "notes_s": 64}
        if not self.whole:
            words |= {"arrivals_s": lane_copies.ARRIVAL_WORDS * self.warps * MOST_COPIES}
            words |= {"masks_s": 4 * self.warps * self.chunk * self.chunks, "before_s": 4 * -(-self.groups // 4), "totals_s": 32}
        return words

    @property
    def list_at(self) -> int:
        """Word of `pool_s` from which on places in the share are listed, behind (key, place) of the candidates or, before there are any,
        the digits' counts of every CTA."""
        return max(2 * self.capacity, choose.BINS * self.ctas)

    @property
    def stays(self) -> bool:
        """Whether the share stays in shared memory, behind the list. If not it passes through, where candidates and list will be."""
        room = lanes.SHARED_WORDS - sum(self.small_words.values()) - self.list_at - self.capacity
        return not self.whole and self.chunks <= MOST_COPIES and room >= self.turn_words * self.chunks

    @property
    def data_at(self) -> int:
        """Word of `pool_s` from which on the share's scores are."""
        return self.list_at + self.capacity if self.stays else choose.BINS * self.ctas

    @property
    def slots(self) -> int:
        """Chunks of a warp that `pool_s` has room for."""
        if self.stays:
            return self.chunks
        room = lanes.SHARED_WORDS - sum(self.small_words.values()) - self.data_at
        return min(room // self.turn_words, self.chunks, MOST_COPIES)

    @property
    def fits(self) -> bool:
        """Whether there is shared memory for it."""
        return sum(self.scratch_words().values()) <= lanes.SHARED_WORDS and (self.whole or self.slots > 0)

    def scratch_words(self) -> dict[str, int]:
        """All of shared memory."""
        if self.whole:
            return {"pool_s": self.list_at} | self.small_words
        data_end = self.data_at + self.turn_words * self.slots
        return {"pool_s": max(self.list_at + self.capacity, data_end)} | self.small_words


def shape_of(batch: int, row: int, k: int, config: Config, *, has_lengths: bool, counted: bool) -> Shape:
    """The sizes of a call. Raises ValueError for a config whose capacity does not hold k."""
    capacity = config.capacity or _capacity(k, row)
    if capacity < min(k, row):
        raise ValueError(f"capacity {capacity} of the config is less than k {k}; leave it None or take at least k")
    sample = config.sample or _sample(row)

    def of(ctas: int) -> Shape:
        return Shape(batch, row, k, config.start, capacity, sample, ctas, has_lengths, counted)

    if row <= capacity or config.ctas:
        return of(config.ctas if row > capacity else 1)
    most = min(clusters.ctas_per_unit(batch), row // LEAST_SHARE)
    usual = next((ctas for ctas in clusters.RESIDENT if ctas <= most), 1)
    return next((s for s in map(of, range(usual, MOST_CTAS + 1)) if s.fits), of(usual))  # more CTAs than run at once, for long rows


def _capacity(k: int, row: int) -> int:
    """Three times k or, if it is short, the row, rounded up to a power of two; at least 4,096 and at most `MOST_CAPACITY`."""
    return min(max(4096, _power_of_two(3 * k), _power_of_two(row) if row <= WHOLE else 0), MOST_CAPACITY)


def _sample(row: int) -> int:
    """2,048 scores of a short row, of others 4,096 or, rounded up to a power of two, every 128th, at most 16,384."""
    return 2048 if row <= SHORT_ROW else min(max(4096, _power_of_two(row // 128)), 16384)


def _power_of_two(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()
