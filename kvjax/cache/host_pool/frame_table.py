"""Where the pages of a layer group lie: in frames of device memory, or in frames of host memory, which kernels read in
place.

A page gets a frame when it is first written, on the device. When the device has none left, another one moves to host
memory: one that no sequence holds any more, or else the one that has been there longest. A page's id stays the same for
its life; only its frame changes. Pages that were copied there ahead go first: these only change their frame. When the
device has room again, pages come back. They also change places with pages there that no sequence holds.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Collection, Iterable, Sequence

import numpy as np
from jaxtyping import Int

from kvjax.cache.host_pool import FrameCounts

EVICTED = 256
"""Where every frame is taken, one page in so many is evicted, so that others can change places."""


class Frames:
    """The frames of one layer group, on the host.

    spare: frames of the device that pages do not come back to, because new pages need them soon.

    frame_of: by page id, -1 for a page without a frame. changed: whether that has changed since the caller last set
    this to False. moved, returned: pages that moved to host memory so far, and that came back. evict: releases so many
    of the pages that no sequence holds, as far as there are any. arrived: says whether all copies of pages are there.
    arrive: waits until they are. give_up: called with a frame whose copy is not wanted; afterwards nothing may write to
    it (`kvjax.cache.host_pool.async_copies`).
    """

    def __init__(self, counts: FrameCounts, spare: int = 0):
        self.counts, self.moved, self.returned, self._spare = counts, 0, 0, spare
        self.frame_of = np.full(counts.device + counts.host, -1, np.int32)
        self.changed = True
        # Heaps: the first free frame is taken, so that pages lie side by side, and are copied together.
        self._free_device, self._free_host = list(range(counts.device)), list(range(counts.border, counts.total))
        self._bound: set[int] = set()  # as many as there are pages at most, however long nobody asks
        self._there: dict[int, None] = {}  # pages on the device, those that have been there longest first
        self._moves: dict[int, tuple[int, int]] = {}  # by page: its frame before, and the one that its bytes have to be copied to
        self._idle: dict[int, None] = {}  # pages on the device that no sequence holds, the first ones to go first
        self._ahead: dict[int, int] = {}  # by page that is on the device: the frame that it is copied to ahead
        self._back: dict[int, int] = {}  # by page in host memory: the frame of the device that it is copied to
        self._searched = False  # whether no page was found that may come back, and nothing has changed since
        self.evict: Callable[[int], None] = lambda count: None
        self.arrived: Callable[[], bool] = lambda: True
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

    def bind(self, pages: Sequence[int], *, wait: bool = True) -> None:
        """Give each of these pages, which are going to be written, a frame if it has none, on the device if possible.
        Other pages may have to move: see `take_moves`. wait: for the copies of pages that were copied ahead, as for a
        chunk of prefill. False: rather move others, as for a step, which needs few pages."""
        for page in pages:
            self._forget_copy(page)
        new = [page for page in pages if page >= 0 and self.frame_of[page] < 0]
        kept = set(pages) if new else set()
        for page in new:
            if not self._free_device:
                self._move_out(kept, wait)
            on_device = bool(self._free_device)
            self.frame_of[page] = heapq.heappop(self._free_device if on_device else self._free_host)
            if on_device:
                self._there[page] = None
            self.changed, self._searched = True, False
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
            self._idle.pop(page, None)
            heapq.heappush(self._free_device if frame < self.counts.device else self._free_host, frame)
            self.frame_of[page], self.changed, self._searched = -1, True, False

    def idle(self, pages: Iterable[int]) -> None:
        """No sequence holds these pages any more, but what they hold is kept: on the device they make room first, in
        this order."""
        for page in pages:
            if page in self._back:
                self._forget_copy(page)
            if page in self._there:
                self._idle[page] = None
            self._searched = False

    def used(self, pages: Iterable[int]) -> None:
        """A sequence holds these pages again."""
        for page in pages:
            self._idle.pop(page, None)

    def take_moves(self) -> Int[np.ndarray, "n 2"]:
        """Frames whose bytes have to be copied, from and to, before anything is written to a page that was bound since
        the last call. No frame is written to twice, or read after it was written to."""
        moves, self._moves = np.array(list(self._moves.values()), np.int32).reshape(-1, 2), {}
        return moves

    def lacking(self, count: int) -> int:
        """How many pages of the device have to be copied ahead, if `count` new pages are to find room there."""
        return max(0, min(count - len(self._free_device) - len(self._ahead), len(self._free_host)))

    def copy_ahead(self, sealed: Collection[int], count: int) -> Int[np.ndarray, "n 2"]:
        """Choose up to `count` of the sealed pages to make room on the device: those that no sequence holds, then those
        that have been there longest. Returns frames whose bytes have to be copied, from and to, before `arrive`
        returns. Until `bind` needs the room, these pages stay where they are."""
        most = min(count, len(self._free_host))
        ordered = dict.fromkeys(itertools.chain(self._idle, self._there))
        chosen = [page for page in ordered if page in sealed and page not in self._ahead][:most]
        for page in chosen:
            self._ahead[page] = heapq.heappop(self._free_host)
        return np.array([(self.frame_of[page], self._ahead[page]) for page in chosen], np.int32).reshape(-1, 2)

    @property
    def room(self) -> int:
        """How many pages may come back to the device now. 0 while others do, and after `bring_back` has found none."""
        if self._back or self._searched:
            return 0
        return max(0, min(len(self._free_device) - self._spare, self.on_host))

    def bring_back(self, sealed: Iterable[int], count: int) -> Int[np.ndarray, "n 2"]:
        """Choose up to `count` of the sealed pages, the first ones of those in host memory, to come back to the device.
        Returns frames whose bytes have to be copied, from and to, before `have_come_back` is called. Until then these
        pages stay where they are. No move may be left to take."""
        count = min(count, self.room)
        for page in sealed:
            if len(self._back) == count:
                break
            if self.frame_of[page] >= self.counts.border and page not in self._back:
                self._back[page] = heapq.heappop(self._free_device)
        self._searched = not self._back
        return np.array([(self.frame_of[page], target) for page, target in self._back.items()], np.int32).reshape(-1, 2)

    @property
    def exchangeable(self) -> int:
        """How many pages in host memory may change places with pages on the device now. 0 as `room` is."""
        return 0 if self._back or self._searched else min(len(self._idle), self.on_host)

    def exchange(self, sealed: Iterable[int], count: int) -> list[Int[np.ndarray, "n 2"]]:
        """Let up to `count` of the sealed pages, the first ones of those in host memory, change places with pages on
        the device that no sequence holds. Returns frames whose bytes have to be copied, from and to, one array after
        the other; in none of them a frame is both read and written. No move may be left to take. If no frame is free, a
        few pages are evicted to have one on the way."""
        there = (page for page in sealed if self.frame_of[page] >= self.counts.border)
        wanted = list(dict.fromkeys(itertools.islice(there, count)))
        if wanted and not (self._free_device or self._free_host):
            self.evict(1 + len(self.frame_of) // EVICTED)
        pairs = list(zip(wanted, [page for page in self._idle if page not in self._ahead], strict=False))
        self._searched, copies = not pairs, []
        outwards_first = len(self._free_host) >= len(self._free_device)
        each = max(len(self._free_host), len(self._free_device))
        for start in range(0, len(pairs) if each else 0, each or 1):
            part = pairs[start : start + each]
            for outwards in (outwards_first, not outwards_first):
                copies.append(self._moved([other if outwards else page for page, other in part], outwards=outwards))
        return copies

    def _moved(self, pages: Sequence[int], *, outwards: bool) -> Int[np.ndarray, "n 2"]:
        """Give these pages free frames in host memory, or of the device. Returns their frames before and after."""
        here, there = (self._free_device, self._free_host) if outwards else (self._free_host, self._free_device)
        frames = [(int(self.frame_of[page]), heapq.heappop(there)) for page in pages]
        for page, (before, after) in zip(pages, frames, strict=True):
            heapq.heappush(here, before)
            self.frame_of[page] = after
            if outwards:
                del self._there[page], self._idle[page]
            else:
                self._there[page] = None
        self.changed = True
        self.moved += len(pages) if outwards else 0
        self.returned += 0 if outwards else len(pages)
        return np.array(frames, np.int32).reshape(-1, 2)

    @property
    def coming(self) -> bool:
        """Whether pages come back."""
        return bool(self._back)

    def have_come_back(self) -> None:
        """The copies of pages that come back have arrived: these pages are on the device now."""
        for page, target in self._back.items():
            heapq.heappush(self._free_host, int(self.frame_of[page]))
            self.frame_of[page], self._there[page] = target, None
        self.returned += len(self._back)
        self.changed, self._back = True, {}

    def take_bound(self) -> list[int]:
        """Pages that got a frame since the last call: what they held before is gone."""
        bound, self._bound = sorted(self._bound), set()
        return bound

    @property
    def moving(self) -> int:
        """How many `take_moves` has."""
        return len(self._moves)

    def _move_out(self, kept: Collection[int], wait: bool) -> None:
        """Make room on the device, without the pages of `kept`. A page that was on its way there stays in host memory;
        or else one that was copied ahead moves there; or else one that no sequence holds; or else the one that has been
        on the device longest. Nothing if none is left, or host memory is full."""
        if self._back:
            self._forget_copy(next(iter(self._back)))
            return
        copied = next((page for page in self._ahead if page not in kept), None)
        other = None
        if self._free_host and (copied is None or not (wait or self.arrived())):
            chain = itertools.chain(self._idle, self._there)
            other = next((page for page in chain if page not in kept and page not in self._ahead), None)
        if other is not None:
            page, after = other, heapq.heappop(self._free_host)
            self._moves[page] = (int(self.frame_of[page]), after)
        elif copied is not None:
            self.arrive()
            page, after = copied, self._ahead.pop(copied)
        else:
            return
        del self._there[page]
        self._idle.pop(page, None)
        heapq.heappush(self._free_device, int(self.frame_of[page]))
        self.frame_of[page] = after
        self.moved += 1

    def _forget_copy(self, page: int) -> None:
        """If the page is copied to another frame, it stays where it is, and that frame is free."""
        for copies, free in ((self._ahead, self._free_host), (self._back, self._free_device)):
            if (target := copies.pop(page, None)) is not None:
                self.give_up(target)
                heapq.heappush(free, target)
