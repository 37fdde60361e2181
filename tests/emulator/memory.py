"""Memory of emulated GPU threads. Words know who wrote and read them and when: races, stray and early accesses are
faults.

Time is counted in memory instructions. Two accesses to a word, one of them a write, must have a barrier between them
that both threads passed: of the warp, of the CTA, or of the cluster.
"""

from __future__ import annotations

import numpy as np


class Log:
    """Per word, the last accesses of a kind: by whom and when, the last by another thread, and the last by another warp
    than the last's."""

    def __init__(self, words: int):
        self.last, self.other_thread, self.other_warp = ([np.zeros(words, np.int32), np.zeros(words, np.int32)] for _ in range(3))
        self.several, self.latest = False, 0

    def _keep(self, record, words, threads, ticks) -> None:
        record[0][words], record[1][words] = threads, ticks

    def note(self, words, threads, tick: int, floor: int) -> None:
        """Threads access words. What happened up to `floor` is ordered before all that comes."""
        if self.latest > floor:
            self._push(words, self.last[0][words], self.last[1][words], threads, floor)
        self.latest = tick
        self._keep(self.last, words, threads, tick)
        now = self.last[0][words]  # of several threads at one word, the last one
        if (threads != now).any():
            self._push(words, threads, np.full(len(words), tick, np.int32), now, floor)

    def _push(self, words, thread, tick, newest, floor: int) -> None:
        other = (thread != newest) & (tick > floor)
        if not other.any():
            return
        self.several = True
        self._keep(self.other_thread, words[other], thread[other], tick[other])
        other &= thread >> 5 != newest >> 5
        self._keep(self.other_warp, words[other], thread[other], tick[other])

    def records(self):
        """The (threads, times) to be compared with."""
        return [self.last, self.other_thread, self.other_warp] if self.several else [self.last]


class Memory:
    """An array: words of global memory, or of the shared memory of each CTA of a cluster, one after another.

    contested: several threads may write a word without a barrier between; one of them wins. Reads still need their
    barriers.
    """

    def __init__(self, name: str, data: np.ndarray, size_bytes: int, *, ctas: int = 0):
        self.name, self.data, self.size_bytes, self.ctas = name, data, size_bytes, ctas
        self.reads, self.writes, self.atomics = Log(len(data)), Log(len(data)), None
        self.known = None if self.is_global else np.zeros(len(data), bool)
        self.read_only = np.zeros(len(data), bool) if self.is_global else None
        self.on_the_way = None
        self.contested = False

    @property
    def is_global(self) -> bool:
        return self.ctas == 0

    @classmethod
    def shared(cls, name: str, words: int, ctas: int) -> Memory:
        """Shared memory, which nobody has written."""
        poison = np.full(words * ctas, 0x5EADBEEF, np.int32)
        return cls(name, poison, 4 * words, ctas=ctas)

    @classmethod
    def of_array(cls, name: str, array: np.ndarray) -> Memory:
        """Global memory that holds a copy of an array; see `copy_back`."""
        data = np.zeros(-(-array.nbytes // 4), np.int32)
        data.view(np.uint8)[: array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        return cls(name, data, array.nbytes)

    def copy_back(self, array: np.ndarray) -> None:
        """What the array holds now."""
        array[...] = self.data.view(np.uint8)[: array.nbytes].view(array.dtype).reshape(array.shape)

    def per_cta(self) -> np.ndarray:
        """`[ctas, words]` of shared memory."""
        return self.data.reshape(self.ctas, -1)


class Clock:
    """What the threads of a cluster know of each other. Thread numbers count on from cluster to cluster."""

    def __init__(self, ctas: int, threads: int, first_thread: int, tick: int):
        self.threads, self.first = threads, first_thread
        self.tick = self.began = self.cluster = tick
        self.ctas = np.full(ctas, tick, np.int32)
        self.warps = np.full(ctas * threads // 32, tick, np.int32)
        self.warps_met = self.warps.copy()
        self.arrived = None
        self.last_remote = 0

    def meet_warps(self, warps) -> None:
        """Lanes have exchanged values: what they read before is read, but what they wrote need not be seen."""
        self.tick += 1
        self.warps_met[warps] = self.tick

    def sync_warps(self, warps) -> None:
        self.meet_warps(warps)
        self.warps[warps] = self.tick

    def sync_ctas(self, ctas) -> None:
        warps = self.threads // 32
        self.sync_warps((ctas[:, None] * warps + np.arange(warps)).ravel())
        self.ctas[ctas] = self.tick

    def sync_cluster(self, arrived: int) -> None:
        self.tick += 1
        self.cluster = arrived
        for times in (self.ctas, self.warps, self.warps_met):
            np.maximum(times, arrived, out=times)

    def _floor(self):
        """The time up to which all is ordered, but for what other clusters did."""
        return self.cluster if len(self.ctas) > 1 else self.ctas[0]

    def is_ordered(self, log: Log | None) -> bool:
        """Whether that is known without a look at single words."""
        return log is None or log.latest == 0 or (self.began == 0 and log.latest <= self._floor())

    def unordered(self, log: Log, words, threads, *, reads: bool):
        """The threads that accessed one of the words before, and where, if no barrier orders them before the threads
        given."""
        floor = self._floor()
        for thread, tick in log.records():
            tick = tick[words]
            recent = tick > floor if self.began == 0 else (tick > floor) | ((tick > 0) & (tick <= self.began))
            if not recent.any():
                continue
            thread = thread[words]
            recent = np.flatnonzero(recent & (thread != threads))
            if not len(recent):
                continue
            thread, tick, mine = thread[recent], tick[recent], threads[recent]
            of_warp = (self.warps_met if reads else self.warps)[(mine - self.first) >> 5]
            of_cta = self.ctas[(mine - self.first) // self.threads]
            same_cta = (thread - self.first) // self.threads == (mine - self.first) // self.threads
            ordered = np.where(thread >> 5 == mine >> 5, of_warp, np.where(same_cta, of_cta, self.cluster))
            bad = np.flatnonzero((tick > ordered) | (tick <= self.began))
            if len(bad):
                return recent[bad[0]], int(thread[bad[0]])
        return None
