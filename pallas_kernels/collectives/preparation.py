"""What a kernel needs from before its launch, and gets from before the loop where it is launched in one.

Kernels that exchange arrays between devices prepare buffers (`pallas_kernels.collectives.peer_buffers`), for which all
devices meet. Inside a loop they would do so in every turn.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Hashable, Iterator
from typing import Any

import jax

Prepare = Callable[[], Any]


def _here(_: Hashable, prepare: Prepare) -> Any:
    return prepare()


_find: contextvars.ContextVar[Callable[[Hashable, Prepare], Any]] = contextvars.ContextVar("find", default=_here)


def prepared(kind: Hashable, prepare: Prepare) -> Any:
    """What `prepare()` returns, arrays: from before the loop, inside `before_loop`, else from here. Not for functions
    that JAX remembers (`jax.jit`, branches of `cond` at the top of a module): what it remembers prepares in every turn.

    kind: equal for calls that may share the arrays. prepare: uses no array of the loop's body.
    """
    return _find.get()(kind, prepare)


@contextlib.contextmanager
def before_loop(body: Callable, *arguments: Any) -> Iterator[Callable]:
    """Prepare here what the kernels of a loop's body need. Gives the body for the loop, which has to be traced inside.
    Traces it once more.

        with before_loop(turn, 0, x) as turn:
            x = jax.lax.fori_loop(0, 8, turn, x)

    arguments: of `body`; of arrays only shapes and dtypes count.
    """
    needed: dict[Hashable, Prepare] = {}

    def note(kind: Hashable, prepare: Prepare) -> Any:
        needed.setdefault(kind, prepare)
        return prepare()

    with _finding(note):
        jax.eval_shape(lambda *given: body(*given), *arguments)  # a function of its own, because JAX may remember how one was traced
    made = {kind: prepare() for kind, prepare in needed.items()}
    with _finding(lambda kind, prepare: made[kind] if kind in made else prepare()):
        yield lambda *given: body(*given)


@contextlib.contextmanager
def _finding(find: Callable[[Hashable, Prepare], Any]) -> Iterator[None]:
    token = _find.set(find)
    try:
        yield
    finally:
        _find.reset(token)
