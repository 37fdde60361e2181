"""Copies of a sequence's pages in device memory, for chunks of prefill, whose attention reads each page many times.

The pages that lie in host memory mostly follow each other there. So one plain copy brings a window of them, beside the
computation of the layer before. The other pages, and those that the chunk itself writes, are then put behind them.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from kvjax.cache.arrays import LatentPages, PagedKV
from kvjax.cache.host_pool import FrameCounts
from kvjax.cache.host_pool.mapped_memory import host_rows
from kvjax.cache.page_tables import staged_width
from pallas_kernels.core.pages import Pages

SPREAD = 2
"""Pages that lie farther apart in host memory than this, in frames for each page, are copied one by one."""
ROUNDED = 64
"""The number of pages that are copied one by one is a multiple of this, so that few programs are compiled."""
PLACES = 32
"""Windows begin, or end, at one of so many places of host memory, because each is kept for the life of the process
(`host_rows`)."""


@flax.struct.dataclass
class Staged:
    """Where a chunk finds the pages of a layer group. places: the row of each logical page among the copies, -1 where
    there is none. The pages of the frames `sources` are put into the rows from `tail` on, once the chunk has been
    written."""

    places: Int[Array, "1 V"]
    sources: Int[Array, "G"]
    tail: Int[Array, ""]


@flax.struct.dataclass
class WindowRows:
    """A layer's pages in a window. rows: a pytree of arrays in host memory, of `Window.rows` pages each. width: pages
    of the copies on the device, more than are copied; `complete` fills the rest."""

    rows: Any
    width: int = flax.struct.field(pytree_node=False)


@dataclasses.dataclass(frozen=True)
class Window:
    """Frames in host memory that are copied together. first: of all frames of the layer group. rows: how many. apart:
    how many other pages in host memory are copied one by one."""

    first: int
    rows: int
    apart: int

    def of(self, layer: PagedKV | LatentPages, width: int) -> WindowRows | None:
        """The layer's part of them, as arrays in host memory (`host_rows`); None if there are none. width: of all
        copies (`Sizes`)."""
        if not self.rows:
            return None
        return WindowRows(jax.tree.map(lambda pool: host_rows(pool, self.first, self.rows), layer.pages), width)

    def bytes_of(self, layer: PagedKV | LatentPages) -> int:
        """Bytes of the layer that are copied from host memory, together and one by one."""
        return (self.rows + self.apart) * sum(pool.nbytes // pool.shape[0] for pool in jax.tree.leaves(layer.pages))


@flax.struct.dataclass
class Copies:
    """What is copied for a slice of a model's layers. staged: by layer group. windows: for each layer, what is copied
    together (`Window.of`); None where nothing is, and for the first layer that needs some, whose copies are there
    already. following: the same for the first layer after the slice that needs some."""

    staged: dict[str, Staged]
    windows: tuple[Any, ...]
    following: Any


@dataclasses.dataclass(frozen=True)
class Sizes:
    """What a program that copies pages is compiled for. width: rows of all copies. others: pages that are copied one by
    one. rows: of the window; 0: there is none."""

    width: int
    others: int
    rows: int


def sizes(in_host: int, counts: FrameCounts, written: int) -> Sizes:
    """Sizes for a window of `in_host` pages and the pages that are copied one by one. written: as in `stage`."""
    others = -(-(counts.device + written) // ROUNDED) * ROUNDED  # they lie on the device, or are the chunk's
    return Sizes(staged_width(in_host + others), others, staged_width(in_host))


def sizes_alone(pages: int, counts: FrameCounts, written: int) -> Sizes | None:
    """Sizes for the last chunk of a prompt of so many pages whose sequence is the only one with pages in host memory,
    and which was written chunk by chunk; None: nothing is copied. Its pages there then are the first ones, one after
    the other. written: as in `stage`."""
    own = (pages - 1) // written * written
    in_host = own - min(own, max(0, counts.device - (pages - own)))
    if in_host:
        return _around(counts.border, counts.border + in_host, counts, written)[2]
    if pages - own <= counts.device:
        return None
    return Sizes(staged_width(pages), staged_width(pages), 0)


def stage(frames: Int[np.ndarray, " n"], own: int, counts: FrameCounts, written: int) -> tuple[Staged, Window]:
    """How to copy the pages of a sequence, whose frames are given, -1 where it has none. own: the first page that the
    chunk writes, or has written before; written: how many pages a chunk writes at most.

    The sizes of the result depend on the number of pages alone, unless these lie far apart. So few programs are
    compiled.
    """
    in_host = (frames >= counts.border) & (np.arange(len(frames)) < own)
    there = frames[in_host]
    low, high = (there.min(), there.max() + 1) if there.size else (counts.border, counts.border)
    if high - low > SPREAD * there.size or not there.size:
        width = staged_width(len(frames))
        places, sources = np.full(width, -1, np.int32), np.zeros(width, np.int32)
        places[: len(frames)] = np.where(frames >= 0, np.arange(len(frames)), -1)
        sources[: len(frames)] = np.maximum(frames, 0)
        return Staged(places[None], sources, np.int32(0)), Window(counts.border, 0, int((frames >= counts.border).sum()))
    first, tail, size = _around(int(low), int(high), counts, written)
    others = np.flatnonzero((frames >= 0) & ~in_host)
    places, sources = np.full(size.width, -1, np.int32), np.zeros(size.others, np.int32)
    places[: len(frames)] = np.where(in_host, frames - first, -1)
    places[others], sources[: len(others)] = tail + np.arange(len(others)), frames[others]
    return Staged(places[None], sources, np.int32(tail)), Window(first, size.rows, int((frames[others] >= counts.border).sum()))


def stage_with(size: Sizes, frames: Int[np.ndarray, " n"], counts: FrameCounts) -> tuple[Staged, Window]:
    """Copies of these sizes for a sequence of few pages, in these frames, with a window that it does not need: to
    compile a program."""
    places, sources = np.full(size.width, -1, np.int32), np.zeros(size.others, np.int32)
    places[: len(frames)], sources[: len(frames)] = np.arange(len(frames)), frames
    return Staged(places[None], sources, np.int32(0)), Window(counts.border, size.rows, 0)


def _around(low: int, high: int, counts: FrameCounts, written: int) -> tuple[int, int, Sizes]:
    """The window that brings the frames [low, high): its first frame, the row after those that it is needed for, and
    sizes."""
    step = max(1, counts.host // PLACES)
    low -= (low - counts.border) % step
    end = min(high + (counts.border - high) % step, counts.total)
    size = sizes(high - low, counts, written)
    if low + size.rows <= counts.total:
        return low, high - low, size
    if low - (end - size.width) >= size.others and end - size.width >= counts.border:
        return end - size.width, 0, dataclasses.replace(size, rows=size.width)
    return counts.border, counts.host, Sizes(staged_width(counts.host + size.others), size.others, counts.host)


@jax.jit
def copy_window(window: WindowRows) -> Any:
    """`copy_keys` and `copy_values`, as a program of its own."""
    return lengthen(copy_values(*copy_keys(window, ()), ()), window.width)


def copy_keys(window: WindowRows, after: Any) -> tuple[Any, Any]:
    """A window's keys, or latents, on their way to device memory, and what is still to be done (`copy_values`). after:
    arrays that are computed before the copy begins."""
    (keys, *values), tree = jax.tree.flatten(window.rows)
    return _copied(keys, after), (values, tree, window.width)


def copy_values(keys: Any, later: Any, after: Any) -> Any:
    """A window on its way to device memory, in the tree that it came in. Keys are as long as all pages that attention
    reads, values as the window (`lengthen`). after: arrays that are computed before the copy begins.

    Memory: the longer arrays are what attention reads (`complete`), and what a slice of layers hands to the next one in
    the same memory. Windows that were handed on, and put into longer arrays for each layer, took 1 GB more for a
    million tokens. The copy of values begins once the keys are longer: so it takes the memory of the shorter array.
    """
    values, tree, width = later
    keys = lengthen(keys, width)
    return jax.tree.unflatten(tree, [keys, *(_copied(each, (after, keys)) for each in values)])


def lengthen(copies: Any, width: int) -> Any:
    """Copies of `width` rows: those that are shorter get zeros. None stays None."""
    return jax.tree.map(lambda rows: jnp.pad(rows, ((0, width - rows.shape[0]), *[(0, 0)] * (rows.ndim - 1))), copies)


def _copied(array: Array, after: Any) -> Array:
    array, _ = jax.lax.optimization_barrier((array, after))
    return jax.device_put(array, jax.memory.Space.Device)


def complete(copies: Pages | None, pages: Pages, staged: Staged) -> Pages:
    """The pages of a sequence: arrays `[V, K, page_size, D]`. copies: of a window, lengthened; None: there is none.
    pages: of the layer, written. Its open pages stay: only where they lie differs."""

    def put(rows: Array, others: Array) -> Array:
        return jax.lax.dynamic_update_slice_in_dim(rows, others, staged.tail, axis=0)

    opened, pages = pages.open, pages.replace(open=None)
    others = jax.tree.map(lambda pool: pool[staged.sources], pages)
    found = others if copies is None else jax.tree.map(put, copies, others)
    if opened is not None:  # the chunk's own pages are never in the window
        row_of = put(jnp.full(staged.places.shape[1], -1, jnp.int32), opened.row_of[staged.sources])
        found = found.replace(open=opened.replace(row_of=row_of))
    return jax.lax.optimization_barrier(found)  # without it XLA may copy a page again for each tile that reads it
