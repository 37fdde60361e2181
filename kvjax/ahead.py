"""Programs that are compiled in another thread, while the device prefills a prompt."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax


class CompileAhead:
    """Compiles jitted functions before they are called. `key in` says whether a key's programs were begun. running: those for which nobody
    has waited yet.

    They are traced and lowered in the caller's thread, because that runs code of policies and depends on the caller's contexts. Only XLA
    runs in the other thread. A later call with arguments of the same shapes and types finds the program and compiles nothing. A call that
    differs compiles its own, so a wrong guess costs time and nothing else.
    """

    def __init__(self):
        self._thread: ThreadPoolExecutor | None = None
        self._begun: set[Hashable] = set()
        self.running: dict[Hashable, Future] = {}

    def __contains__(self, key: Hashable) -> bool:
        return key in self._begun

    def begin(self, key: Hashable, make: Callable[[], Iterable[functools.partial]]) -> None:
        """Compile what some calls of jitted functions run, in order. make: returns the calls; their arguments are arrays, or
        `jax.ShapeDtypeStruct` in their place. If anything fails, nothing is compiled, and the later call says why."""
        self._begun.add(key)
        try:
            lowered = [call.func.lower(*call.args, **call.keywords) for call in make()]
            if self._thread is None:
                self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="kvjax compiles")
            self.running[key] = self._thread.submit(_compile, lowered)
        except Exception:
            return

    def wait(self, key: Hashable) -> None:
        """Wait until a key's programs are compiled, if they were begun."""
        if (future := self.running.pop(key, None)) is not None:
            future.exception()


def _compile(lowered: list[jax.stages.Lowered]) -> None:
    for each in lowered:
        each.compile()


def shape_of(shape: tuple[int, ...], dtype: Any, committed_to: jax.sharding.Sharding | None = None) -> jax.ShapeDtypeStruct:
    """In place of an array. committed_to: where it is; None: not committed to any device."""
    return jax.ShapeDtypeStruct(shape, dtype, sharding=committed_to)
