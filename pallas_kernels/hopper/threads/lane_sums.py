"""Prefix sums over threads, by the threads of `pallas_kernels.hopper.threads.lanes`."""

from __future__ import annotations

from pallas_kernels.hopper.threads import lanes
from pallas_kernels.hopper.threads.lanes import Scalar


def upto(x: Scalar) -> Scalar:
    """The sum of an integer over the lanes of the warp up to and including this one."""
    for distance in (1, 2, 4, 8, 16):
        lower = lanes.shuffle(x, lanes.maximum(lanes.lane() - distance, 0))
        x = x + lanes.where(lanes.lane() >= distance, lower, 0)
    return x


def before(x: Scalar, exchange_s, threads: int) -> tuple[Scalar, Scalar]:
    """The sum of an integer over the threads of the CTA before this one, and over all of them.

    exchange_s: a word for each warp, a multiple of four; a barrier must follow before its next use. All threads of the
    CTA call this. It contains a barrier.
    """
    of_lanes = upto(x)
    with lanes.when(lanes.lane() == 31):
        lanes.store_shared(exchange_s, lanes.warp(), of_lanes)
    lanes.cta_barrier(threads)
    of_warps = [total for w in range(0, threads // 32, 4) for total in lanes.load_shared(exchange_s, w, count=4)]
    earlier = sum((lanes.where(lanes.warp() > w, total, 0) for w, total in enumerate(of_warps)), of_lanes - x)
    return earlier, sum(of_warps, lanes.i32(0))
