"""Devices that write to each other's memory, emulated: bodies of kernels that use `plgpu.remote_ref`, semaphores and
lines run unchanged.

Each CTA is a thread, and one of them runs at a time, until its next access to shared memory or semaphores. Then an
adversary says who goes on (`Adversary`). Memory is as weak as a GPU's: lines and signals arrive at any later time, in
any order. Of a line, a word and its number arrive together, and nothing else.

Each device runs a stream of programs. Between them the memory of a buffer belongs to other work, which notices if it is
written to. A program opens the buffers, then calls the kernel that exchanges, several times. Before the first of its
kernels, as XLA does it, semaphores are zeroed, then all devices meet at a barrier.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import random
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np

from emulator.values import Fault
from pallas_kernels.collectives import peer_buffers

OTHER_WORK = 1
"""What the memory of a buffer holds between programs: the number of a first call."""


class Deadlock(Fault):
    """All that is left waits for what nobody will do."""


class Overwritten(Fault):
    """Memory of other work was written to."""


class Unconsumed(Fault):
    """A semaphore does not end at 0."""


class _Stopped(Exception):
    """Ends threads of a machine that failed."""


class Adversary:
    """Says who goes on, by a seed. Each device, and the wires between devices, has a speed; the extremes let one run
    far ahead."""

    def __init__(self, seed: int, speeds: Sequence[float] = ()):
        self.random, self.speeds = random.Random(seed), list(speeds)

    def choose(self, choices: list[Event]) -> int:
        """The number of one of the choices. device: None for something on a wire."""
        weights = [self.speeds[-1 if event.device is None else event.device] if self.speeds else 1.0 for event in choices]
        return self.random.choices(range(len(choices)), weights)[0]


class Interrupting:
    """Lets a thread run on as long as it can, and then the first one that can. At the given turns the one of that
    number goes on."""

    def __init__(self, interrupts: dict[int, int]):
        self.interrupts, self.turn, self.running, self.widths = interrupts, -1, None, []

    def choose(self, choices: list[Event]) -> int:
        self.turn += 1
        self.widths.append(len(choices))
        if self.turn in self.interrupts:
            found = self.interrupts[self.turn] % len(choices)
        else:
            found = next((n for n, event in enumerate(choices) if event.source is self.running), 0)
        self.running = choices[found].source
        return found


@dataclasses.dataclass(frozen=True)
class Event:
    """What can happen next. source: a thread, or a message."""

    source: Any
    device: int | None


@dataclasses.dataclass(eq=False)
class _Message:
    """Something on its way to a device."""

    deliver: Callable[[], None]


class _Thread:
    """A thread that runs when it is told to."""

    def __init__(self, machine: Machine, device: int, function: Callable[[_Thread], None]):
        self.machine, self.device, self.function = machine, device, function
        self.go, self.ready, self.ended = threading.Semaphore(0), None, False
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        self.go.acquire()
        try:
            if not self.machine.stopped:
                self.function(self)
        except _Stopped:
            pass
        except BaseException as error:
            self.machine.failed = error
        self.ended = True
        self.machine.turn.release()

    def pause(self, ready: Callable[[], bool] | None = None) -> None:
        """Let others run; come back when chosen, and when `ready()` holds."""
        self.ready = ready
        self.machine.turn.release()
        self.go.acquire()
        self.ready = None
        if self.machine.stopped:
            raise _Stopped


class Machine:
    """Threads and messages, one step at a time."""

    def __init__(self, adversary: Any):
        self.adversary, self.turn = adversary, threading.Semaphore(0)
        self.threads: list[_Thread] = []
        self.messages: list[_Message] = []
        self.failed, self.stopped = None, False

    def start(self, device: int, function: Callable[[_Thread], None]) -> _Thread:
        """A new thread, which begins when it is chosen."""
        self.threads.append(_Thread(self, device, function))
        return self.threads[-1]

    def run(self) -> None:
        """Run until all threads have ended and everything has arrived. Raises what a thread raised, or Deadlock."""
        try:
            while True:
                self.threads = [thread for thread in self.threads if not thread.ended]
                able = [thread for thread in self.threads if thread.ready is None or thread.ready()]
                choices = [Event(thread, thread.device) for thread in able] + [Event(message, None) for message in self.messages]
                if not choices and self.threads:
                    raise Deadlock(f"{len(self.threads)} threads wait for what nobody will do")
                if not choices:
                    return
                source = choices[self.adversary.choose(choices)].source
                if isinstance(source, _Message):
                    self.messages.remove(source)
                    source.deliver()
                    continue
                source.go.release()
                self.turn.acquire()
                if self.failed is not None:
                    raise self.failed
        finally:
            self.stopped = True
            for thread in self.threads:
                thread.go.release()
            for thread in self.threads:
                thread.thread.join()


@dataclasses.dataclass(frozen=True)
class Ref:
    """An array in the memory of a device."""

    memory: Sequence[np.ndarray]
    device: int

    @property
    def dtype(self) -> np.dtype:
        return self.memory[self.device].dtype

    def __getitem__(self, index) -> np.ndarray:
        return _current.cta.load(self, index)

    def __setitem__(self, index, value) -> None:
        _current.cta.store(self, index, value)

    @property
    def at(self) -> _At:
        return _At(self)


class _At:
    """`ref.at`, and what `ref.at[index]` gives."""

    def __init__(self, ref: Ref, index: Any = None):
        self.ref, self.index = ref, index

    def __getitem__(self, index) -> _At:
        return _At(self.ref, index)


_current = threading.local()


class Cta:
    """One CTA of a kernel on one device, and what its body does; mutants override that. semaphores: a count per device
    and CTA."""

    def __init__(self, machine: Machine, thread: _Thread, device: int, number: int, semaphores: np.ndarray):
        self.machine, self.thread, self.device, self.number, self.semaphores = machine, thread, device, number, semaphores

    def axis_index(self, name: str) -> int:
        return self.number if name == "cta" else self.device

    def load(self, ref: Ref, index) -> np.ndarray:
        self.thread.pause()
        return ref.memory[ref.device][index].copy()

    def store(self, ref: Ref, index, value) -> None:
        self.thread.pause()
        ref.memory[ref.device][index] = value

    def remote_ref(self, ref: Ref, device_id: dict[str, int]) -> Ref:
        (device,) = device_id.values()
        return dataclasses.replace(ref, device=int(device))

    def signal(self, device_id: dict[str, int]) -> None:
        self.thread.pause()
        (device,) = device_id.values()

        def arrive() -> None:
            self.semaphores[device, self.number] += 1

        self.machine.messages.append(_Message(arrive))

    def wait(self, value: int) -> None:
        self.thread.pause(lambda: self.semaphores[self.device, self.number] >= value)
        self.semaphores[self.device, self.number] -= value

    def clear(self, buffer: np.ndarray, start: int, words: int) -> None:
        for index in (self.number, slice(start, start + words // 2), slice(start + words // 2, start + words)):
            self.thread.pause()
            buffer[index] = 0

    def send(self, buffers: Sequence[np.ndarray], place: int, words: np.ndarray, call: int) -> None:
        """To all devices, its own included; every pair by itself."""
        self.thread.pause()
        for device in range(len(buffers)):
            for number, word in enumerate(words):
                self.send_pair(buffers[device], place + 2 * number, word, call)

    def send_pair(self, buffer: np.ndarray, place: int, word: int, call: int) -> None:
        self.machine.messages.append(_Message(lambda: buffer.__setitem__(slice(place, place + 2), (word, call))))

    def receive(self, buffer: np.ndarray, places: Sequence[int], call: int) -> np.ndarray:
        """The words of pairs, one pair loaded after the other; all of them again, if one was not there."""
        while True:
            self.thread.pause(lambda: bool((buffer[np.add(places, 1)] == call).all()))
            pairs = [self.load_pair(buffer, place) for place in places]
            if all(number == call for _, number in pairs):
                return np.array([word for word, _ in pairs], np.int32)

    def load_pair(self, buffer: np.ndarray, place: int) -> np.ndarray:
        self.thread.pause()
        return buffer[place : place + 2].copy()


@contextlib.contextmanager
def _names(module: Any, ctas: int) -> Iterator[None]:
    """In place of Pallas in the module of a kernel and in that of buffers, and of its stages by single threads. Buffers
    are small."""
    lax = SimpleNamespace(axis_index=lambda name: _current.cta.axis_index(name), rem=lambda a, b: a % b)
    pl = SimpleNamespace(
        ds=lambda start, size: slice(start, start + size),
        semaphore_signal=lambda _, *, device_id: _current.cta.signal(device_id),
        semaphore_wait=lambda _, value: _current.cta.wait(value),
        when=lambda condition: lambda function: function() if condition else None,
    )
    plgpu = SimpleNamespace(remote_ref=lambda ref, device_id: _current.cta.remote_ref(ref, device_id))

    def clear(num_devices: int, buffer: Ref, cta: int) -> None:
        words = peer_buffers.part_words(num_devices)
        _current.cta.clear(buffer.memory[buffer.device], peer_buffers.MAX_CTAS + cta * words, words)

    def note_addresses(table: Ref, opened: Sequence[Ref], me: int) -> None:
        table.memory[table.device][:] = [word for buffer in opened for word in (buffer.device, 0)] + [me]

    def send(s: Any, x: _At, table: Ref, place: int, call: int) -> None:
        known = [_current.buffers[device] for device in table.memory[table.device][: 2 * s.num_devices : 2]]
        _current.cta.send(known, place, x.ref[x.index].view(np.int32), call)

    def receive(s: Any, buffer: Ref, place: int, call: int, received: Ref) -> None:
        out = received.memory[received.device]
        count = out.nbytes // len(out) // 4
        places = [place + device * peer_buffers.LINES * 4 + 2 * number for device in range(len(out)) for number in range(count)]
        out[...] = _current.cta.receive(buffer.memory[buffer.device], places, call).view(out.dtype).reshape(out.shape)

    stages = {"clear": clear, "note_addresses": note_addresses, "send": send, "receive": receive}
    both = {"lax": lax, "pl": pl, "plgpu": plgpu}
    with (
        mock.patch.multiple(peer_buffers, **both, **stages, MAX_CTAS=ctas, LINES=2),
        mock.patch.multiple(module, **both, jnp=SimpleNamespace(float32=np.float32)),
    ):
        yield


class _Streams:
    """All devices, each with its stream of programs, and the memory of its buffer, the same for every program."""

    def __init__(self, body, shape, calls, outs, *, per_program: int, adversary, cta_type: type[Cta], barrier: bool, resident: int | None):
        self.body, self.shape, self.calls, self.outs, self.per_program = body, shape, calls, outs, per_program
        self.cta_type, self.barrier, self.resident = cta_type, barrier, resident
        devices = shape.num_devices
        self.semaphores, self.came = np.zeros((devices, shape.ctas), np.int64), np.zeros(devices, np.int64)
        self.tables = [np.zeros(2 * devices + 1, np.int32) for _ in range(devices)]
        self.machine = Machine(adversary)
        with _names(sys.modules[body.__module__], shape.ctas):
            self.buffers = [np.full(peer_buffers.buffer_words(devices), OTHER_WORK, np.int32) for _ in range(devices)]
            for device in range(devices):
                self.machine.start(device, functools.partial(self._stream, device))
            self.machine.run()

    def _stream(self, device: int, thread: _Thread) -> None:
        for program, first in enumerate(range(0, len(self.calls), self.per_program)):
            self._other_work(device, thread)
            self.semaphores[device] = 0
            thread.pause()
            self.came[device] += 1
            if self.barrier:
                thread.pause(lambda program=program: bool((self.came > program).all()))
            self._launch(device, None, thread)
            if self.semaphores[device].any():
                raise Unconsumed(f"in program {program}, semaphores of device {device} are {self.semaphores[device].tolist()}")
            for call in range(first, min(first + self.per_program, len(self.calls))):
                self._launch(device, call, thread)
        self._other_work(device, thread)

    def _other_work(self, device: int, thread: _Thread) -> None:
        self.buffers[device][...] = OTHER_WORK
        thread.pause()
        if (self.buffers[device] != OTHER_WORK).any():
            raise Overwritten(f"memory of device {device} is written to between programs")

    def _launch(self, device: int, call: int | None, thread: _Thread) -> None:
        """Run a kernel. With less buffer than CTAs, devices begin with different ones."""
        started: list[_Thread] = []
        running = lambda: sum(not cta.ended for cta in started)  # noqa: E731
        for number in range(self.shape.ctas)[:: -1 if device % 2 else 1]:
            if self.resident is not None:
                thread.pause(lambda: running() < self.resident)
            started.append(self.machine.start(device, functools.partial(self._cta, device, number, call)))
        thread.pause(lambda: not running())

    def _cta(self, device: int, number: int, call: int | None, thread: _Thread) -> None:
        _current.cta, _current.buffers = self.cta_type(self.machine, thread, device, number, self.semaphores), self.buffers
        buffer, table = Ref(self.buffers, device), Ref(self.tables, device)
        if call is None:
            peer_buffers.open_buffer(self.shape.axis_name, self.shape.num_devices, buffer, table, None)
            return
        given = self.calls[call]
        received = Ref([np.zeros((len(given[0]), self.shape.piece), given[0].dtype)] * len(given[0]), device)
        self.body(self.shape, buffer, table, *(Ref(list(x), device) for x in given), Ref(list(self.outs[call]), device), received)


def run_calls(
    body: Callable[..., None],
    shape: Any,
    calls: Sequence[tuple[np.ndarray, ...]],
    outs: list[np.ndarray],
    *,
    per_program: int,
    adversary: Any,
    cta_type: type[Cta] = Cta,
    barrier: bool = True,
    resident: int | None = None,
) -> list[np.ndarray]:
    """Run `open_buffer` of `pallas_kernels.collectives.peer_buffers` and the body of a kernel that exchanges on all
    devices, for several calls one after the other.

    shape: as the body takes it. calls: of each, what the devices are given, `[devices, size]` each. outs: for each,
    where they write. per_program: calls of a program. barrier: False leaves XLA's barrier out. resident: CTAs that a
    device has room for at once; None: all of a launch.

    Returns outs. Raises a `Fault`.
    """
    options = {"per_program": per_program, "adversary": adversary, "cta_type": cta_type, "barrier": barrier, "resident": resident}
    return _Streams(body, shape, calls, outs, **options).outs
