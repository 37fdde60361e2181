"""Page ownership on the host: a free list and reference counts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence

from kvjax.cache.eviction_order import Recency
from kvjax.checks import whole_number


class OutOfPages(RuntimeError):
    """The pool has fewer free pages than a call needs. Nothing was written and no page was taken. group: the layer
    group.

    devices: over how many devices its pages are sharded, if one of them has too few. Then the counts are of that
    device. advice: what helps, besides freeing sequences; by default more pages.
    """

    def __init__(self, needed: int, free: int, total: int, advice: str = "", *, group: str = "full", devices: int = 1):
        self.needed, self.free, self.total, self.group, self.devices = needed, free, total, group, devices
        of_group = "" if group == "full" else f" of layer group {group}"
        where, pool, its = ("", "the pool", "") if devices == 1 else (f" on one of {devices} devices", "each", "its ")
        if needed > total:
            text = f"out of pages{of_group}: {needed} needed{where}, and {pool} has only {total}"
            more = "; make the engine with more pages"
        else:
            text = f"out of pages{of_group}: {needed} needed{where}, {free} free of {its}{total}; free sequences"
            more = ", or make the engine with more pages"
        super().__init__(text + (f". {advice}" if advice else more))


class PageAllocator:
    """Hands out page numbers 0 .. total-1. Each sequence that names a page is one owner; the page is free when the last
    owner releases it. The page released last is handed out first, so page numbers depend on history, but results must
    not.

    A page that is kept (`keep`) holds something that may be wanted again. Without owners it is idle: it counts as free,
    and is handed out only when no other page is left. on_evict: called then with the page, whose content is lost.
    on_free: called with each page whose content nobody needs any more, evicted ones included. on_idle, on_used: called
    with pages that become idle, and with those of them that get an owner again.

    parts: over how many devices the pages are sharded. Each has `each` of them: pages [d * each, (d + 1) * each) are
    those of device d. A caller that takes pages says of which device it needs each one.
    """

    def __init__(self, total: int, parts: int = 1):
        self.total = total = whole_number("pages", total, 1)
        if total % parts:
            raise ValueError(f"{total} pages cannot be sharded over {parts} devices evenly: use a multiple of {parts}")
        self.parts, self.each = parts, total // parts
        self.on_evict: Callable[[int], None] | None = None
        self.on_free: Callable[[Sequence[int]], None] | None = None
        self.on_idle: Callable[[Sequence[int]], None] = lambda pages: None
        self.on_used: Callable[[Sequence[int]], None] = lambda pages: None
        self._free = [list(range((part + 1) * self.each - 1, part * self.each - 1, -1)) for part in range(parts)]
        self._idle: list[Recency[int]] = [Recency() for _ in range(parts)]
        self._owners = [0] * total
        self._kept: dict[int, bool] = {}  # whether the page was found again

    @property
    def free(self) -> int:
        """Pages without an owner."""
        return sum(map(self._free_of, range(self.parts)))

    @property
    def kept(self) -> int:
        """Pages whose content is kept, with owners or without."""
        return len(self._kept)

    @property
    def kept_pages(self) -> Collection[int]:
        """Pages whose content is kept, with owners or without."""
        return self._kept.keys()

    def owners(self, page: int) -> int:
        """How many sequences name `page`."""
        return self._owners[page]

    def part_of(self, page: int) -> int:
        """The device that has a page."""
        return page // self.each

    def part_of_first(self, numbers: Sequence[int] = (0,), taken: Mapping[int, int] | None = None) -> int:
        """The device on which a sequence best begins that takes pages at these logical numbers: so that most pages are
        left on the fullest one of the devices that it takes some of (`left`). Of equal ones that with most free pages,
        and then with fewest idle ones."""
        return max(range(self.parts), key=lambda first: (self.left(first, numbers, taken), self._free_of(first), len(self._free[first])))

    def left(self, first: int, numbers: Sequence[int], taken: Mapping[int, int] | None = None) -> int:
        """Free pages of the fullest one of the devices of which a sequence took pages at these logical numbers, if it
        began on device `first`; below 0 if it cannot. taken: pages of each device that others take before."""
        counts, before = Counter((first + number) % self.parts for number in numbers), taken or {}
        return min((self._free_of(part) - before.get(part, 0) - count for part, count in counts.items()), default=0)

    def lacking(self, parts: Sequence[int]) -> bool:
        """Whether any device has too few pages for one on each of these devices."""
        return any(count > self._free_of(part) for part, count in Counter(parts).items())

    def out_of_pages(self, parts: Sequence[int], group: str = "full") -> OutOfPages:
        """The error for these devices, of which `lacking` is true: of the one that lacks most. group: the layer
        group."""
        part, count = max(Counter(parts).items(), key=lambda each: each[1] - self._free_of(each[0]))
        return OutOfPages(count, self._free_of(part), self.each, group=group, devices=self.parts)

    def take(self, count: int) -> list[int]:
        """Take `count` pages of neighbouring devices, as a new sequence does, with one owner each. After OutOfPages
        none were taken."""
        first = self.part_of_first(range(count))
        return self.take_from([(first + number) % self.parts for number in range(count)])

    def take_from(self, parts: Sequence[int]) -> list[int]:
        """Take one page of each of these devices, in order, with one owner each. After OutOfPages none were taken."""
        if self.lacking(parts):
            raise self.out_of_pages(parts)
        for part, count in Counter(parts).items():
            while len(self._free[part]) < count:
                self._evict(part)
        pages = [self._free[part].pop() for part in parts]
        for page in pages:
            self._owners[page] = 1
        return pages

    def keep(self, page: int) -> None:
        """Keep what `page` holds when its last owner releases it. ValueError for a page without an owner."""
        if self._owners[page] == 0:
            raise ValueError(f"page {page} is free and cannot be kept")
        self._kept[page] = False

    def own(self, pages: Sequence[int]) -> None:
        """Add an owner to kept pages, idle ones included. ValueError for a page that is not kept, and then none gets an
        owner."""
        for page in pages:
            if page not in self._kept:
                raise ValueError(f"page {page} is not kept: nobody knows what it holds")
        idle = [page for page in pages if self._owners[page] == 0]
        for page in idle:
            self._idle[self.part_of(page)].remove(page)
        self.on_used(idle)
        for page in pages:
            self._owners[page] += 1
            self._kept[page] = True

    def share(self, pages: Sequence[int]) -> None:
        """Add an owner to each of `pages`, which must have one already."""
        for page in pages:
            if self._owners[page] == 0:
                raise ValueError(f"page {page} is free and cannot be shared")
        for page in pages:
            self._owners[page] += 1

    def release(self, pages: Sequence[int]) -> None:
        """Remove an owner from each of `pages`. Pages without owners become free, or idle where they are kept: the last
        of `pages` is then the first to go, because a prefix is of use without what follows it, and not the other way
        round."""
        idle, freed = [], []
        for page in pages:
            if self._owners[page] == 0:
                raise ValueError(f"page {page} is already free")
            self._owners[page] -= 1
            if self._owners[page] == 0:
                (idle if page in self._kept else freed).append(page)
        for page in freed:
            self._free[self.part_of(page)].append(page)
        if self.on_free is not None:
            self.on_free(freed)
        for page in reversed(idle):
            self._idle[self.part_of(page)].add(page, used=self._kept[page])
        self.on_idle(idle[::-1])

    def evict(self, count: int) -> None:
        """Free up to `count` idle pages, those that were of use longest ago on their device."""
        for part in range(self.parts):
            for _ in range(min(count, len(self._idle[part]))):
                self._evict(part)
                count -= 1

    def _free_of(self, part: int) -> int:
        """Pages of a device without an owner."""
        return len(self._free[part]) + len(self._idle[part])

    def _evict(self, part: int) -> None:
        """Free the idle page of a device that was of use longest ago."""
        page = self._idle[part].pop()
        del self._kept[page]
        self._free[part].append(page)
        if self.on_evict is not None:
            self.on_evict(page)
        if self.on_free is not None:
            self.on_free([page])
