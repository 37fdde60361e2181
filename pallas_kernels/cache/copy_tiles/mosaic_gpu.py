"""copy_tiles in Pallas Mosaic GPU: a few CTAs per tile, in place; each thread has several loads of 16 bytes in flight.

Memory traffic: each copied tile once in and once out. Many CTAs at once keep the bus to host memory busy. A load from
there takes more than a microsecond, so few tiles take about as long as one CTA has loads after each other.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.cache.copy_tiles.api import Call
from pallas_kernels.hopper.threads import lanes

THREADS = 128
UNROLLED = 8
"""Pieces of each array that a thread has in flight."""
TURN = THREADS * UNROLLED
SHARES = 4
"""CTAs of a tile: as many as it has turns of this size, keys and values of 128 tokens in 16 bits."""


@dataclasses.dataclass(frozen=True)
class Shape:
    """Everything that the kernel's code depends on. tile_bytes: of a tile, for each array of the pool, scales
    included."""

    num_kv_heads: int
    tile_bytes: tuple[int, ...]


def unsupported(call: Call, pages, sources, targets) -> str | None:
    """Why this kernel cannot take this valid input, or None if it can."""
    sizes = shape_of(pages).tile_bytes
    if any(size % 16 for size in sizes):
        return f"tiles, and the scales of each, must be multiples of 16 bytes, got {sizes}"
    return None


def copy_tiles(call: Call, pages, sources, targets):
    """See `pallas_kernels.copy_tiles`; takes no config."""
    if reason := unsupported(call, pages, sources, targets):
        raise NotImplementedError(f"copy_tiles 'mosaic_gpu': {reason}")
    return _copy(shape_of(pages), pages, sources, targets)


def shape_of(pages) -> Shape:
    """The sizes of a pool."""
    return Shape(pages.kv_heads, tuple(pool.shape[2] * pool.shape[3] * pool.dtype.itemsize for pool in jax.tree.leaves(pages)))


@functools.partial(jax.jit, static_argnames="s")
def _copy(s: Shape, pages, sources, targets):
    lanes.check_version()
    pools, tree = jax.tree.flatten(pages)
    refs = [jax.new_ref(pool) for pool in pools]  # updated in place: the compiled call returns its operands as its results

    def copy_kernel(sources_ref, targets_ref, *pool_refs):
        @lanes.stage(unit=lax.axis_index("unit"))
        def run(arrays, _, unit):
            copy_tile(s, unit, *arrays)

        run((sources_ref, targets_ref, pool_refs), ())

    plgpu.kernel(copy_kernel, grid=(sources.size * SHARES,), grid_names=("unit",))(sources, targets, *refs)
    return jax.tree.unflatten(tree, [jax.freeze(ref) for ref in refs])


def copy_tile(s: Shape, unit, sources_ref, targets_ref, pool_refs) -> None:
    """By single threads: copy a share of the tile of an entry. unit: counted over entries, heads and shares."""
    entry = unit // SHARES
    source, target = (lanes.load_global(ref, entry) for ref in (sources_ref, targets_ref))
    with lanes.when((source >= 0) & (target >= 0)):
        copy_share(s, entry % s.num_kv_heads, source, target, unit % SHARES, pool_refs)


def copy_share(s: Shape, head, source, target, share, pool_refs) -> None:
    """By single threads: copy one of `SHARES` shares of a head's tile from frame `source` to frame `target`, in every
    array of the pool."""
    before, after = (frame * s.num_kv_heads + head for frame in (source, target))
    turns = 0
    for size, ref in zip(s.tile_bytes, pool_refs, strict=True):
        _copy_array(size, ref, before, after, (share + (SHARES - turns % SHARES)) % SHARES)
        turns += -(-size // 16 // TURN)


def _copy_array(size: int, ref, before, after, first) -> None:
    """Copy tile number `before` of an array to number `after`: every `SHARES`-th turn from `first` on."""
    pieces = size // 16
    whole = pieces // TURN * TURN

    def turn(start):
        places = [(lanes.thread() + (start + n * THREADS)) * 16 for n in range(UNROLLED)]
        held = [lanes.load_written_16_bytes(ref, place, block=before, block_bytes=size) for place in places]
        for place, words in zip(places, held, strict=True):
            lanes.store_global_16_bytes(ref, place, *words, block=after, block_bytes=size)
        return []

    def rest(start):
        place = lanes.thread() + start
        with lanes.when(place < pieces):
            words = lanes.load_written_16_bytes(ref, place * 16, block=before, block_bytes=size)
            lanes.store_global_16_bytes(ref, place * 16, *words, block=after, block_bytes=size)
        return []

    if whole:
        lanes.loop(whole, [], turn, start=first * TURN, step=SHARES * TURN)
    if whole < pieces:
        with lanes.when(first == whole // TURN % SHARES):
            lanes.loop(pieces, [], rest, start=whole, step=THREADS)
