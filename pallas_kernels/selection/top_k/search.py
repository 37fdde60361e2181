"""Stages of the Mosaic GPU kernel of `top_k`: find a threshold that a few more than k scores of a row reach, and list
these scores.

Guess (`guesses`): a threshold from the scores at the hinted places, or from a sample of the row. Verify: all CTAs of
the row's cluster mark the scores that reach it, one bit each, and count them. While they are fewer than k or more than
fit, the next threshold comes from the sample again, by how far off the count was, and then from the secant through the
counts. If that does not end, digits are counted, which always ends: at last the k-th best score itself is known, and of
the scores that equal it the first ones are marked. Marks never overflow, however the best scores are clustered, and
they keep the row's order.

Scores and thresholds are compared as order-preserving integers ("keys"). The secant uses them too, so every number here
is an integer, and `benchmarks/top_k/replay.py` gets the same numbers. Source: "Guess-Verify-Refine", sections 4.2.1 to
4.2.3; marks and digits are ours.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable

from pallas_kernels.hopper.threads import lane_copies, lane_sums, lanes
from pallas_kernels.hopper.threads.lanes import Scalar
from pallas_kernels.selection.select_blocks import choose
from pallas_kernels.selection.top_k.keys import NAN_KEY
from pallas_kernels.selection.top_k.plan import GROUP, MAX_SECANTS, UNROLLED, Shape

MINUS_INFINITY_KEY = -(2**31) + 0x007FFFFF
GO_ON, FOUND, GIVE_UP = 0, 1, 2


def key_of(word: Scalar) -> Scalar:
    """The key of a score's bits: a NaN is below -inf, -0 is 0."""
    score = lanes.bits(word)
    b = lanes.bits(score + 0.0)
    return lanes.where(score != score, NAN_KEY, b ^ ((b >> 31) & 0x7FFFFFFF))


def score_of(key: Scalar) -> Scalar:
    """The score with this key; -inf for lower keys."""
    key = lanes.maximum(key, MINUS_INFINITY_KEY)
    return lanes.bits(key ^ ((key >> 31) & 0x7FFFFFFF))


@dataclasses.dataclass(frozen=True)
class Guess:
    """threshold: the key to try first. low, high: keys that it lies between. another: (scores that reached it) ->
    another key, None if nothing can give one."""

    threshold: Scalar
    low: Scalar
    high: Scalar
    another: Callable | None = None


@dataclasses.dataclass(frozen=True)
class Share:
    """A CTA's part of a row: `groups` groups of `GROUP` scores from group `first` on. scores_ref: all rows. length: of
    this row."""

    s: Shape
    scores_ref: object
    scratch: dict
    row: Scalar
    cta: Scalar
    length: Scalar
    groups: Scalar
    first: Scalar

    @property
    def place(self) -> dict:
        """The row's place, as arguments of functions that read global memory."""
        return {"block": self.row, "block_bytes": 4 * self.s.row}


def share_of(s: Shape, scores_ref, scratch: dict, row: Scalar, cta: Scalar, length: Scalar) -> Share:
    """The row's groups, dealt out evenly; the last CTAs get fewer, or none."""
    groups = (length + (GROUP - 1)) // GROUP
    each = (groups + (s.ctas - 1)) // s.ctas
    first = cta * each
    return Share(s, scores_ref, scratch, row, cta, length, lanes.maximum(lanes.minimum(groups - first, each), 0), first)


# Copies of the share: a warp has one chunk of groups in `warps`. Its first lane starts their copies.


def fetch(share: Share) -> None:
    """Start copying as much of the share as fits, while the threshold is being found."""
    s = share.s
    lane_copies.make_arrivals(share.scratch["arrivals_s"], s.warps * s.slots, s.threads)

    def start(n):
        _fetch_chunk(share, n)
        return []

    lanes.loop(s.slots, [], start)


def _first_group(share: Share, n: Scalar) -> Scalar:
    """The first group, in the share, of the warp's chunk `n`."""
    return (n * share.s.warps + lanes.warp()) * share.s.chunk


def _words_left(share: Share, n: Scalar) -> Scalar:
    """How many scores the share has from the warp's chunk `n` on."""
    return lanes.minimum(share.groups * GROUP, share.s.row - share.first * GROUP) - _first_group(share, n) * GROUP


def _slot(share: Share, n: Scalar) -> Scalar:
    """The word of `pool_s` at which the warp's chunk `n` starts."""
    s = share.s
    return (n % s.slots) * s.turn_words + lanes.warp() * (GROUP * s.chunk) + s.data_at


def _arrival(share: Share, n: Scalar) -> Scalar:
    """The arrival of the warp's chunk `n`."""
    return (n % share.s.slots) * share.s.warps + lanes.warp()


def _fetch_chunk(share: Share, n: Scalar) -> None:
    """Start copying the warp's chunk `n` to its slot, if the warp has that chunk."""
    s, left = share.s, _words_left(share, n)
    with lanes.when((lanes.lane() == 0) & (left > 0)):
        start = (share.first + _first_group(share, n)) * GROUP * 4
        size = lanes.minimum(left, GROUP * s.chunk) * 4
        to, arrivals = share.scratch["pool_s"], share.scratch["arrivals_s"]
        lane_copies.copy_bulk(to, _slot(share, n), share.scores_ref, start, size, arrivals, _arrival(share, n), **share.place)


def _each_chunk(share: Share, use: Callable, again: Scalar) -> None:
    """Call `use(first, words)` for each chunk of a warp: the first group, and a function that returns this lane's four
    consecutive words of group `first + i`. Words past the row's length may be anything; past the share they are 0.

    again: 1 if this is not the first pass.
    """
    s, pool_s, arrivals_s = share.s, share.scratch["pool_s"], share.scratch["arrivals_s"]
    if not s.stays:
        with lanes.when(again == 1):
            lane_copies.forget_arrivals(arrivals_s, s.warps * s.slots, s.threads)
            fetch(share)

    def step(n):
        slot, left = _slot(share, n), _words_left(share, n)
        lane_copies.wait_for_arrival(arrivals_s, _arrival(share, n), n // s.slots)
        with lanes.when(left < GROUP * s.chunk):
            _clear_words(share, slot, left)
        use(_first_group(share, n), lambda i: lanes.load_shared(pool_s, slot + lanes.lane() * 4 + i * GROUP, count=4))
        if not s.stays:
            lanes.warp_barrier()
            _fetch_chunk(share, n + s.slots)
        return []

    turns = (share.groups - lanes.warp() * s.chunk + (s.warps * s.chunk - 1)) // (s.warps * s.chunk)
    lanes.loop(turns, [], step)


def _clear_words(share: Share, slot: Scalar, left: Scalar) -> None:
    """Set the lane's words of a chunk to 0 past what is left."""
    zero = [lanes.i32(0)] * 4
    for i in range(share.s.chunk):
        at = lanes.lane() * 4 + i * GROUP
        with lanes.when(at >= left):
            lanes.store_shared(share.scratch["pool_s"], slot + at, *zero)


def sum_of(values: Iterable[Scalar]) -> Scalar:
    """Sum of this thread's numbers."""
    return functools.reduce(lambda a, b: a + b, values)


# Verify.


def _mark(share: Share, reaches: Callable, again: Scalar, more: bool = False) -> None:
    """Set the bit of each score whose word `reaches`; clear the other bits, or keep them if `more`. again: see
    `_each_chunk`."""
    s, masks_s = share.s, share.scratch["masks_s"]

    def use(first, words):
        masks = [[lanes.ballot(reaches(word)) for word in words(i)] for i in range(s.chunk)]
        left = share.length - (share.first + first) * GROUP
        with lanes.when(lanes.lane() == 0):
            for i, of_group in enumerate(masks):
                if more:
                    of_group = [a | b for a, b in zip(of_group, lanes.load_shared(masks_s, (first + i) * 4, count=4), strict=True)]
                lanes.store_shared(masks_s, (first + i) * 4, *of_group)
            with lanes.when(left < GROUP * s.chunk):  # the row ends in or before this chunk
                for i in range(s.chunk):
                    _clear_past(masks_s, first + i, left - i * GROUP)

    _each_chunk(share, use, again)
    lanes.cta_barrier(s.threads)


def _clear_past(masks_s, group: Scalar, left: Scalar) -> None:
    """Clear the marks of a group past its first `left` scores. Bit l of word j belongs to score 4 l + j."""
    counts = [lanes.maximum(lanes.minimum((left - j + 3) >> 2, 32), 0) for j in range(4)]
    there = [lanes.shift_right(lanes.i32(-1), 32 - count) for count in counts]
    masks = lanes.load_shared(masks_s, group * 4, count=4)
    lanes.store_shared(masks_s, group * 4, *[mask & here for mask, here in zip(masks, there, strict=True)])


def _tally(share: Share, turn: Scalar) -> tuple[Scalar, Scalar, Scalar]:
    """Count the marks. Write to `before_s` how many this CTA has before each of its groups. Returns how many the CTAs
    before it have, how many it has, and all.

    turn: a number that differs from that of the call before by an odd number.
    """
    s, scratch = share.s, share.scratch
    groups = [lanes.thread() * s.groups_per_thread + i for i in range(s.groups_per_thread)]
    counts = []
    for group in groups:
        masks = lanes.load_shared(scratch["masks_s"], lanes.minimum(group, s.groups - 1) * 4, count=4)
        count = sum_of([lanes.popcount(mask) for mask in masks])
        counts.append(lanes.where(group < share.groups, count, 0))
    before, mine = lane_sums.before(sum_of(counts), scratch["notes_s"], s.threads)
    for group, count in zip(groups, counts, strict=True):
        with lanes.when(group < share.groups):
            lanes.store_shared(scratch["before_s"], group, before)
        before = before + count
    totals = (turn & 1) * 16
    with lanes.when(lanes.thread() < s.ctas):
        put(s, lanes.thread(), scratch["totals_s"], totals + share.cta, mine)
    meet(s)
    of_ctas = [lanes.load_shared(scratch["totals_s"], totals + c)[0] for c in range(s.ctas)]
    start = sum_of([lanes.where(share.cta > c, count, 0) for c, count in enumerate(of_ctas)])
    return start, mine, sum_of(of_ctas)


def put(s: Shape, cta: Scalar | int, ref, offset: Scalar, *words: Scalar) -> None:
    """Store 1 or 2 words to shared memory of a CTA of the cluster. That CTA runs: Mosaic starts a kernel with a barrier
    of the cluster."""
    lanes.store_cluster(cta, ref, offset, *words) if s.ctas > 1 else lanes.store_shared(ref, offset, *words)


def meet(s: Shape) -> None:
    """Wait for the cluster. What its CTAs sent has then arrived."""
    lanes.cluster_barrier() if s.ctas > 1 else lanes.cta_barrier(s.threads)


def mark_candidates(share: Share, guess: Guess) -> list[Scalar]:
    """Mark at least k scores (or all) and at most `capacity`. Returns how many of them the CTAs before this one have,
    how many this one has, all, and the passes over the row."""
    s = share.s
    everything = lanes.where(share.length <= s.capacity, lanes.i32(1), 0)

    def verify(t, low, at_low, high, at_high, _, __, ___, passes, ____):
        threshold = score_of(t)
        _mark(share, lambda word: (lanes.bits(word) >= threshold) | (everything == 1), lanes.where(passes > 0, lanes.i32(1), 0))
        start, mine, total = _tally(share, passes)
        few, many = (total < s.k) & (everything == 0), total > s.capacity
        low, at_low = lanes.where(many, t, low), lanes.where(many, total, at_low)
        high, at_high = lanes.where(few, t, high), lanes.where(few, total, at_high)
        last, (t, stuck) = t, _secant(s, low, at_low, high, at_high)
        if guess.another:  # the sample predicts better than the secant through its lowest or highest score
            again = lanes.where((few | many) & (passes == 0), lanes.i32(1), 0)
            other, _ = lanes.while_loop(lambda _, again: again == 1, lambda *_: (guess.another(total), lanes.i32(0)), [t, again])
            t = lanes.where((few & (other < last)) | (many & (other > last)), other, t)
        stuck = stuck | (passes >= MAX_SECANTS - 1)
        state = lanes.where(few | many, lanes.where(stuck, lanes.i32(GIVE_UP), GO_ON), FOUND)
        return t, low, at_low, high, at_high, start, mine, total, passes + 1, state

    nothing = lanes.i32(0)
    carry = [guess.threshold, guess.low, share.length, guess.high, *[nothing] * 5, lanes.i32(GO_ON)]
    found = lanes.while_loop(lambda *carry: carry[-1] == GO_ON, verify, carry)[5:]

    # A loop that runs once or never serves as an `if` with results.
    def by_digits(_, __, ___, passes, ____):
        return *_search_digits(share, passes), lanes.i32(FOUND)

    return lanes.while_loop(lambda *carry: carry[-1] == GIVE_UP, by_digits, found)[:4]


def _secant(s: Shape, low, at_low, high, at_high) -> tuple[Scalar, Scalar]:
    """The next threshold between two with known counts, and whether there is none."""
    half = lanes.shift_right(high - low, lanes.i32(1))  # keys may differ by more than 2^31
    part = (at_low - target_of(s)) // lanes.maximum((at_low - at_high) >> 8, 1)
    part = lanes.maximum(lanes.minimum(part, 248), 8)
    step = lanes.where(half >= 256, (half >> 7) * part, half)
    return low + step, half == 0


def target_of(s: Shape) -> int:
    """Number of candidates that later thresholds aim at."""
    return s.k + (s.capacity - s.k) // 4


# The search by digits, which always ends.


def _search_digits(share: Share, passes: Scalar) -> tuple[Scalar, ...]:
    """Narrow the keys that may be the k-th best, 8 bits a pass, until few enough scores reach the lowest of them.
    Returns as `mark_candidates`."""
    s = share.s
    nothing, again = lanes.i32(0), lanes.i32(1)

    def narrow(low, bits, above, _, passes):
        shift = bits - 8
        found, inside, beyond = _count_digits(share, low, bits, shift, s.k - above)
        above = above + beyond
        return low + (found << shift), shift, above, above + inside, passes + 1

    carry = [lanes.i32(choose.NO_KEY), lanes.i32(32), nothing, lanes.i32(2**31 - 1), passes]
    low, _, above, reach, passes = lanes.while_loop(lambda low, bits, _, reach, __: (bits > 0) & (reach > s.capacity), narrow, carry)
    equal = reach > s.capacity  # more scores than fit equal the k-th best
    with lanes.when(~equal):
        _mark(share, lambda word: key_of(word) >= low, again)
    with lanes.when(equal):
        _mark(share, lambda word: key_of(word) == low, again)
        start, _, _ = _tally(share, passes)
        _keep_first(share, s.k - above - start)
        _mark(share, lambda word: key_of(word) > low, again, more=True)
    passes = passes + lanes.where(equal, lanes.i32(2), 1)
    return *_tally(share, passes + 1), passes


def _count_digits(share: Share, low, bits, shift, need) -> tuple[Scalar, Scalar, Scalar]:
    """Count the row's keys in [low, low + 2^bits) by their digit from bit `shift` on. Returns `choose.find_bin` for
    `need`."""
    s, counts_s, of_ctas = share.s, share.scratch["counts_s"], share.scratch["pool_s"]
    counters = lanes.thread() < choose.BINS
    with lanes.when(counters):
        lanes.store_shared(counts_s, lanes.thread(), lanes.i32(0))
    lanes.cta_barrier(s.threads)

    def use(first, words):
        left = lanes.minimum(share.length - share.first * GROUP, share.groups * GROUP) - first * GROUP - lanes.lane() * 4

        def of_group(i):
            for j, word in enumerate(words(i)):
                key = key_of(word)
                inside = (left - i * GROUP > j) & (key >= low) & (lanes.shift_right(key - low, bits) == 0)
                lanes.count_shared(counts_s, lanes.shift_right(key - low, shift), inside)
            return []

        lanes.loop(share.s.chunk, [], of_group)

    _each_chunk(share, use, lanes.i32(1))
    lanes.cta_barrier(s.threads)
    with lanes.when(counters):
        count = lanes.load_shared(counts_s, lanes.thread())[0]
        for cta in range(s.ctas):
            put(s, cta, of_ctas, share.cta * choose.BINS + lanes.thread(), count)
    meet(s)
    with lanes.when(counters):
        counts = [lanes.load_shared(of_ctas, lanes.thread() + c * choose.BINS)[0] for c in range(s.ctas)]
        lanes.store_shared(counts_s, lanes.thread(), sum_of(counts))
    meet(s)
    _, found, inside, beyond = choose.find_bin(counts_s, lanes.i32(0), need)
    lanes.cta_barrier(s.threads)  # until all have read the counters
    return found, inside, beyond


def _keep_first(share: Share, left: Scalar) -> None:
    """Clear all of this CTA's marks except the first `left`."""
    masks_s, before_s = share.scratch["masks_s"], share.scratch["before_s"]

    def of_group(n):
        group = n + lanes.thread()
        with lanes.when(group < share.groups):
            masks = lanes.load_shared(masks_s, group * 4, count=4)
            quota = left - lanes.load_shared(before_s, group)[0]

            def of_lane(lane, quota, *kept):
                after = []
                for mask, of_word in zip(masks, kept, strict=True):
                    bit = lanes.shift_right(mask, lane) & 1
                    after.append(of_word | (lanes.where(quota > 0, bit, 0) << lane))
                    quota = quota - bit
                return quota, *after

            _, *kept = lanes.loop(32, [quota, *[lanes.i32(0)] * 4], of_lane)
            lanes.store_shared(masks_s, group * 4, *kept)
        return []

    lanes.loop(share.groups, [], of_group, step=share.s.threads)
    lanes.cta_barrier(share.s.threads)


# Collect.


def collect(share: Share, start: Scalar, mine: Scalar) -> None:
    """Send the marked scores, in order of place, to the cluster's first CTA: (key, place)."""
    s, pool_s = share.s, share.scratch["pool_s"]
    _list_marks(share)

    def send(n):
        slots = [n + lanes.thread() + ahead for ahead in range(0, UNROLLED // 2 * s.threads, s.threads)]
        places = [lanes.load_shared(pool_s, lanes.minimum(i, mine - 1) + s.list_at)[0] for i in slots]
        if s.stays:
            words = [lanes.load_shared(pool_s, at + s.data_at)[0] for at in places]
        else:
            words = [lanes.load_written(share.scores_ref, (share.first * GROUP + at) * 4, "i32", **share.place) for at in places]
        for i, at, word in zip(slots, places, words, strict=True):
            with lanes.when(i < mine):
                put(s, 0, pool_s, (start + i) * 2, key_of(word), share.first * GROUP + at)
        return []

    lanes.loop(mine, [], send, step=UNROLLED // 2 * s.threads)
    meet(s)


def _list_marks(share: Share) -> None:
    """Write the places of this CTA's marked scores in its share, in order, to `pool_s` from `list_at` on."""
    s, scratch = share.s, share.scratch

    def of_word(n):
        i = n + lanes.thread()
        group, j = lanes.minimum(i // 4, share.groups - 1), i & 3
        masks = lanes.load_shared(scratch["masks_s"], group * 4, count=4)
        before = lanes.load_shared(scratch["before_s"], group)[0]
        mine = functools.reduce(lambda a, b: a | b, [lanes.where(j == m, mask, 0) for m, mask in enumerate(masks)])

        def next_bit(word):
            bit = word & (0 - word)
            lane = 31 - lanes.leading_zeros(bit)
            earlier = [lanes.popcount(mask & lanes.where(j > m, bit + bit - 1, bit - 1)) for m, mask in enumerate(masks)]
            slot = before + sum_of(earlier)
            lanes.store_shared(scratch["pool_s"], slot + s.list_at, group * GROUP + lane * 4 + j)
            return [word & (word - 1)]

        lanes.while_loop(lambda word: word != 0, next_bit, [lanes.where(i < share.groups * 4, mine, 0)])
        return []

    lanes.loop(share.groups * 4, [], of_word, step=s.threads)
    lanes.cta_barrier(s.threads)
