"""Where the pages of a layer group lie: in frames of device memory, or in frames of host memory, which kernels read in place.

A page gets a frame when it is first written, on the device. When the device has none left, the page that has been there longest moves to
host memory. A page's id stays the same for its life; only its frame changes. Pages that were copied there ahead go first: these only change
their frame.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection, Iterable, Sequence

import numpy as np
from jaxtyping import Int

from kvjax.cache.spanning import FrameCounts


class Frames:
    """The frames of one layer group, on the host.

    frame_of: by page id, -1 for a page without a frame. changed: whether that has changed since the caller last set this to False. moved:
    pages that moved to host memory so far. arrive: called before a page that was copied ahead changes its frame; afterwards its copy must
    be there. give_up: called with a frame whose copy is not wanted; afterwards nothing may write to it (`kvjax.cache.outgoing`).
    """

    def __init__(self, counts: FrameCounts):
        self.counts, self.moved = counts, 0
        self.frame_of = np.full(counts.device + counts.host, -1, np.int32)
        self.changed = True
        # Heaps: the first free frame is taken, so that pages lie side by side, and are copied together.
        self._free_device, self._free_host = list(range(counts.device)), list(range(counts.border, counts.total))
        self._bound: set[int] = set()  # as many as there are pages at most, however long nobody asks
        self._there: dict[int, None] = {}  # pages on the device, those that have been there longest first
        self._moves: dict[int, tuple[int, int]] = {}  # by page: its frame before, and the one that its bytes have to be copied to
        self._ahead: dict[int, int] = {}  # by page that is on the device: the frame that it is copied to ahead
        self.arrive: Callable[[], None] = lambda: None
        self.give_up: Callable[[int], None] = lambda frame: None

    @property
    def on_device(self) -> int:
        """Pages in frames of the device."""
        return len(self._there)

    @property
    def on_host(self) -> int:
        """Pages in frames of host memory."""
        return self.counts.host - len(self._free_host) - len(self._ahead)

    def bind(self, pages: Sequence[int]) -> None:
        """Give each of these pages, which are going to be written, a frame if it has none, on the device if possible. Other pages may have
        to move: see `take_moves`."""
        for page in pages:
            self._forget_copy(page)
        new = [page for page in pages if page >= 0 and self.frame_of[page] < 0]
        kept = set(pages) if new else set()
        for page in new:
            if not self._free_device:
                self._move_out(kept)
            on_device = bool(self._free_device)
            self.frame_of[page] = heapq.heappop(self._free_device if on_device else self._free_host)
            if on_device:
                self._there[page] = None
            self.changed = True
        self._bound.update(new)

    def release(self, pages: Iterable[int]) -> None:
        """Nobody needs the content of these pages any more: their frames are free."""
        for page in pages:
            frame = int(self.frame_of[page])
            if frame < 0:
                continue
            self._forget_copy(page)
            self._moves.pop(page, None)
            self._there.pop(page, None)
            heapq.heappush(self._free_device if frame < self.counts.device else self._free_host, frame)
            self.frame_of[page], self.changed = -1, True

    def take_moves(self) -> Int[np.ndarray, "n 2"]:
        """Frames whose bytes have to be copied, from and to, before anything is written to a page that was bound since the last call. No
        frame is written to twice, or read after it was written to."""
        moves, self._moves = np.array(list(self._moves.values()), np.int32).reshape(-1, 2), {}
        return moves

    def lacking(self, count: int) -> int:
        """How many pages of the device have to be copied ahead, if `count` new pages are to find room there."""
        return max(0, min(count - len(self._free_device) - len(self._ahead), len(self._free_host)))

    def copy_ahead(self, sealed: Collection[int], count: int) -> Int[np.ndarray, "n 2"]:
        """Choose up to `count` of the sealed pages, those that have been on the device longest, to make room there. Returns frames whose
        bytes have to be copied, from and to, before `arrive` returns. Until `bind` needs the room, these pages stay where they are."""
        chosen = [page for page in self._there if page in sealed and page not in self._ahead][: min(count, len(self._free_host))]
        for page in chosen:
            self._ahead[page] = heapq.heappop(self._free_host)
        return np.array([(self.frame_of[page], self._ahead[page]) for page in chosen], np.int32).reshape(-1, 2)

    def take_bound(self) -> list[int]:
        """Pages that got a frame since the last call: what they held before is gone."""
        bound, self._bound = sorted(self._bound), set()
        return bound

    @property
    def moving(self) -> bool:
        """Whether `take_moves` has any."""
        return bool(self._moves)

    def _move_out(self, kept: Collection[int]) -> None:
        """Move a page to host memory: one that was copied ahead, or else the one that has been on the device longest; none if all of them
        are among `kept`, or there is no room."""
        page = next((page for page in self._ahead if page not in kept), None)
        if page is not None:
            self.arrive()
            after = self._ahead.pop(page)
        elif self._free_host and (page := next((page for page in self._there if page not in kept), None)) is not None:
            after = heapq.heappop(self._free_host)
            self._moves[page] = (int(self.frame_of[page]), after)
        else:
            return
        del self._there[page]
        heapq.heappush(self._free_device, int(self.frame_of[page]))
        self.frame_of[page] = after
        self.moved += 1

    def _forget_copy(self, page: int) -> None:
        """If the page was copied ahead, it stays where it is, and the copy's frame is free."""
        if (target := self._ahead.pop(page, None)) is not None:
            self.give_up(target)
            heapq.heappush(self._free_host, target)
