"""Tensors of a GGUF file as loading sees them: rows are widened when they are read, or keep their codes if one of our
formats holds them.

Q8_0 is int8 in blocks of 32 columns, and Q4_0 is int4 in such blocks; their scales are float16. Others are widened by
the `gguf` package.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import jax.numpy as jnp
import numpy as np
from gguf import quants
from gguf.constants import GGMLQuantizationType as Type

from kvjax.models.gguf.header import Entry
from pallas_kernels.core.matrices import MatrixFormat, PackedMatrix

FLOATS = {Type.F32: "F32", Type.F16: "F16", Type.BF16: "BF16"}
"""Types that are not packed, with safetensors' names."""

WIDENED = (
    *(Type.Q4_0, Type.Q4_1, Type.Q5_0, Type.Q5_1, Type.Q8_0),
    *(Type.Q2_K, Type.Q3_K, Type.Q4_K, Type.Q5_K, Type.Q6_K, Type.IQ4_NL, Type.IQ4_XS),
)
"""Packed types that can be read."""


@dataclasses.dataclass(frozen=True)
class HalfScales(MatrixFormat):
    """A format of a GGUF file with the dtype that its scales have there, for counting bytes. Matrices have the plain
    format."""

    @property
    def scale_dtype(self) -> jnp.dtype:
        """float16."""
        return jnp.dtype(jnp.float16)


FORMATS = {Type.Q8_0: MatrixFormat("int8", 1, 32), Type.Q4_0: MatrixFormat("int4", 1, 32)}
"""Types that stay packed."""


@dataclasses.dataclass(frozen=True)
class GgufTensor:
    """A tensor of a file, under its name in Hugging Face's checkpoints (see `kvjax.models.tensors.Tensor`).

    order: the file's row of each row; None: as they are. columns: the file's column of each column; None: as they are.
    change: what is done to the numbers, float32. shape: what `read` gives.
    """

    entry: Entry
    shape: tuple[int, ...]
    order: np.ndarray | None = None
    columns: np.ndarray | None = None
    change: Callable[[np.ndarray], np.ndarray] | None = None

    @property
    def name(self) -> str:
        """The name in the file."""
        return self.entry.name

    @property
    def dtype(self) -> str:
        """safetensors' name of the type that `read` gives."""
        return FLOATS.get(self.entry.type, "F32") if self.change is None else "F32"

    @property
    def format(self) -> MatrixFormat | None:
        """The format in which its codes can stay as they are; None: there is none."""
        matrix = len(self.shape) == 2 and self.columns is None and self.change is None
        return FORMATS.get(self.entry.type) if matrix else None

    @property
    def counted(self) -> MatrixFormat | None:
        """`format`, by which its bytes are counted."""
        return None if self.format is None else HalfScales(*dataclasses.astuple(self.format))

    def read(self, start: int, stop: int) -> np.ndarray:
        """`Tensor.read`. ValueError for numbers that are not finite."""
        rows = self._rows(start, stop)
        numbers = widen(rows, self.entry.type)
        numbers = numbers if self.columns is None else numbers[:, self.columns]
        if not np.isfinite(numbers.astype(np.float32, copy=False)).all():
            raise ValueError(f"{self.entry.file}: {self.name} holds numbers that are not finite: the file is damaged: download it again")
        numbers = numbers if self.change is None else self.change(numbers.astype(np.float32))
        return numbers.reshape(-1, *self.shape[1:])

    def read_packed(self, start: int, stop: int) -> PackedMatrix:
        """Rows [start, stop) in `format`, which must not be None."""
        blocks = self._rows(start, stop).reshape(stop - start, -1, self.entry.nbytes * 32 // math.prod(self.entry.shape))
        scales = np.ascontiguousarray(blocks[..., :2]).view(np.float16)[..., 0]
        if not np.isfinite(scales).all():
            raise ValueError(f"{self.entry.file}: {self.name} holds scales that are not finite: the file is damaged: download it again")
        codes = np.ascontiguousarray(blocks[..., 2:])
        if self.entry.type == Type.Q8_0:
            return PackedMatrix(codes.view(np.int8).reshape(stop - start, -1), scales, format=FORMATS[Type.Q8_0])
        # In a block of 16 bytes, byte j holds columns j and j + 16; here byte j holds columns 2j and 2j + 1.
        low, high = codes & 15, codes >> 4
        pairs = np.concatenate([low[..., 0::2] | (low[..., 1::2] << 4), high[..., 0::2] | (high[..., 1::2] << 4)], axis=-1)
        return PackedMatrix(pairs.reshape(stop - start, -1), scales, format=FORMATS[Type.Q4_0])

    def _rows(self, start: int, stop: int) -> np.ndarray:
        """Bytes of rows [start, stop), in a copy."""
        if self.order is None:
            return self.entry.rows(start, stop)
        # Heads may be in another order, so that ours lie in several places.
        wanted, places = np.unique(self.order[start:stop], return_inverse=True)
        parts = np.split(wanted, np.flatnonzero(np.diff(wanted) > 1) + 1)
        return np.concatenate([self.entry.rows(int(part[0]), int(part[-1]) + 1) for part in parts])[places]


def widen(rows: np.ndarray, kind: Type) -> np.ndarray:
    """Rows of bytes as numbers, in the stored type, or float32 if they were packed."""
    if kind == Type.F32:
        return rows.view(np.float32)
    if kind == Type.F16:
        return rows.view(np.float16)
    if kind == Type.BF16:
        return rows.view(jnp.bfloat16)
    with np.errstate(all="ignore"):  # `read` looks at what comes out
        return quants.dequantize(rows, kind)


def check_types(entries: list[Entry]) -> None:
    """ValueError, with the remedy, that names the types that cannot be read."""
    known = (*FLOATS, *WIDENED)
    wrong = {entry.type: entry for entry in entries if entry.type not in known}
    if wrong:
        kind, entry = next(iter(wrong.items()))
        raise ValueError(
            f"{entry.file}: {entry.name} is stored as {kind.name}, which cannot be read; known: {', '.join(each.name for each in known)}. "
            "Take a file of one of these types (such as Q4_K_M or Q8_0), or the original model with weights='int4'"
        )
