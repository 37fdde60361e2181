"""The k largest of each row by radix selection, in Pallas Mosaic GPU (Hopper): a baseline for `top_k`, used only by
benchmarks.

This is how exact selections work that know nothing about their input ("Guess-Verify-Refine", section 2.2). For each
digit of the scores' bits (11, 11 and 10 bits), one pass over the row counts the scores that agree in all digits before
(a histogram in shared memory) and finds the digit in which the k-th largest lies. One more pass collects. Every pass
reads the row from global memory (from the L2 after the first pass).

There are two forms. By default a cluster of CTAs shares a row, as many as let all rows run at once, and histograms are
summed through distributed shared memory: the best that this chip can do with the algorithm. With `ctas=1` one CTA of
512 threads has a row to itself, like the production kernel that the paper compares with (section 6.1: "single-row (one
CTA), with 512 threads per block"; its own kernel also has one CTA a row, section 5.1).

The paper's baseline differs in its scans: a coarse pass of 16 bits comes before digits of 11, 11 and 10, and each pass
scans the row twice (count, then filter). It stops early and sorts once fewer than 2,048 scores are left (section 2).
Very long rows are divided among 10 CTAs. The kernel here scans every row four times, whatever its content and length.

The set is exact. Of scores equal to the k-th, any are taken, but the same ones each time. Scores: no NaN; -inf counts
as the lowest finite number. Memory traffic: 4 times the row, 8 k bytes of result.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from pallas_kernels.hopper.decode import clusters
from pallas_kernels.hopper.threads import lanes
from pallas_kernels.selection.select_blocks import choose

DIGITS = (11, 11, 10)
"""Bits of each digit, the highest first."""

BINS = 2048
MAX_K = 4096

LOADS, LONE_LOADS = 4, 8
"""Loads of 16 bytes that a thread has in flight: if several CTAs share a row, and if one CTA has it alone."""


@dataclasses.dataclass(frozen=True)
class Shape:
    """Everything that the code depends on. ctas: of the cluster that serves a row. loads: of 16 bytes that a thread has
    in flight."""

    batch: int
    length: int
    k: int
    ctas: int
    threads: int = 512
    loads: int = LOADS

    @property
    def warps(self) -> int:
        """Of a CTA."""
        return self.threads // 32

    @property
    def turn(self) -> int:
        """Scores that a CTA reads at a time."""
        return 4 * self.loads * self.threads

    @property
    def span(self) -> int:
        """Most scores of a CTA."""
        return -(-self.length // (4 * self.ctas)) * 4

    @property
    def owned(self) -> int:
        """Counters that a CTA adds up for the cluster."""
        return -(-BINS // (4 * self.ctas)) * 4

    def scratch_words(self) -> dict[str, int]:
        """Words of shared memory: own counters; those that other CTAs send; the cluster's; of warps; scores and places
        above the threshold, and at it; how many of both each CTA has."""
        bins, found = self.ctas * self.owned, 2 * self.k
        sizes = (bins, bins, bins, 2 * self.warps, found, found, 4 * self.ctas)
        return dict(zip(("counts_s", "sent_s", "totals_s", "warps_s", "above_s", "equal_s", "found_s"), sizes, strict=True))


def radix_top_k(scores: Float[Array, "B N"], k: int, ctas: int | None = None) -> tuple[Float[Array, "B k"], Int[Array, "B k"]]:
    """The k largest of each row and their indices, in no particular order; see the top of this file for ties and what
    scores may be.

    scores: float32, N a multiple of 4. ctas: that share a row, 1 to 16; None: as many as let all rows run at once.
    Raises ValueError for other arrays, for k outside 1 to N, for k above `MAX_K`, and for other ctas.
    """
    if scores.ndim != 2 or scores.dtype != jnp.float32 or scores.shape[1] % 4:
        raise ValueError(f"scores must be float32 [B, N] with N a multiple of 4, got {scores.dtype}{list(scores.shape)}")
    if not 1 <= k <= min(scores.shape[1], MAX_K):
        raise ValueError(f"k must be 1 to {min(scores.shape[1], MAX_K)} (N, and at most {MAX_K}), got {k}")
    if ctas is not None and not 1 <= ctas <= 16:
        raise ValueError(f"ctas must be 1 to 16 (a cluster's most), or None, got {ctas}")
    return _radix_top_k(shape_of(*scores.shape, k, ctas), scores)


def shape_of(batch: int, length: int, k: int, ctas: int | None) -> Shape:
    """The sizes of a call. A CTA that has a multiprocessor's bandwidth to itself has twice as many loads in flight: 64
    KiB."""
    ctas = ctas or clusters.ctas_per_unit(batch)
    return Shape(batch, length, k, ctas, loads=LONE_LOADS if ctas == 1 else LOADS)


@functools.partial(jax.jit, static_argnames="s")
def _radix_top_k(s: Shape, scores):
    lanes.check_version()

    def radix_select_kernel(scores_ref, values_ref, indices_ref, *scratch):
        @lanes.stage(row=lax.axis_index("row"), cta=lax.axis_index("cta"))
        def run(arrays, scratch, row, cta):
            select(s, row, cta, *arrays, scratch)

        run((scores_ref, values_ref, indices_ref), dict(zip(s.scratch_words(), scratch, strict=True)))

    return plgpu.kernel(
        radix_select_kernel,
        out_type=[jax.ShapeDtypeStruct((s.batch, s.k), jnp.float32), jax.ShapeDtypeStruct((s.batch, s.k), jnp.int32)],
        grid=(s.batch,),
        grid_names=("row",),
        cluster=(s.ctas,),
        cluster_names=("cta",),
        num_threads=s.threads // 128,
        thread_name="warpgroup",
        scratch_types=[plgpu.SMEM((n,), jnp.int32) for n in s.scratch_words().values()],
    )(scores)


def select(s: Shape, row, cta, scores_ref, values_ref, indices_ref, scratch) -> None:
    """All stages, by all threads of all CTAs of a cluster. cta: number in the cluster."""
    first = cta * s.span
    stop = lanes.minimum(first + s.span, s.length)
    read = functools.partial(_read, s, scores_ref, row, stop)
    prefix, need, left = lanes.i32(0), lanes.i32(s.k), 32
    for bits in DIGITS:
        _clear(s, scratch["counts_s"])
        lanes.cta_barrier(s.threads)
        _count(s, read, first, stop, scratch["counts_s"], prefix, left, bits)
        lanes.cta_barrier(s.threads)
        _add_up(s, cta, scratch)
        digit, beyond = _find(s, scratch["totals_s"], scratch["warps_s"], need)
        prefix, need, left = (prefix << bits) | digit, need - beyond, left - bits
    threshold = prefix ^ -(2**31)
    above, equal = _collect(s, read, first, stop, threshold, scratch)
    _store(s, row, cta, need, above, equal, values_ref, indices_ref, scratch)


def _read(s: Shape, scores_ref, row, stop, first):
    """This thread's scores of a turn that starts at `first`: (place, whether it is below `stop`, bits, ordered integer)
    of each."""
    found = []
    for load in range(s.loads):
        place = first + (lanes.thread() + load * s.threads) * 4
        at = lanes.minimum(place, s.length - 4) * 4
        words = lanes.load_global_16_bytes(scores_ref, at, block=row, block_bytes=4 * s.length)
        found += [(place + i, place < stop, word) for i, word in enumerate(words)]
    return [(place, there, word, choose.key_of(lanes.bits(word))) for place, there, word in found]


# 1. Narrow.


def _clear(s: Shape, counts_s) -> None:
    words = s.ctas * s.owned
    for start in range(0, words, 4 * s.threads):
        i = lanes.thread() * 4 + start
        with lanes.when(i < words):
            lanes.store_shared(counts_s, i, *[lanes.i32(0)] * 4)


def _count(s: Shape, read, first, stop, counts_s, prefix, left: int, bits: int) -> None:
    """Count this CTA's scores by their next digit. prefix: of the digits before; left: bits after the prefix, of which
    `bits` are next."""

    def turn(start):
        for _, there, _, key in read(start):
            unsigned = key ^ -(2**31)
            agrees = there if left == 32 else there & (lanes.shift_right(unsigned, lanes.i32(left)) == prefix)
            digit = lanes.shift_right(unsigned, lanes.i32(left - bits)) & ((1 << bits) - 1)
            lanes.count_shared(counts_s, digit, agrees)
        return []

    lanes.loop(stop, [], turn, start=first, step=s.turn)


def _add_up(s: Shape, cta, scratch) -> None:
    """Write the counters of all CTAs to `totals_s` of each. Each CTA adds up a part: all send it theirs, and it sends
    the sums to all."""
    counts_s, sent_s, totals_s = scratch["counts_s"], scratch["sent_s"], scratch["totals_s"]
    words = s.ctas * s.owned
    for start in range(0, words, 4 * s.threads):
        i = lanes.thread() * 4 + start
        with lanes.when(i < words):
            counts = lanes.load_shared(counts_s, i, count=4)
            lanes.store_cluster(i // s.owned, sent_s, cta * s.owned + i % s.owned, *counts)
    _meet(s)
    for start in range(0, words // 4, s.threads):  # threads repeat the sums for each CTA that they send to
        i = lanes.thread() + start
        with lanes.when(i < words // 4):
            to, part = i // (s.owned // 4), i % (s.owned // 4) * 4
            sums = lanes.load_shared(sent_s, part, count=4)
            for other in range(1, s.ctas):
                more = lanes.load_shared(sent_s, part + other * s.owned, count=4)
                sums = [a + b for a, b in zip(sums, more, strict=True)]
            lanes.store_cluster(to, totals_s, cta * s.owned + part, *sums)
    _meet(s)


def _meet(s: Shape) -> None:
    """Wait for the other CTAs of the cluster. What they sent has then arrived."""
    lanes.cluster_barrier() if s.ctas > 1 else lanes.cta_barrier(s.threads)


def _find(s: Shape, totals_s, warps_s, need):
    """The largest digit such that its count and those of larger ones add up to `need`, and the sum of the larger
    ones'."""
    per_warp = BINS // s.warps
    per_lane = per_warp // 32
    counts = lanes.load_shared(totals_s, lanes.warp() * per_warp + lanes.lane() * per_lane, count=per_lane)
    total = lanes.warp_reduce(functools.reduce(lambda a, b: a + b, counts), "add")
    with lanes.when(lanes.lane() == 0):
        lanes.store_shared(warps_s, lanes.warp(), total)
    lanes.cta_barrier(s.threads)
    group, base, beyond = lanes.i32(0), lanes.i32(0), lanes.i32(0)
    of_warps = [word for i in range(0, s.warps, 4) for word in lanes.load_shared(warps_s, i, count=4)]
    for number, word in reversed(list(enumerate(of_warps))):
        here = (beyond < need) & (beyond + word >= need)
        group, base = lanes.where(here, number, group), lanes.where(here, beyond, base)
        beyond = beyond + word
    # Every warp searches that group in the same way; the first lane has its last counters.
    first = group * per_warp + (31 - lanes.lane()) * per_lane
    counts = lanes.load_shared(totals_s, first, count=per_lane)[::-1]
    own = functools.reduce(lambda a, b: a + b, counts)
    before = _sum_of_lanes_below(own) + base
    digit, beyond = lanes.i32(0), lanes.i32(0)
    mine = (before < need) & (before + own >= need)
    for place, count in enumerate(counts):
        here = (before < need) & (before + count >= need)
        digit, beyond = lanes.where(here, first + (per_lane - 1 - place), digit), lanes.where(here, before, beyond)
        before = before + count
    holder = lanes.maximum(31 - lanes.leading_zeros(lanes.ballot(mine)), 0)
    return lanes.shuffle(digit, holder), lanes.shuffle(beyond, holder)


def _sum_of_lanes_below(x):
    total = x
    for distance in (1, 2, 4, 8, 16):
        lower = lanes.shuffle(total, lanes.maximum(lanes.lane() - distance, 0))
        total = total + lanes.where(lanes.lane() >= distance, lower, 0)
    return total - x


# 2. Collect.


def _collect(s: Shape, read, first, stop, threshold, scratch):
    """Collect this CTA's scores above the threshold, and (k at most) those that equal it, as (bits, place); return how
    many there are of both.

    One turn at a time: threads count, sums over lanes and warps give each score a place, threads write.
    """

    def turn(start, above, equal, phase):
        mine = [(place, word, there & (key > threshold), there & (key == threshold)) for place, there, word, key in read(start)]
        # Both counts of a thread fit in one word: a turn has less than 2^16 scores.
        counts = functools.reduce(
            lambda a, b: a + b,
            [lanes.where(more, lanes.i32(1), lanes.where(same, lanes.i32(2**16), 0)) for _, _, more, same in mine],
        )
        below = _sum_of_lanes_below(counts)
        with lanes.when(lanes.lane() == 31):
            lanes.store_shared(scratch["warps_s"], phase * s.warps + lanes.warp(), below + counts)
        lanes.cta_barrier(s.threads)
        total = lanes.i32(0)
        for i in range(0, s.warps, 4):
            for number, word in enumerate(lanes.load_shared(scratch["warps_s"], phase * s.warps + i, count=4), i):
                below, total = below + lanes.where(lanes.warp() > number, word, 0), total + word
        slots = [above + (below & 0xFFFF), equal + lanes.shift_right(below, lanes.i32(16))]
        for place, word, more, same in mine:
            for n, (flag, name) in enumerate(((more, "above_s"), (same, "equal_s"))):
                with lanes.when(flag & (slots[n] < s.k)):
                    lanes.store_shared(scratch[name], slots[n] * 2, word, place)
                slots[n] = slots[n] + lanes.where(flag, lanes.i32(1), 0)
        return [above + (total & 0xFFFF), equal + lanes.shift_right(total, lanes.i32(16)), 1 - phase]

    nothing = lanes.i32(0)  # the second half of `warps_s` first: slow warps may still read the first for the last digit
    above, equal, _ = lanes.loop(stop, [nothing, nothing, lanes.i32(1)], turn, start=first, step=s.turn)
    lanes.cta_barrier(s.threads)
    return above, equal


def _store(s: Shape, row, cta, need, above, equal, values_ref, indices_ref, scratch) -> None:
    """Write this CTA's scores after those of the CTAs before it: first all scores above the threshold, then `need` that
    equal it."""
    with lanes.when(lanes.thread() < s.ctas):
        lanes.store_cluster(lanes.thread(), scratch["found_s"], cta * 2, above, equal)
    _meet(s)
    before = [lanes.i32(0), lanes.i32(0)]
    for other in range(s.ctas):
        words = lanes.load_shared(scratch["found_s"], other * 2, count=2)
        before = [b + lanes.where(cta > other, word, 0) for b, word in zip(before, words, strict=True)]
    parts = (("above_s", before[0], above), ("equal_s", before[1] + (s.k - need), lanes.minimum(equal, s.k)))
    for start in range(0, s.k, s.threads):
        i = lanes.thread() + start
        for name, base, count in parts:
            with lanes.when((i < count) & (base + i < s.k)):
                word, place = lanes.load_shared(scratch[name], i * 2, count=2)
                lanes.store_global(values_ref, row * s.k + base + i, lanes.bits(word))
                lanes.store_global(indices_ref, row * s.k + base + i, place)
