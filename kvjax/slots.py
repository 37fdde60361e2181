"""The rows of a decode batch: their page tables and lengths stay on the device from step to step.

A step moves lengths on by itself. The host adds the page that a row writes to next, and only when the row comes to a new page, so that a
step costs the host the same however long the sequences are.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from kvjax.cache import Cache, CacheSpec, LayerCache
from kvjax.cache.tables import page_table, table_width
from kvjax.sequences import CachedSequence

NextPages = dict[str, Int[Array, "B 2"]]
"""By layer group: the page that each row writes its next token to, and the page after it; -1 where there is none."""


class Slots:
    """A decode batch of `size` slots.

    `fill` puts sequences into them, `cache` gives what a step reads, `advance` takes back what it returns.

    Sequences may change between steps in any way (`truncate`, `extend`): `fill` finds the rows that did.
    """

    def __init__(self, spec: CacheSpec, size: int):
        self.spec, self.size = spec, size
        self.sequences: list[CachedSequence | None] = [None] * size
        self.live: list[CachedSequence] = []
        self._filled = np.zeros(size, bool)
        self._pages: list[dict[str, list[int]] | None] = [None] * size
        self._lengths = np.zeros(size, np.int32)
        self._room = np.zeros(size, np.int64)  # tokens that fit into the pages of a row, as far as known here
        self._next = {group.name: np.full((size, 2), -1, np.int32) for group in spec.groups}
        self._at = {group.name: np.full(size, -1, np.int32) for group in spec.groups}  # logical page that `_next` begins with
        self._dirty: set[int] = set()
        self._host_tables: dict[str, Int[np.ndarray, "B M"]] = {}
        self._tables: dict[str, Int[Array, "B M"]] | None = None
        self._device_lengths: Int[Array, "B"] | None = None
        self._named: NextPages | None = None  # `_next` as a step is given it: the call of the step moves it to the device
        self.active: Bool[Array, "B"] = jnp.zeros(size, bool)

    def fill(self, sequences: Sequence[CachedSequence | None]) -> None:
        """Put these sequences into the slots, None: an empty one. What has not changed since the last step stays on the device."""
        lengths, pages = self._lengths.tolist(), self._pages
        changed = [
            row
            for row, each in enumerate(sequences)
            if each is not self.sequences[row] or (each is not None and (each.length != lengths[row] or each.pages is not pages[row]))
        ]
        if not changed:
            return
        for row in changed:
            each = sequences[row]
            self.sequences[row], self._pages[row] = each, None if each is None else each.pages
            self._lengths[row], self._room[row] = 0 if each is None else each.length, 0
            for name in self._next:
                self._next[name][row], self._at[name][row] = -1, -1
        filled = np.array([each is not None for each in self.sequences])
        if not np.array_equal(filled, self._filled):
            self._filled, self.active = filled, jnp.asarray(filled)
        self.live = [each for each in self.sequences if each is not None]
        self._dirty.update(changed)
        self._named = None

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence."""
        return int(self._lengths.max())

    def lacking(self, num_tokens: int) -> list[CachedSequence]:
        """The sequences without pages for so many more tokens."""
        short = []
        for row in np.flatnonzero(self._filled & (self._lengths + num_tokens > self._room)).tolist():
            self._look_at_pages(row)
            if self._lengths[row] + num_tokens > self._room[row]:
                short.append(self.sequences[row])
        return short

    def cache(self, layers: tuple[LayerCache, ...], num_tokens: int) -> tuple[Cache, NextPages]:
        """What a step of `num_tokens` tokens reads and writes, and the pages that `name_pages` adds to its tables. Every sequence must have
        its pages. The step DONATES page tables and lengths; call `advance` with what it returns, or `forget` if it fails."""
        for row in np.flatnonzero(self._filled & (self._lengths + num_tokens > self._room)).tolist():
            self._look_at_pages(row)
        self._name_next()
        self._place_rows(num_tokens)
        if self._named is None:
            self._named = {name: ids.copy() for name, ids in self._next.items()}  # a transfer may be under way when `_next` changes
        return Cache(layers, self._tables, self._device_lengths, self.spec), self._named

    def advance(self, cache: Cache, written: int | Int[np.ndarray, "B"]) -> None:
        """Keep a step's tables and lengths. written: tokens that each filled slot is longer by."""
        self._tables, self._device_lengths = cache.page_tables, cache.lengths
        np.add(self._lengths, written, out=self._lengths, where=self._filled, casting="unsafe")

    def forget(self) -> None:
        """Make the device's arrays anew for the next step."""
        self._tables = None

    def _look_at_pages(self, row: int) -> None:
        """Learn which pages a sequence has got since this was last asked."""
        pages = self._pages[row]
        self._room[row] = min(len(pages[group.name]) * group.page_size for group in self.spec.groups)
        for at in self._at.values():
            at[row] = -1

    def _name_next(self) -> None:
        """Bring `_next` up to date for rows that come to a new page."""
        for group in self.spec.groups:
            now, at, following = self._lengths // group.page_size, self._at[group.name], self._next[group.name]
            for row in np.flatnonzero(self._filled & (now != at)).tolist():
                ids, first = self._pages[row][group.name], int(now[row])
                following[row] = (*ids[first : first + 2], -1, -1)[:2]
                at[row] = first
                if (table := self._host_tables.get(group.name)) is not None:
                    table[row, first : first + 2] = following[row][: max(0, table.shape[1] - first)]
                self._named = None

    def _place_rows(self, num_tokens: int) -> None:
        """Put changed rows into the tables."""
        widths = {group.name: table_width(-(-(self.longest + num_tokens) // group.page_size)) for group in self.spec.groups}
        tables = self._host_tables
        if any(name not in tables or tables[name].shape[1] != width for name, width in widths.items()):
            rows = {name: [pages[name] if pages else () for pages in self._pages] for name in widths}
            self._host_tables = tables = {name: page_table(lists, widths[name]) for name, lists in rows.items()}
            self._tables = None
        elif self._dirty:
            for row in self._dirty:
                for name, table in tables.items():
                    pages = self._pages[row]
                    table[row] = page_table([pages[name] if pages else ()], widths[name])[0]
            self._tables = None
        if self._tables is None:
            # Copies: a transfer may be under way when what is here changes in place, and a CPU array may be this memory.
            copies = {name: table.copy() for name, table in tables.items()}, self._lengths.copy()
            self._tables, self._device_lengths = jax.device_put(copies)
        self._dirty.clear()


def name_pages(cache: Cache, following: NextPages) -> Cache:
    """The cache with the pages that its rows write to next in their page tables."""
    tables = dict(cache.page_tables)
    rows = jnp.arange(cache.lengths.shape[0])[:, None]
    for group in cache.spec.groups:
        places = cache.lengths[:, None] // group.page_size + jnp.arange(2)
        tables[group.name] = tables[group.name].at[rows, places].set(following[group.name], mode="drop")
    return cache.replace(page_tables=tables)


def in_bucket(sequences: Sequence[CachedSequence], buckets: Sequence[int]) -> list[CachedSequence | None]:
    """The sequences, padded with None to the smallest batch bucket that holds them. ValueError for none, or more than the largest holds."""
    if not sequences:
        raise ValueError("a step needs at least one sequence")
    bucket = next((size for size in buckets if size >= len(sequences)), None)
    if bucket is None:
        raise ValueError(f"{len(sequences)} sequences are more than the largest batch bucket, {buckets[-1]}")
    return [*sequences, *([None] * (bucket - len(sequences)))]
