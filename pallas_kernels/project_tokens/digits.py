"""Tokens as integers of three digits, so that `mosaic_gpu` multiplies integer codes of weights as they are (`mma.m16n8k32` of int8).

To make numbers of the codes would take more instructions than all else. A token is much smaller than the rows of a matrix. So a warp makes
integers of the inputs of each chunk of a token: multiples of 2^-20 of the power of two at or below the largest one. They have 22 bits with
their sign, so numbers of bfloat16 keep all of theirs down to 2^-13 of the largest. An integer is d0 * 2^16 + d1 * 2^8 + d2, with digits of
8 bits with their sign. Products of codes and digits add up in int32, exactly; sums of each chunk and digit are scaled, and added up in
float32; the three sums of a token are added at the end of a tile. So a token's result depends on no other token.

The digits of a chunk lie in shared memory, where every lane finds those of its columns of the other operand side by side.
"""

from __future__ import annotations

import dataclasses

from pallas_kernels.hopper import lane_pairs, lanes
from pallas_kernels.hopper.lanes import Scalar

DIGITS = 3

UNITS = 16
"""Words of weights in a row of a chunk."""

MAGIC = 1.5 * 2**23 + 0x8080
"""A float32 whose neighbours are 1 apart, and whose last 16 bits are half of what they hold: added to an integer of 22 bits, it leaves the
digits in its lowest bytes, each but for a constant."""

NEAR = 4
"""For up to so many tokens the digits of a token are columns side by side. For more, they are the same column of three matrices."""

_SIGNS = -0x7F7F7F80  # 0x80808080


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
    def plane(self) -> int:
        """Words of a digit of a token's chunk."""
        return UNITS * self.per_unit

    @property
    def side_by_side(self) -> bool:
        """Whether a matrix of 8 columns has two tokens: their digits, and a column of no use after each three."""
        return self.tokens <= NEAR

    @property
    def column_tiles(self) -> int:
        """Matrices of 8 columns."""
        return -(-self.tokens // 2) if self.side_by_side else DIGITS * -(-self.tokens // 8)

    @property
    def held(self) -> int:
        """Tokens whose digits are in shared memory at a time."""
        return min(self.tokens, 8)

    @property
    def warp_words(self) -> int:
        """Words of shared memory for a warp: the digits of a chunk, and what an integer of 1 stands for, of each token."""
        return self.held * DIGITS * self.plane + -(-self.held // 4) * 4

    def operands(self, digits_s, start: Scalar, load) -> tuple[list[list[Scalar]], list[list[Scalar]]]:
        """Of each matrix of columns: this lane's words of the other operand, by unit t, t + 4, ...; and what an integer of 1 stands for in
        its two columns of the sums. start: the first of the warp's `warp_words`. load: (token, unit, words) -> so many words of two inputs
        of a chunk, as they are multiplied."""
        words, ones = [], []
        for first in range(0, self.tokens, self.held):
            count = min(self.held, self.tokens - first)
            lanes.warp_barrier()  # the digits before were read
            self._store(digits_s, start, lambda token, *place, first=first: load(token + first, *place), count)
            lanes.warp_barrier()
            for tile in range(self.column_tiles if self.side_by_side else DIGITS):
                for found, of_tile in zip((words, ones), self._load(digits_s, start, tile, count), strict=True):
                    found.append(of_tile)
        return words, ones

    def _store(self, digits_s, start: Scalar, load, count: int) -> None:
        """Write the digits of `count` tokens."""
        lanes_each = next(n for n in (16, 8, 4) if count * n <= 32)
        token, own = lanes.lane() // lanes_each, lanes.lane() % lanes_each
        there = token < count
        token = lanes.minimum(token, count - 1)
        units = [own + n for n in range(0, UNITS, lanes_each)]
        inputs = [[x for word in load(token, unit, 2 * self.per_unit) for x in lane_pairs.unpack(word, self.dtype)] for unit in units]
        scale, one = self._scales([x for of_unit in inputs for x in of_unit], lanes_each)
        with lanes.when(there):
            at = start + token * (DIGITS * self.plane)
            for unit, of_unit in zip(units, inputs, strict=True):
                # Of int4, weights of even columns are multiplied together, and those of odd ones.
                groups = [[lanes.bits(lanes.fma(x, scale, MAGIC)) for x in of_unit[n :: self.per_unit]] for n in range(self.per_unit)]
                for digit in range(DIGITS):
                    words = [_of_digit(group, digit) for group in groups]
                    lanes.store_shared(digits_s, at + self._place(digit, unit), *words)
            with lanes.when(own == 0):
                lanes.store_shared(digits_s, start + self.held * (DIGITS * self.plane) + token, one)

    def _place(self, digit: int, unit: Scalar) -> Scalar:
        """Word of a unit's digits in those of its token: lane (g, t) reads units t, t + 4, t + 8, t + 12."""
        return ((unit & 3) * 4 + (unit >> 2)) * self.per_unit + digit * self.plane

    def _scales(self, inputs: list[Scalar], lanes_each: int) -> tuple[Scalar, Scalar]:
        """What makes integers of these inputs and those of the lanes beside, and what an integer of 1 stands for; NaN if one is not
        finite."""
        largest = None
        for x in inputs:
            size = lanes.bits(x) & 0x7FFFFFFF
            largest = size if largest is None else lanes.maximum(largest, size)
        for distance in (8, 4, 2, 1):
            if distance < lanes_each:
                largest = lanes.maximum(largest, lanes.shuffle_xor(largest, distance))
        exponent = largest >> 23
        finite = exponent < 255
        exponent = lanes.maximum(exponent, 21)  # below, numbers are 0
        return lanes.bits((274 - exponent) << 23), lanes.where(finite, lanes.bits((exponent - 20) << 23), float("nan"))

    def _load(self, digits_s, start: Scalar, tile: int, count: int) -> tuple[list[Scalar], list[Scalar]]:
        """`operands` of a matrix of columns."""
        g, t = lanes.lane() >> 2, lanes.lane() & 3
        if self.side_by_side:
            token, digit = (g >> 2) + 2 * tile, lanes.minimum(g & 3, DIGITS - 1)
            of_sums = [(t >> 1) + 2 * tile] * 2
        else:
            token, digit = g, tile
            of_sums = [t * 2 + n for n in range(2)]
        token = lanes.minimum(token, count - 1)
        at = start + token * (DIGITS * self.plane) + digit * self.plane + t * (4 * self.per_unit)
        words = [x for n in range(self.per_unit) for x in lanes.load_shared(digits_s, at + 4 * n, count=4)]
        first = start + self.held * (DIGITS * self.plane)
        return words, [lanes.load_shared(digits_s, first + lanes.minimum(x, count - 1), "f32")[0] for x in of_sums]

    def products(self, weights: list[Scalar], step: int, words: list[Scalar], sums: list[Scalar]) -> list[Scalar]:
        """Integer sums of 16 rows and 8 columns, and the products of step `step` of a chunk. weights: by `load_matrices`, words of rows
        g and g + 8, of two units."""
        if self.codes == "int8":
            return lane_pairs.mma_int8(sums, weights, words[2 * step :][:2])
        for n in range(2):
            low, high = weights[2 * n :][:2]
            even = [_nibbles(word << 4) for word in (low, high)]
            odd = [_nibbles(word) for word in (low, high)]
            sums = lane_pairs.mma_int8(sums, even + odd, words[2 * (2 * step + n) :][:2])
        return sums

    def of_tokens(self, tiles: list[list[Scalar]]) -> list[tuple[Scalar | int, list[list[Scalar]], Scalar | None]]:
        """The sums of tokens from those of their digits. tiles: of each matrix of columns, four sums of a lane. Of each result: the first
        of its tokens, the sums of one or two tokens in rows g and g + 8, and which lanes have it; None: all. Whole warps call this."""
        powers = [2.0 ** (8 * n - (0 if self.codes == "int8" else 4)) for n in (2, 1, 0)]  # codes of int4 are multiplied by 16
        t, found = lanes.lane() & 3, []
        if not self.side_by_side:
            for n in range(0, self.column_tiles, DIGITS):
                sums = [_joined(x, powers) for x in zip(*tiles[n : n + DIGITS], strict=True)]
                found.append((t * 2 + n // DIGITS * 8, [sums[:2], sums[2:]], None))
            return found
        for n, four in enumerate(tiles):
            last = [lanes.shuffle_xor(four[i], 1) for i in (0, 2)]
            sums = [[_joined((four[2 * i], four[2 * i + 1], last[i]), powers)] for i in range(2)]
            found.append(((t >> 1) + 2 * n, sums, (t & 1) == 0))
        return found


def _joined(digits, powers: list[float]) -> Scalar:
    first, second, third = digits
    return lanes.fma(first, lanes.f32(powers[0]), lanes.fma(second, lanes.f32(powers[1]), third * powers[2]))


def _of_digit(integers: list[Scalar], digit: int) -> Scalar:
    """A digit of four integers, a byte each."""
    place = DIGITS - 1 - digit
    pairs = [lane_pairs.permuted(a, b, place | (place + 4) << 4) for a, b in (integers[:2], integers[2:])]
    word = lane_pairs.permuted(*pairs, 0x5410)
    return (word + 0x40404040 if digit == 0 else word) ^ _SIGNS


def _nibbles(word: Scalar) -> Scalar:
    """16 times the codes in the upper halves of four bytes, less 8."""
    return lanes.ptx("lop3.b32 $0, $1, $2, $3, 0x28;", word, _SIGNS, -0x0F0F0F10, result="i32")
