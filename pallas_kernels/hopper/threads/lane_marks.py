"""A set of small numbers in shared memory, one bit each, by the threads of `hopper.threads.lanes`: marked together,
numbered in order.

Clearing and counting such a set costs 1/32 of an array with a word for every number.
"""

from __future__ import annotations

from pallas_kernels.hopper.threads import lane_sums, lanes
from pallas_kernels.hopper.threads.lanes import Scalar


def words(size: int, threads: int) -> int:
    """Words of a set of numbers below `size`: a multiple of four for every thread."""
    return -(-size // (128 * threads)) * 4 * threads


def clear(set_s, size: int, threads: int) -> None:
    """Make the set empty. A barrier must follow before it is used."""
    zero = [lanes.i32(0)] * 4

    def group(i):
        lanes.store_shared(set_s, (i + lanes.thread()) * 4, *zero)
        return []

    lanes.loop(words(size, threads) // 4, [], group, step=threads)


def mark(set_s, number: Scalar, condition: Scalar) -> None:
    """Put a number into the set if the condition holds; otherwise the number may be invalid. In any order and any
    number of times."""
    code = "{.reg .pred p; setp.ne.s32 p, $1, 0; @p red.shared.or.b32 [$0], $2;}"
    lanes.ptx(code, lanes.address(set_s, (number >> 5) * 4), lanes.where(condition, lanes.i32(1), 0), lanes.i32(1) << (number & 31))


def count(set_s, before_s, exchange_s, size: int, threads: int) -> Scalar:
    """Return how many numbers the set has. Write to `before_s`, for each word of the set, how many numbers the words
    before it hold.

    exchange_s: a word for each warp. All threads of the CTA call this after a barrier; it ends with a barrier.
    """
    each = words(size, threads) // threads  # consecutive words of a thread
    first = lanes.thread() * each

    def add(i, total):
        return [total + sum(map(lanes.popcount, lanes.load_shared(set_s, first + i, count=4)), lanes.i32(0))]

    (own,) = lanes.loop(each, [lanes.i32(0)], add, step=4)
    before, total = lane_sums.before(own, exchange_s, threads)

    def write(i, before):
        counts = [lanes.popcount(word) for word in lanes.load_shared(set_s, first + i, count=4)]
        of_words = [before]
        for each_count in counts:
            of_words.append(of_words[-1] + each_count)
        lanes.store_shared(before_s, first + i, *of_words[:4])
        return of_words[4:]

    lanes.loop(each, [before], write, step=4)
    lanes.cta_barrier(threads)
    return total


def place(set_s, before_s, number: Scalar) -> Scalar:
    """How many numbers of the set are smaller. `count` must have been called."""
    word = number >> 5
    smaller = lanes.load_shared(set_s, word)[0] & ((lanes.i32(1) << (number & 31)) - 1)
    return lanes.load_shared(before_s, word)[0] + lanes.popcount(smaller)
