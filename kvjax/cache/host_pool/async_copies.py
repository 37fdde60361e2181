"""Copies of pages between device and host memory, made beside the device's programs. A page changes its frame after its
copy has arrived.

**To host memory, while a chunk of prefill computes.** A chunk needs as many frames of the device as it has pages. If
pages moved out when these frames are needed, their copies would stand before the chunk's computation: JAX runs the
programs of a device one after the other. So when a chunk begins, the pages that are going to make room for the chunk
after it are copied, to frames of host memory that nobody else gets. Until then they stay where they are, and programs
read them there. When the next chunk asks for room, such a page only changes its frame (`Frames.bind`). Where these are
too few, other pages leave then. Many of them are copied in the same way (`wait`, `move`), before the copies for the
next chunk begin: a kernel that moved them would slow those down.

**Back to the device, beside decode steps.** When other sequences have ended, the device has free frames. Pages of
sequences that are decoded are copied there, the newest first, `BACK` at a time, and change their frame in the first
step that finds all of them there. A step never waits for them. Dense steps read every page, from host memory at the
rate of the bus. So a page that has come back pays for its copy in the next dense step already: both read it over the
bus once. Steps with lists find nearly all tiles in the hot buffer. They gain little, and lose as little: the device's
room is copied once. The next chunk of prefill copies what has come back no more. As many frames as a chunk has pages
stay free, so that neither a chunk nor a step pushes out at once what has just come back.

All of these are sealed pages, whose bytes do not change any more. Three orders make this right.

* A copy begins after the programs that wrote its page, and those that read what its new frame held before. They were
  launched before the copy was asked for, so an output of the latest of them tells when they are done. Programs that are
  launched later only read the page, and where it was.
* A page changes its frame after its copy has arrived (`arrive`, `arrived`). Only then its old frame may be written to,
  and its new one be read.
* A frame whose copy is not wanted any more, because the page was freed or another page needs the room, goes to nobody
  else before the copy has ended (`give_up`).

On a GPU the copies are plain ones, by its copy engines, in a stream that JAX does not know
(`kvjax.cache.host_pool.mapped_memory.CopyStream`). So they run beside kernels, and those to host memory beside the
copies of `kvjax.cache.host_pool.prefill_prefetch`, which come the other way. As a program of its own a copy would run
between two programs of the chunk, whenever it was launched. Inside the chunk's program it could run beside kernels, but
XLA would choose where to, which is not the pool, and each number of pages would be another program. The price is that
the orders above are the host's: it waits for the programs before the first copy begins, and for the last copy before it
launches the next chunk. Neither delays the device, as long as the copies of a chunk's pages take less time than a
chunk, because the host waits while the device computes the chunk between both. On a CPU a program copies.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import numpy as np
from jaxtyping import Int

Moves = Int[np.ndarray, "n 2"]
"""Frames, from and to."""


class AsyncCopies:
    """The copies that were asked for and are not known to have arrived.

    copy: begins copies between frames of a layer group. finish: waits until all copies that were begun have ended.
    finished: whether they have. latest: an output of the latest program that was launched, which no program consumes
    before the next one is launched; None before the first.
    """

    def __init__(
        self,
        copy: Callable[[str, Moves], None],
        finish: Callable[[], None],
        finished: Callable[[], bool],
        latest: Callable[[], jax.Array | None],
    ):
        self._copy, self._finish, self._finished, self._latest = copy, finish, finished, latest
        self._waiting: list[tuple[str, Moves]] = []
        self._after: jax.Array | None = None  # once it is computed, the pages of `_waiting` are written
        self._running = False

    def add(self, group: str, moves: Moves) -> None:
        """Copy these frames. No program that is launched from now on writes those that are read, or reads those that
        are written."""
        if len(moves):
            self._waiting.append((group, moves))
            self._after = self._latest()

    def start(self) -> None:
        """Begin the copies if their pages are written. Does not wait for the device."""
        if self._waiting and ((after := self._written_after()) is None or after.is_ready()):
            self._begin()

    @property
    def arrived(self) -> bool:
        """Whether all copies have arrived. Does not wait for the device."""
        if self._running and self._finished():
            self._running = False
        return not self._waiting and not self._running

    def arrive(self) -> None:
        """Wait until all copies have arrived."""
        if self._waiting:
            if (after := self._written_after()) is not None:
                try:
                    after.block_until_ready()
                except Exception:  # it has ended, too, and is told once
                    self._after = None
                    raise
            self._begin()
        self._end()

    def wait(self) -> None:
        """Wait until all programs that were launched have ended."""
        if (latest := self._latest()) is not None:
            latest.block_until_ready()

    def move(self, group: str, moves: Moves) -> None:
        """Copy these frames, and wait until they are copied. For after `wait`: no program is running."""
        self._copy(group, moves)
        self._finish()

    def give_up(self, group: str, target: int) -> None:
        """The copy to frame `target` is not wanted. Afterwards nothing writes to that frame any more."""
        self._waiting = [(name, moves if name != group else moves[moves[:, 1] != target]) for name, moves in self._waiting]
        self._end()

    def _written_after(self) -> jax.Array | None:
        """What shows that the pages are written. A later program may have consumed it: then what shows that this one is
        done."""
        if self._after is not None and self._after.is_deleted():
            self._after = self._latest()
        return self._after

    def _begin(self) -> None:
        waiting, self._waiting, self._after = self._waiting, [], None
        for group, moves in waiting:
            if len(moves):
                self._copy(group, moves)
                self._running = True

    def _end(self) -> None:
        if self._running:
            self._finish()
            self._running = False
