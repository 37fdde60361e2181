"""Several processes, one job: each has some of a mesh's devices, the first schedules, and the others follow.

Every process of a mesh must run the same programs in the same order. So the first process sends what its schedulers are
asked for: requests, steps, cancellations. The others ask schedulers of their own for the same. All see the same tokens,
so they make the same plans; each plan is compared. What depends on one process alone is decided by the first: how many
slices of prefill fit into a gap, and whether Ctrl-C ends a step.

A lost process would leave the others waiting for it. Each process has a connection to the first one, and notices when
it breaks.
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import json
import os
import pickle
import queue
import secrets
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection, Listener
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from kvjax.checks import whole_number
from kvjax.scheduler.lockstep import Follower, Leader, ProcessLost, described
from pallas_kernels.core.messages import shown

if TYPE_CHECKING:
    from jax.sharding import Mesh

    from kvjax.engine.engine import Engine

GRACE_S = 10.0
"""Seconds that a call has to notice that a process is lost. A call that waits for the lost process never does; then
this process ends."""
FAILURE_S = 60.0
"""Seconds in which the first process has to fail in the call in which another one failed. Compiling may take it long to
find the error."""
KEEPALIVE_S = 10
"""Seconds after which a silent connection is tested, so that a machine without power is noticed, too."""
ADDRESS_BYTES = 512


def start_processes(coordinator: str | None = None, count: int | None = None, number: int | None = None) -> Processes:
    """Join a job of several processes. Call it in each of them before anything else uses JAX.

        processes = kvjax.start_processes("host:1234", count=2, number=0)  # number=1 in the other
        engine = kvjax.Engine(kvjax.load(folder, mesh=mesh), mesh=mesh)    # in both, with mesh = kvjax.mesh(tensor=2)
        if processes.number:
            processes.follow(engine)
        else:
            with processes.lead(engine):
                print(kvjax.generate(engine, "Once upon a time"))

    It waits until all have joined. `jax.devices()` then has the devices of all processes.

    Args:
        coordinator: address of the first process, as "host:1234", with a free port. None: as the cluster says (Slurm,
            Open MPI, Kubernetes).
        count: of processes; None only without a coordinator.
        number: of this process, from 0; None only without a coordinator.

    Raises:
        ValueError: for an address without a port, or a number outside [0, count).
        RuntimeError: if JAX has started already, or some processes do not join within five minutes.
    """
    host = None
    if coordinator is not None:
        if count is None or number is None:
            raise ValueError("a job of several processes needs count and number beside the coordinator's address")
        host, _, port = str(coordinator).rpartition(":")
        if not host or not port.isdecimal() or not 0 < int(port) < 2**16:
            raise ValueError(f"coordinator must be an address with a port, as host:1234, got {coordinator!r}")
        count = whole_number("count", count, 1)
        if whole_number("number", number) >= count:
            raise ValueError(f"number is {number}, but the {count} processes have the numbers 0 to {count - 1}")
    elif count is not None or number is not None:
        raise ValueError("count and number need the coordinator's address, as host:1234; without one, the cluster says all three")
    jax.config.update("jax_enable_preemption_service", False)  # with it, SIGTERM ends no process
    try:
        jax.distributed.initialize(coordinator, count, number)
    except ValueError as error:
        raise ValueError(
            f"no cluster says where the processes are ({str(error).rstrip('.')}): start them by Slurm, Open MPI or Kubernetes, or give the "
            "coordinator's address, count and number"
        ) from error
    return Processes(host)


class Processes:
    """This process and its connections to the others. number, count: of this process, and of all; see
    `start_processes`."""

    def __init__(self, host: str | None = None):
        self.number, self.count = jax.process_index(), jax.process_count()
        self._inbox: queue.SimpleQueue[tuple[Any, ...] | None] = queue.SimpleQueue()  # of a follower; None: look for a loss
        self._lost: ProcessLost | None = None
        self._found, self._noticed = threading.Event(), threading.Event()  # that another process is lost, and that this was raised
        self._closing = False
        self._engine: Engine | None = None  # that this process leads, or follows with
        self._peers = self._connected(host)
        for number, peer in self._peers.items():
            threading.Thread(target=self._read, args=(number, peer), name=f"kvjax process {number}", daemon=True).start()

    def __repr__(self) -> str:
        return f"Processes({self.number} of {self.count})"

    def __enter__(self) -> Processes:
        return self

    def __exit__(self, kind: object, error: BaseException | None, _: object) -> None:
        if error is not None and self._lost is None:
            for number in self._peers:
                self.tell(number, 0, f"{type(error).__name__}: {error}")
        self.close()

    def close(self) -> None:
        """Leave the job. The others do not take it for a loss."""
        self._closing = True
        for peer in self._peers.values():
            with contextlib.suppress(OSError):
                peer.send(("left",))

    def share(self, value: Any) -> Any:
        """The value of the first process, in all of them. Each must call it. ProcessLost."""
        if self.number:
            return self.receive("value")[0]
        self.send("value", value)
        return value

    def agree(self, named: Mapping[str, Any]) -> None:
        """ValueError, in all processes, unless each gives the same values. Each must call it, with the same names.
        ProcessLost."""
        if self.number:
            self._peers[0].send(("named", self.number, dict(named)))
            if said := self.receive("value")[0]:
                raise ValueError(said)
            return
        others = sorted(self.receive("named") for _ in range(self.count - 1))
        said = next((each for number, theirs in others if (each := _different(named, number, theirs))), None)
        self.send("value", said)
        if said:
            raise ValueError(said)

    @contextlib.contextmanager
    def lead(self, engine: Engine) -> Iterator[Engine]:
        """Schedule for all processes: those that `follow` an equal engine do what schedulers of this engine are asked
        for in this block.

        Only in the first process. Other calls of the engine raise RuntimeError in the block, because they would run
        here alone. Raises ProcessLost; ValueError if this is not the first process, or the engine's mesh lacks devices
        of some process.
        """
        with self._joined(engine, first=True):
            self.share(described(engine))
            leader = engine.guard.together = Leader(self)
            try:
                yield engine
            finally:
                engine.guard.together = None
                leader.end()

    def follow(self, engine: Engine) -> None:
        """Do what the first process does with its engine, until its block of `lead` ends. Ctrl-C is left to the first
        process.

        Raises ProcessLost if the first process is lost, and RuntimeError if this one failed where that one did not;
        ValueError if this is the first process, or the engines differ.
        """
        with self._joined(engine, first=False):
            own = described(engine)
            expected = self.share(None)
            for name, value in expected.items():
                if own[name] != value:
                    raise ValueError(f"the first process has an engine with {name} {value}, this one with {own[name]}: make equal ones")
            follower = engine.guard.together = Follower(self, engine)
            try:
                with _without_interrupts():
                    follower.run()
            finally:
                engine.guard.together = None

    @contextlib.contextmanager
    def _joined(self, engine: Engine, *, first: bool) -> Iterator[None]:
        if (self.number == 0) != first:
            raise ValueError(f"this is process {self.number} of {self.count}: process 0 calls lead, the others follow")
        if self._engine is not None:
            raise ValueError("this process leads an engine already, and can lead one at a time")
        devices = () if engine.mesh is None else engine.mesh.devices.flat
        if missing := sorted(set(range(self.count)) - {device.process_index for device in devices}):
            raise ValueError(
                f"no device of process {missing[0]} is in the engine's mesh: make one of all {jax.device_count()} devices, by tensor and "
                "context (--tensor, --context)"
            )
        self._engine = engine
        try:
            yield
        finally:
            self._engine = None

    # Connections

    def _connected(self, host: str | None) -> dict[int, Connection]:
        """Connections to the other processes; of a follower, to the first."""
        if self.count == 1:
            return {}
        if self.number:
            told = bytes(multihost_utils.broadcast_one_to_all(np.zeros(ADDRESS_BYTES, np.uint8))).rstrip(b"\0")
            address, port, key = json.loads(told)
            peer = Client((address, port), authkey=bytes.fromhex(key))
            peer.send(self.number)
            return {0: _kept_alive(peer)}
        key, found, host = secrets.token_bytes(32), {}, host or socket.gethostname()
        with Listener((host, 0), backlog=self.count, authkey=key) as listener:
            address = json.dumps((host, listener.address[1], key.hex())).encode()
            multihost_utils.broadcast_one_to_all(np.frombuffer(address.ljust(ADDRESS_BYTES, b"\0"), np.uint8))
            while len(found) < self.count - 1:
                with contextlib.suppress(AuthenticationError, EOFError):  # not one of ours
                    peer = listener.accept()
                    found[peer.recv()] = _kept_alive(peer)
        return dict(sorted(found.items()))

    def _read(self, number: int, peer: Connection) -> None:
        """Receive what a process sends, until it leaves or is lost."""
        try:
            while (message := peer.recv())[0] != "left":
                if message[0] == "failed":
                    self._told(number, *message[1:])
                else:
                    self._inbox.put(message)
        except (EOFError, OSError):
            if not self._closing:
                self._lose(f"process {number} of {self.count} was lost: its connection broke", gone=True)

    def _told(self, number: int, call: int, text: str) -> None:
        """A follower failed in a call. If this process fails in the same call, all is well."""
        leader = None if self._engine is None else self._engine.guard.together
        if call and isinstance(leader, Leader) and leader.fails_too(call, FAILURE_S):
            return
        self._lose(f"process {number} of {self.count} failed: {text}", gone=False)

    def _lose(self, what: str, *, gone: bool) -> None:
        """Let the next call, or the one that waits for a message, raise ProcessLost. A call that goes on waiting for
        the lost process in a program cannot be interrupted: then this process ends. gone: whether the process has
        ended, and does not wait for others."""
        if self._lost is None:
            self._lost = ProcessLost(f"{what}; start all {self.count} processes again")
            self._found.set()
            if gone:
                atexit.register(_exit_alone)
                if self.number:  # JAX may end this process at any moment, with a message of its own
                    print(f"kvjax: {self._lost}", file=sys.stderr, flush=True)
        self._inbox.put(None)
        until = time.monotonic() + GRACE_S
        while not self._noticed.wait(0.1):
            engine = self._engine
            if engine is None or not (self.number or engine.guard.busy):
                return
            if time.monotonic() > until:
                print(f"kvjax: {self._lost}", file=sys.stderr, flush=True)
                _exit_alone()

    def check(self) -> None:
        """ProcessLost if another process is lost."""
        if self._lost is not None:
            self._noticed.set()
            raise self._lost

    @contextlib.contextmanager
    def noticing(self) -> Iterator[None]:
        """ProcessLost in place of an error that a program gives because another process is lost."""
        try:
            yield
        except RuntimeError as error:
            # The connections of the program's own break at the same moment as ours.
            if not isinstance(error, ProcessLost) and self._found.wait(1.0):
                self._noticed.set()
                raise self._lost from error
            raise

    @property
    def lost(self) -> bool:
        """Whether another process is lost."""
        return self._lost is not None

    def send(self, *message: Any) -> None:
        """Send to all other processes. TypeError for what cannot be sent: then nothing was."""
        self.check()
        try:
            packed = pickle.dumps(message)
        except Exception as error:
            raise TypeError(f"{shown(message[-1], 80)} cannot be sent to other processes: {error}") from error
        for peer in self._peers.values():
            try:
                peer.send_bytes(packed)
            except OSError:
                self._found.wait(1.0)  # its reader finds it, too, and may know why
                self.check()
                raise

    def tell(self, number: int, call: int, text: str) -> None:
        """Tell a process that this one failed in a call; 0: outside of calls."""
        with contextlib.suppress(OSError):
            self._peers[number].send(("failed", call, text))

    def receive(self, kind: str | None = None) -> tuple[Any, ...]:
        """The next message of the first process; what follows its kind, if one is named. RuntimeError for another
        kind."""
        message = self._inbox.get()
        if message is None:
            self.check()
        if kind is None:
            return message
        if message[0] != kind:
            raise RuntimeError(f"process {self.number} waited for {kind!r} of the first one, which sent {message[0]!r}")
        return message[1:]


def check_alike(mesh: Mesh, named: Mapping[str, str]) -> None:
    """ValueError, in all processes of a mesh, unless each gives the same texts. Only if the mesh has devices of all
    processes; else nothing is compared."""
    if {device.process_index for device in mesh.devices.flat} != set(range(jax.process_count())) or jax.process_count() == 1:
        return
    own = np.frombuffer(b"".join(hashlib.sha256(text.encode()).digest() for text in named.values()), np.uint8)
    found = multihost_utils.process_allgather(own).reshape(jax.process_count(), len(named), -1)
    for number, row in enumerate(found):
        for (name, text), theirs, expected in zip(named.items(), row, found[0], strict=True):
            if (theirs != expected).any():
                raise ValueError(
                    f"process {number} has another {name} than process 0; this one, {jax.process_index()}, has {text}. Give all the same"
                )


def _different(named: Mapping[str, Any], number: int, theirs: Mapping[str, Any]) -> str | None:
    """What differs in another process, in words."""
    for name, value in named.items():
        if theirs[name] != value:
            return f"process {number} was given {name} {theirs[name]}, and process 0 {name} {value}: give all processes the same"
    return None


def _kept_alive(peer: Connection) -> Connection:
    """The connection, tested while it is silent."""
    with socket.socket(fileno=os.dup(peer.fileno())) as own:
        own.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name in ("TCP_KEEPIDLE", "TCP_KEEPALIVE"):  # Linux and macOS name it differently
            if hasattr(socket, name):
                own.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), KEEPALIVE_S)
        own.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, KEEPALIVE_S)
        own.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
        own.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return peer


def _exit_alone() -> None:
    """End this process without JAX's own exit, which waits minutes for the processes that are lost."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    os._exit(1)


@contextlib.contextmanager
def _without_interrupts() -> Iterator[None]:
    """Ctrl-C does nothing in this block, where it is the main thread's."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
