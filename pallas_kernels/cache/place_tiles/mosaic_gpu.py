"""place_tiles in Pallas Mosaic GPU: one launch, a CTA per KV head, tags and ages in place.

Threads go through the head's list three times, with a barrier between: they look tiles up, let missing ones take a
place, and see who got it. Memory traffic: the list, its pages and frames, and 64 bytes of tags and ages for each entry.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.cache.place_tiles.api import WAYS, Call, Placed
from pallas_kernels.hopper.threads import lanes

THREADS = 128
MAX_ENTRIES = 8192
"""Listed tiles of a head: each takes three words of shared memory."""


@dataclasses.dataclass(frozen=True)
class Shape:
    """Everything that the kernel's code depends on."""

    batch: int
    kv_heads: int
    width: int
    table_width: int
    sets: int
    call: Call

    @property
    def entries(self) -> int:
        """Listed tiles of a head."""
        return self.batch * self.width


def unsupported(call: Call, blocks, page_table, frames, lengths, tags, ages, now) -> str | None:
    """Why this kernel cannot take this valid input, or None if it can."""
    entries = blocks.shape[0] * blocks.shape[2]
    return f"a head may list at most {MAX_ENTRIES} tiles, got {entries}" if entries > MAX_ENTRIES else None


def place_tiles(call: Call, blocks, page_table, frames, lengths, tags, ages, now):
    """See `pallas_kernels.place_tiles`; takes no config."""
    if reason := unsupported(call, blocks, page_table, frames, lengths, tags, ages, now):
        raise NotImplementedError(f"place_tiles 'mosaic_gpu': {reason}")
    s = Shape(*blocks.shape, page_table.shape[1], tags.shape[1], call)
    return _place(s, blocks, page_table, frames, lengths, tags, ages, now)


@functools.partial(jax.jit, static_argnames="s")
def _place(s: Shape, blocks, page_table, frames, lengths, tags, ages, now):
    lanes.check_version()
    refs = [jax.new_ref(x) for x in (tags, ages)]  # updated in place: the compiled call returns its operands as its results

    def place_kernel(blocks_ref, table_ref, frames_ref, lengths_ref, now_ref, tags_ref, ages_ref, *refs):
        *out_refs, ids_s, ways_s, frames_s = refs

        @lanes.stage(head=lax.axis_index("head"))
        def run(arrays, scratch, head):
            lists, buffer, outs = arrays
            place_head(s, head, lists, buffer, outs, scratch)

        lists = (blocks_ref, table_ref, frames_ref, lengths_ref, now_ref)
        run((lists, (tags_ref, ages_ref), tuple(out_refs)), (ids_s, ways_s, frames_s))

    ints = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.int32)
    out_type = [ints((s.batch, s.kv_heads, s.width)), ints((s.entries, s.kv_heads)), ints((s.entries, s.kv_heads))]
    found = plgpu.kernel(
        place_kernel,
        out_type=out_type,
        grid=(s.kv_heads,),
        grid_names=("head",),
        scratch_types=[plgpu.SMEM((s.entries,), jnp.int32)] * 3,
    )(blocks, page_table, frames, lengths, now.reshape(1), *refs)
    return Placed(*found, *(jax.freeze(ref) for ref in refs))


def place_head(s: Shape, head, lists, buffer, outs, scratch) -> None:
    """By single threads: place the listed tiles of one KV head. lists: blocks, page table, frames, lengths, now.
    buffer: tags and ages. outs: block_frames, sources, targets. scratch: three words for each entry."""
    blocks_ref, table_ref, frames_ref, lengths_ref, now_ref = lists
    tags_ref, ages_ref = buffer
    ids_s, ways_s, frames_s = scratch
    now = lanes.load_global(now_ref, 0)

    def set_of(page):
        return head * s.sets + page % s.sets

    def look_up(i):
        row, w = i // s.width, i % s.width
        block = lanes.load_global(blocks_ref, (row * s.kv_heads + head) * s.width + w)
        there = (block >= 0) & (block < s.table_width)
        entry = row * s.table_width + lanes.where(there, block, 0)
        page = lanes.where(there, lanes.load_global(table_ref, entry), -1)
        frame = lanes.where(there, lanes.load_global(frames_ref, entry), -1)
        full = (block + 1) * s.call.page_size <= lanes.load_global(lengths_ref, row) - s.call.num_queries
        asked = (frame >= s.call.border) & (page >= 0) & full
        lanes.store_shared(frames_s, i, frame)
        lanes.store_shared(ids_s, i, lanes.where(asked, page, -1))
        lanes.store_shared(ways_s, i, lanes.i32(-1))
        with lanes.when(asked):
            for way, tag in enumerate(_words(tags_ref, set_of(page))):
                with lanes.when(tag == page):
                    lanes.store_shared(ways_s, i, lanes.i32(way))
                    lanes.store_global(ages_ref, set_of(page) * WAYS + way, now)

    def take(i):
        page, way = lanes.load_shared(ids_s, i)[0], lanes.load_shared(ways_s, i)[0]
        with lanes.when((page >= 0) & (way < 0)):
            oldest, chosen = None, lanes.i32(0)
            for number, age in enumerate(_words(ages_ref, set_of(page))):
                if oldest is None:
                    oldest = age
                    continue
                older = age < oldest
                oldest, chosen = lanes.where(older, age, oldest), lanes.where(older, lanes.i32(number), chosen)
            lanes.store_shared(ways_s, i, chosen + WAYS)  # at least WAYS: it was missing
            lanes.store_global(tags_ref, set_of(page) * WAYS + chosen, page)

    def finish(i):
        page, way, frame = (lanes.load_shared(ref, i)[0] for ref in (ids_s, ways_s, frames_s))
        was_missing, asked = way >= WAYS, page >= 0
        way = lanes.where(was_missing, way - WAYS, lanes.where(asked, way, 0))
        at = lanes.where(asked, set_of(page), head * s.sets)
        kept = lanes.load_written(tags_ref, way * 4, "i32", block=at, block_bytes=WAYS * 4)
        held = asked & (kept == page)
        place = s.call.first + (at - head * s.sets) * WAYS + way
        copied = held & was_missing
        with lanes.when(copied):
            lanes.store_global(ages_ref, at * WAYS + way, now)
        row, w = i // s.width, i % s.width
        lanes.store_global(outs[0], (row * s.kv_heads + head) * s.width + w, lanes.where(held, place, frame))
        lanes.store_global(outs[1], i * s.kv_heads + head, lanes.where(copied, frame, -1))
        lanes.store_global(outs[2], i * s.kv_heads + head, lanes.where(copied, place, -1))

    for number, step in enumerate((look_up, take, finish)):
        if number:
            lanes.cta_barrier(THREADS)
        _for_entries(s, step)


def _for_entries(s: Shape, step) -> None:
    def turn(start):
        i = lanes.thread() + start
        with lanes.when(i < s.entries):
            step(i)
        return []

    lanes.loop(s.entries, [], turn, step=THREADS)


def _words(ref, block) -> list:
    """The words of one set, of tags or of ages."""
    halves = [lanes.load_written_16_bytes(ref, half * 16, block=block, block_bytes=WAYS * 4) for half in range(WAYS // 4)]
    return [word for half in halves for word in half]
