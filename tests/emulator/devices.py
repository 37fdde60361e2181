"""Devices that write to each other's memory, emulated: bodies of kernels that use `plgpu.remote_ref` and semaphores run unchanged.

Each CTA is a thread, and one of them runs at a time, until its next access to shared memory or semaphores. Then an adversary says who goes
on (`Adversary`). Memory is as weak as a GPU's: a write to another device arrives at any later time, in parts, but before a signal of the
same CTA does (release); a signal arrives at any later time.

Each device runs a stream of calls. Between calls the memory of the kernel's buffers belongs to other work, which notices if it is written
to. Before each kernel, as XLA does it, semaphores are zeroed, then all devices meet at a barrier.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np

from emulator.values import Fault

OTHER_WORK = -1024.0
"""What the memory of the buffers holds between calls: a number that 16 bits hold, too."""


class Deadlock(Fault):
    """All that is left waits for what nobody will do."""


class Overwritten(Fault):
    """Memory of other work was written to."""


class Unconsumed(Fault):
    """A semaphore does not end at 0."""


class _Stopped(Exception):
    """Ends threads of a machine that failed."""


class Adversary:
    """Says who goes on, by a seed. Each device, and the wires between devices, has a speed; the extremes let one run far ahead."""

    def __init__(self, seed: int, speeds: Sequence[float] = ()):
        self.random, self.speeds = random.Random(seed), list(speeds)

    def choose(self, choices: list[Event]) -> int:
        """The number of one of the choices. device: None for something on a wire."""
        weights = [self.speeds[-1 if event.device is None else event.device] if self.speeds else 1.0 for event in choices]
        return self.random.choices(range(len(choices)), weights)[0]


class Interrupting:
    """Lets a thread run on as long as it can, and then the first one that can. At the given turns the one of that number goes on."""

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
    """Something on its way to another device. cta: who sent it."""

    cta: Cta
    deliver: Callable[[], None]
    is_signal: bool


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
    """An array in the memory of a device. remote: of another device than the CTA's."""

    memory: Sequence[np.ndarray]
    device: int
    remote: bool = False

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
    """One CTA of a kernel on one device, and what its body does; mutants override that. semaphores: a count per device and CTA."""

    def __init__(self, machine: Machine, thread: _Thread, device: int, number: int, semaphores: np.ndarray):
        self.machine, self.thread, self.device, self.number, self.semaphores = machine, thread, device, number, semaphores

    def axis_index(self, name: str) -> int:
        return self.number if name == "cta" else self.device

    def load(self, ref: Ref, index) -> np.ndarray:
        self.thread.pause()
        return ref.memory[ref.device][index].copy()

    def store(self, ref: Ref, index, value) -> None:
        self.thread.pause()
        array = ref.memory[ref.device]
        if not ref.remote:
            array[index] = value
            return
        half = len(value) // 2
        *row, piece = index
        for part, values in ((slice(piece.start, piece.start + half), value[:half]), (slice(piece.start + half, piece.stop), value[half:])):
            self.send(lambda part=part, values=values: array.__setitem__((*row, part), values), is_signal=False)

    def remote_ref(self, ref: Ref, device_id: dict[str, int]) -> Ref:
        (device,) = device_id.values()
        return dataclasses.replace(ref, device=int(device), remote=True)

    def signal(self, device_id: dict[str, int]) -> None:
        self.thread.pause()
        self.release()
        (device,) = device_id.values()

        def arrive() -> None:
            self.semaphores[device, self.number] += 1

        self.send(arrive, is_signal=True)

    def release(self) -> None:
        """All writes of this CTA arrive."""
        for message in [message for message in self.machine.messages if message.cta is self and not message.is_signal]:
            self.machine.messages.remove(message)
            message.deliver()

    def wait(self, value: int) -> None:
        self.thread.pause(lambda: self.semaphores[self.device, self.number] >= value)
        self.semaphores[self.device, self.number] -= value

    def send(self, deliver: Callable[[], None], *, is_signal: bool) -> None:
        self.machine.messages.append(_Message(self, deliver, is_signal))


@contextlib.contextmanager
def _names(module: Any) -> Iterator[None]:
    """In place of Pallas in the module of a kernel, and of its function `send(piece, pieces)`, which copies one piece to several."""
    lax = SimpleNamespace(axis_index=lambda name: _current.cta.axis_index(name), rem=lambda a, b: a % b)
    pl = SimpleNamespace(
        ds=lambda start, size: slice(start, start + size),
        semaphore_signal=lambda _, *, device_id: _current.cta.signal(device_id),
        semaphore_wait=lambda _, value: _current.cta.wait(value),
    )
    plgpu = SimpleNamespace(remote_ref=lambda ref, device_id: _current.cta.remote_ref(ref, device_id))

    def send(source: _At, targets: Sequence[_At]) -> None:
        values = source.ref[source.index]
        for target in targets:
            target.ref[target.index] = values

    with mock.patch.multiple(module, lax=lax, pl=pl, plgpu=plgpu, jnp=SimpleNamespace(float32=np.float32), send=send):
        yield


class _Streams:
    """All devices, each with its stream of calls, and the memory of its buffers, the same for every call."""

    def __init__(self, module, body, calls, *, ctas: int, adversary, cta_type: type[Cta], barrier: bool, resident: int | None):
        self.body, self.calls, self.count_ctas, self.cta_type, self.barrier, self.resident = body, calls, ctas, cta_type, barrier, resident
        devices, size = calls[0][0].shape
        self.outs = [np.full_like(x, np.nan) for x, _ in calls]
        self.received = [np.full((devices, size), OTHER_WORK, calls[0][0].dtype) for _ in range(devices)]
        self.semaphores, self.came = np.zeros((devices, ctas), np.int64), np.zeros(devices, np.int64)
        self.machine = Machine(adversary)
        with _names(module):
            for device in range(devices):
                self.machine.start(device, functools.partial(self._stream, device))
            self.machine.run()

    def _stream(self, device: int, thread: _Thread) -> None:
        for call in range(len(self.calls)):
            self._other_work(device, thread)
            self.semaphores[device] = 0
            thread.pause()
            self.came[device] += 1
            if self.barrier:
                thread.pause(lambda call=call: bool((self.came > call).all()))
            self._launch(device, call, thread)
            if self.semaphores[device].any():
                raise Unconsumed(f"after call {call}, semaphores of device {device} are {self.semaphores[device].tolist()}")
        self._other_work(device, thread)

    def _other_work(self, device: int, thread: _Thread) -> None:
        self.received[device][...] = OTHER_WORK
        thread.pause()
        if (self.received[device] != OTHER_WORK).any():
            raise Overwritten(f"memory of device {device} is written to between calls")

    def _launch(self, device: int, call: int, thread: _Thread) -> None:
        """Run a kernel. With less room than CTAs, devices begin with different ones."""
        started: list[_Thread] = []
        running = lambda: sum(not cta.ended for cta in started)  # noqa: E731
        for number in range(self.count_ctas)[:: -1 if device % 2 else 1]:
            if self.resident is not None:
                thread.pause(lambda: running() < self.resident)
            started.append(self.machine.start(device, functools.partial(self._cta, device, number, call)))
        thread.pause(lambda: not running())

    def _cta(self, device: int, number: int, call: int, thread: _Thread) -> None:
        (x, residual), out = self.calls[call], self.outs[call]
        _current.cta = self.cta_type(self.machine, thread, device, number, self.semaphores)
        whole = None if residual is None else Ref([residual] * len(x), device)
        self.body(Ref(list(x), device), whole, Ref(self.received, device), Ref(list(out), device), None)


def run_calls(
    module: Any,
    body: Callable[..., None],
    calls: Sequence[tuple[np.ndarray, np.ndarray | None]],
    *,
    ctas: int,
    adversary: Any,
    cta_type: type[Cta] = Cta,
    barrier: bool = True,
    resident: int | None = None,
) -> list[np.ndarray]:
    """Run `body(x_ref, residual_ref, received_ref, out_ref, semaphore)` on all devices, for several calls one after the other.

    module: where the body's names of Pallas are. calls: of each, the devices' arrays `[devices, size]`, and the residual `[size]` or None.
    barrier: False leaves XLA's barrier before kernels out. resident: CTAs that a device has room for at once; None: all of a launch.

    Returns for each call what each device has: `[devices, size]`. Raises a `Fault`.
    """
    options = {"ctas": ctas, "adversary": adversary, "cta_type": cta_type, "barrier": barrier, "resident": resident}
    return _Streams(module, body, calls, **options).outs
