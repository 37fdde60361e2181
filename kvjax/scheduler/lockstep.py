"""What the schedulers of several processes do together: the first one's leads, the others follow
(`kvjax.scheduler.processes`)."""

from __future__ import annotations

import contextlib
import itertools
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Protocol

from kvjax.model.identity import fingerprint
from kvjax.policies.decode import identity
from kvjax.policies.prefill import identity as prefill_identity
from kvjax.scheduler.scheduler import Scheduler

if TYPE_CHECKING:
    from kvjax.engine.engine import Engine
    from kvjax.engine.step_plan import StepPlan
    from kvjax.scheduler.request import Request


class ProcessLost(RuntimeError):
    """Another process of the job has ended or failed. Start all of them again."""


class Channel(Protocol):
    """How the first process tells the others what it calls, as `kvjax.scheduler.processes.Processes` does."""

    number: int

    @property
    def lost(self) -> bool:
        """Whether another process is lost."""

    def send(self, *message: Any) -> None:
        """From the first process to all others."""

    def receive(self, kind: str | None = None) -> tuple[Any, ...]:
        """What the first process sent next. kind: what it must be."""

    def tell(self, number: int, call: int, text: str) -> None:
        """Tell one process that a call has failed here."""

    def noticing(self) -> contextlib.AbstractContextManager[None]:
        """ProcessLost from the block if another process is lost meanwhile."""


class Leader:
    """`kvjax.engine.call_lock.Lockstep` of the first process."""

    def __init__(self, processes: Channel):
        self._processes, self._counter = processes, itertools.count()
        self._numbers = weakref.WeakKeyDictionary[Any, int]()
        self._ended, self._inside = False, False
        self._call, self._failed = 0, False  # the latest call, and whether it failed
        self._failures: set[int] = set()  # calls that failed
        self._over = threading.Condition()

    def end(self) -> None:
        """No calls follow. Followers return."""
        self._ended = True
        if not self._processes.lost:
            self._processes.send("end", self._failed)

    def fails_too(self, call: int, seconds: float) -> bool:
        """Whether this process fails in a call, too. Waits for its end, at most so long."""
        with self._over:
            self._over.wait_for(lambda: self._call > call or not self._inside, seconds)
            return call in self._failures

    def check_inside(self) -> None:
        if not self._inside:
            raise RuntimeError(
                "this engine runs in several processes, and this call would run in the first one alone: use a Scheduler, kvjax.run or "
                "kvjax.generate inside the block of lead"
            )

    def add(self, scheduler: Scheduler, options: dict[str, Any], *, listening: bool) -> None:
        self._numbers[scheduler] = next(self._counter)
        with self.call(scheduler, "add", options, listening):
            pass

    @contextlib.contextmanager
    def call(self, scheduler: Scheduler, name: str, *given: Any) -> Iterator[None]:
        if name == "close" and (self._ended or self._processes.lost):  # nobody follows: free what is here
            self._inside = True
            try:
                yield
            finally:
                self._inside = False
            return
        if self._ended:
            raise RuntimeError("the block of lead has ended, and other processes do not follow any more: use the scheduler inside it")
        self._processes.send("call", self._failed, self._numbers[scheduler], name, *given)
        self._inside, self._call, self._failed = True, self._call + 1, True
        try:
            with self._processes.noticing():
                yield
            self._failed = False
        finally:
            with self._over:
                self._inside = False
                self._failures |= {self._call} if self._failed else set()
                self._over.notify_all()

    def first(self, value: Any) -> Any:
        self._processes.send("value", value)
        return value

    def compare(self, plan: StepPlan) -> None:
        self._processes.send("value", _outline(plan))

    def interrupt_point(self, interrupt: Callable[[], None]) -> None:
        raised = None
        try:
            interrupt()
        except BaseException as error:
            raised = error
        if self._inside:
            self._processes.send("value", raised is not None)
        if raised is not None:
            raise raised


class Follower:
    """`kvjax.engine.call_lock.Lockstep` of the other processes. It makes the calls of the first one."""

    def __init__(self, processes: Channel, engine: Engine):
        self._processes, self._engine = processes, engine
        self._schedulers: dict[int, Scheduler] = {}
        self._handles: dict[int, weakref.WeakValueDictionary[int, Any]] = {}
        self._call, self._failure = 0, None

    def run(self) -> None:
        """Make calls until the first process says that no more follow."""
        while True:
            kind, failed, *call = self._processes.receive()
            if failed != (self._failure is not None):
                said = f"failed: {self._failure}" if self._failure is not None else "did not fail, and the first one did"
                raise RuntimeError(f"process {self._processes.number} {said}; the processes no longer agree") from self._failure
            if kind == "end":
                return
            self._call += 1
            try:
                with self._processes.noticing():
                    self._make(*call)
                self._failure = None
            except BaseException as error:
                self._failure = error
                self._processes.tell(0, self._call, f"{type(error).__name__}: {error}")
                if isinstance(error, ProcessLost):
                    raise

    def _make(self, number: int, name: str, *given: Any) -> None:
        if name == "add":
            options, listening = given
            self._schedulers[number] = Scheduler(self._engine, **options, on_token=_heard if listening else None)
            self._handles[number] = weakref.WeakValueDictionary()
            return
        scheduler, handles = self._schedulers[number], self._handles[number]
        if name == "submit":
            handle = scheduler.submit(*given)
            handles[handle.order[1]] = handle
        elif name == "cancel":
            scheduler.cancel(handles[given[0]])
        else:
            getattr(scheduler, name)()

    def check_inside(self) -> None:
        pass

    def add(self, scheduler: Scheduler, options: dict[str, Any], *, listening: bool) -> None:
        pass

    def call(self, scheduler: Scheduler, name: str, *given: Any) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def first(self, value: Any) -> Any:
        return self._processes.receive("value")[0]

    def compare(self, plan: StepPlan) -> None:
        expected = self.first(None)
        if _outline(plan) != expected:
            raise RuntimeError(f"process {self._processes.number} plans {_outline(plan)}, the first one {expected}")

    def interrupt_point(self, interrupt: Callable[[], None]) -> None:
        if self.first(None):
            raise KeyboardInterrupt


def _heard(request: Request, token: int, text: str) -> None:
    """In the first process somebody wants every token."""


def _outline(plan: StepPlan) -> tuple[Any, ...]:
    """A plan without its arrays: policies and lengths of its steps; places, lengths and slices of its chunks."""
    decodes = [
        (str(each.policy), each.launch and each.launch.steps, *(-1 if row is None else row.length for row in each.sequences))
        for each in plan.decodes
    ]
    return tuple(decodes), tuple((each.sequence.length, len(each.tokens), each.slices) for each in plan.chunks)


def described(engine: Engine) -> dict[str, str]:
    """What engines must agree on."""
    pages = {name: each.total for name, each in engine.allocators.items()}
    named = {"model": fingerprint(engine.model), "policies": [identity(each) for each in engine.policies], "pages": pages}
    named |= {"prefill": prefill_identity(engine.prefill_policy), "page_size": engine.page_size, "prefill_chunk": engine.prefill_chunk}
    named |= {"batch_buckets": engine.batch_buckets, "mesh": dict(engine.mesh.shape), "stores": engine._stores}
    return {name: str(value) for name, value in named.items()}
