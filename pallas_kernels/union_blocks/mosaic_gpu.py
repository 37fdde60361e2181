"""union_blocks in Pallas Mosaic GPU (Hopper): a CTA per tile and head, which adds scores up by block in shared memory.

The rows go one after another: a row has a block at most once, so that its threads never meet in a sum, and the sums run in the order of
the rows. The k_trim best means or sums are found by counting (`select_blocks.choose`), in order of block, which is the order asked for.

Memory traffic: the lists once. Source: "Measure Once, Mask Once", Algorithm 2.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import lanes
from pallas_kernels.select_blocks import choose

MOST_ENTRIES = 64
"""Entries of a tile that a thread holds at most."""


def _threads(num_blocks: int) -> int:
    return 128 if num_blocks <= 4096 else 256


def unsupported(ids, scores, *, rows, k_trim, rank, num_blocks) -> str | None:
    """Why this valid input is none for this kernel, or None if it is one."""
    if num_blocks is None:
        return "it needs num_blocks"
    most = min(choose.MOST_PER_THREAD * 256, (lanes.SHARED_WORDS - choose.SCRATCH_WORDS) // 2 - 2048)
    if num_blocks > most:
        return f"num_blocks must be at most {most:,}, which shared memory holds, got {num_blocks:,}"
    entries = min(rows, ids.shape[1]) * -(-ids.shape[3] // _threads(num_blocks))
    if entries > MOST_ENTRIES:
        return f"a tile of {rows} rows of {ids.shape[3]} blocks gives a thread {entries} entries, it holds at most {MOST_ENTRIES}"
    return None


def union_blocks(ids, scores, *, rows, k_trim, rank, num_blocks):
    """See `pallas_kernels.union_blocks.union_blocks`."""
    reason = unsupported(ids, scores, rows=rows, k_trim=k_trim, rank=rank, num_blocks=num_blocks)
    if reason:
        raise NotImplementedError(f"union_blocks 'mosaic_gpu': {reason}")
    return _unite(ids, scores, rows=rows, k_trim=k_trim, rank=rank, num_blocks=num_blocks)


@functools.partial(jax.jit, static_argnames=("rows", "k_trim", "rank", "num_blocks"))
def _unite(ids, scores, *, rows, k_trim, rank, num_blocks):
    lanes.check_version()
    batch, num_rows, num_heads, k = ids.shape
    tiles, threads = -(-num_rows // rows), _threads(num_blocks)
    bins = -(-num_blocks // (4 * threads)) * 4 * threads

    def union_blocks_kernel(ids_ref, scores_ref, blocks_ref, sums_s, hits_s, counts_s):
        @lanes.stage(unit=lax.axis_index("unit"))
        def run(arrays, scratch, unit):
            *lists, blocks_ref = arrays
            sums_s, hits_s, counts_s = scratch
            head, tile, row = unit % num_heads, unit // num_heads % tiles, unit // (num_heads * tiles)
            entries = [
                _entries((row * num_rows + tile * rows + r) * num_heads + head, tile * rows + r < num_rows, lists, k, threads)
                for r in range(min(rows, num_rows))
            ]
            _clear(bins, threads, sums_s, hits_s)
            for of_row in entries:
                _add(of_row, num_blocks, threads, sums_s, hits_s)
            _order(rank, bins, threads, sums_s, hits_s)
            place = {"block": unit, "block_bytes": 4 * k_trim}

            def keep(block, _, slot):
                lanes.store_global_if(slot < k_trim, blocks_ref, slot * 4, block, **place)

            kept, _ = choose.best(k_trim, threads, hits_s, counts_s, count=lanes.i32(num_blocks), most=num_blocks, stride=1, keep=keep)
            for start in range(0, k_trim, threads):
                slot = lanes.thread() + start
                lanes.store_global_if((slot >= kept) & (slot < k_trim), blocks_ref, slot * 4, lanes.i32(-1), **place)

        run((ids_ref, scores_ref, blocks_ref), (sums_s, hits_s, counts_s))

    return plgpu.kernel(
        union_blocks_kernel,
        out_type=jax.ShapeDtypeStruct((batch, tiles, num_heads, k_trim), jnp.int32),
        grid=(batch * tiles * num_heads,),
        grid_names=("unit",),
        num_threads=threads // 128,
        thread_name="warpgroup",
        scratch_types=[
            plgpu.SMEM((bins,), jnp.float32),
            plgpu.SMEM((bins,), jnp.int32),
            plgpu.SMEM((choose.SCRATCH_WORDS,), jnp.int32),
        ],
    )(ids, scores)


def _entries(row, there, lists, k: int, threads: int):
    """This thread's (block, score) pairs of a row, block -1 for none."""
    place = {"block": lanes.where(there, row, 0), "block_bytes": 4 * k}
    found = []
    for start in range(0, k, threads):
        i = lanes.thread() + start
        at = lanes.minimum(i, k - 1) * 4
        block, score = (lanes.load_written(ref, at, name, **place) for ref, name in zip(lists, ("i32", "f32"), strict=True))
        found.append((lanes.where(there & (i < k), block, -1), score))
    return found


def _clear(bins: int, threads: int, sums_s, hits_s) -> None:
    zero = [lanes.i32(0)] * 4

    def clear(i):
        for ref in (sums_s, hits_s):
            lanes.store_shared(ref, (i + lanes.thread()) * 4, *zero)
        return []

    lanes.loop(bins // 4, [], clear, step=threads)
    lanes.cta_barrier(threads)


def _add(entries, num_blocks: int, threads: int, sums_s, hits_s) -> None:
    """Add one row."""
    for block, score in entries:
        with lanes.when((block >= 0) & (block < num_blocks)):
            lanes.store_shared(sums_s, block, lanes.load_shared(sums_s, block, "f32")[0] + score)
            lanes.store_shared(hits_s, block, lanes.load_shared(hits_s, block)[0] + 1)
    lanes.cta_barrier(threads)


def _order(rank: str, bins: int, threads: int, sums_s, hits_s) -> None:
    """To `hits_s`, a key per block that orders as the means or sums do."""

    def order(i):
        block = i + lanes.thread()
        total, hits = lanes.load_shared(sums_s, block, "f32")[0], lanes.load_shared(hits_s, block)[0]
        worth = lanes.ptx("div.rn.f32 $0, $1, $2;", total, lanes.number(hits), result="f32") if rank == "mean" else total
        lanes.store_shared(hits_s, block, lanes.where(hits > 0, choose.key_of(worth), choose.NO_KEY))
        return []

    lanes.loop(bins, [], order, step=threads)
    lanes.cta_barrier(threads)
