"""Tensors of a checkpoint: where each is stored, and how rows of it are read. Whatever a checkpoint's format, loading
sees these.

A tensor has `name`, `shape`, `dtype` (the stored type, by safetensors' name) and `read(start, stop)`.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import jax.numpy as jnp
import numpy as np

from kvjax.text.checkpoint_files import named
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
    """A tensor of a safetensors file, under the name `name`."""

    file: Path
    shape: tuple[int, ...]
    dtype: str
    name: str

    def read(self, start: int, stop: int) -> np.ndarray:
        """`Tensor.read`."""
        from safetensors import safe_open

        with named(self.file), safe_open(self.file, framework="np") as opened:  # what was read stays mapped until it is closed
            return opened.get_slice(self.name)[start:stop]

    def read_columns(self, start: int, stop: int) -> np.ndarray:
        """Columns [start, stop) of all rows of a matrix."""
        from safetensors import safe_open

        with named(self.file), safe_open(self.file, framework="np") as opened:
            return opened.get_slice(self.name)[:, start:stop]


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


def read_whole(stored: Stored) -> np.ndarray:
    """A tensor, in the stored type."""
    return mapped(stored).copy()


def mapped(stored: Stored) -> np.ndarray:
    """A tensor in the stored type, in the pages of its file: what is not looked at is not read. Read only; copy what is
    kept.

    safetensors reads those of 8-bit floats only for other frameworks, so the file is mapped here. ValueError for other
    types.
    """
    dtype = _ANY_DTYPES.get(stored.dtype)
    if dtype is None:
        raise ValueError(f"{stored.name} is stored in {stored.dtype}; {', '.join(_ANY_DTYPES)} can be read")
    with named(stored.file):
        size, header = header_of(stored.file)
        begin, end = header[stored.name]["data_offsets"]
        if begin == end:
            return np.zeros(stored.shape, dtype)
        found = np.memmap(stored.file, np.uint8, "r", 8 + size + begin, (end - begin,))
    return np.asarray(found).view(dtype).reshape(stored.shape)


def header_of(path: Path) -> tuple[int, Mapping[str, Any]]:
    """The size in bytes of a safetensors file's header, and the header. The file must be whole
    (`kvjax.models.checkpoint`)."""
    said = path.stat()
    return _header_of(path, (said.st_ino, said.st_size, said.st_mtime_ns))


@functools.lru_cache(maxsize=16)  # a packed matrix asks for each of its parts, in pieces, and a header may have a megabyte
def _header_of(path: Path, version: tuple[int, ...]) -> tuple[int, Mapping[str, Any]]:
    """`header_of`. version: tells the file from what was at that path before."""
    with open(path, "rb") as file:
        size = int.from_bytes(file.read(8), "little")
        return size, json.loads(file.read(size))
