"""The pages on the device. If a jitted call that consumes them fails, this is reported."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax

from kvjax.cache.types import LayerCache, SlotLayer

Layers = tuple[LayerCache | None, ...]


class Pool:
    """The layers' pages. Every step consumes them (they are donated) and returns them."""

    def __init__(self, layers: Layers):
        self.layers = layers
        self._latest: jax.Array | None = None  # an output of the latest call, which shows whether it failed
        self._failure: Exception | None = None

    @functools.cached_property
    def on_cpu(self) -> bool:
        """Whether the pages are in the memory of a CPU."""
        return any(device.platform == "cpu" for device in first_array(self.layers).devices())

    def run(self, step: Callable, *args: Any, kept: Callable[[Any], tuple[Layers, jax.Array]] | None = None, **kwargs: Any) -> Any:
        """Call a jitted function that consumes the pages, and keep the pages that it returns. An error while tracing or compiling is raised
        unchanged, and the pages stay. Raises as `check` does.

        kept: finds all pages in the result, and one of the call's outputs; None where the result is the pages of all layers.
        """
        self.check()
        try:
            result = step(*args, **kwargs)
        except Exception as error:
            self.check(error)
            raise
        self.layers, self._latest = (result, first_array(result)) if kept is None else kept(result)
        return result

    def check(self, error: Exception | None = None) -> None:
        """RuntimeError if a call failed after it had begun (out of device memory, say): the pages are lost, or their content is invalid.

        error: what the latest call raised. Without it this does not wait for the device: a call that is still running passes, and only the
        first array is checked, because a call that fails after it has begun raises, or its outputs do.
        """
        lost = first_array(self.layers).is_deleted() if error is None else any(leaf.is_deleted() for leaf in jax.tree.leaves(self.layers))
        latest = self._latest
        if self._failure is None:
            if lost:
                self._failure = error or RuntimeError("the pages were deleted")
            elif latest is not None and (error is not None or latest.is_ready()):
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


def first_array(layers: Layers) -> jax.Array:
    """The first array of the layers, without going through all of them. The first layer always has arrays of its own."""
    first = layers[0]
    return first.start if isinstance(first, SlotLayer) else first.pages.k
