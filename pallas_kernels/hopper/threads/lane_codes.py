"""Codes of packed matrices, made 16-bit numbers in registers by the threads of `pallas_kernels.hopper.threads.lanes`.

A word holds 4 codes of 8 bits or 8 of 4 bits. It becomes pairs of numbers, a word each: codes (0, 2), (1, 3) of four,
and (0, 4), (1, 5), (2, 6), (3, 7) of eight. Codes of a pair are 16 bits apart, so that one mask takes both. `paired`
brings other numbers into that order.

Integers: the bits of a code are put into the mantissa of a constant, and the constant is subtracted, which is exact.
fp8_e4m3: exponent and mantissa are moved to their places in the wider number, and the product with a power of two
corrects the exponent's bias. It is exact, for denormals too, but the two codes of NaN become 480 and -480.
"""

from __future__ import annotations

from collections.abc import Sequence

from pallas_kernels.hopper.threads import lane_pairs, lanes
from pallas_kernels.hopper.threads.lanes import Scalar

PER_WORD = {"int8": 4, "fp8_e4m3": 4, "int4": 8}
"""Codes in a word, by kind."""

_WHOLE = {"bfloat16": 0x4300, "float16": 0x6400}
"""128 and 1024: the smallest number whose neighbours are 1 apart."""

_FP8 = {"bfloat16": (4, 0x07F0, 0x7B80), "float16": (1, 0x3F80, 0x5C00)}
"""Of e4m3 in the upper byte: how far its bits move to the right, which bits they are then, and the power of two, 2^120
or 2^8."""


def _both(half: int) -> int:
    """A word with 16 bits twice, as a signed integer."""
    word = half << 16 | half
    return word - (1 << 32) if word >= 1 << 31 else word


def zero_word(zero: Scalar, dtype: str) -> Scalar:
    """What `numbers` subtracts for int4 whose code of zero is `zero`, 0 to 127."""
    return (zero | zero << 16) + _both(_WHOLE[dtype])


def numbers(word: Scalar, codes: str, dtype: str, zero: Scalar | None = None) -> list[Scalar]:
    """The numbers of a word of codes, without their scale, in pairs. zero: `zero_word` of int4; None: of 8."""
    if codes == "int4":
        zero = lanes.i32(_both(_WHOLE[dtype] + 8)) if zero is None else zero
        wide = [lanes.masked_or(word >> 4 * n if n else word, _both(0x000F), _both(_WHOLE[dtype])) for n in range(4)]
        return [lane_pairs.subtract_pairs(x, zero, dtype) for x in wide]
    if codes == "int8":
        return [_from_int8(word, dtype), _from_int8(word >> 8, dtype)]
    return [_from_fp8(word << 8, dtype), _from_fp8(word, dtype)]


def _from_int8(word: Scalar, dtype: str) -> Scalar:
    """Of the lower bytes of both halves."""
    if dtype == "float16":
        wide = _masked_xor(word, _both(0x00FF), _both(_WHOLE[dtype] | 0x80))
        return lane_pairs.subtract_pairs(wide, lanes.i32(_both(_WHOLE[dtype] | 0x80)), dtype)
    # The mantissa has 7 bits. The eighth, the sign, stands for -128: with it, 256 is subtracted instead of 128, the
    # next exponent.
    wide, less = (lanes.masked_or(word, _both(mask), _both(_WHOLE[dtype])) for mask in (0x7F, 0x80))
    return lane_pairs.subtract_pairs(wide, less, dtype)


def _from_fp8(word: Scalar, dtype: str) -> Scalar:
    """Of the upper bytes of both halves."""
    places, mask, power = _FP8[dtype]
    bits = lanes.masked_or(word, _both(0x8000), (word >> places) & _both(mask))
    return lane_pairs.multiply_pairs(bits, lanes.i32(_both(power)), dtype)


def _masked_xor(x: Scalar, mask: int, y: Scalar | int) -> Scalar:
    """x & mask ^ y, in one instruction."""
    return lanes.ptx("lop3.b32 $0, $1, $2, $3, 0x6a;", x, mask, y, result="i32")


def paired(words: Sequence[Scalar]) -> list[Scalar]:
    """Consecutive numbers, two in a word, in the order of `numbers`: 2 words to go with 4 codes, 4 words to go with
    8."""
    half = len(words) // 2
    both = list(zip(words[:half], words[half:], strict=True))
    return [pair for a, b in both for pair in (lane_pairs.low_halves(a, b), lane_pairs.high_halves(a, b))]
