"""The rows of a decode batch: their page tables and lengths stay on the device from step to step.

A step updates lengths on the device, and one count on the host. The host only adds a row's next page, when the row
comes to a new page. So the host's time per step depends neither on the number of rows nor on the length of sequences.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int, Int32

from kvjax.cache import Cache, CacheSpec, pages_of_step
from kvjax.cache.page_tables import narrower, page_table, table_width
from kvjax.cache.pool import Pool
from kvjax.engine.sequence import CachedSequence, Growth
from kvjax.engine.step_output import count_tokens_that_stay

if TYPE_CHECKING:
    from kvjax.policies.decode import DecodePolicy

NextPages = dict[str, Int[Array, "B n"]]
"""By layer group: a place in each row's page table, and the pages from there on, as many as a step may write to
(`pages_of_step`), -1 where there is none."""


Written = int | Int[np.ndarray, "B"]
"""How many tokens a step, or a launch of several, writes in every row of a batch, or row by row."""


class DecodeBatch:
    """A decode batch of `size` slots.

    `hold` says whether sequences are in the slots, and `fill` puts them there. `cache` gives a step's input, `advance`
    takes its output.

    Sequences may change between steps in any way (`truncate`, `extend`): then they leave the slots' `Growth`, by which
    `hold` and `fill` find them.

    Rounds of drafting may be launched before the host has read how many tokens the rounds before wrote
    (`launched_ahead`). Then the sequences are shorter here than on the device, by `unread` tokens at most, until
    `settle`.

    put: puts arrays where a step reads them (`Pool.put`). rows: slots with a sequence, ascending. live: their
    sequences. longest: tokens of the longest.
    """

    def __init__(self, spec: CacheSpec, size: int, put: Callable[[Any], Any]):
        self.spec, self.size, self._put = spec, size, put
        self.sequences: tuple[CachedSequence | None, ...] = (None,) * size
        self.rows: list[int] = []
        self.live: list[CachedSequence] = []
        self.longest = 0
        self._growth = Growth()  # of `live`
        self._page_ends: list[int] = []  # of `live`: up to what growth `_next_pages` has their pages
        self._nearest_end = 0  # the smallest of these
        self._next_pages = {group.name: _no_pages(size, pages_of_step(group.page_size)) for group in spec.groups}
        self._device_next_pages: NextPages | None = None  # `_next_pages` on the device
        self._host_tables: dict[str, Int[np.ndarray, "B M"]] = {}
        self._holds = 0, 0  # bounds of the longest row for the current table width: more than, at most
        self._dirty: set[int] = set()
        self._tables: dict[str, Int[Array, "B M"]] | None = None
        self._device_lengths: Int[Array, "B"] | None = None
        self._unread: list[tuple[Int32[Array, "N B C"], int]] = []  # results of rounds, and how many tokens they wrote at most
        self.active: Bool[Array, "B"] = put(np.zeros(size, bool))

    def hold(self, sequences: Sequence[CachedSequence | None]) -> bool:
        """Whether these sequences are in the slots, unchanged since the last step. A freed or suspended sequence counts
        as changed."""
        # The same tuple has the same entries. A list may have changed.
        same = sequences is self.sequences or all(map(operator.is_, sequences, self.sequences))
        return same and self._growth.whole

    def fill(self, sequences: Sequence[CachedSequence | None]) -> None:
        """Put these sequences into the slots (None: an empty slot). Rows that have not changed since the last step stay
        on the device."""
        rows = [row for row, each in enumerate(sequences) if each is not None]
        if rows != self.rows:  # first, because it may fail
            self.active = self._put(np.array([each is not None for each in sequences]))
        known = dict(zip(self.rows, zip(self.live, self._page_ends, strict=True), strict=True))
        before, self._growth = self._growth, Growth()
        self.sequences = tuple(sequences)
        self._dirty.update(known.keys() - rows)
        self.rows, self.live, self._page_ends = rows, [sequences[row] for row in rows], []
        for row, each in zip(rows, self.live, strict=True):
            last, limit = known.get(row, (None, 0))
            if each is last and each.growth is before:
                self._page_ends.append(limit - before.tokens)
            else:
                self._dirty.add(row)
                self._page_ends.append(0)
            each.grow_with(self._growth)
        self.longest, self._nearest_end, self._device_next_pages = max(self.lengths, default=0), min(self._page_ends, default=0), None
        for following in self._next_pages.values():
            following[list(self._dirty)] = _no_pages(len(self._dirty), following.shape[1] - 1)

    @property
    def lengths(self) -> list[int]:
        """Tokens of each sequence in `live`."""
        return [each.length for each in self.live]

    def sealed(self, group: str) -> Iterator[int]:
        """Pages of a layer group that the sequences hold and have filled, the newest of each first."""
        (page_size,) = [each.page_size for each in self.spec.groups if each.name == group]
        for sequence in self.live:
            yield from (page for page in reversed(sequence.pages[group][: sequence.length // page_size]) if page >= 0)

    def lacking(self, written: Written) -> tuple[list[CachedSequence], list[int]]:
        """The sequences that lack pages for so many more tokens, and how many these are for each. written: for all
        slots, or slot by slot."""
        grown = [(self.live[place], self.unread + of_slot(written, self.rows[place])) for place in self._at_page_end(_most(written))]
        lacking = [(each, count) for each, count in grown if each.length + count > self._room(each)]
        return [each for each, _ in lacking], [count for _, count in lacking]

    def longest_after(self, written: Written) -> int:
        """Tokens of the longest sequence after so many more, at most."""
        if isinstance(written, int):
            return self.longest + self.unread + written
        return self.unread + max(
            (length + count for length, count in zip(self.lengths, written[self.rows].tolist(), strict=True)), default=0
        )

    def cache(self, pool: Pool, written: Written, reach: int = 0) -> tuple[Cache, NextPages]:
        """The cache that a step of so many tokens reads and writes, and the pages that `name_pages` adds to its tables.
        reach: tokens for which the tables have room at least.
        Every sequence must have its pages. The step DONATES all of it: call `advance` with its result, or `forget` if
        it fails."""
        if near := self._at_page_end(_most(written)):
            for place in near:
                sequence = self.live[place]
                self._bind_next_pages(pool, sequence)
                self._page_ends[place] = self._growth.tokens + self._set_next_pages(self.rows[place], sequence) - sequence.length
            self._nearest_end = min(self._page_ends)
        longest = max(self.longest_after(written), reach)
        if self._dirty or not self._holds[0] < longest <= self._holds[1]:
            self._place_rows(longest)
        if self._tables is None:
            lengths = np.zeros(self.size, np.int32)
            lengths[self.rows] = self.lengths
            # Copies, because these arrays change in place while a transfer may be running, and a CPU array may share
            # this memory.
            self._tables, self._device_lengths = self._put(({name: table.copy() for name, table in self._host_tables.items()}, lengths))
        if self._device_next_pages is None:
            self._device_next_pages = self._put({name: ids.copy() for name, ids in self._next_pages.items()})  # as above
        return pool.cache(self.spec, self._tables, self._device_lengths), self._device_next_pages

    def advance(self, cache: Cache, written: Written) -> None:
        """Keep a step's tables, and let the sequences grow. written: tokens by which each filled slot grew."""
        self._keep(cache)
        if isinstance(written, int):
            self._growth.tokens += written
            self.longest += written if self.live else 0
        else:
            self._grow(written)

    @property
    def unread(self) -> int:
        """How many more tokens than the host knows of the device may have written in a row."""
        return sum([most for _, most in self._unread])

    def has_room_ahead(self, most: int) -> bool:
        """Whether rounds that write so many tokens of a row may be launched before those in flight are read: a launch
        takes its pages from where the host knows a row to end."""
        return all(self.unread + most <= 1 + (pages_of_step(each.page_size) - 1) * each.page_size for each in self.spec.groups)

    def launched_ahead(self, cache: Cache, packed: Int32[Array, "N B C"], most: int) -> None:
        """Keep the tables of rounds of drafting; `settle` finds in `packed` how many tokens stayed. most: that they
        wrote in a row at most."""
        self._keep(cache)
        self._unread.append((packed, most))

    def settle(self, last: Int32[Array, "N B C"] | None = None) -> None:
        """Wait for rounds that were launched ahead, and let the sequences grow. last: up to those with these results;
        None: all."""
        if last is not None and all(packed is not last for packed, _ in self._unread):
            return
        while self._unread:
            packed, _ = self._unread[0]
            try:
                stayed = count_tokens_that_stay(np.asarray(packed))
            except BaseException:
                self._unread.clear()
                self.forget()
                raise
            del self._unread[0]
            self._grow(stayed)
            if packed is last:
                return

    def forget(self) -> None:
        """Rebuild the device's arrays for the next step."""
        self._tables = None

    def _keep(self, cache: Cache) -> None:
        self._tables, self._device_lengths = cache.page_tables, cache.lengths
        if not self._growth.tokens:  # later steps find it so
            for sequence in self.live:
                sequence.logits = sequence.open_chunk = None

    def _grow(self, written: Int[np.ndarray, "B"]) -> None:
        for place, (sequence, count) in enumerate(zip(self.live, written[self.rows].tolist(), strict=True)):
            if sequence.growth is self._growth:  # else it was freed before its rounds were read
                sequence.grow(count)
                self._page_ends[place] -= count
        self.longest, self._nearest_end = max(self.lengths, default=0), min(self._page_ends, default=0)

    def _at_page_end(self, num_tokens: int) -> list[int]:
        """Places in `live` of the rows that so many more tokens would take beyond their limit."""
        grown = self._growth.tokens + self.unread + num_tokens
        return [place for place, limit in enumerate(self._page_ends) if grown > limit] if grown > self._nearest_end else []

    def _room(self, sequence: CachedSequence) -> int:
        """Tokens that fit into a sequence's pages."""
        return min([len(sequence.pages[group.name]) * group.page_size for group in self.spec.groups])

    def _bind_next_pages(self, pool: Pool, sequence: CachedSequence) -> None:
        """Give the page of a sequence's next token, and the pages after it that a step may write to, frames."""
        if pool.frames:
            places = {group.name: sequence.length // group.page_size for group in self.spec.groups}
            following = {name: sequence.pages[name][first : first + self._next_pages[name].shape[1] - 1] for name, first in places.items()}
            pool.bind(following, wait=False)

    def _set_next_pages(self, row: int, sequence: CachedSequence) -> int:
        """Update `_next_pages` of a row from its sequence's pages, which must have been taken. Returns the row's limit:
        the end of a page."""
        limits = []
        for group in self.spec.groups:
            ids, first = sequence.pages[group.name], sequence.length // group.page_size
            known = self._next_pages[group.name]
            count = known.shape[1] - 1
            following = [*ids[first : first + count], *[-1] * count][:count]
            limits.append((first + 1) * group.page_size)
            if known[row].tolist() != [first, *following]:
                known[row], self._device_next_pages = [first, *following], None
            if (table := self._host_tables.get(group.name)) is not None:
                table[row, first : first + count] = following[: max(0, table.shape[1] - first)]
        return min(limits)

    def _place_rows(self, longest: int) -> None:
        """Put changed rows into the tables. Their width is what a row of `longest` tokens needs."""
        bounds = []
        for group in self.spec.groups:
            width = table_width(-(-longest // group.page_size))
            bounds.append((narrower(width) * group.page_size, width * group.page_size))
            table = self._host_tables.get(group.name)
            if table is None or table.shape[1] != width:
                self._host_tables[group.name] = page_table([each.pages[group.name] if each else () for each in self.sequences], width)
                self._tables = None
            elif self._dirty:
                rows = list(self._dirty)
                changed = [self.sequences[row] for row in rows]
                table[rows] = page_table([each.pages[group.name] if each else () for each in changed], width)
                self._tables = None
        self._holds = max(low for low, _ in bounds), min(high for _, high in bounds)
        self._dirty.clear()


def _most(written: Written) -> int:
    return written if isinstance(written, int) else int(written.max())


@dataclasses.dataclass(eq=False, slots=True)
class Launched:
    """A decode step that was launched: its policy, its results other than the cache, the policy's states, and the
    cache."""

    policy: DecodePolicy
    slots: DecodeBatch
    results: list[Any]
    states: tuple[Any, ...]
    cache: Cache
    steps: int = 1


def of_slot(written: Written, slot: int) -> int:
    """How many tokens are written in a slot."""
    return written if isinstance(written, int) else int(written[slot])


def name_pages(cache: Cache, following: NextPages) -> Cache:
    """The cache, with the next pages of its rows added to the page tables."""
    tables = dict(cache.page_tables)
    rows = jnp.arange(cache.lengths.shape[0])[:, None]
    for name, known in following.items():
        places = known[:, :1] + jnp.arange(known.shape[1] - 1)
        tables[name] = tables[name].at[rows, places].set(known[:, 1:], mode="drop")
    return cache.replace(page_tables=tables)


def _no_pages(rows: int, count: int) -> Int32[np.ndarray, "B n"]:
    """`NextPages` of rows that have none."""
    none = np.full((rows, 1 + count), -1, np.int32)
    none[:, 0] = 0
    return none


def in_bucket(sequences: Sequence[CachedSequence], buckets: Sequence[int]) -> list[CachedSequence | None]:
    """The sequences, padded with None to the smallest batch bucket that holds them. ValueError for no sequence, or too
    many."""
    if not sequences:
        raise ValueError("a step needs at least one sequence")
    bucket = next((size for size in buckets if size >= len(sequences)), None)
    if bucket is None:
        raise ValueError(f"{len(sequences)} sequences are more than the largest batch bucket, {buckets[-1]}")
    return [*sequences, *([None] * (bucket - len(sequences)))]
