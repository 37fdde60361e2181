"""Page ownership on the host: a free list and reference counts."""

from __future__ import annotations

from collections.abc import Sequence

from kvjax.checks import whole_number


class OutOfPages(RuntimeError):
    """The pool has fewer free pages than a call needs. Nothing was written and no page was taken. group: the layer group."""

    def __init__(self, needed: int, free: int, total: int, advice: str = "", *, group: str = "full"):
        self.needed, self.free, self.total, self.group = needed, free, total, group
        of_group = "" if group == "full" else f" of layer group {group}"
        if needed > total:
            text = f"out of pages{of_group}: {needed} needed, and the pool has only {total}; make the engine with more pages"
        else:
            text = f"out of pages{of_group}: {needed} needed, {free} free of {total}; free sequences, or make the engine with more pages"
        super().__init__(f"{text}. {advice}" if advice else text)


class PageAllocator:
    """Hands out page numbers 0 .. total-1. Each sequence that names a page is one owner; the page is free when the last owner releases it.
    The page released last is handed out first, so page numbers depend on history, but results must not."""

    def __init__(self, total: int):
        self.total = total = whole_number("pages", total, 1)
        self._free = list(range(total - 1, -1, -1))
        self._owners = [0] * total

    @property
    def free(self) -> int:
        """Pages without an owner."""
        return len(self._free)

    def owners(self, page: int) -> int:
        """How many sequences name `page`."""
        return self._owners[page]

    def take(self, count: int) -> list[int]:
        """Take `count` pages, with one owner each. After OutOfPages none were taken."""
        if count > len(self._free):
            raise OutOfPages(count, len(self._free), self.total)
        pages = [self._free.pop() for _ in range(count)]
        for page in pages:
            self._owners[page] = 1
        return pages

    def share(self, pages: Sequence[int]) -> None:
        """Add an owner to each of `pages`, which must have one already."""
        for page in pages:
            if self._owners[page] == 0:
                raise ValueError(f"page {page} is free and cannot be shared")
        for page in pages:
            self._owners[page] += 1

    def release(self, pages: Sequence[int]) -> None:
        """Remove an owner from each of `pages`. Pages without owners become free."""
        for page in pages:
            if self._owners[page] == 0:
                raise ValueError(f"page {page} is already free")
            self._owners[page] -= 1
            if self._owners[page] == 0:
                self._free.append(page)
