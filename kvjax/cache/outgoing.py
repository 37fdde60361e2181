"""Copies of pages on their way to host memory, made while a chunk of prefill computes, so that the next chunk finds room on the device.

A chunk needs as many frames of the device as it has pages. If pages moved out when these frames are needed, their copies would stand before
the chunk's computation: JAX runs the programs of a device one after the other. So when a chunk begins, the pages that are going to make
room for the chunk after it are copied: sealed pages, whose bytes do not change any more, to frames of host memory that nobody else gets.
Until then they stay where they are, and programs read them there. When the next chunk asks for room, such a page only changes its frame
(`Frames.bind`).

Three orders make this right.

* A copy begins after the programs that wrote its page. They were launched before the copy was asked for, so an output of the latest of
  them tells when they are done. Programs that are launched later only read the page.
* A page changes its frame after its copy has arrived (`arrive`). Only then its old frame may be written to, and its new one be read.
* A frame whose copy is not wanted any more, because the page was freed or is written again, goes to nobody else before the copy has ended
  (`give_up`).

On a GPU the copies are plain ones, of the copy engine that writes to host memory, in a stream that JAX does not know
(`kvjax.cache.spanning.CopyStream`). So they run beside kernels, and beside the copies of `kvjax.cache.staging`, which come the other way.
As a program of its own a copy would run between two programs of the chunk, whenever it was launched. Inside the chunk's program it could
run beside kernels, but XLA would choose where to, which is not the pool, and each number of pages would be another program. The price is
that the orders above are the host's: it waits for `after` before the first copy begins, and for the last copy before it launches the next
chunk. Neither delays the device, as long as the copies of a chunk's pages take less time than a chunk, because the host waits while the
device computes the chunk between both. On a CPU a program copies.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import numpy as np
from jaxtyping import Int

Moves = Int[np.ndarray, "n 2"]
"""Frames, from and to."""


class Outgoing:
    """The copies that were asked for and are not known to have arrived.

    copy: begins copies between frames of a layer group. finish: waits until all copies that were begun have ended. latest: an output of the
    latest program that was launched, which no program consumes before the next one is launched; None before the first.
    """

    def __init__(self, copy: Callable[[str, Moves], None], finish: Callable[[], None], latest: Callable[[], jax.Array | None]):
        self._copy, self._finish, self._latest = copy, finish, latest
        self._waiting: list[tuple[str, Moves]] = []
        self._after: jax.Array | None = None  # once it is computed, the pages of `_waiting` are written
        self._running = False

    def add(self, group: str, moves: Moves) -> None:
        """Copy these frames, which no program that is launched from now on writes."""
        if len(moves):
            self._waiting.append((group, moves))
            self._after = self._latest()

    def start(self) -> None:
        """Begin the copies if their pages are written. Does not wait for the device."""
        if self._waiting and ((after := self._written_after()) is None or after.is_ready()):
            self._begin()

    def arrive(self) -> None:
        """Wait until all copies have arrived."""
        if self._waiting:
            if (after := self._written_after()) is not None:
                after.block_until_ready()
            self._begin()
        self._end()

    def give_up(self, group: str, target: int) -> None:
        """The copy to frame `target` is not wanted. Afterwards nothing writes to that frame any more."""
        self._waiting = [(name, moves if name != group else moves[moves[:, 1] != target]) for name, moves in self._waiting]
        self._end()

    def _written_after(self) -> jax.Array | None:
        """What shows that the pages are written. A later program may have consumed it: then what shows that this one is done."""
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
