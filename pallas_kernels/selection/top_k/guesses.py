"""Guesses of the Mosaic GPU kernel of `top_k`: the threshold that `search.mark_candidates` tries first, from a sample
of the row or from hinted places. Source: "Guess-Verify-Refine", section 4.2.1."""

from __future__ import annotations

import functools

from pallas_kernels.hopper.threads import lanes
from pallas_kernels.hopper.threads.lanes import Scalar
from pallas_kernels.selection.select_blocks import choose
from pallas_kernels.selection.top_k import search
from pallas_kernels.selection.top_k.plan import TOGETHER
from pallas_kernels.selection.top_k.search import Guess, Share


def sample(share: Share) -> tuple[Scalar, list[tuple[Scalar, list[Scalar]]]]:
    """Start loads of scores from all over the row. Returns how many, and for this thread whether each exists, with the
    words, by place.

    The row is cut into as many cells as places are sampled. From each cell, `TOGETHER` scores are taken at a scattered
    place.
    """
    s = share.s
    units = share.length // TOGETHER
    size = lanes.minimum(units, s.sample // TOGETHER)
    width, rest = units // lanes.maximum(size, 1), units % lanes.maximum(size, 1)
    places = []
    for start in range(0, s.sample // TOGETHER, s.threads):
        i = lanes.thread() + start
        there = i < size
        i = lanes.where(there, i, 0)
        scattered = ((i * -1640531527 >> 16) & 0xFFFF) * (width + lanes.where(i < rest, lanes.i32(1), 0)) >> 16
        places.append((there, i * width + lanes.minimum(i, rest) + scattered))
    words = [lanes.load_written_16_bytes(share.scores_ref, at * 16, **share.place) for _, at in places]
    return size * TOGETHER, [(there, of_place) for (there, _), of_place in zip(places, words, strict=True)]


def guess_from_sample(share: Share, size: Scalar, sampled: list[tuple[Scalar, list[Scalar]]]) -> Guess:
    """A threshold that enough scores reach for it to be unlikely that one of the k best is missed.

    If c samples lie among the k best on average, the sample of rank r = c + 4 sqrt(c) + 4 is wanted, or one up to an
    eighth further. Of large samples only each thread's best is used, unless the samples are crowded with good ones: of
    T threads, about T r / (T + r / 2) hold the r best samples if neighbours are not alike. If many more samples than r
    reach the threshold, neighbours are alike, and the search is repeated at a rank smaller by that factor.
    """
    s, counts_s = share.s, share.scratch["counts_s"]
    yet = lanes.minimum(share.length, s.k) * size // lanes.maximum(share.length, 1)
    want = yet + 4 * _square_root(yet) + 4
    keys = [lanes.where(there, search.key_of(word), choose.NO_KEY) for there, words in sampled for word in words]
    looked_at = keys if s.crowded else [functools.reduce(lanes.maximum, keys)]

    def look(_, __, ___, ____, need, tries):
        found, low, high = choose.quantile(need, need >> 3, s.threads, looked_at, counts_s)
        count = lanes.warp_reduce(search.sum_of([lanes.where(key >= found, lanes.i32(1), 0) for key in keys]), "add")
        lanes.cta_barrier(s.threads)  # until all have read the counters
        with lanes.when(lanes.lane() == 0):
            lanes.store_shared(counts_s, lanes.warp(), count)
        lanes.cta_barrier(s.threads)
        count = search.sum_of(_words(counts_s, 0, s.warps))
        lanes.cta_barrier(s.threads)
        higher = lanes.maximum(need * want // lanes.maximum(count, 1), 1)
        again = (count > want + (want >> 1)) & (higher < need) & (tries == 0)
        return found, low, high, need, lanes.where(again, higher, 0), tries + 1

    nothing = lanes.i32(0)
    first = want if s.crowded else want * (2 * s.threads) // (want + 2 * s.threads)
    found, low, high, need, *_ = lanes.while_loop(lambda *carry: carry[4] > 0, look, [*[nothing] * 4, first, nothing])

    def another(total):
        rank = lanes.maximum(lanes.minimum(need * search.target_of(s) // lanes.maximum(total, 1), s.sample if s.crowded else s.threads), 1)
        found, *_ = choose.quantile(rank, rank >> 3, s.threads, looked_at, counts_s)
        lanes.cta_barrier(s.threads)  # all have read the counters
        return found

    return Guess(found, low, high, another)


def _square_root(n: Scalar) -> Scalar:
    """Square root of an integer below 2^15: rounded down at most by the fraction, and at most a little too large."""
    root = lanes.i32(1) << ((33 - lanes.leading_zeros(n)) >> 1)
    for _ in range(3):
        root = lanes.maximum((root + n // root) >> 1, 1)
    return root


def guess_from_hint(share: Share, hint_ref) -> Guess:
    """The mean key of the scores at those hinted places that exist, between the lowest and the highest (0 if none
    exists)."""
    s, counts_s = share.s, share.scratch["counts_s"]
    keys, theres = [], []
    for start in range(0, s.k, s.threads):
        i = lanes.thread() + start
        at = lanes.load_written(hint_ref, lanes.minimum(i, s.k - 1) * 4, "i32", block=share.row, block_bytes=4 * s.k)
        theres.append((i < s.k) & (at >= 0) & (at < share.length))
        keys.append(lanes.where(theres[-1], at, 0))
    keys = [search.key_of(lanes.load_written(share.scores_ref, at * 4, "i32", **share.place)) for at in keys]
    ones = [lanes.where(there, lanes.i32(1), 0) for there in theres]
    sums = [lanes.where(there, key >> 13, 0) for key, there in zip(keys, theres, strict=True)]
    lows = [lanes.where(there, key, 2**31 - 1) for key, there in zip(keys, theres, strict=True)]
    highs = [lanes.where(there, key, choose.NO_KEY) for key, there in zip(keys, theres, strict=True)]
    found = []
    for n, (values, kind) in enumerate(((ones, "add"), (sums, "add"), (lows, "min"), (highs, "max"))):
        combine = {"add": lambda a, b: a + b, "min": lanes.minimum, "max": lanes.maximum}[kind]
        of_warp = lanes.warp_reduce(functools.reduce(combine, values), kind)
        with lanes.when(lanes.lane() == 0):
            lanes.store_shared(counts_s, lanes.warp() + n * s.warps, of_warp)
        found.append((combine, n * s.warps))
    lanes.cta_barrier(s.threads)
    count, total, low, high = (functools.reduce(combine, _words(counts_s, at, s.warps)) for combine, at in found)
    mean = lanes.where(count > 0, (total // lanes.maximum(count, 1)) << 13, 0)
    return Guess(mean, lanes.where(count > 0, low, search.MINUS_INFINITY_KEY), lanes.where(count > 0, high, 0x7F800000))


def _words(ref, first: int, count: int) -> list[Scalar]:
    return [x for i in range(0, count, 4) for x in lanes.load_shared(ref, first + i, count=4)]
