"""The k best of many integer keys in shared memory, exactly, of equal keys the lower place: selection by counting, by one CTA.

The threads share the keys out. A threshold is bisected by counting how many keys reach it, and the search ends as soon as exactly k do; if
equal keys prevent that, the place up to which they are taken is bisected likewise. Ballots number the chosen, in order of place.
(Measured on an H200 and slower: every warp holding all keys and trying a threshold of its own, which splits the range in nine a round.)
"""

from __future__ import annotations

import functools
from collections.abc import Callable

from pallas_kernels import lanes

NO_KEY = -(2**31)
"""Key of what is no candidate."""

SCRATCH_WORDS = 64
MOST_PER_THREAD = 96


def best(k: int, threads: int, keys_s, counts_s, *, count, most: int, stride: int, keep: Callable):
    """Call `keep(place, key, slot)`, in the thread that holds it, for each of the k best of the first `count` keys (at most `most`).

    slot: 0, 1, ... in order of place. keys_s: one key every `stride` words. Returns how many are kept: fewer than k only if there are no
    more candidates. All threads of the CTA call this; counts_s: SCRATCH_WORDS words.
    """
    warps = threads // 32
    m = -(-most // threads)
    places = [(lanes.warp() * m + j) * 32 + lanes.lane() for j in range(m)]  # a warp's places are consecutive
    keys = [lanes.where(i < count, lanes.load_shared(keys_s, lanes.minimum(i, most - 1) * stride)[0], NO_KEY) for i in places]
    low, high, number = _range(threads, keys, counts_s)
    few = number <= k
    low, high = lanes.where(few, NO_KEY + 1, low), lanes.where(few, NO_KEY + 2, high)
    total = functools.partial(_total, threads, counts_s)

    def halve(low, high, reach_low, reach_high, turn):
        mid = low + lanes.half_unsigned(high - low)
        reached = total([key >= mid for key in keys], turn)
        up = reached >= k
        bounds = lanes.where(up, mid, low), lanes.where(up, high, mid)
        return *bounds, lanes.where(up, reached, reach_low), lanes.where(up, reach_high, reached), turn ^ 1

    def undecided(low, high, reach_low, *_):
        return ((high - low) != 1) & (reach_low > k)

    threshold, _, reach, beyond, turn = lanes.while_loop(undecided, halve, (low, high, number, lanes.i32(0), lanes.i32(1)))
    exact = reach <= k
    ties = [key == threshold for key in keys]

    def halve_places(low, high, turn):
        mid = low + lanes.half_unsigned(high - low)
        enough = total([tie & (i <= mid) for tie, i in zip(ties, places, strict=True)], turn) >= k - beyond
        return lanes.where(enough, low, mid + 1), lanes.where(enough, mid, high), turn ^ 1

    start = (lanes.where(exact, most, lanes.i32(0)), lanes.i32(most), turn)
    last, *_ = lanes.while_loop(lambda low, high, _: low != high, halve_places, start)
    flags = [(key > threshold) | (tie & (i <= last)) for key, tie, i in zip(keys, ties, places, strict=True)]
    masks = [lanes.ballot(flag) for flag in flags]
    of_warps = _exchange(threads, counts_s, 4 * warps, _sum([lanes.popcount(mask) for mask in masks]))
    before = _sum([lanes.where(lanes.warp() > w, word, 0) for w, word in enumerate(of_warps)])
    below = lanes.lanes_below()
    for i, key, flag, mask in zip(places, keys, flags, masks, strict=True):
        with lanes.when(flag):
            keep(i, key, before + lanes.popcount(mask & below))
        before = before + lanes.popcount(mask)
    return _sum(of_warps)


def _range(threads: int, keys, counts_s):
    """The smallest candidate, one more than the largest, and how many candidates there are."""
    warps = threads // 32
    valid = [key > NO_KEY for key in keys]
    smallest = functools.reduce(lanes.minimum, [lanes.where(there, key, 2**31 - 1) for key, there in zip(keys, valid, strict=True)])
    extremes = lanes.warp_reduce(smallest, "min"), lanes.warp_reduce(functools.reduce(lanes.maximum, keys), "max")
    with lanes.when(lanes.lane() == 0):
        for n, x in enumerate(extremes):
            lanes.store_shared(counts_s, lanes.warp() + (2 + n) * warps, x)
    number = _total(threads, counts_s, valid, lanes.i32(0))  # a barrier as well
    low, high = ([x for i in range(0, warps, 4) for x in lanes.load_shared(counts_s, (2 + n) * warps + i, count=4)] for n in range(2))
    return functools.reduce(lanes.minimum, low), functools.reduce(lanes.maximum, high) + 1, number


def _total(threads: int, counts_s, flags, turn):
    """For how many keys of all threads the flags hold. turn: alternates between calls, so that one barrier a call is enough."""
    if len(flags) <= 2:
        return _sum([lanes.cta_count(flag, threads) for flag in flags])
    mine = _sum([lanes.where(flag, lanes.i32(1), 0) for flag in flags])
    return _sum(_exchange(threads, counts_s, turn * (threads // 32), lanes.warp_reduce(mine, "add")))


def _exchange(threads: int, counts_s, offset, value):
    """The values of all warps."""
    with lanes.when(lanes.lane() == 0):
        lanes.store_shared(counts_s, lanes.warp() + offset, value)
    lanes.cta_barrier(threads)
    return [x for i in range(0, threads // 32, 4) for x in lanes.load_shared(counts_s, offset + i, count=4)]


def _sum(values):
    return functools.reduce(lambda a, b: a + b, values)
