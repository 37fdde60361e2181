"""Tensors of a model with adapters merged into them, read by rows as every other tensor is. Numbers are added in
float32.

Sources: LoRA (arXiv 2106.09685), DoRA (arXiv 2402.09353); details as in peft's `merge` of `Linear` and `Embedding`.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Protocol

import numpy as np

from kvjax.models.tensors import Stored, Tensor, View

ROWS = 4096
"""Rows of an embedding that are read at a time for the norms of its columns."""


class Change(Protocol):
    """What an adapter does to a tensor."""

    def onto(self, rows: np.ndarray, start: int, stop: int) -> np.ndarray:
        """Rows [start, stop), float32, after it. rows: these rows after the changes before it."""


@dataclasses.dataclass(frozen=True)
class LowRank:
    """A matrix [F, E] plus `scale * b @ a`. base: the matrix before any change. b: [F, r]. a: [r, E]. magnitude: DoRA's
    norms of rows [F].

    With magnitudes each row is then multiplied by its magnitude over the norm of the row of the base plus this change.
    peft measures that norm without the adapters merged before.
    """

    base: Tensor
    b: Stored
    a: Stored
    scale: float
    magnitude: Stored | None = None

    def onto(self, rows: np.ndarray, start: int, stop: int) -> np.ndarray:
        """`Change.onto`."""
        delta = (self.scale * _numbers(self.b, start, stop)) @ _numbers(self.a)
        if self.magnitude is None:
            return np.add(rows, delta, out=delta)
        norms = np.linalg.norm(_floats(self.base, start, stop) + delta, axis=1)
        return _ratio(self.magnitude, start, stop, norms)[:, None] * (rows + delta)


@dataclasses.dataclass(frozen=True)
class LowRankTable:
    """An embedding [V, E] plus `scale * (b @ a)` transposed. a: [r, V]. b: [E, r]. magnitude: DoRA's norms of columns
    [E].

    With magnitudes each column is multiplied by its magnitude over the norm of the column of the base plus this change,
    so the first rows that are read cost a reading of all of them.
    """

    base: Tensor
    b: Stored
    a: Stored
    scale: float
    magnitude: Stored | None = None

    def onto(self, rows: np.ndarray, start: int, stop: int) -> np.ndarray:
        """`Change.onto`."""
        changed = rows + self._delta(start, stop)
        return changed if self.magnitude is None else changed * self._factors

    def _delta(self, start: int, stop: int) -> np.ndarray:
        return _finite(self.a, self.a.read_columns(start, stop)).T @ (self.scale * _numbers(self.b)).T

    @functools.cached_property
    def _factors(self) -> np.ndarray:
        count, width = self.base.shape
        squares = np.zeros(width)
        for start in range(0, count, ROWS):
            stop = min(start + ROWS, count)
            squares += np.square(_floats(self.base, start, stop) + self._delta(start, stop), dtype=np.float64).sum(axis=0)
        return _ratio(self.magnitude, 0, width, np.sqrt(squares))


@dataclasses.dataclass(frozen=True)
class Added:
    """A bias [F] plus `scale * bias`: what `lora_bias` trains."""

    bias: Stored
    scale: float

    def onto(self, rows: np.ndarray, start: int, stop: int) -> np.ndarray:
        """`Change.onto`."""
        return rows + self.scale * _numbers(self.bias, start, stop)


@dataclasses.dataclass(frozen=True)
class Merged(View):
    """A tensor after changes, in order. Rows are float32, and are rounded once, when they are loaded."""

    changes: tuple[Change, ...]

    @property
    def dtype(self) -> str:
        """float32."""
        return "F32"

    def read(self, start: int, stop: int) -> np.ndarray:
        """`Tensor.read`. ValueError for numbers of an adapter, or a sum, that are not finite."""
        base = rows = _floats(self.tensor, start, stop)
        with np.errstate(all="ignore"):  # what is not finite is found below
            for change in self.changes:
                rows = change.onto(rows, start, stop)
        if not np.isfinite(rows).all() and np.isfinite(base).all():
            raise ValueError(
                f"{self.name} with its adapters merged holds numbers that are not finite: the adapter is damaged, or its scale too large"
            )
        return rows


@dataclasses.dataclass(frozen=True)
class Replaced(View):
    """A tensor of an adapter in the place of the model's `tensor`, which has the same shape."""

    by: Stored

    @property
    def shape(self) -> tuple[int, ...]:
        """The same for both."""
        return self.by.shape

    @property
    def dtype(self) -> str:
        """That of the adapter's."""
        return self.by.dtype

    def read(self, start: int, stop: int) -> np.ndarray:
        """`Tensor.read`."""
        return self.by.read(start, stop)


def _floats(tensor: Tensor, start: int, stop: int) -> np.ndarray:
    return tensor.read(start, stop).astype(np.float32, copy=False)


def _numbers(stored: Stored, start: int = 0, stop: int | None = None) -> np.ndarray:
    """Rows of an adapter's tensor."""
    return _finite(stored, stored.read(start, stored.shape[0] if stop is None else stop))


def _finite(stored: Stored, found: np.ndarray) -> np.ndarray:
    """float32. ValueError for numbers that are not finite."""
    found = found.astype(np.float32)
    if not np.isfinite(found).all():
        raise ValueError(f"{stored.file}: {stored.name} holds numbers that are not finite: download the adapter again")
    return found


def _ratio(magnitude: Stored, start: int, stop: int, norms: np.ndarray) -> np.ndarray:
    """Magnitudes over norms, float32. A norm of 0 gives infinity, which `Merged.read` refuses."""
    return (_numbers(magnitude, start, stop) / norms).astype(np.float32)
