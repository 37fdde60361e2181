"""The k best of many integer keys in shared memory, exactly, of equal keys the lower place: selection by counting, by one CTA.

A threshold is searched by counting how many keys reach it, and the search ends as soon as exactly k do; if equal keys prevent that, the
place up to which they are taken is searched likewise. Ballots number the chosen, in order of place. There are two ways to count. Few
keys: every warp holds all of them, and each warp tries another threshold, so that one exchange between warps splits the range in nine.
Many: the threads share the keys out, and all try the same threshold.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

from pallas_kernels import lanes

NO_KEY = -(2**31)
"""Key of what is no candidate."""

SCRATCH_WORDS = 64
MOST_PER_THREAD = 64
MOST_PER_LANE = 32
"""Keys that each lane of every warp may hold in the form for few."""


def best(k: int, threads: int, keys_s, counts_s, *, count, most: int, stride: int, keep: Callable):
    """Call `keep(place, key, slot)`, in the thread that holds it, for each of the k best of the first `count` keys (at most `most`).

    slot: 0, 1, ... in order of place. keys_s: one key every `stride` words. Returns how many are kept: fewer than k only if there are no
    more candidates. All threads of the CTA call this; counts_s: SCRATCH_WORDS words.
    """
    form = _few if most <= 32 * MOST_PER_LANE else _many
    return form(k, threads, keys_s, counts_s, count, most, stride, keep)


def _load(places, keys_s, count, most: int, stride: int):
    return [lanes.where(i < count, lanes.load_shared(keys_s, lanes.minimum(i, most - 1) * stride)[0], NO_KEY) for i in places]


def _sum(values):
    return functools.reduce(lambda a, b: a + b, values)


def _how_many(flags):
    return _sum([lanes.where(flag, lanes.i32(1), 0) for flag in flags])


def _middle(a, b):
    return a + lanes.half_unsigned(b - a)


# Few keys: every warp holds all of them.


def _few(k, threads, keys_s, counts_s, count, most, stride, keep):
    warps = threads // 32
    places = [lanes.lane() + 32 * j for j in range(-(-most // 32))]
    keys = _load(places, keys_s, count, most, stride)

    def total(flags):
        return lanes.warp_reduce(_how_many(flags), "add")

    valid = [key > NO_KEY for key in keys]
    smallest = functools.reduce(lanes.minimum, [lanes.where(there, key, 2**31 - 1) for key, there in zip(keys, valid, strict=True)])
    low = lanes.warp_reduce(smallest, "min")
    high = lanes.warp_reduce(functools.reduce(lanes.maximum, keys), "max") + 1
    number = total(valid)
    few = number <= k
    low, high = lanes.where(few, NO_KEY + 1, low), lanes.where(few, NO_KEY + 2, high)

    def split(low, high, reach_low, reach_high, turn):
        step = lanes.divide_unsigned(high - low, warps + 1)
        step = lanes.where(step == 0, 1, step)
        reached = total([key >= low + step * (lanes.warp() + 1) for key in keys])
        with lanes.when(lanes.lane() == 0):
            lanes.store_shared(counts_s, turn * warps + lanes.warp(), reached)
        lanes.cta_barrier(threads)
        counts = [x for i in range(0, warps, 4) for x in lanes.load_shared(counts_s, turn * warps + i, count=4)]
        new_low, new_high, new_reach_low, new_reach_high = low, high, reach_low, reach_high
        for w in reversed(range(warps)):  # the lowest threshold that fewer than k reach
            short = counts[w] < k
            at = low + step * (w + 1)
            inside = lanes.minimum_unsigned(at - low, high - low) == at - low
            new_high = lanes.where(short & inside, at, new_high)
            new_reach_high = lanes.where(short & inside, counts[w], new_reach_high)
        for w in range(warps):  # the highest that at least k reach
            enough = counts[w] >= k
            new_low = lanes.where(enough, low + step * (w + 1), new_low)
            new_reach_low = lanes.where(enough, counts[w], new_reach_low)
        return new_low, new_high, new_reach_low, new_reach_high, turn ^ 1

    start = (low, high, number, lanes.i32(0), lanes.i32(0))
    going = lambda low, high, reach_low, *_: ((high - low) != 1) & (reach_low > k)
    threshold, _, reach, beyond, _ = lanes.while_loop(going, split, start)
    exact = reach <= k
    ties = [key == threshold for key in keys]
    need = k - beyond

    def halve(low, high):
        mid = _middle(low, high)
        enough = total([tie & (i <= mid) for tie, i in zip(ties, places, strict=True)]) >= need
        return lanes.where(enough, low, mid + 1), lanes.where(enough, mid, high)

    start = (lanes.where(exact, most, lanes.i32(0)), lanes.i32(most))
    last, _ = lanes.while_loop(lambda low, high: low != high, halve, start)
    below, before = lanes.lanes_below(), lanes.i32(0)
    for j, (i, key, tie) in enumerate(zip(places, keys, ties, strict=True)):
        flag = (key > threshold) | (tie & (i <= last))
        mask = lanes.ballot(flag)
        with lanes.when(flag & (lanes.warp() == j % warps)):
            keep(i, key, before + lanes.popcount(mask & below))
        before = before + lanes.popcount(mask)
    return before


# Many keys: the threads share them out.


def _many(k, threads, keys_s, counts_s, count, most, stride, keep):
    warps = threads // 32
    m = -(-most // threads)
    places = [(lanes.warp() * m + j) * 32 + lanes.lane() for j in range(m)]  # a warp's places are consecutive
    keys = _load(places, keys_s, count, most, stride)

    def exchange(value, offset):
        with lanes.when(lanes.lane() == 0):
            lanes.store_shared(counts_s, lanes.warp() + offset, value)
        lanes.cta_barrier(threads)
        return [x for i in range(0, warps, 4) for x in lanes.load_shared(counts_s, offset + i, count=4)]

    def total(flags, turn):
        return _sum(exchange(lanes.warp_reduce(_how_many(flags), "add"), turn * warps))

    valid = [key > NO_KEY for key in keys]
    smallest = functools.reduce(lanes.minimum, [lanes.where(there, key, 2**31 - 1) for key, there in zip(keys, valid, strict=True)])
    low = functools.reduce(lanes.minimum, exchange(lanes.warp_reduce(smallest, "min"), 2 * warps))
    largest = lanes.warp_reduce(functools.reduce(lanes.maximum, keys), "max")
    high = functools.reduce(lanes.maximum, exchange(largest, 3 * warps)) + 1
    number = total(valid, lanes.i32(0))
    few = number <= k
    low, high = lanes.where(few, NO_KEY + 1, low), lanes.where(few, NO_KEY + 2, high)

    def halve(low, high, reach_low, reach_high, turn):
        mid = _middle(low, high)
        reached = total([key >= mid for key in keys], turn)
        up = reached >= k
        bounds = lanes.where(up, mid, low), lanes.where(up, high, mid)
        return *bounds, lanes.where(up, reached, reach_low), lanes.where(up, reach_high, reached), turn ^ 1

    start = (low, high, number, lanes.i32(0), lanes.i32(1))
    going = lambda low, high, reach_low, *_: ((high - low) != 1) & (reach_low > k)
    threshold, _, reach, beyond, turn = lanes.while_loop(going, halve, start)
    exact = reach <= k
    ties = [key == threshold for key in keys]
    need = k - beyond

    def halve_places(low, high, turn):
        mid = _middle(low, high)
        enough = total([tie & (i <= mid) for tie, i in zip(ties, places, strict=True)], turn) >= need
        return lanes.where(enough, low, mid + 1), lanes.where(enough, mid, high), turn ^ 1

    start = (lanes.where(exact, most, lanes.i32(0)), lanes.i32(most), turn)
    last, *_ = lanes.while_loop(lambda low, high, _: low != high, halve_places, start)
    flags = [(key > threshold) | (tie & (i <= last)) for key, tie, i in zip(keys, ties, places, strict=True)]
    masks = [lanes.ballot(flag) for flag in flags]
    of_warps = exchange(_sum([lanes.popcount(mask) for mask in masks]), 4 * warps)
    before = _sum([lanes.where(lanes.warp() > w, word, 0) for w, word in enumerate(of_warps)])
    below = lanes.lanes_below()
    for i, key, flag, mask in zip(places, keys, flags, masks, strict=True):
        with lanes.when(flag):
            keep(i, key, before + lanes.popcount(mask & below))
        before = before + lanes.popcount(mask)
    return _sum(of_warps)
