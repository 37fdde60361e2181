"""The k best of many integer keys in shared memory, exactly, of equal keys the lower place: selection by counting, by
one CTA.

The threads divide the keys among themselves and count them by intervals of their range. The interval that holds the
k-th best is the next range, until exactly k keys reach its start. If equal keys prevent that, the place up to which
they are taken is found in the same way. Ballots number the chosen keys, in order of place.

(Tried on an H200: bisecting a threshold by counting takes about as long with two keys per thread. These take longer:
every warp holds all keys and tries its own threshold; 512 intervals a round.)
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable

import numpy as np

from pallas_kernels.hopper.threads import lane_sums, lanes

NO_KEY = -(2**31)
"""Key of a non-candidate."""

LOWEST = float(np.finfo(np.float32).min)

BINS = 256
"""Intervals of a round. Three sets of counters take turns: one counts, slow warps still read one, and one is set to
0."""

SCRATCH_WORDS = 3 * BINS + 64
MAX_PER_THREAD = 96


def key_of(score):
    """An integer that orders as scores do: NaN and -inf are the lowest finite number, -0 is 0."""
    b = lanes.bits(lanes.maximum(score + 0.0, LOWEST))
    return b ^ ((b >> 31) & 0x7FFFFFFF)


def best(k: int, threads: int, keys_s, counts_s, *, count, most: int, stride: int, keep: Callable, even: bool = False):
    """Call `keep(place, key, slot)`, in the thread that holds it, for each of the k best of the first `count` keys (at
    most `most`).

    slot: 0, 1, ... in order of place. keys_s: one key every `stride` words. even: deal out `count` keys evenly; for
    calls where `count` is mostly far less than `most`. Returns how many are kept (fewer than k only if there are no
    more candidates) and the rounds of counting. All threads of the CTA call this. counts_s: SCRATCH_WORDS words.
    """
    m = -(-most // threads)
    each = (count + (threads - 1)) // threads if even else lanes.i32(m)
    places = [(lanes.warp() * each + j) * 32 + lanes.lane() for j in range(m)]  # a warp's places are consecutive
    there = [(i < count) & (each > j) for j, i in enumerate(places)] if even else [i < count for i in places]
    keys = [lanes.load_shared(keys_s, lanes.minimum(i, most - 1) * stride)[0] for i in places]
    keys = [lanes.where(here, key, NO_KEY) for here, key in zip(there, keys, strict=True)]
    descend = functools.partial(_descend, threads, counts_s)
    low, bits, _ = key_range(threads, keys, counts_s)
    nothing = lanes.i32(0)
    threshold, beyond, exact, *turns = descend(keys, low, bits, lanes.i32(k), nothing, (nothing, nothing))
    ties = [lanes.where(key == threshold, -1 - i, NO_KEY) for key, i in zip(keys, places, strict=True)]
    last, _, _, _, rounds = descend(ties, lanes.i32(-most), lanes.i32((most - 1).bit_length()), k - beyond, exact, turns)
    flags = [(key > threshold) | (tie >= last) for key, tie in zip(keys, ties, strict=True)]
    masks = [lanes.ballot(flag) for flag in flags]
    of_warps = _exchange(threads, counts_s, _sum([lanes.popcount(mask) for mask in masks]))
    before = _sum([lanes.where(lanes.warp() > w, word, 0) for w, word in enumerate(of_warps)])
    below = lanes.lanes_below()
    for i, key, flag, mask in zip(places, keys, flags, masks, strict=True):
        with lanes.when(flag):
            keep(i, key, before + lanes.popcount(mask & below))
        before = before + lanes.popcount(mask)
    return _sum(of_warps), rounds


def quantile(need, slack, threads: int, keys, counts_s):
    """A key that at least `need` and at most `need + slack` of all threads' keys reach, if equal keys allow it; the
    lowest key if there are fewer. Returns it, the lowest and the highest key. counts_s: SCRATCH_WORDS words; a barrier
    must follow before another use."""
    low, bits, high = key_range(threads, keys, counts_s)
    nothing = lanes.i32(0)
    found, *_ = _descend(threads, counts_s, keys, low, bits, need, nothing, (nothing, nothing), slack)
    return found, low, high


def key_range(threads: int, keys, counts_s):
    """The smallest candidate, how many bits its difference to the largest has, and the largest. Also sets counters to
    0."""
    warps = threads // 32
    smallest = functools.reduce(lanes.minimum, [lanes.where(key == NO_KEY, 2**31 - 1, key) for key in keys])
    extremes = lanes.warp_reduce(smallest, "min"), lanes.warp_reduce(functools.reduce(lanes.maximum, keys), "max")
    with lanes.when(lanes.lane() == 0):
        for n, x in enumerate(extremes):
            lanes.store_shared(counts_s, lanes.warp() + (3 * BINS + n * warps), x)
    _clear(threads, counts_s, lanes.i32(0))
    lanes.cta_barrier(threads)
    low, high = (_words_of_warps(threads, counts_s, n) for n in range(2))
    low, high = functools.reduce(lanes.minimum, low), functools.reduce(lanes.maximum, high)
    return low, 32 - lanes.leading_zeros(high - low), high


def _descend(threads: int, counts_s, keys, low, bits, need, done, turns, slack=0):
    """Find the largest t such that `need` keys reach it, or an earlier one that at most `need + slack` reach; the
    lowest key if fewer do.

    low, bits: t lies in [low, low + 2^bits). done: 1 if nothing is to be found. turns: of the counters, and how many
    there were. Returns t, how many keys lie above, whether no more than that (or all) keys reach t, and the next turns.
    """

    def narrow(low, bits, above, turn):
        shift = lanes.maximum(bits - (BINS.bit_length() - 1), 0)
        following = lanes.where(turn == 2, 0, turn + 1)
        for key in keys:
            offset = key - low
            inside = (key >= low) & (lanes.shift_right(offset, bits) == 0)
            lanes.count_shared(counts_s, turn * BINS + lanes.shift_right(offset, shift), inside)
        _clear(threads, counts_s, following)
        lanes.cta_barrier(threads)
        there, found, inside, beyond = find_bin(counts_s, turn, need - above)
        exact = lanes.where(there & (beyond + inside > need - above + slack), lanes.i32(0), 1)
        low = lanes.where(there, low + (found << shift), low)
        return low, shift, lanes.where(there, above + beyond, above), exact, exact | lanes.where(shift == 0, lanes.i32(1), 0), following

    def step(low, bits, above, _, done, turn, rounds):
        return *narrow(low, bits, above, turn), rounds + 1

    carry = low, bits, lanes.i32(0), done, done, *turns
    low, _, above, exact, _, *turns = lanes.while_loop(lambda *carry: carry[4] == 0, step, carry)
    return low, above, exact, *turns


def find_bin(counts_s, turn, need):
    """Whether the counters add up to `need`; the last counter for which it and those after it do; its count; the sum of
    those after it.

    Every warp does the same. A lane adds up a few counters; the first lane has the last ones.
    """
    per_lane = BINS // 32
    first = (31 - lanes.lane()) * per_lane
    counts = [x for i in range(0, per_lane, 4) for x in lanes.load_shared(counts_s, turn * BINS + first + i, count=4)]
    own = list(itertools.accumulate(reversed(counts)))
    upto = lane_sums.upto(own[-1])
    before = upto - own[-1]
    mask = lanes.ballot((before < need) & (need <= upto))
    short = [before + x < need for x in own]
    place = first + (per_lane - 1) - _sum([lanes.where(x, lanes.i32(1), 0) for x in short])
    beyond = before + functools.reduce(lanes.maximum, [lanes.where(there, x, 0) for there, x in zip(short, own, strict=True)])
    reached = before + functools.reduce(lanes.minimum, [lanes.where(there, own[-1], x) for there, x in zip(short, own, strict=True)])
    holder = lanes.maximum(31 - lanes.leading_zeros(mask), 0)
    return mask != 0, *(lanes.shuffle(x, holder) for x in (place, reached - beyond, beyond))


def _clear(threads: int, counts_s, turn) -> None:
    """Set counters to 0."""
    for start in range(0, BINS, threads):
        with lanes.when(lanes.thread() < BINS) if threads > BINS else contextlib.nullcontext():
            lanes.store_shared(counts_s, turn * BINS + lanes.thread() + start, lanes.i32(0))


def _exchange(threads: int, counts_s, value):
    """The values of all warps, one from each."""
    with lanes.when(lanes.lane() == 0):
        lanes.store_shared(counts_s, lanes.warp() + (3 * BINS + 2 * (threads // 32)), value)
    lanes.cta_barrier(threads)
    return _words_of_warps(threads, counts_s, 2)


def _words_of_warps(threads: int, counts_s, n: int):
    warps = threads // 32
    return [x for i in range(0, warps, 4) for x in lanes.load_shared(counts_s, 3 * BINS + n * warps + i, count=4)]


def _sum(values):
    return functools.reduce(lambda a, b: a + b, values)
