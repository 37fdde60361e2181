"""Programs that are compiled in another thread, while the device prefills a prompt."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Hashable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax

from pallas_kernels.dispatch import forced, forced_to


class CompileAhead:
    """Compiles jitted functions before they are called, in one thread. `key in` says whether a key's programs were begun. running: those
    for which nobody has waited yet.

    A later call with arguments of the same shapes and types finds the program and compiles nothing. A call that differs compiles its own,
    so a wrong guess costs time and nothing else.
    """

    def __init__(self):
        self._thread: ThreadPoolExecutor | None = None
        self._begun: set[Hashable] = set()
        self.running: dict[Hashable, Future] = {}

    def __contains__(self, key: Hashable) -> bool:
        return key in self._begun

    def begin(self, key: Hashable, make: Callable[[], Iterable[functools.partial]]) -> None:
        """Compile what some calls of jitted functions run, in order. make: returns the calls; their arguments are arrays, or
        `jax.ShapeDtypeStruct` in their place. If it raises, nothing is compiled, and the later call will say why."""
        self._begun.add(key)
        try:
            calls = tuple(make())
        except Exception:
            return
        if self._thread is None:
            self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="kvjax compiles")
        # Shapes, because steps that run meanwhile consume the arrays.
        shapes = [functools.partial(call.func, *_shapes(call.args), **_shapes(call.keywords)) for call in calls]
        self.running[key] = self._thread.submit(_compile, forced_to(), shapes)

    def wait(self, key: Hashable) -> None:
        """Wait until a key's programs are compiled, if they were begun. If that failed, the call will say why."""
        if (future := self.running.pop(key, None)) is not None:
            future.exception()


def _compile(implementation: str | None, calls: list[functools.partial]) -> None:
    with contextlib.nullcontext() if implementation is None else forced(implementation):
        for call in calls:
            call.func.lower(*call.args, **call.keywords).compile()


def _shapes(given: Any) -> Any:
    def shape_of(leaf: Any) -> Any:
        if isinstance(leaf, jax.Array) and leaf.committed:
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) if hasattr(leaf, "dtype") and hasattr(leaf, "shape") else leaf

    return jax.tree.map(shape_of, given)
