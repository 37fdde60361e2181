"""Words of two 16-bit numbers, for the functions of `pallas_kernels.hopper.threads.lanes`: packed, multiplied, and as
small matrices of a warp."""

from __future__ import annotations

from collections.abc import Sequence

from pallas_kernels.hopper.threads import lanes


def load_matrices(ref, offset: lanes.Scalar, *, transposed: bool = False) -> list[lanes.Scalar]:
    """`ldmatrix.x4`: four 8 x 8 matrices of 16-bit numbers from shared memory, a word of each per lane.

    offset: words. Lane 8m + r gives the address of row r of matrix m, 16 bytes. Lane (g, t) gets columns 2t, 2t + 1 of
    row g; transposed: rows 2t, 2t + 1 of column g.
    """
    code = f"ldmatrix.sync.aligned.m8n8.x4{'.trans' if transposed else ''}.shared.b16 {{$0, $1, $2, $3}}, [$4];"
    return lanes.ptx(code, lanes.address(ref, offset * 4), result=["i32"] * 4, convergent=True)


def mma(acc: Sequence[lanes.Scalar], a: Sequence[lanes.Scalar], b: Sequence[lanes.Scalar], dtype: str) -> list[lanes.Scalar]:
    """`mma.m16n8k16` of a warp: 4 float32 accumulators, 4 words of A (16 x 16), 2 words of B (16 x 8). dtype: bfloat16
    or float16."""
    kind = {"bfloat16": "bf16", "float16": "f16"}[dtype]
    registers = "{$0, $1, $2, $3}, {$4, $5, $6, $7}, {$8, $9}, {$10, $11, $12, $13}"
    code = f"mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32 {registers};"
    return lanes.ptx(code, *a, *b, *acc, result=["f32"] * 4, convergent=True)


def mma_int8(acc: Sequence[lanes.Scalar], a: Sequence[lanes.Scalar], b: Sequence[lanes.Scalar], kind: str = "s8") -> list[lanes.Scalar]:
    """`mma.m16n8k32` of a warp: 4 int32 accumulators, 4 words of A (16 x 32 of int8), 2 words of B (32 x 8). Lane (g,
    t) has rows g, g + 8 and columns 4t and on, 4t + 16 and on, of A, the same rows of column g of B, and accumulators
    as in `mma`. kind: of B, s8 or u8."""
    registers = "{$0, $1, $2, $3}, {$4, $5, $6, $7}, {$8, $9}, {$10, $11, $12, $13}"
    code = f"mma.sync.aligned.m16n8k32.row.col.s32.s8.{kind}.s32 {registers};"
    return lanes.ptx(code, *a, *b, *acc, result=["i32"] * 4, convergent=True)


def transposed(word: lanes.Scalar) -> lanes.Scalar:
    """`movmatrix`: an 8 x 8 matrix of 16-bit numbers, a word per lane, turned round.

    Lane (g, t) gives columns 2t, 2t + 1 of row g, and gets rows 2t, 2t + 1 of column g.
    """
    return lanes.ptx("movmatrix.sync.aligned.m8n8.trans.b16 $0, $1;", word, result="i32", convergent=True)


def pack(low: lanes.Scalar, high: lanes.Scalar, dtype: str) -> lanes.Scalar:
    """Two float32 rounded to bfloat16 or float16, in one word."""
    kind = {"bfloat16": "bf16x2", "float16": "f16x2"}[dtype]
    return lanes.ptx(f"cvt.rn.{kind}.f32 $0, $1, $2;", high, low, result="i32")


def multiply_pairs(a: lanes.Scalar, b: lanes.Scalar, dtype: str) -> lanes.Scalar:
    """Products of the two numbers of each word, rounded to bfloat16 or float16."""
    kind = {"bfloat16": "bf16x2", "float16": "f16x2"}[dtype]
    return lanes.ptx(f"mul.rn.{kind} $0, $1, $2;", a, b, result="i32")


def subtract_pairs(a: lanes.Scalar, b: lanes.Scalar, dtype: str) -> lanes.Scalar:
    """a - b of the two numbers of each word, rounded to bfloat16 or float16."""
    kind = {"bfloat16": "bf16x2", "float16": "f16x2"}[dtype]
    return lanes.ptx(f"sub.rn.{kind} $0, $1, $2;", a, b, result="i32")


def larger_pairs(a: lanes.Scalar, b: lanes.Scalar) -> lanes.Scalar:
    """The larger of each 16 bits of two words, read as integers without a sign: of numbers that are not negative, the
    larger ones."""
    return lanes.ptx("max.u16x2 $0, $1, $2;", a, b, result="i32")


def of_e4m3(word: lanes.Scalar) -> tuple[lanes.Scalar, lanes.Scalar]:
    """Four float8_e4m3fn as pairs of bfloat16: those of bytes 0 and 2, and of bytes 1 and 3."""
    order = "prmt.b32 w, $2, 0, 0x3120; mov.b32 {l, h}, w;"
    code = f"{{.reg .b16 l, h; .reg .b32 w; {order} cvt.rn.f16x2.e4m3x2 $0, l; cvt.rn.f16x2.e4m3x2 $1, h;}}"
    low, high = (pack(*unpack(x, "float16"), "bfloat16") for x in lanes.ptx(code, word, result=["i32", "i32"]))
    return low, high


def to_e4m3(a: lanes.Scalar, b: lanes.Scalar, c: lanes.Scalar, d: lanes.Scalar) -> lanes.Scalar:
    """Four float32 rounded to float8_e4m3fn, the first in the lowest byte. What is beyond 448 becomes 448, with its
    sign."""
    low, high = (f"cvt.rn.satfinite.e4m3x2.f32 {half}, {pair};" for half, pair in (("l", "$2, $1"), ("h", "$4, $3")))
    return lanes.ptx(f"{{.reg .b16 l, h; {low} {high} mov.b32 $0, {{l, h}};}}", a, b, c, d, result="i32")


def multiply_add_pairs(a: lanes.Scalar, b: lanes.Scalar, c: lanes.Scalar, dtype: str) -> lanes.Scalar:
    """a * b + c of the two numbers of each word, rounded once to bfloat16 or float16."""
    kind = {"bfloat16": "bf16x2", "float16": "f16x2"}[dtype]
    return lanes.ptx(f"fma.rn.{kind} $0, $1, $2, $3;", a, b, c, result="i32")


def permuted(a: lanes.Scalar, b: lanes.Scalar, order: int | lanes.Scalar) -> lanes.Scalar:
    """Four bytes of two words, the lowest first. order: four digits of 16, the lowest for the lowest byte; 0 to 3: a's,
    4 to 7: b's."""
    if isinstance(order, lanes.Scalar):
        return lanes.ptx("prmt.b32 $0, $1, $2, $3;", a, b, order, result="i32")
    return lanes.ptx(f"prmt.b32 $0, $1, $2, {order:#06x};", a, b, result="i32")


def unpack(word: lanes.Scalar, dtype: str) -> list[lanes.Scalar]:
    """The two numbers of a word as float32."""
    if dtype == "bfloat16":
        return [lanes.bits(word << 16), lanes.bits(word & -65536)]
    code = "{.reg .b16 l, h; mov.b32 {l, h}, $2; cvt.f32.f16 $0, l; cvt.f32.f16 $1, h;}"
    return lanes.ptx(code, word, result=["f32", "f32"])


def low_halves(a: lanes.Scalar, b: lanes.Scalar) -> lanes.Scalar:
    """The lower numbers of two words: a's below, b's above."""
    return a & 0xFFFF | b << 16


def high_halves(a: lanes.Scalar, b: lanes.Scalar) -> lanes.Scalar:
    """The upper numbers of two words: a's below, b's above."""
    return lanes.shift_right(a, lanes.i32(16)) | b & -65536
