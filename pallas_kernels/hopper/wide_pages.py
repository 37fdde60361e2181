"""Packed pages as pages of bfloat16 numbers, a span of positions at a time: a CTA unpacks a tile of keys and one of values of a KV head.

The numbers are those that `hopper.packed_tiles` makes, by the same stages (`lane_halves`). Memory traffic: codes and scales of the span
once, its numbers once.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.hopper.decode_tiles import SWIZZLED
from pallas_kernels.hopper.lane_halves import HalfTile
from pallas_kernels.hopper.query_tiles import Shape
from pallas_kernels.pages import Pages


def unit(s: Shape) -> int:
    """Spans are multiples of this: whole pages, and whole tiles of keys."""
    return math.lcm(s.page_size, s.tile)


def widen(s: Shape, pages: Pages, table, first, stops, tokens: int, *, interpret=None) -> tuple[jax.Array, jax.Array]:
    """The pages of positions first, ..., first + tokens - 1 of every row of the batch, and before `stops`: keys and values
    `[B * tokens / P, K, P, D]`, those of a row together, in order. Where the table has no page, and from `stops` on, they may be anything.

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
