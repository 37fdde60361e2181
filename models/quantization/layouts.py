"""How packed matrices lie in the tensors of a checkpoint: by layout, which tensors a matrix [F, E] has, and how rows of
it are read.

Rows are read as `Affine`: codes, with scales and zeros of groups of g inputs. Words are int32; codes of b bits lie in
them one after the other, lowest bits first, also across words.

    plain      weight [F, E] int8 or e4m3; weight_scale or weight_scale_inv, a factor: one number, [F, 1] or [blocks of F, blocks of E], in
               floats or, of mxfp8, uint8 exponents of e8m0; int8 may have a weight_zero_point of the scales' shape
    words      weight_packed [F, E b/32] words of code + half along E; weight_scale [F, E/g]; weight_shape; weight_zero_point [F b/32, E/g]
               words along F, or one I8, if there are zeros; weight_g_idx [E]
    fp4        weight_packed [F, E/2] of e2m1, low half first; weight_scale [F, E/g] e4m3 over weight_global_scale, or exponents of e8m0
    blocks     weight_blocks [F, E/32, 16] of e2m1, low half first; weight_scales [F, E/32] exponents of e8m0
    awq        qweight [E, F/8] words along F, in the order 0 2 4 6 1 3 5 7; qzeros [E/g, F/8] alike; scales [E/g, F]
    gemv       qweight [F, E/8] words along E; qzeros [F, >= E/8g] words; scales [F, >= E/g]; beyond E/g is padding
    gemv_fast  qweight [F/4, E] int16, interleaved (`_GemvFast`); scales and qzeros [>= E/g, F]: qzeros is float16 and is added
    gptq       qweight [E b/32, F] words along E; qzeros [E/g, F b/32] words along F, of zero - 1 ("gptq") or zero ("gptq_v2");
               scales [E/g, F]; g_idx [E]: the group of each input
    bnb8       weight [F, E] int8; SCB [F]: the largest number of a row

Without zeros of its own a code is signed, as it is multiplied. `nested` has bitsandbytes' 4 bits, and `torchao` what
torchao stores.

Sources: compressed-tensors' `compressors`, AutoAWQ's `WQLinear_GEMM`, `WQLinear_GEMV` and `WQLinear_GEMVFast`,
AutoGPTQ's `QuantLinear`, transformers' `finegrained_fp8`, `fbgemm_fp8` and `mxfp4`, bitsandbytes'
`int8_vectorwise_dequant`.
"""

from __future__ import annotations

import dataclasses
import math
import weakref
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.models.quantization.rules import Rule
from kvjax.models.tensors import Stored
from pallas_kernels.core.matrices import ZERO, MatrixFormat, PackedMatrix

AGAIN = "download the model again"


@dataclasses.dataclass(frozen=True, eq=False)
class StoredMatrix:
    """A matrix as a checkpoint holds it: the tensors by their names in the layout. shape: (F, E), as the model needs
    it."""

    module: str
    rule: Rule
    shape: tuple[int, int]
    parts: Mapping[str, Stored]

    def array(self, name: str) -> np.ndarray:
        """A tensor."""
        return self.parts[name].read_whole()

    def some(self, name: str, start: int, stop: int) -> np.ndarray:
        """Rows [start, stop) of a tensor."""
        return self.parts[name].read(start, stop)

    def held(self, name: str) -> np.ndarray:
        """A tensor that lies along inputs, so that every piece of the matrix has some of all its rows. It stays in
        memory until another matrix is read."""
        if self not in _held:
            _held.clear()
        tensors = _held.setdefault(self, {})
        if name not in tensors:
            tensors[name] = self.array(name)
        return tensors[name]

    @property
    def groups(self) -> int:
        """Groups of inputs."""
        return 1 if self.rule.columns is None else -(-self.shape[1] // self.rule.columns)

    def columns(self, name: str) -> np.ndarray:
        """The group of each input `[E]`, which the tensor `name` says if it is stored. ValueError for a group that
        there is not."""
        inputs = self.shape[1]
        if name not in self.parts:
            return np.arange(inputs) // (self.rule.columns or inputs)
        found = self.array(name).reshape(-1).astype(np.int64)
        if found.min() < 0 or found.max() >= self.groups:
            said = f"{self.module} has a {name} from {found.min()} to {found.max()}"
            raise ValueError(f"{said}, and its groups are 0 to {self.groups - 1}: {AGAIN}")
        return found

    def in_order(self, name: str) -> bool:
        """Whether inputs are grouped in the order that they come in."""
        return self.groups == 1 or np.array_equal(self.columns(name), np.arange(self.shape[1]) // self.rule.columns)

    def check(self, name: str, shapes: tuple[tuple[int, ...], ...], dtypes: tuple[str, ...]) -> None:
        """ValueError for a tensor of another shape or type than these."""
        stored = self.parts[name]
        if stored.shape not in shapes or stored.dtype not in dtypes:
            said = f"{self.module} has {name} {stored.dtype}{list(stored.shape)}"
            raise ValueError(f"{said}, must be {' or '.join(str(list(shape)) for shape in shapes)} in {', '.join(dtypes)}: {AGAIN}")

    def factors(self, array: np.ndarray, name: str, blocks: tuple[int, int]) -> np.ndarray:
        """One number for each block `[blocks]`; axes of 1 may be left out, and one number counts for all. ValueError
        for another shape."""
        if array.size == 1:
            return np.broadcast_to(array.reshape(1, 1), blocks)
        if tuple(n for n in array.shape if n > 1) != tuple(n for n in blocks if n > 1):
            raise ValueError(f"{self.module} has {name} {list(array.shape)}, must be {list(blocks)}: {AGAIN}")
        return array.reshape(blocks)


_held: weakref.WeakKeyDictionary[StoredMatrix, dict[str, np.ndarray]] = weakref.WeakKeyDictionary()
"""What `StoredMatrix.held` has read, of one matrix."""


@dataclasses.dataclass(frozen=True)
class Affine:
    """Rows of a matrix: `(codes - zeros) * scales + offsets`, where these are of the group of the column.

    codes: whole numbers [n, E], signed where zeros is None, and else from 0. scales: [n, G], as they are stored. zeros:
    whole numbers [n, G]. offsets: [n, G]. columns: the group of each column [E].
    """

    codes: np.ndarray
    scales: np.ndarray
    columns: np.ndarray
    zeros: np.ndarray | None = None
    offsets: np.ndarray | None = None

    def numbers(self) -> np.ndarray:
        """float32 [n, E]."""
        found = self.codes.astype(np.float32)
        if self.zeros is not None:
            found -= self.zeros.astype(np.float32)[:, self.columns]
        found *= self.scales.astype(np.float32)[:, self.columns]
        return found if self.offsets is None else found + self.offsets.astype(np.float32)[:, self.columns]


FLOATS = ("F32", "F16", "BF16")
_OF_ACTIVATIONS = ("input_scale", "output_scale", "activation_scale", "input_global_scale", "input_zero_point")


class Layout:
    """How the tensors of a matrix are read. parts: their names; more: those that it may have. unused: those that are
    read past."""

    parts: tuple[str, ...] = ()
    more: tuple[str, ...] = ()
    unused: tuple[str, ...] = _OF_ACTIVATIONS

    @property
    def mark(self) -> str:
        """The tensor that only matrices of this layout have."""
        return self.parts[0]

    def check(self, matrix: StoredMatrix) -> None:
        """ValueError for tensors of other shapes and types than the layout has. Reads no numbers."""

    def format_of(self, matrix: StoredMatrix) -> MatrixFormat | None:
        """The format that holds it; None: it is widened. Reads zeros and orders."""
        return matrix.rule.format

    def rows(self, matrix: StoredMatrix, start: int, stop: int) -> Affine:
        """Rows [start, stop)."""
        raise NotImplementedError

    def numbers(self, matrix: StoredMatrix, start: int, stop: int) -> np.ndarray:
        """Rows [start, stop) in float32."""
        return self.rows(matrix, start, stop).numbers()

    def whole(self, matrix: StoredMatrix, own: MatrixFormat) -> PackedMatrix:
        """The matrix in the format that `format_of` gives, on the host."""
        features, inputs = matrix.shape
        step = max(1, _CODES_AT_A_TIME // inputs)
        pieces = [pack_rows(self.rows(matrix, start, min(start + step, features)), own) for start in range(0, features, step)]
        return jax.tree.map(lambda *leaves: np.concatenate(leaves), *pieces)


_CODES_AT_A_TIME = 1 << 22


def pack_rows(rows: Affine, own: MatrixFormat) -> PackedMatrix:
    """Rows whose columns are in the order of their groups, in int8 or int4. The caller knows that their codes fit."""
    scales = np.ascontiguousarray(rows.scales)
    if own.codes == "int8":
        codes = rows.codes if rows.zeros is None else rows.codes.astype(np.int16) - rows.zeros[:, rows.columns]
        return PackedMatrix(codes.astype(np.int8), scales, format=own)
    codes = rows.codes if rows.zeros is not None else rows.codes + np.int8(ZERO)
    codes = np.ascontiguousarray(codes).view(np.uint8)
    zeros = None if rows.zeros is None else np.ascontiguousarray(rows.zeros).astype(np.uint8)
    return PackedMatrix(codes[:, 0::2] | (codes[:, 1::2] << 4), scales, zeros, format=own)


def codes_of(words: np.ndarray, bits: int, count: int) -> np.ndarray:
    """The first `count` codes in each row of words [n, W]: uint8 [n, count]."""
    wide = np.ascontiguousarray(words).view(np.uint32)
    if 32 % bits == 0:
        mask = np.uint32((1 << bits) - 1)
        found = np.stack([((wide >> np.uint32(place)) & mask).astype(np.uint8) for place in range(0, 32, bits)], axis=-1)
        return found.reshape(len(wide), -1)[:, :count]
    wide = np.pad(wide, ((0, 0), (0, 1)))  # the last code may end in its word
    places = np.arange(count, dtype=np.int64) * bits
    pairs = wide[:, places // 32] | (wide[:, places // 32 + 1].astype(np.uint64) << np.uint64(32))
    return ((pairs >> (places % 32).astype(np.uint64)) & np.uint64((1 << bits) - 1)).astype(np.uint8)


def exponents(stored: np.ndarray, module: str) -> np.ndarray:
    """Scales of e8m0, which are stored as their exponents: float32. ValueError for NaN."""
    found = stored.view(np.uint8)
    if (found == 255).any():
        raise ValueError(f"{module} has scales that are not finite, or below 0: {AGAIN}")
    return np.ldexp(np.float32(1), found.astype(np.int32) - 127).astype(np.float32)


class _Plain(Layout):
    parts, more = ("weight",), ("weight_scale", "weight_scale_inv", "weight_zero_point")

    def check(self, matrix: StoredMatrix) -> None:
        matrix.check("weight", (matrix.shape,), ("F8_E4M3" if matrix.rule.format.codes == "fp8_e4m3" else "I8",))
        name = self.scale_name(matrix)
        matrix.check(name, (matrix.parts[name].shape,), (*FLOATS, "F8_E8M0", "U8"))
        if "weight_zero_point" in matrix.parts and matrix.rule.format.codes == "int8":
            matrix.check("weight_zero_point", (matrix.parts["weight_zero_point"].shape,), ("I8",))

    def scale_name(self, matrix: StoredMatrix) -> str:
        return "weight_scale_inv" if "weight_scale_inv" in matrix.parts else "weight_scale"

    def scales(self, matrix: StoredMatrix) -> np.ndarray:
        """[blocks of F, blocks of E]."""
        name = self.scale_name(matrix)
        found = matrix.array(name)
        found = exponents(found, matrix.module) if found.dtype in (np.uint8, jnp.float8_e8m0fnu) else found
        return matrix.factors(found, "scales", matrix.rule.format.scales_shape(matrix.shape))

    def format_of(self, matrix: StoredMatrix) -> MatrixFormat | None:
        if "weight_zero_point" not in matrix.parts or not matrix.array("weight_zero_point").astype(np.float32).any():
            return matrix.rule.format  # some releases stored zeros that are all 0
        if matrix.rule.format.codes != "int8":
            raise ValueError(f"{matrix.module} has a weight_zero_point other than 0, which is read for integers alone: {AGAIN}")
        return None

    def rows(self, matrix: StoredMatrix, start: int, stop: int) -> Affine:
        own = matrix.rule.format
        blocks = np.arange(start, stop) // own.rows
        columns = np.arange(matrix.shape[1]) // (own.columns or matrix.shape[1])
        zeros = matrix.factors(matrix.array("weight_zero_point"), "weight_zero_point", own.scales_shape(matrix.shape))
        codes = matrix.some("weight", start, stop)
        return Affine(codes, self.scales(matrix)[blocks], columns, zeros[blocks].astype(np.int16))

    def whole(self, matrix: StoredMatrix, own: MatrixFormat) -> PackedMatrix:
        return PackedMatrix(matrix.array("weight"), self.scales(matrix).copy(), format=own)


class _Words(Layout):
    parts, more = ("weight_packed", "weight_scale", "weight_shape"), ("weight_zero_point", "weight_g_idx")

    def check(self, matrix: StoredMatrix) -> None:
        (features, inputs), bits = matrix.shape, matrix.rule.bits
        matrix.check("weight_packed", ((features, -(-inputs * bits // 32)),), ("I32",))
        if "weight_zero_point" in matrix.parts and not self.one_zero(matrix):
            matrix.check("weight_zero_point", ((-(-features * bits // 32), matrix.groups),), ("I32",))
        if "weight_g_idx" in matrix.parts:
            matrix.check("weight_g_idx", ((inputs,),), ("I32", "I64"))
        matrix.check("weight_shape", ((2,), (1, 2)), ("I32", "I64"))
        matrix.check("weight_scale", (matrix.parts["weight_scale"].shape,), FLOATS)
        if tuple(matrix.array("weight_shape").reshape(-1)) != matrix.shape:
            said = f"{matrix.module} has weight_shape {matrix.array('weight_shape').tolist()}"
            raise ValueError(f"{said}, must be {list(matrix.shape)}: {AGAIN}")

    def one_zero(self, matrix: StoredMatrix) -> bool:
        """Whether there is one zero, which is a signed number and not packed: of strategy tensor."""
        stored = matrix.parts["weight_zero_point"]
        return stored.dtype == "I8" and math.prod(stored.shape) == 1

    def zeros(self, matrix: StoredMatrix) -> np.ndarray | None:
        """[F, E/g], as they are stored: from 0."""
        if "weight_zero_point" not in matrix.parts:
            return None
        if self.one_zero(matrix):
            found = matrix.array("weight_zero_point").reshape(1, 1).astype(np.int16) + (1 << (matrix.rule.bits - 1))
            return np.broadcast_to(found, (matrix.shape[0], matrix.groups))
        return codes_of(matrix.array("weight_zero_point").T, matrix.rule.bits, matrix.shape[0]).T.astype(np.int16)

    def format_of(self, matrix: StoredMatrix) -> MatrixFormat | None:
        zeros = self.zeros(matrix)
        holds = matrix.rule.bits < 8 or zeros is None or (zeros == 128).all()
        return matrix.rule.format if holds and matrix.in_order("weight_g_idx") else None

    def rows(self, matrix: StoredMatrix, start: int, stop: int) -> Affine:
        codes = codes_of(matrix.some("weight_packed", start, stop), matrix.rule.bits, matrix.shape[1])
        scales = matrix.factors(matrix.array("weight_scale"), "scales", (matrix.shape[0], matrix.groups))[start:stop]
        zeros, columns = self.zeros(matrix), matrix.columns("weight_g_idx")
        if zeros is None:
            half = 1 << (matrix.rule.bits - 1)
            return Affine((codes.astype(np.int16) - half).astype(np.int8), scales, columns)
        return Affine(codes, scales, columns, zeros[start:stop])

    def whole(self, matrix: StoredMatrix, own: MatrixFormat) -> PackedMatrix:
        if matrix.rule.bits not in (4, 8):
            return super().whole(matrix, own)
        codes, inputs = np.ascontiguousarray(matrix.array("weight_packed")).view(np.uint8), matrix.shape[1]
        scales = matrix.factors(matrix.array("weight_scale"), "scales", own.scales_shape(matrix.shape)).copy()
        if matrix.rule.bits == 8:
            return PackedMatrix((codes[:, :inputs] ^ 128).view(np.int8), scales, format=own)
        zeros = self.zeros(matrix)
        zeros = None if zeros is None else np.ascontiguousarray(zeros).astype(np.uint8)
        return PackedMatrix(codes[:, : inputs // 2].copy(), scales, zeros, format=own)  # a byte holds two codes, as in memory


_HALVES = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.int8)
"""Numbers of e2m1, twice."""


class _Fp4(Layout):
    parts, more = ("weight_packed", "weight_scale"), ("weight_global_scale",)

    def check(self, matrix: StoredMatrix) -> None:
        features, inputs = matrix.shape
        if inputs % matrix.rule.columns:
            raise ValueError(f"{matrix.module} is {[features, inputs]}; {matrix.rule.columns} inputs have one scale: {AGAIN}")
        matrix.check("weight_packed", ((features, inputs // 2),), ("U8",))
        nvfp4 = matrix.rule.columns == 16
        matrix.check("weight_scale", ((features, matrix.groups),), ("F8_E4M3",) if nvfp4 else ("U8", "F8_E8M0"))
        if nvfp4 != ("weight_global_scale" in matrix.parts):
            said = "without" if nvfp4 else "with a"
            raise ValueError(f"{matrix.module} is stored packed {said} weight_global_scale: {AGAIN}")
        if nvfp4:
            matrix.check("weight_global_scale", ((1,), ()), ("F32",))

    def rows(self, matrix: StoredMatrix, start: int, stop: int) -> Affine:
        codes = _HALVES[codes_of_bytes(matrix.some("weight_packed", start, stop))]
        stored = matrix.some("weight_scale", start, stop)
        if matrix.rule.columns == 32:
            scales = exponents(stored, matrix.module)
        else:
            scales = stored.astype(np.float32) / matrix.array("weight_global_scale").reshape(())
        return Affine(codes, scales / np.float32(2), matrix.columns(""))


class _Blocks(Layout):
    parts = ("weight_blocks", "weight_scales")

    def check(self, matrix: StoredMatrix) -> None:
        features, inputs = matrix.shape
        if inputs % 32:
            raise ValueError(f"{matrix.module} is {[features, inputs]}; 32 inputs have one scale: {AGAIN}")
        matrix.check("weight_blocks", ((features, inputs // 32, 16),), ("U8",))
        matrix.check("weight_scales", ((features, inputs // 32),), ("U8",))

    def rows(self, matrix: StoredMatrix, start: int, stop: int) -> Affine:
        codes = _HALVES[codes_of_bytes(matrix.some("weight_blocks", start, stop).reshape(stop - start, -1))]
        scales = exponents(matrix.some("weight_scales", start, stop), matrix.module)
        return Affine(codes, scales / np.float32(2), matrix.columns(""))


def codes_of_bytes(pairs: np.ndarray) -> np.ndarray:
    """The two codes of each byte, the low half first: [n, B] -> [n, 2B]."""
    return np.stack([pairs & 15, pairs >> 4], axis=-1).reshape(len(pairs), -1)


def check_zeros(matrix: StoredMatrix) -> None:
    """ValueError if zeros are missing that config.json speaks of."""
    if matrix.rule.zeros and "qzeros" not in matrix.parts:
        raise ValueError(f"{matrix.module} is stored packed without qzeros: {AGAIN}")


class _Awq(Layout):
    parts = ("qweight", "scales")
    more = ("qzeros",)
    order = (0, 4, 1, 5, 2, 6, 3, 7)
    """The place in a word of each code, in the order of features."""

    def check(self, matrix: StoredMatrix) -> None:
        (features, inputs), groups = matrix.shape, matrix.groups
        if features % 8 or inputs % 8:
            raise ValueError(f"{matrix.module} is {[features, inputs]}; {matrix.rule.layout} needs multiples of 8")
        matrix.check("qweight", ((inputs, features // 8),), ("I32",))
        matrix.check("scales", ((groups, features),), FLOATS)
        check_zeros(matrix)
        if "qzeros" in matrix.parts:
            matrix.check("qzeros", ((groups, features // 8),), ("I32",))

    def rows(self, matrix: StoredMatrix, start: int, stop: int) -> Affine:
        first, last = start // 8, -(-stop // 8)
        ours = slice(start - 8 * first, stop - 8 * first)

        def codes(name: str) -> np.ndarray:
            words = codes_of(matrix.held(name)[:, first:last], 4, 8 * (last - first))
            return words.reshape(len(words), -1, 8)[..., self.order].reshape(len(words), -1)[:, ours].T

        scales, columns = matrix.held("scales")[:, start:stop].T, matrix.columns("")
        if "qzeros" not in matrix.parts:  # zero_point: false
            return Affine(codes("qweight").astype(np.int8) - np.int8(8), scales, columns)
        return Affine(codes("qweight"), scales, columns, codes("qzeros").astype(np.int16))


class _Gemv(Layout):
    parts = ("qweight", "scales")
    more = ("qzeros",)

    def check(self, matrix: StoredMatrix) -> None:
        (features, inputs), words = matrix.shape, -(-matrix.groups // 8)
        if features % 8 or inputs % 8:
            raise ValueError(f"{matrix.module} is {[features, inputs]}; {matrix.rule.layout} needs multiples of 8")
        matrix.check("qweight", ((features, inputs // 8),), ("I32",))
        check_zeros(matrix)
        widths = range(words, words + 4)  # rounded up to what its kernels read at a time
        matrix.check("scales", tuple((features, 8 * width) for width in widths), FLOATS)
        if "qzeros" in matrix.parts:
            matrix.check("qzeros", tuple((features, width) for width in widths), ("I32",))

    def rows(self, matrix: StoredMatrix, start: int, stop: int) -> Affine:
        codes = codes_of(matrix.some("qweight", start, stop), 4, matrix.shape[1])
        scales = matrix.some("scales", start, stop)[:, : matrix.groups]
        if "qzeros" not in matrix.parts:  # zero_point: false
            return Affine(codes.astype(np.int8) - np.int8(8), scales, matrix.columns(""))
        zeros = codes_of(matrix.some("qzeros", start, stop), 4, matrix.groups)
        return Affine(codes, scales, matrix.columns(""), zeros.astype(np.int16))


class _GemvFast(Layout):
    """Four rows lie together: of 64 inputs of each of them, in the order of rows, each number of 16 bits holds four
    codes in turn. In each 32 inputs of a row the order is 0 1 8 9 16 17 24 25 2 3 ..., and then in each 8 of these even
    places come before odd ones."""

    parts = ("qweight", "scales", "qzeros")

    def check(self, matrix: StoredMatrix) -> None:
        (features, inputs), words = matrix.shape, -(-matrix.groups // 8)
        if features % 8 or inputs % 64:
            raise ValueError(f"{matrix.module} is {[features, inputs]}; gemv_fast needs multiples of 8 and of 64")
        matrix.check("qweight", ((features // 4, inputs),), ("I16",))
        padded = tuple((8 * width, features) for width in range(words, words + 4))
        matrix.check("scales", padded, ("F16",))
        matrix.check("qzeros", padded, ("F16",))

    def rows(self, matrix: StoredMatrix, start: int, stop: int) -> Affine:
        first, last = start // 4, -(-stop // 4)
        words = np.ascontiguousarray(matrix.some("qweight", first, last)).view(np.uint16)
        count, inputs = words.shape
        codes = np.stack([(words >> np.uint16(4 * place)).astype(np.uint8) & 15 for place in range(4)], axis=-1)
        codes = codes.reshape(count, inputs // 64, 4, 64).transpose(0, 2, 1, 3).reshape(4 * count, inputs // 32, 4, 2, 4)
        codes = codes.transpose(0, 1, 2, 4, 3)  # even and odd places of 8
        codes = codes.reshape(4 * count, inputs // 32, 4, 4, 2).transpose(0, 1, 3, 2, 4).reshape(4 * count, inputs)
        ours = slice(start - 4 * first, stop - 4 * first)
        scales, offsets = (matrix.held(name)[: matrix.groups, start:stop].T for name in ("scales", "qzeros"))
        return Affine(codes[ours], scales, matrix.columns(""), offsets=offsets)


class _Gptq(Layout):
    parts, more = ("qweight", "qzeros", "scales"), ("g_idx",)

    def check(self, matrix: StoredMatrix) -> None:
        (features, inputs), bits, groups = matrix.shape, matrix.rule.bits, matrix.groups
        if features * bits % 32 or inputs * bits % 32:
            raise ValueError(f"{matrix.module} is {[features, inputs]}; gptq of {bits} bits needs multiples of {32 // math.gcd(32, bits)}")
        matrix.check("qweight", ((inputs * bits // 32, features),), ("I32",))
        matrix.check("qzeros", ((groups, features * bits // 32),), ("I32",))
        matrix.check("scales", ((groups, features),), FLOATS)
        if "g_idx" in matrix.parts:
            matrix.check("g_idx", ((inputs,),), ("I32", "I64"))

    def zeros(self, matrix: StoredMatrix, start: int, stop: int) -> np.ndarray:
        """[n, E/g]."""
        bits = matrix.rule.bits
        first, last = start // 32, -(-stop // 32)  # 32 codes fill whole words
        words = matrix.held("qzeros")[:, first * bits : last * bits]
        return codes_of(words, bits, stop - 32 * first)[:, start - 32 * first :].T.astype(np.int16) + matrix.rule.zero_shift

    def format_of(self, matrix: StoredMatrix) -> MatrixFormat | None:
        holds = matrix.rule.bits <= 4 or (self.zeros(matrix, 0, matrix.shape[0]) == 128).all()
        return matrix.rule.format if holds and matrix.in_order("g_idx") else None

    def rows(self, matrix: StoredMatrix, start: int, stop: int) -> Affine:
        codes = codes_of(matrix.held("qweight")[:, start:stop].T, matrix.rule.bits, matrix.shape[1])
        scales = matrix.held("scales")[:, start:stop].T
        return Affine(codes, scales, matrix.columns("g_idx"), self.zeros(matrix, start, stop))


class _Bnb8(Layout):
    parts, unused = ("SCB", "weight"), ("weight_format",)

    def check(self, matrix: StoredMatrix) -> None:
        matrix.check("weight", (matrix.shape,), ("I8",))
        matrix.check("SCB", (matrix.shape[:1],), ("F32",))

    def rows(self, matrix: StoredMatrix, start: int, stop: int) -> Affine:
        scales = matrix.some("SCB", start, stop)[:, None] * np.float32(7.874015718698502e-3)  # 1/127, as bitsandbytes has it
        return Affine(matrix.some("weight", start, stop), scales, matrix.columns(""))


LAYOUTS: Mapping[str, Layout] = {
    "plain": _Plain(),
    "words": _Words(),
    "fp4": _Fp4(),
    "blocks": _Blocks(),
    "awq": _Awq(),
    "gemv": _Gemv(),
    "gemv_fast": _GemvFast(),
    "gptq": _Gptq(),
    "bnb8": _Bnb8(),
}
"""By name, but for those with files of their own (`kvjax.models.quantization.reading.LAYOUTS`)."""
