"""Asynchronous copies that run ahead of their use, by the threads of `hopper.threads.lanes`: a software pipeline,
swizzled rows, bulk copies."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence

from pallas_kernels.hopper.threads import lanes
from pallas_kernels.hopper.threads.lanes import Scalar


def copy_async_16_bytes(
    shared, offset, ref, offset_bytes, *, block: Scalar, block_bytes: int, there: Scalar, around: int | None = None
) -> None:
    """Start copying 16 bytes of an array in global memory to word `offset` of shared memory, zeros unless `there`.

    around: 128 or 256: the aligned bytes around them, so many, should come into the L2 cache together, as others are
    about to copy them.
    """
    target, source = lanes.address(shared, offset * 4), lanes.address(ref, offset_bytes, block, block_bytes)
    size = lanes.where(there, lanes.i32(16), 0)
    lanes.ptx(f"cp.async.cg.shared.global{f'.L2::{around}B' if around else ''} [$0], [$1], 16, $2;", target, source, size)


def commit_copies() -> None:
    """Make one group of the copies that this thread has started since the last call."""
    lanes.ptx("cp.async.commit_group;")


def wait_for_copies(groups: int) -> None:
    """Wait until at most the last `groups` groups of each lane of the warp are in flight. Then the whole warp may read
    the older ones."""
    lanes.ptx(f"cp.async.wait_group {groups};")
    lanes.ptx("bar.warp.sync 0xffffffff;", convergent=True)


def pipeline(
    turns: Scalar,
    depth: int,
    locate: Callable,
    fetch: Callable,
    consume: Callable,
    carry: Sequence[Scalar],
    meanwhile: Callable = lambda: None,
    prepare: Callable = lambda: None,
    arrive: Callable | None = None,
) -> list[Scalar]:
    """`for n in range(turns): carry = consume(n, place, *carry)`; returns the carry.

    place = locate(n), a list; fetch(n, place) starts copies. Fetching runs `depth` turns ahead, and locating one turn
    more, so that a turn waits neither for the reads of `locate` nor for the copies. prepare: called before the first
    copies are started, while `locate` reads their places. meanwhile: called after these copies are started; what it
    reads arrives after them. arrive: waits for the copies of turn n, if they are bulk copies.
    """
    places = [locate(lanes.i32(n)) for n in range(depth + 1)]
    prepare()
    size = len(places[0])

    def start(n, place):
        with lanes.when(n < turns):
            fetch(n, place)
        if arrive is None:
            commit_copies()

    for n in range(depth):
        start(lanes.i32(n), places[n])
    meanwhile()

    def turn(n, *carry):
        after_next = locate(n + (depth + 1))
        wait_for_copies(depth - 1) if arrive is None else arrive(n)
        after = consume(n, carry[:size], *carry[(depth + 1) * size :])
        start(n + depth, carry[depth * size :][:size])
        return [*carry[size : (depth + 1) * size], *after_next, *after]

    carry = lanes.loop(turns, [*(x for place in places for x in place), *carry], turn)
    if arrive is None:
        wait_for_copies(0)
    return carry[(depth + 1) * size :]


def prefetch(ref, offset_bytes) -> None:
    """Bring the 32 bytes around a byte of an array in global memory into the L2 cache."""
    lanes.ptx("prefetch.global.L2 [$0];", lanes.address(ref, offset_bytes))


def copy_rows_async(shared, offset: Scalar, place, *, rows: int, row_bytes: int, around: int | None = None, threads: int = 32) -> None:
    """Start copying rows to `rows * row_bytes` bytes of shared memory from word `offset` on, 16-byte pieces permuted by
    row; by one warp, or by the first `threads` of the CTA, more than 32.

    place: number of a row, Scalar -> (array, block, bytes of a block, bytes from the block's start, whether the row
    exists; else zeros). `swizzled` says where pieces land. around: see `copy_async_16_bytes`.
    """
    pieces, mine = row_bytes // 16, lanes.lane() if threads == 32 else lanes.thread()
    for first in range(0, rows * pieces, threads):
        i = mine + first
        row, piece = i // pieces, i % pieces
        if pieces % threads == 0:  # all lanes have one row; the compiler does not see that
            row, piece = lanes.i32(first // pieces), mine + first % pieces
        ref, block, block_bytes, start, there = place(row)
        target = offset + swizzled(row, piece, row_bytes)
        with lanes.when(i < rows * pieces) if first + threads > rows * pieces else contextlib.nullcontext():
            source = {"block": block, "block_bytes": block_bytes, "there": there}
            copy_async_16_bytes(shared, target, ref, start + piece * 16, **source, around=around)


def copy_tile_async(
    shared, offset: Scalar, ref, start: Scalar, *, rows: int, row_bytes: int, count: Scalar, block: Scalar, block_bytes: int
) -> None:
    """`copy_rows_async` of rows that follow each other in memory, from byte `start` of a block on: the first `count`,
    then zeros."""
    source, pieces = lanes.part(ref, start + lanes.lane() * 16, block, block_bytes), row_bytes // 16
    for first in range(0, rows * pieces, 32):
        i = lanes.lane() + first
        row, piece = i // pieces, i % pieces
        target = lanes.address(shared, (offset + swizzled(row, piece, row_bytes)) * 4)
        with lanes.when(i < rows * pieces) if first + 32 > rows * pieces else contextlib.nullcontext():
            size = lanes.where(row < count, lanes.i32(16), 0)
            lanes.ptx("cp.async.cg.shared.global [$0], [$1], 16, $2;", target, lanes.address(source, first * 16), size)


def copy_bytes_async(shared, offset: Scalar, ref, start: Scalar, size: int, *, block: Scalar, block_bytes: int, there: Scalar) -> None:
    """Start copying `size` bytes of an array in global memory to word `offset` of shared memory, by one warp; zeros
    unless `there`."""
    for first in range(0, size // 16, 32):
        piece = lanes.lane() + first
        with lanes.when(piece < size // 16) if first + 32 > size // 16 else contextlib.nullcontext():
            copy_async_16_bytes(shared, offset + piece * 4, ref, start + piece * 16, block=block, block_bytes=block_bytes, there=there)


def swizzled(row: Scalar, piece: Scalar, row_bytes: int) -> Scalar:
    """Word offset of a 16-byte piece of a row. Pieces with the same number in 8 consecutive rows lie in different
    banks.

    row_bytes: a power of two below 128, or a multiple of 128.
    """
    lines = max(1, 128 // row_bytes)  # rows that the banks hold side by side
    turn = row & 7 if lines == 1 else (row // lines) & (8 // lines - 1)
    return row * (row_bytes // 4) + (piece ^ turn) * 4


# Bulk copies: one thread starts a copy, the copy engine does it, and an arrival in shared memory (an mbarrier, two
# words) signals its end. If all threads copied 16 bytes each, slow memory would hold up the other work of their warps.

ARRIVAL_WORDS = 2


def make_arrivals(arrivals, count: int, threads: int) -> None:
    """Initialise the first `count` arrivals, by all threads of the CTA, before any copy."""
    for start in range(0, count, threads):
        with lanes.when(lanes.thread() + start < count):
            lanes.ptx("mbarrier.init.shared::cta.b64 [$0], 1;", _arrival(arrivals, lanes.thread() + start))
    lanes.ptx("fence.mbarrier_init.release.cluster;")
    lanes.cta_barrier(threads)


def forget_arrivals(arrivals, count: int, threads: int) -> None:
    """Invalidate them, each by the thread that will initialise it again; after a barrier of the CTA, with no copy in
    flight."""
    for start in range(0, count, threads):
        with lanes.when(lanes.thread() + start < count):
            lanes.ptx("mbarrier.inval.shared::cta.b64 [$0];", _arrival(arrivals, lanes.thread() + start))
    lanes.publish_to_tensor_cores()  # the copy engine will write where this thread wrote


def copy_bulk(
    shared, offset: Scalar, ref, offset_bytes: Scalar, size_bytes: Scalar, arrivals, number: Scalar, *, block, block_bytes
) -> None:
    """Start copying a multiple of 16 bytes of an array in global memory to word `offset` of shared memory, by one
    thread. Arrival `number` signals its end."""
    arrival = _arrival(arrivals, number)
    _expect(arrival, size_bytes)
    _copy_bulk(lanes.address(shared, offset * 4), lanes.address(ref, offset_bytes, block, block_bytes), size_bytes, arrival)


def copy_rows_bulk(
    shared, offset: Scalar, ref, row: Scalar, count: Scalar, *, row_bytes: int, stride_bytes: int, arrivals, number: Scalar
) -> None:
    """Start copying the first `count` rows, 1 to 32, to shared memory from word `offset` on, `stride_bytes` apart, by
    one warp. Arrival `number` signals the end of all. row: the number, in the array, of the row that this lane
    copies."""
    arrival, lane = _arrival(arrivals, number), lanes.lane()
    with lanes.when(lane == 0):
        _expect(arrival, count * row_bytes)
    with lanes.when(lane < count):
        target = lanes.address(shared, offset * 4 + lane * stride_bytes)
        _copy_bulk(target, lanes.address(ref, 0, row, row_bytes), lanes.i32(row_bytes), arrival)


def _expect(arrival, size_bytes: Scalar) -> None:
    lanes.ptx("mbarrier.arrive.expect_tx.shared::cta.b64 _, [$0], $1;", arrival, size_bytes)


def _copy_bulk(target, source, size_bytes: Scalar, arrival) -> None:
    code = "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [$0], [$1], $2, [$3];"
    lanes.ptx(code, target, source, size_bytes, arrival)


def wait_for_arrival(arrivals, number: Scalar, turn: Scalar) -> None:
    """Wait until copy number `turn` (0, 1, ...) of this arrival has come; by whole warps."""
    wait = "mbarrier.try_wait.parity.shared::cta.b64 p, [$0], $1;"
    code = f"{{.reg .pred p; WAIT: {wait} @p bra DONE; bra WAIT; DONE:}}"
    lanes.ptx(code, _arrival(arrivals, number), turn & 1, convergent=True)


def _arrival(arrivals, number: Scalar):
    return lanes.address(arrivals, number * (4 * ARRIVAL_WORDS))
