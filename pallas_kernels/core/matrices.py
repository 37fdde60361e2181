"""Packed matrices: codes of 8 or 4 bits with scales, which `project_tokens` takes instead of an array.

A number of a packed matrix is `(code - zero) * scale`. A block of `rows` x `columns` numbers has one scale; the last
block of a row or a column may be smaller. zero is 0, but for int4, whose codes are 0 to 15: there it is 8, or what
`zeros` says for the block.

Sources: absolute-maximum scaling, round to nearest (LLM.int8(), arXiv 2208.07339, section 2.1; FP8 Formats for Deep
Learning, arXiv 2209.05433, for e4m3); blocks of 128 x 128 as in DeepSeek-V3 (arXiv 2412.19437, section 3.3); groups of
128 inputs and zeros as in GPTQ (arXiv 2210.17323) and AWQ (arXiv 2306.00978).
"""

from __future__ import annotations

import dataclasses
import functools
import numbers
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, DTypeLike, Float, Int, UInt8

LARGEST = {"int8": 127.0, "fp8_e4m3": 448.0, "int4": 7.0}
"""Kinds of codes, each with the code of the number that is largest in its block."""

DTYPES = {"int8": "int8", "fp8_e4m3": "float8_e4m3fn", "int4": "uint8"}
"""The dtype of the array that holds the codes; a byte holds two of int4."""

SOURCES = ("float32", "bfloat16", "float16")
"""Dtypes of matrices that can be packed, and of scales."""

ZERO = 8
"""The code of zero in int4, unless `zeros` says another."""

SMALLEST = 2.0**-116
"""A block whose numbers are all smaller than this is stored as zeros: its scale would be no normal float32."""


@dataclasses.dataclass(frozen=True)
class MatrixFormat:
    """How the numbers of a matrix are stored. Static and hashable.

    codes: one of `LARGEST`. rows, columns: of the block that shares a scale; columns=None: whole rows, so that rows=1
    is one scale for each output channel. fp8_tokens: products of many tokens round these to fp8, too
    (`pallas_kernels.project_tokens`); the matrix is stored as without, and must be fp8 with scales for whole rows.
    Raises ValueError for anything else.
    """

    codes: str
    rows: int = 1
    columns: int | None = None
    fp8_tokens: bool = False

    def __post_init__(self):
        if self.codes not in LARGEST:
            raise ValueError(f"packed matrices hold {', '.join(LARGEST)}, not {self.codes!r}")
        for name in ("rows", "columns"):
            value = getattr(self, name)
            if not (isinstance(value, numbers.Integral) and value >= 1) and (name, value) != ("columns", None):
                raise ValueError(f"{name} of a block must be a whole number of at least 1, got {value!r}")
        if self.codes == "int4" and (self.columns or 2) % 2:
            raise ValueError(f"a byte holds two codes of int4, so the columns of a block must be even, got {self.columns}")
        if self.fp8_tokens and (self.codes, self.columns) != ("fp8_e4m3", None):
            raise ValueError(f"tokens are rounded to fp8 for matrices of fp8_e4m3 with scales for whole rows, not for {self.codes}")

    @property
    def scale_dtype(self) -> jnp.dtype:
        """The dtype of the scales that `pack` makes: there are many of int4, so they have 16 bits. Matrices packed by
        others may differ."""
        return jnp.dtype(jnp.bfloat16 if self.codes == "int4" else jnp.float32)

    def scales_shape(self, shape: tuple[int, int]) -> tuple[int, int]:
        """The shape of the scales of a matrix [F, E]."""
        return -(-shape[0] // self.rows), 1 if self.columns is None else -(-shape[1] // self.columns)

    def codes_shape(self, shape: tuple[int, int]) -> tuple[int, int]:
        """The shape of the array that holds the codes of a matrix [F, E]."""
        return (shape[0], shape[1] // 2) if self.codes == "int4" else shape

    def empty(self, shape: tuple[int, int]) -> PackedMatrix:
        """A matrix [F, E] that `pack` makes, with shapes and dtypes in the place of its arrays."""
        codes = jax.ShapeDtypeStruct(self.codes_shape(shape), DTYPES[self.codes])
        return PackedMatrix(codes, jax.ShapeDtypeStruct(self.scales_shape(shape), self.scale_dtype), format=self)

    def bytes_of(self, shape: tuple[int, int]) -> int:
        """Bytes of a matrix [F, E] that `pack` makes, scales included."""
        (rows, columns), scales = self.codes_shape(shape), self.scales_shape(shape)
        return rows * columns + scales[0] * scales[1] * self.scale_dtype.itemsize

    def __str__(self) -> str:
        return f"{self.codes}:{self.rows}x{'all' if self.columns is None else self.columns}" + "+tokens" * self.fp8_tokens


@flax.struct.dataclass
class PackedMatrix:
    """A matrix [F, E], stored [features, inputs], in codes and scales. A pytree: its arrays are its leaves.

    codes: int8 or float8_e4m3fn `[F, E]`, or uint8 `[F, E/2]` of int4: the low 4 bits of byte j are column 2j, the high
    ones column 2j + 1. scales: `[ceil(F / rows), ceil(E / columns)]`, float32, bfloat16 or float16; `[ceil(F / rows),
    1]` for whole rows. zeros: of int4 only, uint8, of the scales' shape; None: 8 everywhere. `check_packed` checks that
    they fit together.
    """

    codes: Array
    scales: Float[Array, "Fb Eb"]
    zeros: UInt8[Array, "Fb Eb"] | None = None
    format: MatrixFormat = flax.struct.field(pytree_node=False, kw_only=True)

    @property
    def shape(self) -> tuple[int, int]:
        """(F, E)."""
        rows, columns = self.codes.shape
        return rows, columns * (2 if self.format.codes == "int4" else 1)

    @property
    def ndim(self) -> int:
        """2."""
        return len(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of codes, scales and zeros."""
        return sum(leaf.nbytes for leaf in jax.tree.leaves(self))

    def __str__(self) -> str:
        return f"{self.format}{'' if self.zeros is None else '+zeros'}{list(self.shape)}"


def is_packed(node: Any) -> bool:
    """Whether this is a `PackedMatrix`: a test for leaves, for `jax.tree` functions."""
    return isinstance(node, PackedMatrix)


def check_packed(matrix: PackedMatrix, name: str = "matrix") -> None:
    """Raise ValueError, with shapes and dtypes, unless codes, scales and zeros fit together. name: for the message."""
    own, arrays = matrix.format, {"codes": matrix.codes, "scales": matrix.scales, "zeros": matrix.zeros}
    held = " ".join(f"{part} {array.dtype}{list(array.shape)}" for part, array in arrays.items() if array is not None)
    said = f"{name}, packed as {own}, has {held}"
    if matrix.codes.ndim != 2 or 0 in matrix.codes.shape or matrix.codes.dtype != DTYPES[own.codes]:
        raise ValueError(f"{said}: codes must be {DTYPES[own.codes]} with two axes, none empty")
    if matrix.scales.shape != own.scales_shape(matrix.shape) or matrix.scales.dtype.name not in SOURCES:
        raise ValueError(f"{said}: scales must be {list(own.scales_shape(matrix.shape))} in {', '.join(SOURCES)}")
    if matrix.zeros is None:
        return
    if own.codes != "int4" or matrix.zeros.dtype != jnp.uint8 or matrix.zeros.shape != matrix.scales.shape:
        raise ValueError(f"{said}: zeros belong to int4 alone, and must be uint8 of the scales' shape")


def pack(matrix: Float[Array, "F E"], format: MatrixFormat, name: str = "matrix") -> PackedMatrix:
    """Pack a matrix: in each block the scale is the largest absolute number over `LARGEST`, and codes are rounded to
    nearest.

    Args:
        matrix: float32, bfloat16 or float16, on the device or the host. Needs float32 scratch of its size.
        format: of the result.
        name: of the matrix, for errors.

    The error of a number is at most scale / 2 (int8, int4), or 2**-4 of the number and 2**-10 scale (fp8_e4m3; XLA for
    CPUs rounds to float16 first, which adds up to 2**-11 of the number). Scales are float32; of int4 bfloat16, rounded
    up. Blocks that are all below `SMALLEST` become zeros.

    Raises ValueError for other shapes and dtypes, an odd number of columns in int4, and numbers that are not finite.
    """
    if matrix.ndim != 2 or 0 in matrix.shape or matrix.dtype.name not in SOURCES:
        raise ValueError(f"{name} is {matrix.dtype}{list(matrix.shape)}; a matrix [F,E] of {', '.join(SOURCES)} can be packed")
    if format.codes == "int4" and matrix.shape[1] % 2:
        raise ValueError(
            f"{name} is {list(matrix.shape)}, and a byte holds two codes of int4: an odd number of columns needs int8 or fp8_e4m3"
        )
    packed = _pack(jnp.asarray(matrix), format)
    if not np.isfinite(np.asarray(packed.scales, np.float32)).all():
        raise ValueError(f"{name} holds numbers that are not finite (inf or NaN), which cannot be packed: look at how it was made")
    return packed


@functools.partial(jax.jit, static_argnames="format")
def _pack(matrix: Float[Array, "F E"], format: MatrixFormat) -> PackedMatrix:
    f, e = matrix.shape
    rows, columns = format.scales_shape(matrix.shape)
    width = e if format.columns is None else format.columns
    padded = jnp.pad(matrix.astype(jnp.float32), ((0, rows * format.rows - f), (0, columns * width - e)))
    largest = jnp.max(jnp.abs(padded.reshape(rows, format.rows, columns, width)), axis=(1, 3))
    exact = jnp.where(largest < SMALLEST, 1.0, largest / LARGEST[format.codes])
    scales = exact.astype(format.scale_dtype)
    scales = jnp.where(scales.astype(jnp.float32) < exact, jnp.nextafter(scales, jnp.asarray(jnp.inf, scales.dtype)), scales)
    scaled = matrix.astype(jnp.float32) / _spread(scales, format, matrix.shape)
    if format.codes == "fp8_e4m3":
        return PackedMatrix(scaled.astype(jnp.float8_e4m3fn), scales, format=format)
    rounded = jnp.clip(jnp.round(scaled), -LARGEST[format.codes], LARGEST[format.codes]).astype(jnp.int8)
    if format.codes == "int8":
        return PackedMatrix(rounded, scales, format=format)
    pairs = (rounded + ZERO).astype(jnp.uint8).reshape(f, e // 2, 2)
    return PackedMatrix(pairs[..., 0] | (pairs[..., 1] << 4), scales, format=format)


def unpack(matrix: PackedMatrix, dtype: DTypeLike = jnp.float32) -> Float[Array, "F E"]:
    """The matrix as an array: `(code - zero) * scale` in float32, rounded once to `dtype`. May be traced."""
    scales = _spread(matrix.scales, matrix.format, matrix.shape)
    return (code_numbers(matrix, jnp.float32) * scales).astype(dtype)


def code_numbers(matrix: PackedMatrix, dtype: DTypeLike) -> Float[Array, "F E"]:
    """`code - zero` of every number: what a scale multiplies. float32, bfloat16 and float16 hold it exactly."""
    if matrix.format.codes != "int4":
        return matrix.codes.astype(dtype)
    halves = (matrix.codes[..., None] >> jnp.array([0, 4], jnp.uint8)) & 15
    codes = halves.reshape(matrix.shape).astype(jnp.int8)
    zeros = ZERO if matrix.zeros is None else _spread(matrix.zeros.astype(jnp.int8), matrix.format, matrix.shape)
    return (codes - zeros).astype(dtype)


def row_scales(matrix: PackedMatrix) -> Float[Array, "F"]:
    """The scale of each row, float32, in a format whose blocks are whole rows."""
    return jnp.repeat(matrix.scales[:, 0].astype(jnp.float32), matrix.format.rows)[: matrix.shape[0]]


def rows_from(matrix: PackedMatrix, start: Int[Array, ""] | int, count: int) -> PackedMatrix:
    """`count` rows from row `start` on. Both must be multiples of the rows of a block; count may be smaller where the
    matrix ends."""
    own = matrix.format.rows

    def part(leaf: Array, rows: int) -> Array:
        return jax.lax.dynamic_slice_in_dim(leaf, start // rows, -(-count // rows))

    zeros = None if matrix.zeros is None else part(matrix.zeros, own)
    codes = _as_codes(part(_as_bytes(matrix.codes), 1), matrix)
    return matrix.replace(codes=codes, scales=part(matrix.scales, own), zeros=zeros)


def _as_bytes(codes: Array) -> Array:
    """e4m3 as uint8, others as they are. XLA for CPUs would widen a whole matrix of e4m3 to take rows of it."""
    return jax.lax.bitcast_convert_type(codes, jnp.uint8) if codes.dtype == jnp.float8_e4m3fn else codes


def _as_codes(taken: Array, matrix: PackedMatrix) -> Array:
    return jax.lax.bitcast_convert_type(taken, matrix.codes.dtype) if taken.dtype != matrix.codes.dtype else taken


def take_rows(
    table: Float[Array, "V E"] | PackedMatrix, ids: Int[Array, "*B"], *, fill: float, dtype: DTypeLike | None = None
) -> Float[Array, "*B E"]:
    """Rows of an array or a packed matrix, by number; those that it does not have are filled with `fill`, 0 or NaN.

    dtype: of the rows of a packed matrix; those of an array have its own.
    """
    options = {"mode": "fill", "wrap_negative_indices": False}
    if not is_packed(table):
        return table.at[ids].get(fill_value=fill, **options)
    there = (ids >= 0) & (ids < table.shape[0])
    blocks = jnp.where(there, ids // table.format.rows, -1)
    of_rows = dataclasses.replace(table.format, rows=1)
    codes = _as_codes(_as_bytes(table.codes).at[ids].get(fill_value=0, **options), table).reshape(-1, table.codes.shape[1])
    scales = table.scales.at[blocks].get(fill_value=fill, **options).reshape(-1, table.scales.shape[1])
    zeros = None
    if table.zeros is not None:
        zeros = table.zeros.at[blocks].get(fill_value=0, **options).reshape(-1, table.zeros.shape[1])
    rows = unpack(PackedMatrix(codes, scales, zeros, format=of_rows), table.scales.dtype if dtype is None else dtype)
    return rows.reshape(*ids.shape, table.shape[1])


def _spread(blocks: Array, format: MatrixFormat, shape: tuple[int, int]) -> Array:
    """The value of each number's block: `[F, E]`, or `[F, 1]` for whole rows. Scales become float32."""
    blocks = blocks.astype(jnp.float32) if jnp.issubdtype(blocks.dtype, jnp.floating) else blocks
    if format.rows > 1:
        blocks = jnp.repeat(blocks, format.rows, axis=0)[: shape[0]]
    return blocks if format.columns is None else jnp.repeat(blocks, format.columns, axis=1)[:, : shape[1]]
