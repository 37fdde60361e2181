"""Tokens as integers of three digits, so that `mosaic_gpu` multiplies integer codes of weights as they are
(`mma.m16n8k32` of int8).

To make numbers of the codes would take more instructions than all else. A token is much smaller than the rows of a
matrix. So a warp makes integers of the inputs of each chunk of a token: multiples of 2^-20 of the power of two at or
below the largest one, or of 2^-126 if that is below 2^-106. They have 22 bits with their sign, so numbers of bfloat16
keep all of theirs down to 2^-13 of the largest. An integer is d0 * 2^16 + d1 * 2^8 + d2, with digits of 8 bits with
their sign. Products of codes and digits add up in int32, exactly. For each chunk, the sums of d0, and those of d1 * 2^8
+ d2, become float32, are scaled, and are added up; both are put together at the end of a tile. So a token's result
depends on no other token.

Every lane makes the digits that it multiplies. Columns of the other operand are, for one or two tokens, their digits
side by side. For more tokens each column is a token, and each digit has a matrix of its own: with more than
`MAX_TOKENS`, digits cost more than they save.
"""

from __future__ import annotations

import dataclasses
import functools

from pallas_kernels.hopper.threads import lane_pairs, lanes
from pallas_kernels.hopper.threads.lanes import Scalar

DIGITS = 3

MAX_TOKENS = 8
"""More tokens are multiplied as numbers."""

MAGIC = 1.5 * 2**23 + 0x8080
"""A float32 whose neighbours are 1 apart: added to an integer of 22 bits, it leaves the digits in the lowest three
bytes, each but for a constant."""

_HALF, _FIRST = -0x7F7F7F80, 0x40404040
"""0x80 in each byte, which all digits have too much, and what the first one lacks before."""


@dataclasses.dataclass(frozen=True)
class Digits:
    """codes: "int8" or "int4". dtype: of the tokens. tokens: how many."""

    codes: str
    dtype: str
    tokens: int

    @property
    def per_unit(self) -> int:
        """Words of a digit that go with a word of weights."""
        return 1 if self.codes == "int8" else 2

    @property
    def least(self) -> float:
        """What a product of 1 in the last digit is of the integers' product: codes of int4 are multiplied by 16."""
        return 1.0 if self.codes == "int8" else 2.0**-4

    @property
    def side_by_side(self) -> bool:
        """Whether the digits of a token are columns side by side: d1, d2, d0, and one of zeros."""
        return self.tokens <= 2

    @property
    def sums(self) -> int:
        """Sums of a lane for 16 rows of weights, float32: of first digits, and of the others."""
        return 2 if self.side_by_side else 8

    def operands(self, load) -> tuple[list[list[Scalar]], list[Scalar]]:
        """Of each matrix of columns: this lane's words of the other operand, by units t, t + 4, ... of 4 bytes of
        weights. And what an integer of 1 stands for in each of this lane's sums of a row. load: (token, unit, words) ->
        so many words of two inputs of a chunk, as they are multiplied. Whole warps call this."""
        g, t = lanes.lane() >> 2, lanes.lane() & 3
        token = lanes.minimum(g >> 2 if self.side_by_side else g, self.tokens - 1)
        units = [load(token, t + n, 2 * self.per_unit) for n in (0, 4, 8, 12)]
        scale, one = self._scales([word for words in units for word in words])
        fours = []
        for words in units:
            inputs = [lanes.bits(lanes.fma(x, scale, MAGIC)) for word in words for x in lane_pairs.unpack(word, self.dtype)]
            # Of int4, weights of even columns are multiplied together, and those of odd ones.
            fours += [inputs[n :: self.per_unit] for n in range(self.per_unit)]
        if not self.side_by_side:
            ones = [lanes.bits(lanes.shuffle(lanes.bits(one), t * 8 + 4 * n)) * self.least for n in range(2)]
            return [[_of_digit(four, digit) for four in fours] for digit in range(DIGITS)], [one * 2.0**16 for one in ones] + ones
        if self.tokens > 1:
            one = lanes.bits(lanes.shuffle(lanes.bits(one), (t >> 1) * 16))
        return [_chosen(fours, g & 3)], [one * lanes.where((t & 1) != 0, lanes.f32(2.0**16 * self.least), self.least)]

    def _scales(self, words: list[Scalar]) -> tuple[Scalar, Scalar]:
        """What makes integers of the inputs of this lane and of the three beside it, and what an integer of 1 stands
        for; NaN if one of them is not finite. words: of two inputs."""
        largest = functools.reduce(lane_pairs.larger_pairs, [word & 0x7FFF7FFF for word in words])
        for distance in (2, 1):
            largest = lane_pairs.larger_pairs(largest, lanes.shuffle_xor(largest, distance))
        first, second = (lanes.bits(x) for x in lane_pairs.unpack(largest, self.dtype))
        exponent = lanes.maximum(first, second) >> 23
        finite = exponent < 255
        exponent = lanes.maximum(exponent, 21)  # below, an integer of 1 would be no normal float32
        return lanes.bits((274 - exponent) << 23), lanes.where(finite, lanes.bits((exponent - 20) << 23), float("nan"))

    def products(self, weights: list[Scalar], step: int, words: list[Scalar], sums: list[Scalar]) -> list[Scalar]:
        """Integer sums of 16 rows and 8 columns, and the products of step `step` of a chunk. weights: by
        `load_matrices`, words of rows g and g + 8, of two units."""
        if self.codes == "int8":
            return lane_pairs.mma_int8(sums, weights, words[2 * step :][:2])
        for n in range(2):
            low, high = weights[2 * n :][:2]
            even = [_upper_codes(word << 4) for word in (low, high)]
            odd = [_upper_codes(word) for word in (low, high)]
            sums = lane_pairs.mma_int8(sums, even + odd, words[2 * (2 * step + n) :][:2])
        return sums

    def added(self, before: list[Scalar], tiles: list[list[Scalar]], ones: list[Scalar], scales: list[Scalar] | None) -> list[Scalar]:
        """The `sums` after a chunk. tiles: integer sums of each matrix of columns. scales: of the chunk's weights in
        rows g and g + 8; None: of whole rows."""
        odd, found = (lanes.lane() & 1) != 0, []
        for row in range(2):
            columns = [tile[2 * row :][:2] for tile in tiles]
            if self.side_by_side:
                first, second = columns[0]
                integers = [first * lanes.where(odd, lanes.i32(1), 256) + second]
            else:
                integers = columns[0] + [x * 256 + y for x, y in zip(*columns[1:], strict=True)]
            for x, one in zip(integers, ones, strict=True):
                number, last = lanes.number(x), before[len(found)]
                # A scale multiplies the sum, not `one`: their product may be too large or too small where the result is
                # not.
                found.append(lanes.fma(number, one, last) if scales is None else lanes.fma(number * one, scales[row], last))
        return found

    def of_tokens(self, sums: list[Scalar]) -> list[tuple[Scalar, list[list[Scalar]], Scalar | None]]:
        """Results from the `sums` of all chunks: the first of their tokens, one or two of them in rows g and g + 8, and
        which lanes have them; None: all. Whole warps call this."""
        t = lanes.lane() & 3
        if self.side_by_side:
            return [(t >> 1, [[lanes.shuffle_xor(x, 1) + x] for x in sums], (t & 1) == 0)]
        return [(t * 2, [[row[n] + row[2 + n] for n in range(2)] for row in (sums[:4], sums[4:])], None)]


def _bytes_of(four: list[Scalar], order) -> Scalar:
    """A byte of each of four integers. order: as `permuted` takes it, for two of them."""
    return lane_pairs.permuted(*(lane_pairs.permuted(a, b, order) for a, b in (four[:2], four[2:])), 0x5410)


def _of_digit(four: list[Scalar], digit: int) -> Scalar:
    """A digit of four integers."""
    place = DIGITS - 1 - digit
    word = _bytes_of(four, place | (place + 4) << 4)
    return (word + _FIRST if digit == 0 else word) ^ _HALF


def _chosen(fours: list[list[Scalar]], column: Scalar) -> list[Scalar]:
    """The digit of column 0 to 3 of each four integers: d1, d2, d0, or zeros."""
    place = lanes.where(column == 2, lanes.i32(2), 1 - column)
    order = lanes.where(column == 3, lanes.i32(0), place * 0x11 + 0x40)
    more, kept = lanes.where(column == 2, lanes.i32(_FIRST), 0), lanes.where(column == 3, lanes.i32(0), -1)
    return [_different_and(_bytes_of(four, order) + more, _HALF, kept) for four in fours]


def _upper_codes(word: Scalar) -> Scalar:
    """16 times what the codes in the upper halves of four bytes stand for."""
    return _different_and(word, _HALF, -0x0F0F0F10)


def _different_and(x: Scalar, y: int, mask: Scalar | int) -> Scalar:
    """(x ^ y) & mask, by one instruction."""
    return lanes.ptx("lop3.b32 $0, $1, $2, $3, 0x28;", x, y, mask, result="i32")
