"""Packed pages as pages of bfloat16 numbers, a span of positions at a time: a CTA unpacks a tile of keys and one of
values of a KV head. And how the prefill kernels of `hopper.prefill.prefill_fold` read them: tiles that they read as
packed come from these numbers by TMA.

The numbers are those that `hopper.prefill.packed_tiles` makes, by the same stages (`unpack`). Memory traffic: codes and
scales of the span once, its numbers once.
"""

from __future__ import annotations

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.core.pages import Pages
from pallas_kernels.hopper.decode.wgmma_fold import SWIZZLED
from pallas_kernels.hopper.prefill import packed_tiles, prefill_fold
from pallas_kernels.hopper.prefill.prefill_fold import Shape
from pallas_kernels.hopper.prefill.unpack import HalfTile


def unit(s: Shape) -> int:
    """Spans are multiples of this: whole pages, and whole tiles of keys."""
    return math.lcm(s.page_size, s.tile)


def whole_span(s: Shape, width: int) -> int:
    """Tokens of a span of all pages of a table of `width`."""
    return unit(s) * -(-width * s.page_size // unit(s))


def span_bytes(s: Shape, tokens: int) -> int:
    """Bytes of the numbers of a span of so many tokens, of all rows of the batch."""
    return 2 * s.batch * s.num_kv_heads * s.head_dim * s.dtype.itemsize * tokens


def span_of(s: Shape, width: int, most_bytes: int) -> int:
    """Tokens of a span: as many whole pages and tiles as `most_bytes` of numbers hold, at least one, but not more than
    a table of `width` pages."""
    return min(unit(s) * max(1, most_bytes // span_bytes(s, unit(s))), whole_span(s, width))


def pools_of(s: Shape, pages: Pages, table, starts, lengths, first, span: int):
    """What `fetcher` reads: the numbers of a span, the open pages, if there are any, and the first position of the
    span. They are the pages of a chunk's sequences: first position of each row, and tokens written."""
    opened = pages.open
    # A tile of queries brings keys after the chunk, too, which no query sees: values among them must be numbers. Own
    # pages are read open.
    read = lengths if opened is None else packed_tiles.own_start(s, jnp.minimum(lengths, starts + s.num_rows) - 1)
    read = jnp.where(starts < lengths, read, 0)
    return widen(s, pages, table, first, read, span), None if opened is None else (opened.k, opened.v, opened.row_of), first


def fetcher(span: int) -> prefill_fold.Fetcher:
    """How tiles come to the ring from `pools_of`."""
    return prefill_fold.Fetcher(prefill_fold.PLAIN.registers, functools.partial(_fetch, span))


def _fetch(span: int, s: Shape, walk: prefill_fold.Walk, pools, head, scratch) -> None:
    """By the third warpgroup: bring the tiles of a span from its numbers, then those of the queries' own pages."""
    wide, own, first_ref = pools
    steps, end = walk.packed
    before = lax.axis_index("row") * (span // s.page_size) - lax.div(first_ref[0], jnp.int32(s.page_size))

    def page_of(position):
        return jnp.where(walk.page_of(position) < 0, -1, lax.div(position, jnp.int32(s.page_size)) + before)

    prefill_fold.fetch(s, dataclasses.replace(walk, steps=steps, length=end, page_of=page_of), wide, head, scratch)
    if own is not None:
        packed_tiles.fetch_open(s, walk, own, head, scratch)


def widen(s: Shape, pages: Pages, table, first, stops, tokens: int, *, interpret=None) -> tuple[jax.Array, jax.Array]:
    """The pages of positions first, ..., first + tokens - 1 of every row of the batch, and before `stops`: keys and
    values `[B * tokens / P, K, P, D]`, those of a row together, in order. Where the table has no page, and from `stops`
    on, they may be anything.

    first: int32 `[1]`. stops: int32 `[B]`. tokens: a multiple of `unit`.
    """
    halves = [format and HalfTile(format, s.head_dim, s.tile, s.page_size, s.num_kv_heads) for format in (pages.k_packed, pages.v_packed)]
    sides = [[x for x in side if x is not None] for side in ((pages.k, pages.k_scales), (pages.v, pages.v_scales))]
    of_row, last_page, rows = tokens // s.page_size, table.shape[1] - 1, s.tile // 2

    def widen_pages_kernel(table_ref, first_ref, stops_ref, *refs, rings, bar):
        refs, wides = refs[:-2], refs[-2:]
        refs = refs[: len(sides[0])], refs[len(sides[0]) :]
        head, row, tile = (lax.axis_index(name) for name in ("head", "row", "tile"))

        @pl.when(first_ref[0] + tile * s.tile < stops_ref[row])
        def _():
            places = [tile * s.tile + half * rows for half in range(2)]  # in the span
            pages_of = [lax.div(first_ref[0] + place, jnp.int32(s.page_size)) for place in places]
            frames = [jnp.maximum(table_ref[row, jnp.minimum(page, last_page)], 0) for page in pages_of]
            tokens_of = [pl.multiple_of(lax.rem(place, jnp.int32(s.page_size)), rows) for place in places]
            held = []
            for side, of_side, ring in zip(refs, halves, rings, strict=True):
                for half, (frame, token) in enumerate(zip(frames, tokens_of, strict=True)):
                    if of_side is not None:
                        held.append((of_side, ring, half, of_side.bring(side, frame, head, token)))
                        continue
                    source = side[0].at[frame, head, pl.ds(token, rows)]
                    plgpu.copy_gmem_to_smem(source, ring.at[0, pl.ds(half * rows, rows)], bar)
                    plgpu.barrier_wait(bar)
            for of_side, ring, half, words in held:
                of_side.put(ring, jnp.int32(0), half, words)
            plgpu.commit_smem()
            for ring, wide in zip(rings, wides, strict=True):
                for half, (place, token) in enumerate(zip(places, tokens_of, strict=True)):
                    target = wide.at[row * of_row + lax.div(place, jnp.int32(s.page_size)), head, pl.ds(token, rows)]
                    plgpu.copy_smem_to_gmem(ring.at[0, pl.ds(half * rows, rows)], target)
            plgpu.wait_smem_to_gmem(0)

    ring = plgpu.SMEM((1, s.tile, s.head_dim), s.dtype, transforms=SWIZZLED)
    wide = jax.ShapeDtypeStruct((s.batch * of_row, s.num_kv_heads, s.page_size, s.head_dim), s.dtype)
    return plgpu.kernel(
        widen_pages_kernel,
        out_type=[wide, wide],
        grid=(tokens // s.tile, s.num_kv_heads, s.batch),
        grid_names=("tile", "head", "row"),
        scratch_types={"rings": [ring, ring], "bar": plgpu.Barrier()},
        interpret=interpret,
    )(table, first, stops, *sides[0], *sides[1])
