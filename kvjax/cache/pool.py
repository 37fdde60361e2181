"""The pages on the device. If a jitted call that consumes them fails, this is reported."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax

from kvjax.cache.types import LayerCache

Layers = tuple[LayerCache | None, ...]


class Pool:
    """The layers' pages. Every step consumes them (they are donated) and returns them."""

    def __init__(self, layers: Layers):
        self.layers = layers
        self._first = _first_array(layers)  # the first array of `layers`
        self._latest: jax.Array | None = None  # an output of the latest call, which shows whether it failed
        self._failure: Exception | None = None

    @functools.cached_property
    def on_cpu(self) -> bool:
        """Whether the pages are in the memory of a CPU."""
        return any(device.platform == "cpu" for device in self._first.devices())

    def run(self, step: Callable, *args: Any, layers: Callable[[Any], Layers] = lambda result: result, **kwargs: Any) -> Any:
        """Call a jitted function that consumes the pages, and keep the pages that it returns (`layers` finds them in the result). An error
        while tracing or compiling is raised unchanged, and the pages stay. Raises as `check` does."""
        self.check()
        try:
            result = step(*args, **kwargs)
        except Exception as error:
            self.check(error)
            raise
        self.layers, self._latest = layers(result), _first_array(result)
        self._first = _first_array(self.layers)
        return result

    def check(self, error: Exception | None = None) -> None:
        """RuntimeError if a call failed after it had begun (out of device memory, say): the pages are lost, or their content is invalid.

        error: what the latest call raised. Without it this does not wait for the device: a call that is still running passes, and only the
        first array is checked, because a call that fails after it has begun raises, or its outputs do.
        """
        lost = self._first.is_deleted() if error is None else any(leaf.is_deleted() for leaf in jax.tree.leaves(self.layers))
        if self._failure is None and lost:
            self._failure = error or RuntimeError("the pages were deleted")
        latest = self._latest
        if self._failure is None and latest is not None and not latest.is_deleted() and (error is not None or latest.is_ready()):
            try:
                latest.block_until_ready()
            except Exception as earlier:
                self._failure = earlier
        if self._failure is not None:
            said = str(self._failure).strip().partition("\n")[0]
            raise RuntimeError(
                f"this engine lost its pages when a step failed ({type(self._failure).__name__}: {said:.200}): make a new engine, and "
                "prefill again"
            ) from self._failure


def _first_array(result: Any) -> jax.Array:
    """The first array of a result, without going through all of it."""
    while isinstance(result, tuple):
        result = result[0]
    return jax.tree.leaves(result)[0]
