"""Data-parallel replicas: several engines of one process, each on devices of its own, that answer one stream of
requests.

Each engine has a thread, which drives its scheduler and nothing else. Everything of the caller's runs in the caller's
thread: the iterable of requests, `on_token`, `on_prefill`. Both sides talk through queues, so no lock can be left
behind by Ctrl-C.
"""

from __future__ import annotations

import collections
import contextlib
import copy
import dataclasses
import queue
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax

from kvjax.axes import mesh
from kvjax.checks import whole_number
from kvjax.engine.call_lock import CallLock, Stopped, interrupts
from kvjax.engine.engine import Engine
from kvjax.model.identity import fingerprint
from kvjax.model.protocols import Model
from kvjax.policies.decode import DecodePolicy
from kvjax.scheduler.request import Completion, OnToken, Request
from kvjax.scheduler.scheduler import Scheduler
from pallas_kernels.core import dispatch
from pallas_kernels.core.messages import shown

END = object()
"""What the iterable of requests gives at its end."""
IDLE_SECONDS = 0.2
"""So often a replica that has nothing to do looks whether the process is ending."""

_made_by: weakref.WeakKeyDictionary[Engine, object] = weakref.WeakKeyDictionary()
"""For engines of one call of `replicas`, the same object."""
_fingerprints: weakref.WeakKeyDictionary[Engine, str] = weakref.WeakKeyDictionary()
"""Of engines that were made otherwise. To find one takes a pass over all weights."""


def replicas(
    model: Model,
    policy: str | DecodePolicy | None = None,
    *,
    data: int,
    tensor: int = 1,
    context: int = 1,
    devices: Sequence[jax.Device] | None = None,
    **options: Any,
) -> list[Engine]:
    """Engines that answer requests together: give the list to `run`, `generate` or `run_batch`, in place of one engine.

    Args:
        model: its weights are copied to the devices of every engine. It may lie on a mesh of the same sizes
            (`load(mesh=...)`).
        policy: as in `Engine`.
        data: how many engines.
        tensor, context: of the mesh of each (`mesh`).
        devices: at least `data * tensor * context`; neighbours belong to one engine. None: the first ones that JAX has.
        options: other arguments of `Engine`, the same for each. Without `pages`, each pool fits the memory of its own
            devices.

    Raises:
        ValueError: for sizes below 1 or too few devices, and whatever `mesh` and `Engine` say.
    """
    if "mesh" in options:
        raise ValueError("replicas makes a mesh for each engine: give tensor, context and devices in place of mesh")
    meshes = meshes_of(data, tensor, context, devices)
    if data > 1 and options.get("disk") is not None:
        raise ValueError(
            f"each replica would need a disk of its own, and all were given {options['disk']}: leave it out, or give host_bytes, of which "
            "each has its own"
        )
    engines = [Engine(model if data == 1 else _with_own_tokenizer(model), policy, mesh=each, **options) for each in meshes]
    _made_by.update(dict.fromkeys(engines, object()))
    return engines


def _with_own_tokenizer(model: Model) -> Model:
    """The model with a copy of its tokenizer, if that is one of Hugging Face's. A call with `truncation=True` changes
    such a tokenizer, and prompts that other threads give it meanwhile lose their ends, without an error."""
    if getattr(model.tokenizer, "backend_tokenizer", None) is None:
        return model
    own = copy.copy(model)
    object.__setattr__(own, "tokenizer", copy.deepcopy(model.tokenizer))  # a frozen dataclass, as a rule
    return own


def meshes_of(data: int, tensor: int = 1, context: int = 1, devices: Sequence[jax.Device] | None = None) -> list[jax.sharding.Mesh]:
    """The meshes of `data` engines, each of its own devices. Arguments and errors as of `replicas`."""
    data, devices = whole_number("data", data, 1), list(jax.devices() if devices is None else devices)
    each = whole_number("tensor", tensor, 1) * whole_number("context", context, 1)
    if data * each > len(devices):
        raise ValueError(
            f"data {data} x tensor {tensor} x context {context} needs {data * each} devices, and there are {len(devices)}: use fewer "
            "replicas, or a smaller mesh"
            + (" (for trials, the environment variable JAX_NUM_CPU_DEVICES=8 gives a CPU eight)" if devices[0].platform == "cpu" else "")
        )
    return [mesh(tensor=tensor, context=context, devices=devices[at : at + each]) for at in range(0, data * each, each)]


def engines_of(given: Engine | Sequence[Engine], what: str) -> tuple[Engine, ...]:
    """One engine, or several replicas, as a tuple. what: the name of the function that got them, for the error.

    TypeError for anything else. ValueError for engines whose answers would not have the same bits, or that share a
    device.
    """
    if isinstance(given, Engine):
        return (given,)
    if not isinstance(given, Sequence) or not given or not all(isinstance(each, Engine) for each in given):
        got = type(given).__name__ if not isinstance(given, Sequence) or isinstance(given, str) else shown(given)
        raise TypeError(
            f"{what} needs an engine, or a list of replicas, got {got}: make one with kvjax.Engine(model, policy), or several with "
            "kvjax.replicas(model, policy, data=2)"
        )
    first, *others = given
    for number, other in enumerate(others, 1):
        for name, (mine, its) in _differences(first, other).items():
            if mine != its:
                raise ValueError(
                    f"replicas must be alike, so that an answer does not depend on which of them gives it: {name} is {mine} in engine 0 "
                    f"and {its} in engine {number}. Make them with kvjax.replicas(model, policy, data={len(given)})"
                )
    holder: dict[jax.Device, int] = {}
    for number, each in enumerate(given):
        for device in _devices(each):
            if holder.setdefault(device, number) != number:
                raise ValueError(
                    f"engines {holder[device]} and {number} are both on device {device}: kvjax.replicas(model, policy, "
                    f"data={len(given)}) gives each its own"
                )
    return tuple(given)


def _differences(one: Engine, other: Engine) -> dict[str, tuple[Any, Any]]:
    """Everything that an answer's bits depend on, in both engines."""
    together = one.model.params is other.model.params or (one in _made_by and _made_by[one] is _made_by.get(other))
    mine, its = _facts(one, together), _facts(other, together)
    return {name: (value, its[name]) for name, value in mine.items()}


def _facts(engine: Engine, together: bool) -> dict[str, Any]:
    """What replicas have in common. together: whether the model is known to be the same."""
    if not together and engine not in _fingerprints:
        _fingerprints[engine] = fingerprint(engine.model)
    stats = engine.stats()
    return {
        "model": None if together else _fingerprints[engine],
        "policy": engine.policy,
        "policies": engine.policies,
        "prefill": engine.prefill_policy,
        "page_size": engine.page_size,
        "prefill_chunk": engine.prefill_chunk,
        "batch_buckets": engine.batch_buckets,
        "dtype": str(engine.dtype),
        "reuse": None if stats is None else True if stats.exact else "any",
        "mesh": {"context": 1, "tensor": 1} if engine.mesh is None else dict(engine.mesh.shape),
        "kind of device": _devices(engine)[0].device_kind,
    }


def _devices(engine: Engine) -> list[jax.Device]:
    """The devices of an engine, those of other processes left out."""
    if engine.mesh is not None:
        return engine.mesh.local_devices
    leaf = jax.tree.leaves(engine.model.params)[0]
    return sorted(leaf.devices(), key=lambda device: device.id) if isinstance(leaf, jax.Array) else jax.local_devices()[:1]


def run_replicas(
    engines: Sequence[Engine],
    requests: Iterable[Request | None],
    *,
    on_token: OnToken | None,
    on_prefill: Callable[[int], None] | None,
    **options: Any,
) -> Iterator[tuple[Request, Completion]]:
    """`kvjax.run` over several engines (`engines_of`). A request goes to the replica with a free slot that has fewest
    requests. options: those of each replica's scheduler.

    A request is taken from the iterable only when a slot is free for it. An error of a replica ends all of them.
    However the generator ends, every thread ends with it, and nothing of the engines stays in use.
    """
    said: queue.SimpleQueue[_Said] = queue.SimpleQueue()
    members = [_Replica(number, engine, said, on_token=on_token, on_prefill=on_prefill, **options) for number, engine in enumerate(engines)]
    source, more, whole = iter(requests), True, CallLock("the start or end of replicas")
    finished: collections.deque[tuple[Request, Completion]] = collections.deque()
    try:
        with whole:  # Ctrl-C waits until all are known to have started
            for member in members:
                member.thread.start()
        while more or finished or any(member.owed for member in members):
            if more and (free := [member for member in members if member.free > 0]):
                if (request := next(source, END)) is END:
                    more = False
                elif request is None:  # there is no request yet, and some run, or have just finished
                    finished += () if finished else _heard(said.get(), members, on_token, on_prefill)
                else:
                    min(free, key=lambda member: len(member.owed)).send(request)
            elif not finished:
                finished += _heard(_next(said), members, on_token, on_prefill)
            while not finished and not said.empty():  # an error that comes after a completion must not lose it
                finished += _heard(said.get(), members, on_token, on_prefill)
            if finished:
                yield finished.popleft()
    finally:
        if alive := [member for member in members if member.thread.is_alive()]:
            with whole:
                for member in alive:
                    member.stop()
                for member in alive:
                    member.thread.join()


def _next(said: queue.SimpleQueue[_Said]) -> _Said:
    """What a replica says next. Ctrl-C ends the wait."""
    while True:
        with interrupts, contextlib.suppress(queue.Empty):
            return said.get(timeout=IDLE_SECONDS)


def _heard(
    said: _Said, members: Sequence[_Replica], on_token: OnToken | None, on_prefill: Callable[[int], None] | None
) -> tuple[tuple[Request, Completion], ...]:
    """Take note of what a replica said, and tell the caller's functions. Returns what has finished; raises the
    replica's error."""
    finished = members[said.number].heard(said)
    for event in said.tokens:
        on_token(*event)
    if said.prefilled:
        on_prefill(said.prefilled)
    return finished


@dataclasses.dataclass(frozen=True)
class _Said:
    """What a replica's thread tells the caller's. number: of the replica. received, room: requests that it has taken so
    far, and how many more it had room for then. idle: it has nothing to do. error: it has ended."""

    number: int
    received: int = 0
    room: int = 0
    idle: bool = False
    finished: tuple[tuple[Request, Completion], ...] = ()
    tokens: tuple[tuple[Request, int, str], ...] = ()
    prefilled: int = 0
    error: BaseException | None = None


class _Replica:
    """One engine and its thread. `send`, `stop` and `heard` are for the caller's thread; what begins with an underscore
    is the replica's.

    sent: how many requests it was given. owed: those without a completion. free: how many more it has room for.
    """

    def __init__(
        self,
        number: int,
        engine: Engine,
        said: queue.SimpleQueue[_Said],
        *,
        on_token: OnToken | None,
        on_prefill: Callable[[int], None] | None,
        **options: Any,
    ):
        self.number, self._engine, self._said, self._inbox = number, engine, said, queue.SimpleQueue()
        self.sent, self.owed = 0, list[Request]()
        self._tokens: list[tuple[Request, int, str]] = []
        told = {
            "on_token": None if on_token is None else (lambda *event: self._tokens.append(event)),
            "on_prefill": None if on_prefill is None else (lambda tokens: said.put(_Said(number, prefilled=tokens))),
        }
        self._scheduler, self._stop, self._received = Scheduler(engine, **told, **options), False, 0
        self.free = self._scheduler.slots
        self._forced = dispatch.forced_path()
        # No daemon: Python would end the process in the middle of a device's call.
        self.thread = threading.Thread(target=self._run, name=f"kvjax replica {number}", daemon=False)

    def send(self, request: Request) -> None:
        """Give it a request."""
        self.sent, self.free = self.sent + 1, self.free - 1
        self.owed.append(request)
        self._inbox.put(request)

    def stop(self) -> None:
        """Let its thread end at the next chunk of a prompt, or after the next step."""
        self._stop = True
        self._inbox.put(None)

    def heard(self, said: _Said) -> tuple[tuple[Request, Completion], ...]:
        """Take note of what it said. Returns the completions, or raises its error."""
        if said.error is not None:
            said.error.add_note(f"in replica {self.number}, counted from 0")
            raise said.error
        if said.prefilled:
            return ()
        self.free = said.room - (self.sent - said.received)
        for request, _ in said.finished:
            place = next((place for place, each in enumerate(self.owed) if each is request), None)
            if place is None:
                raise RuntimeError(f"replica {self.number} has answered a request that it does not have: {shown(request, 200)}")
            del self.owed[place]
        if said.idle and said.received == self.sent and self.owed:
            raise RuntimeError(f"replica {self.number} has nothing to do, and has not answered {shown(self.owed[0], 200)}")
        return said.finished

    # In its own thread

    def _run(self) -> None:
        error = None
        try:
            with contextlib.nullcontext() if self._forced is None else dispatch.forced(self._forced):
                self._answer()
        except Stopped:
            pass
        except BaseException as failed:
            error = failed
        try:
            self._engine.guard.stopping = None
            self._scheduler.close()
        except BaseException as failed:
            error = error or failed
        if error is not None:
            self._said.put(_Said(self.number, error=error))

    def _answer(self) -> None:
        """What `kvjax.run` does, with requests from the inbox."""
        self._engine.guard.stopping = self._stopping
        scheduler, before = self._scheduler, None
        while True:
            self._take(wait=False)
            finished = () if scheduler.idle else tuple((each.request, each.completion) for each in scheduler.step())
            room = max(0, scheduler.slots - scheduler.running - scheduler.waiting) if scheduler.has_room else 0
            tokens, self._tokens = tuple(self._tokens), []
            now = self._received, room, scheduler.idle
            if finished or tokens or now != before:
                self._said.put(_Said(self.number, *now, finished, tokens))
                before = now
            if self._stopping():
                return
            if scheduler.idle:
                self._take(wait=True)

    def _take(self, *, wait: bool) -> None:
        """Submit the requests that have come. wait: until one does, or the run ends."""
        while not self._stopping():
            try:
                request = self._inbox.get(block=wait, timeout=IDLE_SECONDS if wait else None)
            except queue.Empty:
                if wait:
                    continue
                return
            if request is not None:
                self._received += 1
                self._scheduler.submit(request)
            wait = False

    def _stopping(self) -> bool:
        """Whether the run has ended. The process may end before: then Python waits for this thread, and nobody stops
        it."""
        return self._stop or not threading.main_thread().is_alive()
