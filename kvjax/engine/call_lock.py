"""Calls on shared state: one thread at a time, and Ctrl-C never stops a call half-way, and is never lost."""

from __future__ import annotations

import contextlib
import functools
import signal
import sys
import threading
from _signal import getsignal  # CPython's own: those of `signal` also look for an enum member of each handler, which takes far longer
from _signal import signal as set_handler
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, Concatenate, Protocol, Self


class Lockstep(Protocol):
    """What the first process and the others do at the same places of their schedulers. In the first process it sends,
    in the others it receives."""

    def check_inside(self) -> None:
        """RuntimeError outside of the calls that all processes make."""

    def add(self, scheduler: Any, options: dict[str, Any], *, listening: bool) -> None:
        """A scheduler was made with these options. listening: whether somebody wants every token."""

    def call(self, scheduler: Any, name: str, *given: Any) -> contextlib.AbstractContextManager[None]:
        """The block is a call of this method."""

    def first(self, value: Any) -> Any:
        """The first process's value."""

    def compare(self, plan: Any) -> None:
        """RuntimeError unless the first process has the same plan."""

    def interrupt_point(self, interrupt: Callable[[], None]) -> None:
        """Let a Ctrl-C take effect that the first process has held back. interrupt: lets it in this process."""


class Stopped(BaseException):
    """What Ctrl-C is for the main thread, for others: their work is to end here. No error, so nothing takes it for
    one."""


class Interrupts(contextlib.ContextDecorator):
    """A context manager, or decorator, around long work in the main thread: Ctrl-C takes effect at the next safe place,
    and is never lost.

    Python raises KeyboardInterrupt wherever the main thread happens to be. In a callback of the garbage collector (JAX
    has one), in a `__del__` or in the callback of a weak reference, Python prints the exception and drops it. Inside
    the block, a first Ctrl-C is only noted, and raised by `check`, at an interrupt point of a `CallLock`, or at the end
    of the block. A second one is raised at once. Blocks may be nested. Nothing changes in other threads, nor where the
    caller has a handler of Ctrl-C of its own.
    """

    def __init__(self):
        self._handler = self._press  # one object, so that it is known again
        self._depth, self._pressed, self._before = 0, False, signal.default_int_handler

    def __enter__(self) -> Self:
        if not _in_main_thread():
            return self
        if not self._depth and (now := getsignal(signal.SIGINT)) is not self._handler:
            if now not in (signal.default_int_handler, _presses.handler):
                return self
            self._pressed, self._before = False, now
            set_handler(signal.SIGINT, self._handler)
        self._depth += 1
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if not self._depth or not _in_main_thread():
            return
        self._depth -= 1
        if self._depth:
            if kind is None:
                self.check()
            return
        if getsignal(signal.SIGINT) is self._handler:
            set_handler(signal.SIGINT, self._before)
        if kind is None or issubclass(kind, Exception):  # who catches the error must not go on as if nobody had pressed Ctrl-C
            self.check()
        self._pressed = False

    def check(self) -> None:
        """Raise KeyboardInterrupt if Ctrl-C was pressed. For places where nothing is half done."""
        if self._pressed and _in_main_thread():
            self._pressed = False
            raise KeyboardInterrupt

    def _press(self, number: int, frame: FrameType | None) -> None:
        if self._pressed:
            self._pressed = False
            raise KeyboardInterrupt
        self._pressed = True


interrupts = Interrupts()
"""Of this process."""

AGAIN_SECONDS = 0.05


class _Presses:
    """Ctrl-C that takes effect a moment later, in the main thread. held: whether one waits until no module is being
    imported."""

    def __init__(self):
        self.handler = self._press  # one object, so that it is known again
        self.held, self._mine, self._timers = False, False, list[threading.Timer]()

    def again(self) -> None:
        """Press Ctrl-C in a moment."""

        def press() -> None:
            self._mine = True
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

        self._timers.append(threading.Timer(AGAIN_SECONDS, press))
        self._timers[-1].daemon = True
        self._timers[-1].start()

    def forget(self) -> None:
        """Press no more."""
        for each in self._timers:
            each.cancel()
        self.held = self._mine = False
        self._timers.clear()

    def _press(self, number: int, frame: FrameType | None) -> None:
        """Python's own handler, but that it waits while a module is imported, which may make an error of its own of it.
        A second Ctrl-C does not wait."""
        second, self._mine = self.held and not self._mine, False
        self.held = _importing(frame) and not second
        if not self.held:
            raise KeyboardInterrupt
        self.again()


_presses = _Presses()


def _importing(frame: FrameType | None) -> bool:
    """Whether a module is being imported there."""
    while frame is not None:
        if frame.f_code.co_name == "_find_and_load" and frame.f_code.co_filename == "<frozen importlib._bootstrap>":
            return True
        frame = frame.f_back
    return False


@contextlib.contextmanager
def pressed_again() -> Iterator[None]:
    """For a whole program: Ctrl-C is not lost, and leaves nothing half imported. One that Python drops (`Interrupts`
    says where) comes again a moment later. So does one that comes while a module is imported, until none is; at
    the end of the block it is raised. Nothing changes where the caller has a handler of Ctrl-C of its own."""
    before, mine = sys.unraisablehook, _in_main_thread() and getsignal(signal.SIGINT) is signal.default_int_handler

    def hook(dropped: sys.UnraisableHookArgs) -> None:
        if issubclass(dropped.exc_type, KeyboardInterrupt):
            _presses.again()
        else:
            before(dropped)

    if mine:
        set_handler(signal.SIGINT, _presses.handler)
    sys.unraisablehook = hook
    try:
        yield
        if _presses.held:
            raise KeyboardInterrupt
    finally:
        sys.unraisablehook = before
        if mine and getsignal(signal.SIGINT) is _presses.handler:
            set_handler(signal.SIGINT, signal.default_int_handler)
        _presses.forget()


def _in_main_thread() -> bool:
    return threading.get_ident() == threading.main_thread().ident


class CallLock:
    """A context manager around every call that touches an object's state. The thread that is in it may enter it again.

    Another thread that enters meanwhile gets a RuntimeError at once, and does not wait. In the main thread, Ctrl-C is
    held back inside the guard: it takes effect at `interrupt_point`, or else when the outermost call returns. An
    interrupt in the middle of a call would leave the object half changed. One in the middle of a JAX operation may
    leave all of JAX unusable.

    together: the other processes that make the same calls (`kvjax.scheduler.processes`), if there are any; then they
    are interrupted together.
    """

    def __init__(self, what: str):
        self._what = what
        self.together: Lockstep | None = None
        self._lock = threading.Lock()
        self._owner: int | None = None
        self._depth = 0
        self._handler: Any = None
        self._held: list[FrameType | None] = []
        self.stopping: Callable[[], bool] | None = None  # asked at every interrupt point, in the thread that is there

    def __enter__(self) -> Self:
        return self._enter(wait=False)

    @contextlib.contextmanager
    def when_free(self) -> Iterator[None]:
        """Enter, and wait while another thread is in it. For freeing what would otherwise be lost."""
        self._enter(wait=True)
        try:
            yield
        finally:
            self.__exit__()

    def _enter(self, *, wait: bool) -> Self:
        me = threading.get_ident()
        if self._owner == me:
            self._depth += 1
            return self
        held: list[FrameType | None] = []
        handler = None
        if _in_main_thread() and getsignal(signal.SIGINT) is not None:
            handler = set_handler(signal.SIGINT, lambda number, frame: held.append(frame))
        if not self._lock.acquire(blocking=wait):
            _give_back(handler, held)
            raise RuntimeError(
                f"{self._what} is being used by another thread, and only one may use it at a time: make one for each thread, or put a "
                "lock of your own around every use"
            )
        self._owner, self._depth, self._handler, self._held = me, 1, handler, held
        return self

    def __exit__(self, *_: object) -> None:
        self._depth -= 1
        if self._depth:
            return
        handler, held = self._handler, self._held
        self._owner = self._handler = None
        self._lock.release()
        _give_back(handler, held)

    @property
    def busy(self) -> bool:
        """Whether a thread is in it."""
        return self._owner is not None

    def interrupt_point(self) -> None:
        """Let a Ctrl-C that was held back take effect here. For places where the state is consistent. Stopped if
        `stopping` says so: only the main thread gets a Ctrl-C, and the others have to ask."""
        if self.stopping is not None and self.stopping():
            raise Stopped
        if self.together is not None:
            self.together.interrupt_point(self._interrupt)
        else:
            self._interrupt()

    def _interrupt(self) -> None:
        if self._held and callable(self._handler):
            frame = self._held.pop()
            self._held.clear()
            self._handler(signal.SIGINT, frame)
        interrupts.check()


def _give_back(handler: Any, held: list[FrameType | None]) -> None:
    """Restore the earlier handler of Ctrl-C. A Ctrl-C that was held back takes effect now."""
    if handler is not None:
        set_handler(signal.SIGINT, handler)
        if held:
            signal.raise_signal(signal.SIGINT)


class Guarded(Protocol):
    """Whatever has a guard."""

    guard: CallLock


def guarded[S: Guarded, **P, R](method: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], R]:
    """A method that runs inside its object's guard. RuntimeError if it would run here alone, and not in all processes
    of the job."""

    @functools.wraps(method)
    def call(self: S, *args: P.args, **kwargs: P.kwargs) -> R:
        with self.guard:
            if self.guard.together is not None:
                self.guard.together.check_inside()
            return method(self, *args, **kwargs)

    return call
