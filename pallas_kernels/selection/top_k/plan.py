"""How the Mosaic GPU kernel of `top_k` divides a row, and what it keeps in shared memory. The kernel and its replay use
these sizes."""

from __future__ import annotations

import dataclasses

from pallas_kernels.hopper.decode import clusters
from pallas_kernels.hopper.threads import lane_copies, lanes
from pallas_kernels.selection.select_blocks import choose

GROUP = 128
"""Scores that a warp compares at once. The results are four words of a mask."""

UNROLLED = 8
"""Loads that a thread has in flight at once."""

CHUNK = 4
"""Groups that a warp takes at a time, if it has that many."""

MAX_COPIES = 4
"""Most chunks of a warp in flight at once, and most chunks of a warp in a share that stays in shared memory."""

TOGETHER = 4
"""Neighbouring scores of a sample that are read at once: 16 bytes, because memory is slow for scattered words."""

MAX_K = 4096
MAX_CAPACITY = 12288
MAX_CTAS = 16

WHOLE = 8192
"""In a row of up to this many scores, all are candidates, whatever k is: finding a threshold first would take
longer."""

MIN_SHARE = 4096
"""Fewest scores per CTA of a cluster: fewer CTAs synchronise faster."""

SHORT_ROW = 32768
"""Up to this many scores, half the usual sample is enough."""

MAX_SECANTS = 5
"""Most passes that search for a threshold by interpolation. After them, digits are counted."""

STARTS = ("sample", "hint")


@dataclasses.dataclass(frozen=True)
class Config:
    """Choices that change the time, never the result. Raises ValueError for other values.

    start: where the first threshold comes from, "sample" (scores from all over the row) or "hint" (the mean of the
    hinted scores). capacity: most candidates that are refined, a multiple of 512; None: from k and, for a short row,
    its length. In a row of at most `capacity` scores, all are candidates: there is no threshold, and one CTA. sample:
    scores in the sample, a multiple of 2,048; None: from the length of a row. ctas: of the cluster that serves a row,
    at most 16; None: from the batch and the length of a row.
    """

    start: str = "sample"
    capacity: int | None = None
    sample: int | None = None
    ctas: int | None = None

    def __post_init__(self):
        if self.start not in STARTS:
            raise ValueError(f"start must be one of {', '.join(STARTS)}, got {self.start!r}")
        for name, unit, most in (("capacity", 512, MAX_CAPACITY), ("sample", 2048, 16384)):
            value = getattr(self, name)
            if value is not None and (value % unit or not unit <= value <= most):
                raise ValueError(f"{name} must be a multiple of {unit} up to {most}, got {value}")
        if self.ctas is not None and not 1 <= self.ctas <= MAX_CTAS:
            raise ValueError(f"ctas must be 1 to {MAX_CTAS}, got {self.ctas}")


@dataclasses.dataclass(frozen=True)
class Shape:
    """Everything that the kernel's code depends on. row: scores of a row, a multiple of 4. ctas: of the cluster that
    serves a row."""

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
        """Numbers of candidates for which there is code. Threads spend time on missing candidates too, so there are
        several."""
        steps = {max(1024, -(-(self.k * quarters) // 2048) * 512) for quarters in (7, 9)}  # usually 1.75 k, rarely 2.25 k
        return (*sorted(step for step in steps if step < self.capacity), self.capacity)

    @property
    def crowded(self) -> bool:
        """Whether so many samples are among the k best that most threads have one or more of them."""
        return 4 * self.k * self.sample > self.row * self.threads

    @property
    def groups(self) -> int:
        """Most groups of `GROUP` scores of a CTA."""
        return -(-self.row // (GROUP * self.ctas))

    @property
    def groups_per_thread(self) -> int:
        """Consecutive groups whose masks a thread counts."""
        return -(-self.groups // self.threads)

    @property
    def chunk(self) -> int:
        """Consecutive groups that a warp takes at a time."""
        return min(CHUNK, -(-self.groups // self.warps))

    @property
    def chunks(self) -> int:
        """Most chunks of a warp: it has one in `warps`."""
        return -(-self.groups // (self.warps * self.chunk))

    @property
    def turn_words(self) -> int:
        """Scores in a chunk of every warp."""
        return GROUP * self.chunk * self.warps

    @property
    def small_words(self) -> dict[str, int]:
        """Words of shared memory beside `pool_s`. arrivals_s: for each warp's chunks in flight. masks_s: a bit per
        score of the share. before_s: candidates before each group. totals_s: of every CTA, alternating between two
        passes."""
        words = {"counts_s": choose.SCRATCH_WORDS, "notes_s": 64}
        if not self.whole:
            words |= {"arrivals_s": lane_copies.ARRIVAL_WORDS * self.warps * MAX_COPIES}
            words |= {"masks_s": 4 * self.warps * self.chunk * self.chunks, "before_s": 4 * -(-self.groups // 4), "totals_s": 32}
        return words

    @property
    def list_at(self) -> int:
        """The word of `pool_s` at which the list of places in the share starts. It is after (key, place) of the
        candidates or, before there are any, the counts of digits of every CTA."""
        return max(2 * self.capacity, choose.BINS * self.ctas)

    @property
    def stays(self) -> bool:
        """Whether the share stays in shared memory, after the list. If not, it streams through the words of candidates
        and list."""
        room = lanes.shared_words() - sum(self.small_words.values()) - self.list_at - self.capacity
        return not self.whole and self.chunks <= MAX_COPIES and room >= self.turn_words * self.chunks

    @property
    def data_at(self) -> int:
        """The word of `pool_s` at which the share's scores start."""
        return self.list_at + self.capacity if self.stays else choose.BINS * self.ctas

    @property
    def slots(self) -> int:
        """Chunks of a warp for which `pool_s` has room."""
        if self.stays:
            return self.chunks
        room = lanes.shared_words() - sum(self.small_words.values()) - self.data_at
        return min(room // self.turn_words, self.chunks, MAX_COPIES)

    @property
    def fits(self) -> bool:
        """Whether shared memory is large enough."""
        return sum(self.scratch_words().values()) <= lanes.shared_words() and (self.whole or self.slots > 0)

    def scratch_words(self) -> dict[str, int]:
        """Words of all shared memory, by name."""
        if self.whole:
            return {"pool_s": self.list_at} | self.small_words
        data_end = self.data_at + self.turn_words * self.slots
        return {"pool_s": max(self.list_at + self.capacity, data_end)} | self.small_words


def shape_of(batch: int, row: int, k: int, config: Config, *, has_lengths: bool, counted: bool) -> Shape:
    """The sizes of a call. Raises ValueError for a config whose capacity is less than k."""
    capacity = config.capacity or _capacity(k, row)
    if capacity < min(k, row):
        raise ValueError(f"capacity {capacity} of the config is less than k {k}; leave it None or take at least k")
    sample = config.sample or _sample(row)

    def of(ctas: int) -> Shape:
        return Shape(batch, row, k, config.start, capacity, sample, ctas, has_lengths, counted)

    if row <= capacity or config.ctas:
        return of(config.ctas if row > capacity else 1)
    most = min(clusters.ctas_per_unit(batch), row // MIN_SHARE)
    usual = next((ctas for ctas in clusters.RESIDENT if ctas <= most), 1)
    more = range(usual, clusters.largest() + 1)  # more CTAs than run at once, for long rows
    return next((s for s in map(of, more) if s.fits), of(usual))


def _capacity(k: int, row: int) -> int:
    """Three times k or, if it is short, the row, rounded up to a power of two; at least 4,096 and at most
    `MAX_CAPACITY`."""
    return min(max(4096, _power_of_two(3 * k), _power_of_two(row) if row <= WHOLE else 0), MAX_CAPACITY)


def _sample(row: int) -> int:
    """2,048 scores of a short row. Of others every 128th, rounded up to a power of two, at least 4,096 and at most
    16,384."""
    return 2048 if row <= SHORT_ROW else min(max(4096, _power_of_two(row // 128)), 16384)


def _power_of_two(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()
