"""union_blocks in Pallas Mosaic GPU (Hopper): a CTA per tile and head numbers the tile's blocks and adds up their
scores by number.

The blocks of a tile are a set of bits in shared memory. A block's place in the set is its number, so the cost of the
rest depends on the entries of the tile, however long the sequence is. Rows are added one after another. A row has a
block at most once, so its threads never add to the same sum, and sums run in the order of the rows. The k_trim best
means or sums are found by counting (`select_blocks.choose`), in order of number, which is the order of the blocks.

(Measured before: one sum for every block of the sequence. At 1M tokens and blocks of 64 tokens, clearing and searching
the sums took nearly all the time.)

Memory traffic: the lists once. Source: "Measure Once, Mask Once", Algorithm 2.
"""

from __future__ import annotations

import functools
import itertools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.hopper.threads import lane_marks, lanes
from pallas_kernels.selection.select_blocks import choose
from pallas_kernels.selection.union_blocks.api import Call

MAX_ENTRIES = 64
"""Most entries of a tile that one thread holds."""


def _sizes(ids, rows: int, num_blocks: int) -> tuple[int, int, int]:
    """Rows per tile, threads, and the most blocks that a tile can have, rounded up to four per thread."""
    rows, k = min(rows, ids.shape[1]), ids.shape[3]
    threads = 128 if rows * k <= 4096 else 256
    return rows, threads, -(-min(rows * k, num_blocks) // (4 * threads)) * 4 * threads


def unsupported(call: Call, ids, scores) -> str | None:
    """Why this kernel cannot take this valid input, or None if it can."""
    rows, num_blocks = call.rows, call.num_blocks
    if num_blocks is None:
        return "it needs num_blocks"
    rows_here, threads, most = _sizes(ids, rows, num_blocks)
    entries = rows_here * -(-ids.shape[3] // threads)
    if entries > MAX_ENTRIES:
        return f"a tile of {rows} rows of {ids.shape[3]} blocks gives a thread {entries} entries, it holds at most {MAX_ENTRIES}"
    room = lanes.shared_words() - choose.SCRATCH_WORDS - 3 * most
    if 2 * lane_marks.words(num_blocks, threads) > room:
        return f"num_blocks must be at most {room // (8 * threads) * 128 * threads:,}, which shared memory holds, got {num_blocks:,}"
    return None


def union_blocks(call: Call, ids, scores):
    """See `pallas_kernels.union_blocks`."""
    reason = unsupported(call, ids, scores)
    if reason:
        raise NotImplementedError(f"union_blocks 'mosaic_gpu': {reason}")
    return _unite(call, ids, scores)


@functools.partial(jax.jit, static_argnames="call")
def _unite(call: Call, ids, scores):
    rows, k_trim, rank, num_blocks = call.rows, call.k_trim, call.rank, call.num_blocks
    lanes.check_version()
    batch, num_rows, num_heads, k = ids.shape
    tiles = -(-num_rows // rows)
    rows_here, threads, most = _sizes(ids, rows, num_blocks)
    words = lane_marks.words(num_blocks, threads)

    def union_blocks_kernel(ids_ref, scores_ref, blocks_ref, *scratch):
        @lanes.stage(unit=lax.axis_index("unit"))
        def run(arrays, scratch, unit):
            *lists, blocks_ref = arrays
            set_s, before_s, sums_s, keys_s, of_numbers_s, counts_s = scratch
            head, tile, row = unit % num_heads, unit // num_heads % tiles, unit // (num_heads * tiles)
            entries = [
                _entries((row * num_rows + tile * rows + r) * num_heads + head, tile * rows + r < num_rows, lists, k, threads, num_blocks)
                for r in range(rows_here)
            ]
            lane_marks.clear(set_s, num_blocks, threads)
            _clear(most, threads, sums_s, *([keys_s] if rank == "mean" else []))
            lanes.cta_barrier(threads)
            for block, _ in itertools.chain(*entries):
                lane_marks.mark(set_s, block, block >= 0)
            lanes.cta_barrier(threads)
            count = lane_marks.count(set_s, before_s, counts_s, num_blocks, threads)
            hits_s = keys_s if rank == "mean" else None
            numbers = _numbers(entries[0], set_s, before_s)
            for of_row, following in zip(entries, [*entries[1:], []], strict=True):
                _add(of_row, numbers, sums_s, hits_s, of_numbers_s)
                numbers = _numbers(following, set_s, before_s)  # before the barrier: no load can move across it
                lanes.cta_barrier(threads)
            _order(rank, count, threads, sums_s, keys_s)
            place = {"block": unit, "block_bytes": 4 * k_trim}

            def keep(number, _, slot):
                block = lanes.load_shared(of_numbers_s, number)[0]
                lanes.store_global_if(slot < k_trim, blocks_ref, slot * 4, block, **place)

            kept, _ = choose.best(k_trim, threads, keys_s, counts_s, count=count, most=most, stride=1, keep=keep)
            for start in range(0, k_trim, threads):
                slot = lanes.thread() + start
                lanes.store_global_if((slot >= kept) & (slot < k_trim), blocks_ref, slot * 4, lanes.i32(-1), **place)

        run((ids_ref, scores_ref, blocks_ref), scratch)

    return plgpu.kernel(
        union_blocks_kernel,
        out_type=jax.ShapeDtypeStruct((batch, tiles, num_heads, k_trim), jnp.int32),
        grid=(batch * tiles * num_heads,),
        grid_names=("unit",),
        num_threads=threads // 128,
        thread_name="warpgroup",
        scratch_types=[
            plgpu.SMEM((words,), jnp.int32),
            plgpu.SMEM((words,), jnp.int32),
            plgpu.SMEM((most,), jnp.float32),
            plgpu.SMEM((most,), jnp.int32),
            plgpu.SMEM((most,), jnp.int32),
            plgpu.SMEM((choose.SCRATCH_WORDS,), jnp.int32),
        ],
    )(ids, scores)


def _entries(row, there, lists, k: int, threads: int, num_blocks: int):
    """This thread's (block, score) pairs of a row, block -1 for none."""
    place = {"block": lanes.where(there, row, 0), "block_bytes": 4 * k}
    found = []
    for start in range(0, k, threads):
        i = lanes.thread() + start
        at = lanes.minimum(i, k - 1) * 4
        block, score = (lanes.load_written(ref, at, name, **place) for ref, name in zip(lists, ("i32", "f32"), strict=True))
        found.append((lanes.where(there & (i < k) & (block < num_blocks), block, -1), score))
    return found


def _clear(most: int, threads: int, *refs) -> None:
    zero = [lanes.i32(0)] * 4

    def clear(i):
        for ref in refs:
            lanes.store_shared(ref, (i + lanes.thread()) * 4, *zero)
        return []

    lanes.loop(most // 4, [], clear, step=threads)


def _numbers(entries, set_s, before_s):
    return [lane_marks.place(set_s, before_s, lanes.maximum(block, 0)) for block, _ in entries]


def _add(entries, numbers, sums_s, hits_s, of_numbers_s) -> None:
    """Add one row to the sums and hits of its blocks' numbers. hits_s: None where hits are not needed."""
    for (block, score), number in zip(entries, numbers, strict=True):
        with lanes.when(block >= 0):
            lanes.store_shared(sums_s, number, lanes.load_shared(sums_s, number, "f32")[0] + score)
            if hits_s is not None:
                lanes.store_shared(hits_s, number, lanes.load_shared(hits_s, number)[0] + 1)
            lanes.store_shared(of_numbers_s, number, block)


def _order(rank: str, count, threads: int, sums_s, keys_s) -> None:
    """Write to `keys_s`, for each number, a key that orders as the means or sums do. Under "mean", `keys_s` holds the
    hits before."""

    def order(i):
        number = i + lanes.thread()
        worth = lanes.load_shared(sums_s, number, "f32")[0]
        if rank == "mean":
            worth = lanes.ptx("div.rn.f32 $0, $1, $2;", worth, lanes.number(lanes.load_shared(keys_s, number)[0]), result="f32")
        lanes.store_shared(keys_s, number, choose.key_of(worth))
        return []

    lanes.loop(count, [], order, step=threads)
    lanes.cta_barrier(threads)
