"""The pages that sequences hold in each layer group, on the host: taken as sequences grow, given back as pages leave a
window."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np
from jax.sharding import Mesh
from jaxtyping import Int

from kvjax.axes import ONE_DEVICE, Shards
from kvjax.cache.allocator import PageAllocator
from kvjax.cache.arrays import LayerCache, made_on
from kvjax.cache.host_pool import FrameCounts
from kvjax.cache.index_spec import IndexSpec
from kvjax.cache.page_tables import page_table
from kvjax.cache.spec import MAX_STEP_TOKENS, WHOLE, CacheSpec, GroupSpec
from pallas_kernels.cache.place_tiles import WAYS

if TYPE_CHECKING:
    from kvjax.cache.host_pool.frame_table import Frames

HOT_SHARE = 0.75
"""Share of the device's frames that holds copies of the host's tiles, where pages lie in host memory."""

PageIds = dict[str, list[int]]
"""The pages of one sequence, by group: logical page -> page id, including reserved ones; -1 for a page that a window
gave back."""


Numbers = Mapping[str, Sequence[int]]
"""Logical pages by group."""

Reach = tuple[int, int]
"""(sink_tokens, window_tokens): the first tokens of a sequence, and the last ones up to a query, its own included."""


class Holder(Protocol):
    """A sequence: its number of written tokens, its pages, and what it keeps in groups without a window of their own;
    None: every page.

    firsts: by layer group, on which device of a mesh its first page is to lie if it holds no page of the group; where a
    group is missing, where most pages are free.
    """

    length: int
    pages: PageIds

    @property
    def reach(self) -> Reach | None: ...

    @property
    def firsts(self) -> Mapping[str, int]: ...


Wanted = tuple[Holder | None, Sequence[int]]
"""A sequence, None for one that holds no page, and the numbers of logical pages that it is to get."""


class PageManager:
    """The pages of every layer group, and the sequences that hold them.

    totals: pages of each group. host: how many of them lie in host memory, in groups that keep all tokens. chunk:
    tokens that prefill writes at a time; a window group keeps the pages that the next token's chunk reads. hot: whether
    steps list pages, so that a part of the device's is worth more as a hot buffer. reach: what every new sequence keeps
    in groups without a window; None: every page. has_windows: whether any group gives pages back by itself. frames: of
    the groups with pages in host memory. on_short: called before OutOfPages is raised; it may give pages back. mesh:
    over whose devices heads are split and pages sharded; None: one device. shards: the same, with the pages of each
    device.
    """

    def __init__(
        self,
        spec: CacheSpec,
        totals: Mapping[str, int],
        host: int,
        chunk: int,
        *,
        hot: bool,
        reach: Reach | None = None,
        mesh: Mesh | None = None,
    ):
        self.spec, self.chunk, self.reach, totals = spec, chunk, reach, dict(totals)
        self.frames: dict[str, Frames] = {}
        for group in spec.groups if host else ():
            if group.window is None and group.page_size != WHOLE:
                from kvjax.cache.host_pool.frame_table import Frames

                counts = frame_counts(totals[group.name], host, pages_for(chunk, group), hot=hot)
                totals[group.name], self.frames[group.name] = counts.device + counts.host, Frames(counts, pages_for(chunk, group))
        self.shards = ONE_DEVICE if mesh is None else _shards(mesh, spec, totals, chunk)
        self.allocators = {group.name: self._allocator(group.name, totals[group.name]) for group in spec.groups}
        for name, frames in self.frames.items():
            pages = self.allocators[name]
            pages.on_free, pages.on_idle, pages.on_used, frames.evict = frames.release, frames.idle, frames.used, pages.evict
        self.has_windows = any(group.window is not None for group in spec.groups)
        self.on_short: Callable[[], None] | None = None

    def empty(self, indexes: tuple[IndexSpec, ...]) -> tuple[LayerCache | None, ...]:
        """The arrays of all pages, as `CacheSpec.empty` makes them. MemoryError, NotImplementedError: see
        `kvjax.cache.host_pool.mapped_memory.empty`."""
        totals = {name: each.total for name, each in self.allocators.items()}
        make = functools.partial(self.spec.empty, totals, indexes, {name: frames.counts for name, frames in self.frames.items()})
        return made_on(self.shards, make)

    @property
    def used(self) -> dict[str, int]:
        """Pages of each group that sequences hold, each counted once."""
        return {name: each.total - each.free for name, each in self.allocators.items()}

    def describe(self) -> str:
        """How many of the pages with tokens are in use, in words. Rows are left out."""
        paged = [group for group in self.spec.groups if group.page_size != WHOLE]
        used, total = (
            sum(counts) for counts in zip(*((self.used[each.name], self.allocators[each.name].total) for each in paged), strict=True)
        )
        return f"{used:,} of {total:,} pages of {paged[0].page_size} tokens in use"

    @property
    def longest(self) -> float:
        """Tokens of the longest sequence that the whole pool can hold; infinite if there is no limit."""
        bounds = [float("inf")]
        for group in self.spec.groups:
            total = self.allocators[group.name].total
            if most_pages(group, self.chunk, self.reach) > total:
                bounds.append(total * group.page_size)
        return min(bounds)

    def new(self) -> PageIds:
        """The pages of a sequence without tokens."""
        return {group.name: [] for group in self.spec.groups}

    def reserve(self, sequences: Sequence[Holder], tokens: int | Sequence[int]) -> None:
        """Take the pages that `tokens` more tokens of every sequence need, or raise OutOfPages and take none. Window
        groups first give back pages that no later query reads. They take at most the pages of the next token's chunk,
        or of one step. tokens: of every sequence, or one number for each."""
        for sequence in sequences:
            self.give_back(sequence)
        counts = [tokens] * len(sequences) if isinstance(tokens, int) else tokens
        grown = list(zip(sequences, counts, strict=True))
        dealt = self._checked(lambda group: [(each, self._next(each, group, self._missing(group, each, count))) for each, count in grown])
        for name, parts in dealt.items():
            for sequence, each in zip(sequences, parts, strict=True):
                sequence.pages[name] += self.allocators[name].take_from(each)

    def check_new(self, tokens: Sequence[int]) -> None:
        """OutOfPages unless new sequences of so many tokens fit, one after the other."""
        needed = [self.needed(count) for count in tokens]
        self._checked(lambda group: [(None, range(each[group.name])) for each in needed])

    def check_room(self, tokens: int, sequence: Holder | None, held: Numbers | None, growing: Sequence[Holder]) -> None:
        """OutOfPages unless a sequence fits that grows to `tokens` tokens, and those of `growing` find a page more
        each.

        sequence: None: a new one. held: if it is suspended, the logical pages that it gets back.
        """
        needed = self.needed(tokens)

        def wanted(group: GroupSpec) -> list[Wanted]:
            others = [] if group.page_size == WHOLE else [(each, self._next(each, group, 1)) for each in growing]
            if held is not None:
                back, length = held[group.name], pages_for(sequence.length, group)
                return [(None, [*back, *range(length, pages_for(tokens, group))]), *others]
            if sequence is None:
                return [(None, range(needed[group.name])), *others]
            lacking = needed[group.name] - sum(page >= 0 for page in sequence.pages[group.name])
            return [(sequence, self._next(sequence, group, max(0, lacking))), *others]

        self._checked(wanted)

    def check_parts(self, needed: Mapping[str, Sequence[int]]) -> None:
        """OutOfPages unless every group has one free page on each of these devices."""
        if self.on_short is not None and any(self.allocators[name].lacking(parts) for name, parts in needed.items()):
            self.on_short()
        for name, parts in needed.items():
            if (allocator := self.allocators[name]).lacking(parts):
                raise allocator.out_of_pages(parts, name)

    def needed(self, tokens: int) -> dict[str, int]:
        """The most pages of each group that a new sequence of `tokens` tokens takes."""
        most = {group.name: most_pages(group, self.chunk, self.reach) for group in self.spec.groups}
        return {group.name: min(pages_for(tokens, group), most[group.name]) for group in self.spec.groups}

    def give_back(self, sequence: Holder, *, narrowed: bool = False) -> None:
        """Release the pages that no later query reads: those between the sinks and the window of the chunk that holds
        the next token.

        narrowed: the sequence's reach has changed, so pages before one that was given back may still be there, as sinks
        of a wider reach. False: none are, so the search ends at the first gap, and does not grow with the sequence.
        """
        start = sequence.length // self.chunk * self.chunk
        for group in self.spec.groups:
            ids, sinks = sequence.pages[group.name], sink_pages(group, sequence.reach)
            for page in range(first_read(group, start, sequence.reach) - 1, sinks - 1, -1):
                if ids[page] >= 0:
                    self.allocators[group.name].release([ids[page]])
                    ids[page] = -1
                elif not narrowed:
                    break

    def release(self, sequence: Holder, numbers: Iterable[int]) -> None:
        """Release these logical pages, if the sequence holds them, in every group that keeps all tokens."""
        for group in self.spec.groups:
            if group.window is None and group.page_size != WHOLE:
                ids = sequence.pages[group.name]
                held = [number for number in numbers if number < len(ids) and ids[number] >= 0]
                self.allocators[group.name].release([ids[number] for number in held])
                for number in held:
                    ids[number] = -1

    def keep(self, sequence: Holder, counts: Mapping[str, int]) -> None:
        """Release all pages of each group after the first `counts`. `sequence.pages` becomes a new dict. By this, slots
        notice that page tables on the device are out of date: the sequence may grow to the same length again in other
        pages."""
        kept = {name: ids[: counts[name]] if name in counts else ids for name, ids in sequence.pages.items()}
        if any(len(ids) < len(sequence.pages[name]) for name, ids in kept.items()):
            for name, ids in kept.items():
                self.allocators[name].release([page for page in sequence.pages[name][len(ids) :] if page >= 0])
            sequence.pages = kept

    def keep_written(self, sequence: Holder, length: int, least: Mapping[str, int] | None = None) -> None:
        """Release the pages after the first `length` tokens, but keep at least the first `least` of each group."""
        counts = {group.name: pages_for(length, group) for group in self.spec.groups}
        self.keep(sequence, {name: max(count, (least or {}).get(name, 0)) for name, count in counts.items()})

    def fill(self, sequence: Holder, numbers: Numbers) -> None:
        """Take pages for these logical pages, ascending, of a sequence that holds none, beginning where most pages are
        free."""
        dealt = self._checked(lambda group: [(None, numbers[group.name])])
        for name, each in numbers.items():
            ids = [-1] * (each[-1] + 1 if each else 0)
            for number, page in zip(each, self.allocators[name].take_from(dealt[name][0]), strict=True):
                ids[number] = page
            sequence.pages[name] = ids

    def skip(self, sequence: Holder) -> None:
        """Name no page for tokens before `sequence.length` beyond the last page, as if they had been given back. For a
        sequence that only seems to have so many tokens (`Engine.warmup`)."""
        for group in self.spec.groups:
            if window_of(group, sequence.reach) is not None:
                ids = sequence.pages[group.name]
                ids += [-1] * (sequence.length // group.page_size - len(ids))

    def fork(self, parent: Holder, child: Holder) -> tuple[dict[str, int], dict[str, int]] | None:
        """Share the parent's sealed pages with the child, and take a new page for each open one. Returns source and
        target of the open page by group, both 0 in groups without one; None if no group has one. After OutOfPages
        nothing is shared."""
        opened = {group.name: int(parent.length % group.page_size > 0) for group in self.spec.groups}
        dealt = {}
        for group in self.spec.groups:  # the copy of the open page lies on the same device
            sealed = parent.length // group.page_size
            dealt[group.name] = [
                self.allocators[group.name].part_of(page) for page in parent.pages[group.name][sealed:][: opened[group.name]]
            ]
        self.check_parts(dealt)
        sources, targets = ({group.name: 0 for group in self.spec.groups} for _ in range(2))
        for group in self.spec.groups:
            name, sealed = group.name, parent.length // group.page_size
            child.pages[name] = list(parent.pages[name][:sealed])
            self.allocators[name].share([page for page in child.pages[name] if page >= 0])
            if opened[name]:
                sources[name] = parent.pages[name][sealed]
                (targets[name],) = self.allocators[name].take_from(dealt[name])
                child.pages[name].append(targets[name])
        return (sources, targets) if any(opened.values()) else None

    def tables(self, slots: Sequence[Holder | None]) -> dict[str, Int[np.ndarray, "B M"]]:
        """Page tables of a batch, by group."""
        return {group.name: page_table([slot.pages[group.name] if slot else () for slot in slots]) for group in self.spec.groups}

    def staged_tables(self, sequence: Holder, length: int, widths: Mapping[str, int]) -> dict[str, Int[np.ndarray, "1 M"]]:
        """Page tables of a sequence's first `length` tokens, by group, with so many columns in the groups that `widths`
        names."""
        counts = {group.name: pages_for(length, group) for group in self.spec.groups}
        return {name: page_table([sequence.pages[name][:count]], widths.get(name)) for name, count in counts.items()}

    def held(self, sequence: Holder, hash_block: int | None = None) -> dict[str, list[int]]:
        """The logical pages of a sequence that must be stored, and that it holds, by group. hash_block: as in
        `stored_pages`."""
        pages = sequence.pages
        wanted = {group.name: stored_pages(group, sequence.length, sequence.reach, hash_block) for group in self.spec.groups}
        return {name: [number for number in numbers if pages[name][number] >= 0] for name, numbers in wanted.items()}

    def ids(self, sequence: Holder, numbers: Mapping[str, Sequence[int]]) -> dict[str, Int[np.ndarray, " n"]]:
        """Ids of logical pages of a sequence, by group."""
        return {name: np.array([sequence.pages[name][number] for number in each], np.int32) for name, each in numbers.items()}

    def written(self, sequence: Holder, first: int, last: int) -> PageIds:
        """Pages of a sequence that hold the positions [first, last), by group."""
        places = {group.name: slice(first // group.page_size, pages_for(last, group)) for group in self.spec.groups}
        return {name: sequence.pages[name][place] for name, place in places.items()}

    def _allocator(self, name: str, total: int) -> PageAllocator:
        sharded = name in dict(self.shards.pages)
        return PageAllocator(total, self.shards.context if sharded else 1)

    def first_of(self, name: str, sequence: Holder) -> int | None:
        """On which device the first page of a sequence lies, or would lie where it was given back; None if it holds no
        page of a group."""
        allocator, ids = self.allocators[name], sequence.pages[name]
        held = next((number for number, page in enumerate(ids) if page >= 0), None)
        return None if held is None else (allocator.part_of(ids[held]) - held) % allocator.parts

    def parts_from(self, name: str, first: int, numbers: Iterable[int]) -> list[int]:
        """The devices of these logical pages of a sequence whose first page lies on device `first`."""
        return [(first + number) % self.allocators[name].parts for number in numbers]

    def _next(self, sequence: Holder, group: GroupSpec, count: int) -> range:
        """The next logical pages of a sequence."""
        done = len(sequence.pages[group.name])
        return range(done, done + count)

    def _checked(self, wanted: Callable[[GroupSpec], Sequence[Wanted]]) -> dict[str, list[list[int]]]:
        """By group, the devices of the pages that sequences want of it, in turn. OutOfPages if one of them has too
        few."""

        def dealt() -> dict[str, list[list[int]]]:
            return {group.name: self._dealt(group.name, wanted(group)) for group in self.spec.groups}

        found = dealt()
        flat = {name: [part for each in parts for part in each] for name, parts in found.items()}
        if self.on_short is not None and any(self.allocators[name].lacking(parts) for name, parts in flat.items()):
            self.on_short()
            found = dealt()  # pages came back: sequences may begin elsewhere
            flat = {name: [part for each in parts for part in each] for name, parts in found.items()}
        self.check_parts(flat)
        return found

    def _dealt(self, name: str, wanted: Sequence[Wanted]) -> list[list[int]]:
        """The devices of the pages that each sequence wants of a group."""
        allocator, found, taken = self.allocators[name], [], Counter()
        if allocator.parts == 1:
            return [[0] * len(numbers) for _, numbers in wanted]
        for sequence, numbers in wanted:
            first = None if sequence is None else self.first_of(name, sequence)
            if first is None and sequence is not None:
                first = sequence.firsts.get(name)
            if first is None:
                first = allocator.part_of_first(numbers, taken)
            found.append(self.parts_from(name, first, numbers))
            taken.update(found[-1])
        return found

    def _missing(self, group: GroupSpec, sequence: Holder, tokens: int) -> int:
        # A step writes up to MAX_STEP_TOKENS at once, past the end of a chunk too.
        ahead = (
            tokens
            if window_of(group, sequence.reach) is None
            else min(tokens, max(self.chunk - sequence.length % self.chunk, MAX_STEP_TOKENS))
        )
        return max(0, pages_for(sequence.length + ahead, group) - len(sequence.pages[group.name]))


def _shards(mesh: Mesh, spec: CacheSpec, totals: Mapping[str, int], chunk: int) -> Shards:
    """The mesh, with the pages that each of its devices has, and over how many of them rows of a chunk are sharded."""
    context = Shards(mesh).context
    dealt = [group for group in spec.groups if group.page_size != WHOLE] if context > 1 else []
    rows = 1 if chunk % (2 * context) else context
    return Shards(mesh, tuple((group.name, totals[group.name] // context) for group in dealt), rows)


def pages_for(tokens: int, group: GroupSpec) -> int:
    """Pages that the first `tokens` tokens take."""
    return -(-tokens // group.page_size)


def window_of(group: GroupSpec, reach: Reach | None) -> Reach | None:
    """Sinks and window that a sequence keeps in a group; None: every page. reach: as in `Holder`."""
    if group.page_size == WHOLE:
        return None
    return reach if group.window is None else (0, group.window)


def sink_pages(group: GroupSpec, reach: Reach | None) -> int:
    """Pages at the beginning that a sequence keeps beside its window."""
    window = window_of(group, reach)
    return 0 if window is None else -(-window[0] // group.page_size)


def first_read(group: GroupSpec, position: int, reach: Reach | None = None) -> int:
    """The first page, sinks aside, that a query at `position`, or a later one, reads."""
    window = window_of(group, reach)
    return 0 if window is None else max(0, position - window[1] + 1) // group.page_size


def first_stored(group: GroupSpec, length: int, hash_block: int | None = None) -> int:
    """The first page that must be stored of `length` tokens. hash_block: if policies learn from prefill, the chunk
    size: the queries of an unfinished chunk run again when prefill continues. None: no query runs again."""
    hash_block = hash_block or group.page_size
    return first_read(group, length // hash_block * hash_block)


def stored_pages(group: GroupSpec, length: int, reach: Reach | None = None, hash_block: int | None = None) -> list[int]:
    """The logical pages that must be stored of a sequence of `length` tokens. reach: as in `Holder`. hash_block: as in
    `first_stored`."""
    hash_block = hash_block or group.page_size
    first = first_read(group, length // hash_block * hash_block, reach)
    return [*range(min(sink_pages(group, reach), first)), *range(first, pages_for(length, group))]


def most_pages(group: GroupSpec, chunk: int, reach: Reach | None = None) -> int | float:
    """The most pages that a sequence of any length holds: those of sinks, a window, a chunk and the tokens of one step,
    and one more, because a window may begin inside a page. 1 if one page holds the whole sequence. reach: as in
    `Holder`."""
    if group.page_size == WHOLE:
        return 1
    window = window_of(group, reach)
    if window is None:
        return float("inf")
    return pages_for(window[1] - 1 + chunk + MAX_STEP_TOKENS - 1, group) + 1 + sink_pages(group, reach)


def frame_counts(pages: int, host: int, chunk: int, *, hot: bool) -> FrameCounts:
    """Frames of a layer group that has memory for `pages` pages, for `host` of them in host memory. chunk: pages of a
    chunk of prefill. hot: whether steps list pages, so that a part of the device's is worth more as a hot buffer: no
    larger than host memory, so that this never makes the pool smaller."""
    copies = min(hot_frames(pages - host, chunk), host // WAYS * WAYS) if hot else 0
    return FrameCounts(pages - host - copies, copies, host)


def hot_frames(device: int, chunk: int) -> int:
    """How many of a group's frames on the device are a hot buffer, if other pages lie in host memory. chunk: pages of a
    chunk of prefill, which need places of their own, as open pages do."""
    return max(0, min(int(HOT_SHARE * device), device - 2 * chunk)) // WAYS * WAYS
