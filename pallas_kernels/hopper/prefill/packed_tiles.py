"""Packed pages for the prefill kernels of `hopper.prefill.prefill_fold`: the third warpgroup unpacks tiles into the
ring instead of copying them.

It holds the codes and scales of half a tile of keys and half a tile of values on their way (`unpack`), makes bfloat16
numbers of those that have arrived, each product with its scale rounded once, and stores them where `wgmma` reads them.
So the folding warpgroups do what they do over bfloat16 pages, and no number is unpacked twice for the 128 query rows of
a CTA.

Each query reads its own page open and every earlier page as packed. A walk has the tiles that are read as packed first,
then those of the open pages of its queries, which TMA copies.

Memory traffic: codes and scales once per 128 query rows and head, from L2 where neighbours share them; open pages once.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.core.pages import Pages, unlike
from pallas_kernels.hopper.decode import packed_operands
from pallas_kernels.hopper.prefill import prefill_fold
from pallas_kernels.hopper.prefill.prefill_fold import Shape, Walk
from pallas_kernels.hopper.prefill.unpack import HalfTile

REGISTERS = 208, 88
"""Per thread of a folding and of the fetching warpgroup: all that a CTA has."""


class Side(NamedTuple):
    """Keys or values of pages: numbers or codes, scales if there are any, and open pages if queries read some."""

    pool: Any
    scales: Any
    opened: Any


class Pools(NamedTuple):
    """What the fetching warpgroup reads. row_of: page -> row of the open pages; None: every page is read as packed."""

    keys: Side
    values: Side
    row_of: Any


def unsupported(q, pages: Pages, sm_scale: float) -> str | None:
    """Why prefill kernels cannot take these queries and pages, packed or not, or None if they can."""
    if not pages.packed:
        return unlike(pages) or prefill_fold.unsupported(q, pages.k, sm_scale)
    if pages.v is None:
        return f"it reads V from an array of its own, not from the first {pages.value_dim} columns of K"
    if pages.head_dim != pages.v_head_dim:
        return f"it reads keys and values of one head dim, got {pages.head_dim} and {pages.v_head_dim}"
    for name, format in (("keys", pages.k_packed), ("values", pages.v_packed)):
        if format is not None and (reason := packed_operands.unsupported(name, format)):
            return reason
    for name, array in (("k", pages.k), ("v", pages.v), *(() if pages.open is None else (("k", pages.open.k), ("v", pages.open.v)))):
        if array.dtype.name in ("float32", "float16"):
            return f"beside packed pages it reads {packed_operands.NUMBERS}, got {name} {array.dtype}"
    if q.dtype.name != packed_operands.NUMBERS:
        return f"over packed pages it multiplies {packed_operands.NUMBERS}, got q {q.dtype}"
    return prefill_fold.unsupported(q, numbers(pages), sm_scale)


def unsupported_window(pages: Pages, window: tuple[int, int] | None) -> str | None:
    """Why an op that reads only a part of the keys cannot read these pages. Beside open ones, a query has to read its
    whole own page."""
    if pages.open is not None and (window is None or window[1] < pages.page_size):
        return f"beside open pages its window must reach over a page of {pages.page_size} tokens, got window {window}"
    return None


def numbers(pages: Pages) -> jax.ShapeDtypeStruct:
    """The keys of packed pages as they would be unpacked: shape and dtype."""
    return jax.ShapeDtypeStruct((*pages.k.shape[:3], pages.head_dim), pages.k_format.dtype)


def shape_of(q, pages: Pages, **more) -> Shape:
    """`prefill_fold.shape_of` for pages, packed or not."""
    return prefill_fold.shape_of(q, numbers(pages), **more)


def pools_of(pages: Pages):
    """The arrays that the fetching warpgroup reads."""
    if not pages.packed:
        return pages.k, pages.v
    opened = pages.open
    keys = Side(pages.k, pages.k_scales, None if opened is None else opened.k)
    values = Side(pages.v, pages.v_scales, None if opened is None else opened.v)
    return Pools(keys, values, None if opened is None else opened.row_of)


def fetcher_of(s: Shape, pages: Pages) -> prefill_fold.Fetcher:
    """How tiles of these pages come to the ring."""
    if not pages.packed:
        return prefill_fold.PLAIN
    halves = [format and HalfTile(format, s.head_dim, s.tile, s.page_size, s.num_kv_heads) for format in (pages.k_packed, pages.v_packed)]
    return prefill_fold.Fetcher(REGISTERS, functools.partial(_fetch, halves))


def own_start(s: Shape, position):
    """The first position of the page of a position."""
    size = jnp.int32(s.page_size)
    return position - lax.rem(position, jnp.broadcast_to(size, position.shape) if position.ndim else size)


def own_tiles(s: Shape, first, start, length):
    """Of a tile of queries from position `first` on, of a chunk that starts at `start`: the position before which it
    reads pages as packed, the position from which it reads open pages, and how many tiles of these it needs; 0 where no
    query is one of the sequence. Tiles begin at multiples of their size, so that a page is cut into tiles in one way
    whichever queries read it."""
    of_tile, of_chunk = first + (prefill_fold.TILE_ROWS - 1) * s.row_stride, start + (s.num_rows - 1) * s.row_stride
    written = first + lax.div(jnp.maximum(length - 1 - first, 0), jnp.int32(s.row_stride)) * s.row_stride
    last = jnp.minimum(jnp.minimum(of_tile, of_chunk), written)
    own = own_start(s, first)
    own -= lax.rem(own, jnp.int32(s.tile))
    tiles = lax.div(last + 1 - own + (s.tile - 1), jnp.int32(s.tile))
    return own_start(s, last), own, jnp.where(first < length, tiles, 0)


def own_masks(s: Shape, packed: tuple[Any, Any], unmasked: Callable | None = None, seen: Callable | None = None) -> dict[str, Callable]:
    """`unmasked` and `seen` of a walk with `packed`, where each query reads its own page in the steps after these, and
    earlier pages in them. Queries past the end of the sequence, whose pages nobody brings, read as the last one."""
    packed_steps, packed_end = packed

    def own(position):
        return jnp.minimum(own_start(s, position), packed_end)

    def unmasked_too(step, starts, first, last):
        as_packed = functools.reduce(jnp.logical_and, [start < own(first) for start in starts])
        as_open = functools.reduce(jnp.logical_and, [start >= own(last) for start in starts])
        plain = jnp.where(step < packed_steps, as_packed, as_open)
        return plain if unmasked is None else plain & unmasked(step, starts, first, last)

    def seen_too(step, pos, query_pos):
        found = (pos < own(query_pos)) == (step < packed_steps)
        return found if seen is None else found & seen(step, pos, query_pos)

    return {"unmasked": unmasked_too, "seen": seen_too}


@dataclasses.dataclass(frozen=True)
class _Source:
    """Keys or values, where they go, and how their codes are unpacked; halves None: they are numbers, which TMA
    copies."""

    side: Side
    halves: HalfTile | None
    ring: Any
    bar: Any
    free: Any

    def ahead(self, s: Shape, head, half: int, here):
        """Start loading half a tile from its `places`."""
        if self.halves is None:
            return ()
        first = half * self.halves.rows
        page, token, _ = here[first // s.piece]
        refs = [ref for ref in self.side[:2] if ref is not None]
        return self.halves.bring(refs, jnp.maximum(page, 0), head, token + first % s.piece)

    def put(self, slot, half: int, held) -> None:
        """Unpack half a tile that was loaded."""
        if self.halves is not None:
            self.halves.put(self.ring, slot, half, held)


def _fetch(halves, s: Shape, walk: Walk, pools: Pools, head, scratch) -> None:
    """By the third warpgroup: bring every tile of the walk into the ring, as soon as a slot is free; like
    `prefill_fold.fetch`."""
    keys, values = (
        _Source(side, of_side, *(scratch[f"{name}_{part}"] for part in ("s", "bar", "free")))
        for name, side, of_side in zip("kv", (pools.keys, pools.values), halves, strict=True)
    )
    steps, end = walk.packed
    packed = dataclasses.replace(walk, steps=steps, length=end)

    def step(n, carry):
        here, of_keys = carry
        slot = lax.rem(n, jnp.int32(s.stages))
        after = prefill_fold.places(s, packed, jnp.minimum(n + 1, steps - 1))
        prefill_fold.when_free(s, n, keys.free.at[slot])
        of_values = []
        if keys.halves is None:
            prefill_fold.copy(s, keys.side.pool, head, keys.ring.at[slot], keys.bar.at[slot], here)
        for half in range(2):
            keys.put(slot, half, of_keys[half])
            of_values.append(values.ahead(s, head, half, here))
        if keys.halves is not None:
            plgpu.commit_smem()
            prefill_fold.announce(s, keys.bar.at[slot])
        prefill_fold.when_free(s, n, values.free.at[slot])
        of_keys = []
        if values.halves is None:
            prefill_fold.copy_values(s, values.side.pool, head, slot, scratch, here)
        for half in range(2):
            values.put(slot, half, of_values[half])
            of_keys.append(keys.ahead(s, head, half, after))
        if values.halves is not None:
            plgpu.commit_smem()
            known = [(page, token, jnp.where(page < 0, 0, count)) for page, token, count in here]  # without a page, page 0 was read
            pl.when(prefill_fold.partly_written(s, known))(lambda: prefill_fold.forget_unwritten(s, values.ring.at[slot], known))
            prefill_fold.announce(s, values.bar.at[slot])
        return after, tuple(of_keys)

    @pl.when(steps > 0)
    def _():
        first = prefill_fold.places(s, packed, jnp.int32(0))
        lax.fori_loop(0, steps, step, (first, tuple(keys.ahead(s, head, half, first) for half in range(2))))

    if pools.row_of is not None:
        fetch_open(s, walk, (pools.keys.opened, pools.values.opened, pools.row_of), head, scratch)


def fetch_open(s: Shape, walk: Walk, opened, head, scratch) -> None:
    """By the third warpgroup: bring the tiles of a walk that are read from open pages, after those that are read as
    packed. opened: keys, values, and the row of each page."""
    keys, values, row_of_ref = opened

    def row_of(position):
        page = walk.page_of(position)
        return jnp.where(page < 0, -1, row_of_ref[jnp.maximum(page, 0)])

    steps, _ = walk.packed
    prefill_fold.fetch(s, dataclasses.replace(walk, page_of=row_of), (keys, values), head, scratch, begin=steps)
