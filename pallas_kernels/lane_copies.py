"""Asynchronous copies ahead of their use, by the threads of `pallas_kernels.lanes`: a software pipeline, and rows brought swizzled."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence

from pallas_kernels import lanes
from pallas_kernels.lanes import Scalar


def pipeline(
    turns: Scalar,
    depth: int,
    locate: Callable,
    fetch: Callable,
    consume: Callable,
    carry: Sequence[Scalar],
    meanwhile: Callable = lambda: None,
    prepare: Callable = lambda: None,
) -> list[Scalar]:
    """`for n in range(turns): carry = consume(n, place, *carry)`; returns the carry.

    place = locate(n), a list; fetch(n, place) starts copies. Fetching runs `depth` turns ahead, and locating one more, so that neither
    what a place is read from nor what it leads to is waited for. prepare: called before the first copies are started, while their
    places are read. meanwhile: called once these copies are on their way; what it reads arrives after them.
    """
    places = [locate(lanes.i32(n)) for n in range(depth + 1)]
    prepare()
    size = len(places[0])

    def start(n, place):
        with lanes.when(n < turns):
            fetch(n, place)
        lanes.commit_copies()

    for n in range(depth):
        start(lanes.i32(n), places[n])
    meanwhile()

    def turn(n, *carry):
        after_next = locate(n + (depth + 1))
        lanes.wait_for_copies(depth - 1)
        after = consume(n, carry[:size], *carry[(depth + 1) * size :])
        start(n + depth, carry[depth * size :][:size])
        return [*carry[size : (depth + 1) * size], *after_next, *after]

    carry = lanes.loop(turns, [*(x for place in places for x in place), *carry], turn)
    lanes.wait_for_copies(0)
    return carry[(depth + 1) * size :]


def copy_rows_async(shared, offset: Scalar, place, *, rows: int, row_bytes: int) -> None:
    """Start copying rows to `rows * row_bytes` bytes of shared memory from word `offset` on, by one warp, 16-byte pieces exchanged by row.

    place: number of a row, Scalar -> (array, block, bytes of a block, bytes from the block's start, whether it is there: else zeros). See
    `swizzled` for where pieces land.
    """
    pieces = row_bytes // 16
    for first in range(0, rows * pieces, 32):
        i = lanes.lane() + first
        row, piece = i // pieces, i % pieces
        if pieces % 32 == 0:  # one row for all lanes, which the compiler does not see
            row, piece = lanes.i32(first // pieces), lanes.lane() + first % pieces
        ref, block, block_bytes, start, there = place(row)
        target = offset + swizzled(row, piece, row_bytes)
        with lanes.when(i < rows * pieces) if first + 32 > rows * pieces else contextlib.nullcontext():
            lanes.copy_async_16_bytes(shared, target, ref, start + piece * 16, block=block, block_bytes=block_bytes, there=there)


def swizzled(row: Scalar, piece: Scalar, row_bytes: int) -> Scalar:
    """Word at which a 16-byte piece of a row stands: the pieces of 8 consecutive rows with the same number lie in different banks."""
    return row * (row_bytes // 4) + (piece ^ (row & 7)) * 4


def prefetch_to_l2(ref, offset_bytes: Scalar, size_bytes: Scalar, *, block: Scalar, block_bytes: int) -> None:
    """Start bringing bytes of an array in global memory to the L2 cache, by one thread; all numbers multiples of 16."""
    lanes.ptx("cp.async.bulk.prefetch.L2.global [$0], $1;", lanes.address(ref, offset_bytes, block, block_bytes), size_bytes)
