"""Tensors of a checkpoint: where each is stored, and how rows of it are read. Whatever a checkpoint's format, loading
sees these.

A tensor has `name`, `shape`, `dtype` (the stored type, by safetensors' name) and `read(start, stop)`.
"""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Protocol, runtime_checkable

import jax.numpy as jnp
import numpy as np

from kvjax.known_files import KnownFile
from pallas_kernels.core.matrices import MatrixFormat, PackedMatrix

DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
"""Types of numbers that are not packed: safetensors' name -> numpy's name."""

_ANY_DTYPES = {name: jnp.dtype(dtype) for name, dtype in DTYPES.items()} | {
    "F8_E4M3": jnp.dtype(jnp.float8_e4m3fn),
    "F8_E8M0": jnp.dtype(jnp.float8_e8m0fnu),
    "I8": jnp.dtype(jnp.int8),
    "U8": jnp.dtype(jnp.uint8),
    "I16": jnp.dtype(jnp.int16),
    "I32": jnp.dtype(jnp.int32),
    "I64": np.dtype(np.int64),
}
"""Stored types of the tensors of packed matrices."""


class Tensor(Protocol):
    """A tensor that parameters are read from. dtype: what `read` gives, one of `DTYPES` or, of a packed matrix's parts,
    of safetensors' other names."""

    @property
    def name(self) -> str:
        """For errors, and in the file."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The number of elements along each axis."""

    @property
    def dtype(self) -> str:
        """safetensors' name of the type."""

    def read(self, start: int, stop: int) -> np.ndarray:
        """Rows [start, stop) of the first axis, in a copy that the caller may keep."""


@runtime_checkable
class RowsPacked(Tensor, Protocol):
    """A tensor that may stay packed as it is stored."""

    @property
    def format(self) -> MatrixFormat | None:
        """The format in which it can stay packed; None: it is widened when it is read."""

    @property
    def counted(self) -> MatrixFormat | None:
        """`format`, by which its bytes are counted: the scales of a stored matrix may have another dtype than those of
        one packed here."""

    def read_packed(self, start: int, stop: int) -> PackedMatrix:
        """Rows [start, stop) in `format`, in arrays of the host."""


@dataclasses.dataclass(frozen=True)
class Stored:
    """A tensor of a safetensors file, under the name `name`, from byte `start` of the file on."""

    known: KnownFile
    start: int
    shape: tuple[int, ...]
    dtype: str
    name: str

    @property
    def file(self) -> Path:
        """Where its file is, for errors."""
        return self.known.path

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor in the file."""
        return math.prod(self.shape) * self._type.itemsize

    def read(self, start: int, stop: int) -> np.ndarray:
        """`Tensor.read`."""
        size = math.prod(self.shape[1:]) * self._type.itemsize
        return self.bytes(start * size, stop * size).view(self._type).reshape(stop - start, *self.shape[1:])

    def read_columns(self, start: int, stop: int) -> np.ndarray:
        """Columns [start, stop) of all rows of a matrix."""
        (rows, columns), size = self.shape, self._type.itemsize
        return self.known.read_parts(self.start + start * size, (stop - start) * size, rows, columns * size).view(self._type)

    def read_whole(self) -> np.ndarray:
        """The tensor, in the stored type. ValueError for a type that cannot be read."""
        return self.bytes(0, self.nbytes).view(self._type).reshape(self.shape)

    def bytes(self, first: int, last: int) -> np.ndarray:
        """Bytes [first, last) of the tensor, uint8."""
        return self.known.read(self.start + first, last - first)

    @property
    def _type(self) -> np.dtype:
        if self.dtype not in _ANY_DTYPES:
            raise ValueError(f"{self.name} is stored in {self.dtype}; {', '.join(_ANY_DTYPES)} can be read")
        return _ANY_DTYPES[self.dtype]


@dataclasses.dataclass(frozen=True)
class View:
    """Another tensor, shown in another way. `read` and what differs are its subclasses'."""

    tensor: Tensor

    @property
    def name(self) -> str:
        """That of the other tensor."""
        return self.tensor.name

    @property
    def shape(self) -> tuple[int, ...]:
        """That of the other tensor."""
        return self.tensor.shape

    @property
    def dtype(self) -> str:
        """That of the other tensor."""
        return self.tensor.dtype


@dataclasses.dataclass(frozen=True)
class RowsOf(View):
    """Some rows of another tensor, in the order of `rows`: a part of a fused matrix (a range), or rows in another
    order. It is `RowsPacked`, too."""

    rows: range | tuple[int, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """As many rows as are named."""
        return (len(self.rows), *self.tensor.shape[1:])

    @property
    def format(self) -> MatrixFormat | None:
        """That in which the other tensor can stay packed, if each of its rows has scales of its own; else None."""
        own = self.tensor.format if isinstance(self.tensor, RowsPacked) else None
        return own if own is not None and own.rows == 1 else None

    @property
    def counted(self) -> MatrixFormat | None:
        """`RowsPacked.counted`."""
        return None if self.format is None else self.tensor.counted

    def read(self, start: int, stop: int) -> np.ndarray:
        """`Tensor.read`. ValueError if the other tensor has fewer rows than are named."""
        first, last, places = self._span(start, stop)
        return self.tensor.read(first, last)[places]

    def read_packed(self, start: int, stop: int) -> PackedMatrix:
        """`RowsPacked.read_packed`. ValueError as in `read`."""
        first, last, places = self._span(start, stop)
        whole = self.tensor.read_packed(first, last)
        return whole.replace(codes=whole.codes[places], scales=whole.scales[places])

    def _span(self, start: int, stop: int) -> tuple[int, int, np.ndarray]:
        """The rows [first, last) of the other tensor that hold our rows [start, stop), and which of them are ours."""
        wanted = np.asarray(self.rows[start:stop], np.int64)
        if not wanted.size:
            return 0, 0, wanted
        first, last = int(wanted.min()), int(wanted.max())
        if first < 0 or last >= self.tensor.shape[0]:
            raise ValueError(f"{self.name} has {self.tensor.shape[0]} rows, and row {last if first >= 0 else first} is needed")
        return first, last + 1, wanted - first
