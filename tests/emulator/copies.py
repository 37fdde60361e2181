"""Asynchronous copies of emulated GPU threads: of 16 bytes, waited for in groups, and of any length, waited for by
arrivals."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np

from emulator.memory import Memory
from emulator.values import NotArrived, Pointer, Undefined, Value


class Copies:
    """What a `Machine` has on its way, and its instructions for it. size: how many threads it has."""

    def __init__(self, size: int):
        self.size = size
        self.copies: list = []
        self.arrivals: dict[tuple[int, int], SimpleNamespace] = {}
        self.committed = np.zeros(size, np.int32)

    # Asynchronous copies of 16 bytes, which may arrive any time after they are started: here when they are waited for.

    def start_copies(self, target: Pointer, source: Pointer, size: Value, where=None) -> None:
        there = self.known(size, "copies")
        self.refuse((there != 0) & (there != 16), Undefined, "copies neither 0 nor 16 bytes")
        self.clock.tick += 1
        content = np.zeros((self.size, 4), np.int32)
        for memory, threads, places in self.places(source, 4, there == 16 if where is None else where & (there == 16)):
            self._refuse_space(memory, "global", source)
            content[threads] = memory.data[places]
        for memory, threads, places in self.places(target, 4, where):
            self._refuse_space(memory, "shared", target)
            self._refuse_early(memory, threads, places)
            self._refuse_access(memory, threads, places, "copies to", "read", memory.reads, reads=True)
            self._refuse_access(memory, threads, places, "copies to", "wrote", memory.writes)
            if memory.on_the_way is None:
                memory.on_the_way = np.zeros(len(memory.data), bool)
            memory.on_the_way[places] = True
            self.copies.append((memory, threads, places, content[threads], self.committed[threads]))

    def commit(self) -> None:
        self.committed[self.mask.threads] += 1

    def wait(self, groups: int) -> None:
        self.clock.tick += 1
        left = []
        for memory, threads, places, content, group in self.copies:
            done = self.mask.bits[threads] & (group < self.committed[threads] - groups)
            if done.any():
                memory.on_the_way[places[done]] = False
                self.write(memory, threads[done], places[done], content[done])
                memory.known[places[done]] = True
            if not done.all():
                left.append(tuple(x if x is memory else x[~done] for x in (memory, threads, places, content, group)))
        self.copies = left

    # Bulk copies, which arrive when their arrival is awaited. An arrival is told by the place of its first word.

    def _arrivals(self, pointer: Pointer, threads):
        """Of each of these threads: memory, places, and the arrival's name."""
        for thread in threads:
            alone = np.arange(self.size) == thread
            ((memory, _, places),) = self.places(pointer, 2, alone)
            yield int(thread), memory, places, (id(memory), int(places[0, 0]))

    def make_arrivals(self, pointer: Pointer) -> None:
        self.clock.tick += 1
        for thread, memory, places, name in self._arrivals(pointer, self.mask.threads):
            if name in self.arrivals:
                raise Undefined(f"{self._name(thread)} makes an arrival that is there")
            self.write(memory, np.array([thread]), places, np.zeros((1, 2), np.int32))
            self.arrivals[name] = SimpleNamespace(came=0, expected=0, copies=[])

    def forget_arrivals(self, pointer: Pointer) -> None:
        self.clock.tick += 1
        for thread, memory, places, name in self._arrivals(pointer, self.mask.threads):
            if self._arrival(thread, memory, places, name).copies:
                raise NotArrived(f"{self._name(thread)} forgets an arrival that is awaited")
            self.write(memory, np.array([thread]), places, np.zeros((1, 2), np.int32))
            del self.arrivals[name]

    def _arrival(self, thread: int, memory: Memory, places, name) -> SimpleNamespace:
        if name not in self.arrivals:
            raise Undefined(f"{self._name(thread)} uses an arrival that nobody made")
        self._refuse_access(memory, np.array([thread]), places, "uses", "made", memory.writes)
        self._note(memory, memory.reads, np.array([thread]), places)
        return self.arrivals[name]

    def expect(self, pointer: Pointer, size: Value) -> None:
        count = self.known(size, "expects")
        for thread, *arrival in self._arrivals(pointer, self.mask.threads):
            arrival = self._arrival(thread, *arrival)
            if arrival.copies or arrival.expected:
                raise Undefined(f"{self._name(thread)} arrives where a copy is awaited")
            arrival.expected = int(count[thread])

    def start_bulk_copies(self, target: Pointer, source: Pointer, size: Value, pointer: Pointer) -> None:
        count = self.known(size, "copies")
        self.refuse((count <= 0) | (count % 16 != 0), Undefined, "copies no positive multiple of 16 bytes")
        self.clock.tick += 1
        for thread, *arrival in self._arrivals(pointer, self.mask.threads):
            alone, threads = np.arange(self.size) == thread, np.array([thread])
            ends = [[next(self.places(at.moved(by), 4, alone)) for by in (0, int(count[thread]) - 16)] for at in (source, target)]
            words = np.arange(int(count[thread]) // 4)[None]
            (origin, _, first), memory, places = ends[0][0], ends[1][0][0], ends[1][0][2][:, :1] + words
            self._refuse_space(origin, "global", source)
            self._refuse_space(memory, "shared", target)
            self._refuse_early(memory, threads, places)
            self._refuse_access(memory, threads, places, "copies to", "read", memory.reads, reads=True)
            self._refuse_access(memory, threads, places, "copies to", "wrote", memory.writes)
            if memory.on_the_way is None:
                memory.on_the_way = np.zeros(len(memory.data), bool)
            memory.on_the_way[places] = True
            arrival = self._arrival(thread, *arrival)
            arrival.expected -= int(count[thread])
            arrival.copies.append((memory, threads, places, origin.data[first[:, :1] + words]))

    def wait_for_arrivals(self, pointer: Pointer, parity: Value) -> None:
        self.whole_warps("an arrival")
        self.clock.tick += 1
        turn, warps = self.known(parity, "awaits"), self.mask.warps[0]
        for thread, *arrival in self._arrivals(pointer, warps * 32):
            arrival = self._arrival(thread, *arrival)
            if arrival.copies and not arrival.expected:
                for memory, threads, places, content in arrival.copies:
                    memory.on_the_way[places] = False
                    self.write(memory, threads, places, content)
                    memory.known[places] = True
                arrival.copies, arrival.came = [], arrival.came + 1
            if arrival.came % 2 == turn[thread]:
                raise NotArrived(f"{self._name(thread)} waits for ever for an arrival")
        self.clock.sync_warps(warps)
