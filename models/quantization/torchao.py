"""What torchao stores in safetensors: a matrix `weight` is `_weight_qdata`, `_weight_scale` and more, and the file's
header says its kind.

Kinds, of a matrix [F, E] in blocks of b0 x b1, with one scale each:

    Int8Tensor, IntxUnpackedToInt8Tensor  qdata [F, E] int8; scale [F/b0, E/b1]; zero_point int8, alike, if there is one
    Float8Tensor                          qdata [F, E] e4m3; scale alike
    Int4Tensor                            qdata [F, E/2] bytes of two signed codes, low half first; scale and zero_point [E/b1, F]:
                                          numbers are code * scale + zero_point

Sources: torchao's `prototype.safetensors` and `quantization.quantize_.workflows`.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from kvjax.known_files import header_of
from kvjax.models.quantization.layouts import AGAIN, FLOATS, Affine, Layout, StoredMatrix, codes_of_bytes
from kvjax.models.quantization.rules import REMEDY, is_block
from pallas_kernels.core.matrices import MatrixFormat, PackedMatrix

_KINDS = ("Float8Tensor", "Int4Tensor", "Int8Tensor", "IntxUnpackedToInt8Tensor")
_QDATA, _SCALE, _ZERO = "_weight_qdata", "_weight_scale", "_weight_zero_point"
_MAX_BYTES = 1 << 16


class TorchAo(Layout):
    """See the module."""

    parts, more = (_QDATA,), (_SCALE, _ZERO, "_weight_act_pre_scale", "_weight_scale_and_zero", "_weight_per_tensor_scale")
    unused = ("_weight_act_quant_scale", "_weight_act_quant_zero_point")

    def described(self, matrix: StoredMatrix) -> tuple[str, tuple[int, int]]:
        """The kind of a matrix and its blocks, as the file's header says. ValueError for kinds that cannot be read."""
        stored = matrix.parts[_QDATA]
        name = f"{stored.name.removesuffix(_QDATA)}weight"
        said: Any = (header_of(stored.known)[1].get("__metadata__") or {}).get(name, "")
        try:
            found = json.loads(said[:_MAX_BYTES])
            kind, data = found["_type"], found["_data"]
            block = data.get("block_size") or self.measured(matrix)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            what = f"the header of {stored.file.name} says {said!r:.100} of {name}"
            raise ValueError(f"{what}, which is not how torchao describes it: {AGAIN}") from error
        if kind not in _KINDS:
            raise ValueError(f"{matrix.module} is stored as torchao's {kind!r:.100}; supported: {', '.join(_KINDS)}. For others: {REMEDY}")
        features, inputs = matrix.shape
        if isinstance(block, list):
            block = [size if given == -1 else given for given, size in zip(block, matrix.shape, strict=False)]
        if not is_block(block) or features % block[0] or inputs % block[1]:
            raise ValueError(f"{matrix.module} is {list(matrix.shape)} in blocks of {block!r:.100}, which do not divide it: {AGAIN}")
        return kind, (block[0], block[1])

    def measured(self, matrix: StoredMatrix) -> list[int]:
        """The blocks, from the number of scales: older versions do not say them."""
        scales = matrix.parts[_SCALE].shape
        if 0 in scales:
            raise ValueError("there is no scale")
        return [size // count for size, count in zip(matrix.shape, scales if len(scales) == 2 else (1, 1), strict=True)]

    def check(self, matrix: StoredMatrix) -> None:
        """Shapes and types, and what the header says of them."""
        (features, inputs), (kind, (high, wide)) = matrix.shape, self.described(matrix)
        if "_weight_act_pre_scale" in matrix.parts:
            raise ValueError(f"{matrix.module} scales its inputs (act_pre_scale of torchao), which is not supported: {REMEDY}")
        missing = [name for name in (_SCALE, *((_ZERO,) if kind == "Int4Tensor" else ())) if name not in matrix.parts]
        if missing:
            raise ValueError(f"{matrix.module} is stored packed without {', '.join(missing)}: {AGAIN}")
        if kind == "Int4Tensor":
            if high != 1 or inputs % 2:
                raise ValueError(f"{matrix.module} is {list(matrix.shape)} in blocks of {high} rows, and Int4Tensor has one: {AGAIN}")
            matrix.check(_QDATA, ((features, inputs // 2),), ("U8", "I8"))
            matrix.check(_SCALE, ((inputs // wide, features),), FLOATS)
            matrix.check(_ZERO, ((inputs // wide, features),), FLOATS)
            return
        matrix.check(_QDATA, (matrix.shape,), ("F8_E4M3" if kind == "Float8Tensor" else "I8",))
        blocks = (features // high, inputs // wide)
        shapes = (blocks, *((blocks[:1],) if blocks[1] == 1 else ()), *(((),) if blocks == (1, 1) else ()))
        matrix.check(_SCALE, shapes, FLOATS)
        if _ZERO in matrix.parts:
            matrix.check(_ZERO, shapes, ("I8",))

    def blocks(self, matrix: StoredMatrix) -> tuple[int, int]:
        """Blocks along rows and columns."""
        _, (high, wide) = self.described(matrix)
        return matrix.shape[0] // high, matrix.shape[1] // wide

    def format_of(self, matrix: StoredMatrix) -> MatrixFormat | None:
        """int8 if codes less zeros fit; Float8Tensor stays e4m3; Int4Tensor has zeros that are no codes, and is
        widened."""
        kind, (high, wide) = self.described(matrix)
        if kind == "Int4Tensor":
            return None
        columns = None if wide == matrix.shape[1] else wide
        own = MatrixFormat("fp8_e4m3" if kind == "Float8Tensor" else "int8", 1 if high == matrix.shape[0] else high, columns)
        if _ZERO not in matrix.parts or not matrix.array(_ZERO).any():
            return own
        # Rows of a block share a scale, so pieces of single rows cannot be put together.
        return own if own.rows == 1 and self.fits(matrix) else None

    def fits(self, matrix: StoredMatrix) -> bool:
        """Whether codes less zeros are numbers of 8 bits."""
        step = max(1, (1 << 22) // matrix.shape[1])
        for start in range(0, matrix.shape[0], step):
            rows = self.rows(matrix, start, min(start + step, matrix.shape[0]))
            numbers = rows.codes.astype(np.int16) - rows.zeros[:, rows.columns]
            if numbers.min() < -128 or numbers.max() > 127:
                return False
        return True

    def rows(self, matrix: StoredMatrix, start: int, stop: int) -> Affine:
        """Rows [start, stop)."""
        kind, (high, wide) = self.described(matrix)
        columns = np.arange(matrix.shape[1]) // wide
        if kind == "Int4Tensor":
            codes = codes_of_bytes(matrix.some(_QDATA, start, stop).view(np.uint8))
            codes = ((codes ^ 8).astype(np.int8) - np.int8(8)).astype(np.int8)  # four bits, signed
            scales, offsets = (matrix.held(name)[:, start:stop].T for name in (_SCALE, _ZERO))
            return Affine(codes, scales, columns, offsets=offsets)
        blocks = np.arange(start, stop) // high
        scales = matrix.array(_SCALE).reshape(self.blocks(matrix))[blocks]
        zeros = matrix.array(_ZERO).reshape(self.blocks(matrix))[blocks].astype(np.int16) if _ZERO in matrix.parts else None
        return Affine(matrix.some(_QDATA, start, stop), scales, columns, zeros)

    def whole(self, matrix: StoredMatrix, own: MatrixFormat) -> PackedMatrix:
        """The matrix on the host."""
        if _ZERO in matrix.parts and matrix.array(_ZERO).any():
            return super().whole(matrix, own)
        scales = matrix.factors(matrix.array(_SCALE), "scales", own.scales_shape(matrix.shape)).copy()
        return PackedMatrix(matrix.array(_QDATA), scales, format=own)
