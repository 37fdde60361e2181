"""fetch_tiles in Pallas Mosaic GPU: one launch, a cluster of CTAs per KV head; pool, tags and ages in place.

The first CTA of a cluster places the head's tiles (`place_tiles.mosaic_gpu`). After a barrier of the cluster all of its
CTAs make the list of missing tiles, and copy shares of them in turn (`copy_tiles.mosaic_gpu`). Memory traffic: that of
both.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.cache.copy_tiles import mosaic_gpu as copying
from pallas_kernels.cache.fetch_tiles.api import Call, FetchedTiles
from pallas_kernels.cache.place_tiles import api as place_api
from pallas_kernels.cache.place_tiles import mosaic_gpu as placing
from pallas_kernels.hopper.threads import lane_sums, lanes

THREADS = placing.THREADS  # its barriers count them
CTAS = 8
"""Of a cluster: every GPU with clusters can launch as many."""


@dataclasses.dataclass(frozen=True)
class Shape:
    """Everything that the kernel's code depends on."""

    place: placing.Shape
    copy: copying.Shape


def unsupported(call: Call, pages, *lists) -> str | None:
    """Why this kernel cannot take this valid input, or None if it can."""
    return placing.unsupported(call, *lists) or copying.unsupported(call, pages, None, None)


def fetch_tiles(call: Call, pages, blocks, page_table, frames, lengths, tags, ages, now):
    """See `pallas_kernels.fetch_tiles`; takes no config."""
    lists = (blocks, page_table, frames, lengths, tags, ages, now)
    if reason := unsupported(call, pages, *lists):
        raise NotImplementedError(f"fetch_tiles 'mosaic_gpu': {reason}")
    placed = place_api.Call(pages.page_size, call.num_queries, call.first, call.border, None)
    s = Shape(placing.Shape(*blocks.shape, page_table.shape[1], tags.shape[1], placed), copying.shape_of(pages))
    return _fetch(s, pages, *lists)


@functools.partial(jax.jit, static_argnames="s")
def _fetch(s: Shape, pages, blocks, page_table, frames, lengths, tags, ages, now):
    lanes.check_version()
    pools, tree = jax.tree.flatten(pages)
    refs = [jax.new_ref(x) for x in (tags, ages, *pools)]  # updated in place: the compiled call returns its operands as its results

    def fetch_kernel(blocks_ref, table_ref, frames_ref, lengths_ref, now_ref, tags_ref, ages_ref, *refs):
        pool_refs, outs, scratch = refs[: len(pools)], refs[len(pools) : len(pools) + 3], refs[len(pools) + 3 :]

        @lanes.stage(head=lax.axis_index("head"), cta=lax.axis_index("cta"))
        def run(arrays, scratch, head, cta):
            fetch_head(s, head, cta, *arrays, scratch)

        lists = (blocks_ref, table_ref, frames_ref, lengths_ref, now_ref)
        run((lists, (tags_ref, ages_ref), pool_refs, outs), scratch)

    ints, entries = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.int32), s.place.entries
    block_frames, sources, _ = plgpu.kernel(
        fetch_kernel,
        out_type=[ints(blocks.shape), *[ints((entries, s.place.kv_heads))] * 2],
        grid=(s.place.kv_heads,),
        grid_names=("head",),
        cluster=(CTAS,),
        cluster_names=("cta",),
        scratch_types=[*[plgpu.SMEM((entries,), jnp.int32)] * 3, plgpu.SMEM((THREADS // 32,), jnp.int32)],
    )(blocks, page_table, frames, lengths, now.reshape(1), *refs)
    tags, ages, *pools = (jax.freeze(ref) for ref in refs)
    return FetchedTiles(jax.tree.unflatten(tree, pools), block_frames, sources, tags, ages)


def fetch_head(s: Shape, head, cta, lists, buffer, pool_refs, outs, scratch) -> None:
    """By single threads: place the listed tiles of one KV head, and copy those that are missing."""
    *words, exchange_s = scratch
    with lanes.when(cta == 0):
        placing.place_head(s.place, head, lists, buffer, outs, words)
    lanes.cluster_barrier()
    count = _missing(s, head, outs[1:], words, exchange_s)
    shares = copying.SHARES

    def copy(unit):
        number, share = unit // shares, unit % shares
        (source,), (target,) = (lanes.load_shared(ref, number) for ref in words[:2])
        copying.copy_share(s.copy, head, source, target, share, pool_refs)
        return []

    lanes.loop(count * shares, [], copy, start=cta, step=CTAS)


def _missing(s: Shape, head, found, words, exchange_s):
    """Write sources and targets of the missing tiles to shared memory, in the order of entries; return their number."""
    entries, heads = s.place.entries, s.place.kv_heads

    def turn(start, before):
        i = lanes.minimum(lanes.thread() + start, entries - 1)
        source, target = (lanes.load_written(ref, 0, "i32", block=i * heads + head, block_bytes=4) for ref in found)
        missing = (lanes.thread() + start < entries) & (source >= 0)
        place, number = lane_sums.before(lanes.where(missing, lanes.i32(1), 0), exchange_s, THREADS)
        with lanes.when(missing):
            for ref, value in zip(words[:2], (source, target), strict=True):
                lanes.store_shared(ref, before + place, value)
        lanes.cta_barrier(THREADS)
        return [before + number]

    (count,) = lanes.loop(entries, [lanes.i32(0)], turn, step=THREADS)
    return count
