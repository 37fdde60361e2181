"""Copies of a sequence's pages in device memory, for chunks of prefill, whose attention reads each page many times.

The pages that lie in host memory mostly follow each other there. So one plain copy brings a window of them, and the copies of a layer run
beside the layer before it. The other pages, and those that the chunk itself writes, are then put into rows of the window that the sequence
does not need.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from kvjax.cache.spanning import FrameCounts, host_rows
from kvjax.cache.tables import staged_width
from kvjax.cache.types import LatentPages, PagedKV


@flax.struct.dataclass
class Staged:
    """Where a chunk finds the pages of a layer group. places: the row of each logical page among the copies, -1 where there is none.
    Row targets[i] gets the page of frame sources[i] once the chunk has been written; targets from V on are padding."""

    places: Int[Array, "1 V"]
    sources: Int[Array, "G"]
    targets: Int[Array, "G"]


@dataclasses.dataclass(frozen=True)
class Window:
    """Frames in host memory that are copied together. first: of all frames of the layer group. rows: how many."""

    first: int
    rows: int

    def of(self, layer: PagedKV | LatentPages) -> Any:
        """The layer's part of them, as arrays in host memory; see `host_rows`."""
        return jax.tree.map(lambda pool: host_rows(pool, self.first, self.rows), layer.pages)


def stage(frames: Int[np.ndarray, " n"], own: int, counts: FrameCounts, written: int) -> tuple[Staged, Window]:
    """How to copy the pages of a sequence, whose frames are given, -1 where it has none. own: the first page that the chunk writes, or has
    written before; written: how many pages a chunk writes at most.

    The sizes of the result depend on the number of pages alone, unless the pages lie far apart. So few programs are compiled.
    """
    width = staged_width(len(frames))
    rows = min(width, counts.host)
    earlier = np.arange(len(frames)) < own
    there = np.sort(frames[earlier & (frames >= counts.border)]) - counts.border
    first = counts.border + _best_window(there, rows, counts.host)
    inside = earlier & (frames >= first) & (frames < first + rows)
    places = np.full(width, -1, np.int32)
    places[: len(frames)][inside] = frames[inside] - first
    outside = np.flatnonzero((frames >= 0) & ~inside)
    free = np.setdiff1d(np.arange(width), places[places >= 0])
    places[outside] = free[: len(outside)]
    size = min(width, staged_width(counts.device + written))
    size = size if len(outside) <= size else width
    sources, targets = np.zeros(size, np.int32), width + np.arange(size, dtype=np.int32)
    sources[: len(outside)], targets[: len(outside)] = frames[outside], places[outside]
    return Staged(places[None], sources, targets), Window(first, rows)


STEPS = 8
"""A window begins at a multiple of its size divided by this. So windows are few, and each can be kept (`host_rows`)."""


def _best_window(there: Int[np.ndarray, " n"], rows: int, total: int) -> int:
    """The beginning of a window of so many rows that holds as many of these sorted numbers as any other that begins at a step. total: the
    window ends before it."""
    step = max(1, rows // STEPS)
    starts = np.append(np.arange(0, total - rows, step), total - rows)
    held = np.searchsorted(there, starts + rows) - np.searchsorted(there, starts)
    return int(starts[np.argmax(held)])


def copy_window(window: Any, after: Any) -> Any:
    """A window's pages in device memory: arrays `[rows, K, page_size, D]`. after: arrays that are computed before the copy begins.

    XLA begins a copy a few operations before its result is needed. The arrays are copied one after the other, so that the first copy begins
    earlier.
    """
    leaves, tree = jax.tree.flatten(window)
    copies = []
    for each in leaves:
        each, after = jax.lax.optimization_barrier((each, after))
        after = jax.device_put(each, jax.memory.Space.Device)
        copies.append(after)
    return jax.tree.unflatten(tree, copies)


def complete(copies: Any, pages: Any, staged: Staged) -> Any:
    """A window's pages with those of `staged.sources` in their rows: arrays `[V, K, page_size, D]`. pages: of the layer, written."""
    width = staged.places.shape[1]

    def put(rows: Array, pool: Array) -> Array:
        rows = jnp.pad(rows, ((0, width - rows.shape[0]), *[(0, 0)] * (rows.ndim - 1)))
        return rows.at[staged.targets].set(pool[staged.sources], mode="drop", unique_indices=True)

    # Without the barrier XLA may copy a page again for each tile that reads it.
    return jax.lax.optimization_barrier(jax.tree.map(put, copies, pages))
