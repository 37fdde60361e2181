"""Logits of keys that an index holds in few bits (`page_index.codes`), by the threads of `hopper.threads.lanes`.

A key is low + step * code in each channel, so its logit is q . low + (q * step) . code. Codes are whole numbers below
16. Those of 16 keys are the rows of `mma.m16n8k32`, made in registers from the bytes of the index, 8 codes by three
  instructions. The other operand is q * step
in whole numbers of 16 bits, of which the largest of a query row has the largest. Their high and low bytes are
multiplied apart, and these sums are exact. q . low is summed in float32, once for all keys of a block.

Source of the logits' use: a shortlist chosen by low-bit keys, Twilight (arXiv 2502.02770), HISA (arXiv 2603.28458).
"""

from __future__ import annotations

import dataclasses
import functools

from pallas_kernels.hopper.threads import lane_copies, lane_math, lane_pairs, lanes
from pallas_kernels.hopper.threads.lanes import Scalar
from pallas_kernels.selection.page_index import CODED, index_shape

MAX_BITS = 4
"""Of a code."""

_LARGEST = 32760.0
"""What the largest q * step of a query row becomes."""

_ROUNDING = 1.5 * 2**23
"""Added to a number below 2^22, it leaves the nearest whole number in the low bits."""


def unsupported(kind: str, head_dim: int) -> str | None:
    """Why an index of this kind cannot be read, or None if it can."""
    row_bytes = head_dim * CODED[kind] // 8
    if CODED[kind] > MAX_BITS:
        return f"it reads codes of at most {MAX_BITS} bits, got {kind}"
    return f"it reads codes of whole 16 bytes; {kind} of head dim {head_dim} has {row_bytes} a key" if row_bytes % 16 else None


@dataclasses.dataclass(frozen=True)
class CodedKeys:
    """A key tile of one warp: up to 32 keys of a block. In shared memory their codes, 16-byte pieces swizzled, then the
    block's levels."""

    kind: str
    block_size: int
    head_dim: int

    @property
    def bits(self) -> int:
        """Bits of a code."""
        return CODED[self.kind]

    @property
    def keys(self) -> int:
        """Keys of a key tile."""
        return min(32, self.block_size)

    @property
    def key_tiles(self) -> int:
        """Turns of a block."""
        return self.block_size // self.keys

    @property
    def row_bytes(self) -> int:
        """Bytes of a key's codes."""
        return self.head_dim * self.bits // 8

    @property
    def code_words(self) -> int:
        """Words of a key tile's codes."""
        return self.keys * self.row_bytes // 4

    @property
    def words(self) -> int:
        """Words of a key tile: codes, lowest levels, distances."""
        return self.code_words + self.head_dim

    def copy(self, ring_s, at: Scalar, ref, place: Scalar, key_tile: Scalar, levels: Scalar | bool = True) -> None:
        """By one warp: start copying a key tile of a block to word `at`. place: number of the block in the index `[N,
        K, nb, R, W]`; zeros where it is -1. levels: whether the block's levels come, too."""
        rows, row_bytes = index_shape(self.kind, self.block_size, self.head_dim)
        block_bytes, there, place = rows * row_bytes, place >= 0, lanes.maximum(place, 0)

        def row_place(row):
            return ref, place, block_bytes, (key_tile * self.keys + row) * row_bytes, there

        lane_copies.copy_rows_async(ring_s, at, row_place, rows=self.keys, row_bytes=row_bytes)
        start, size = lanes.i32(self.block_size * row_bytes), 4 * self.head_dim
        there = there if levels is True else there & levels
        lane_copies.copy_bytes_async(ring_s, at + self.code_words, ref, start, size, block=place, block_bytes=block_bytes, there=there)

    def scaled(self, ring_s, at: Scalar, query_words, dtype: str, factor: float = 1.0) -> list[Scalar]:
        """What all keys of a block share: per 16 channels the high and the low bytes of q * step; then of the query
        rows 2t and 2t + 1 what these whole numbers count, and q . low, both times `factor`. `at` is a key tile whose
        levels came.

        query_words: a block of 16 channels -> two words of 16-bit numbers of the lane's query g: channels e, e + 2 and
        e + 1, e + 3, where e is 16 * block + 4t. dtype: of these numbers.
        """
        base, products = lanes.f32(0.0), []
        for block in range(self.head_dim // 16):
            q = [x for word in query_words(block) for x in lane_pairs.unpack(word, dtype)]
            low, step = self._levels(ring_s, at, block)
            for a, b in zip(q, low, strict=True):
                base = lanes.fma(a, b, base)
            products.append([a * b for a, b in zip(q, step, strict=True)])
        largest = functools.reduce(lanes.maximum, [lanes.maximum(x, 0.0 - x) for four in products for x in four], lanes.f32(1e-30))
        for distance in (1, 2):  # over the lanes of the same query
            base = base + lanes.shuffle_xor(base, distance)
            largest = lanes.maximum(largest, lanes.shuffle_xor(largest, distance))
        count = lane_math.reciprocal(largest) * _LARGEST
        words = [word for four in products for word in _bytes_of([lanes.bits(lanes.fma(x, count, _ROUNDING)) for x in four])]
        of_row = (largest * (factor / _LARGEST), base * factor)
        return words + [lanes.bits(lanes.shuffle(lanes.bits(x), (lanes.lane() & 3) * 8 + 4 * j)) for x in of_row for j in range(2)]

    def nothing_scaled(self) -> list[Scalar]:
        """Values of the types of `scaled`."""
        return [lanes.i32(0)] * (self.head_dim // 8) + [lanes.f32(0.0)] * 4

    def logits(self, ring_s, at: Scalar, scaled: list[Scalar]) -> list[list[Scalar]]:
        """Logits of a key tile at word `at`, per 16 keys: keys g, g, g + 8, g + 8 by query rows 2t, 2t + 1, 2t, 2t + 1
        of a tile. scaled: of its block."""
        *words, unit, next_unit, base, next_base = scaled
        sums = [[[lanes.i32(0)] * 4 for _ in range(2)] for _ in range(self.keys // 16)]
        for blocks, tiles in self._operands(ring_s, at):
            for n, kind in enumerate(("s8", "u8")):
                numbers = [words[2 * block + n] for block in blocks]
                for tile, keys in enumerate(tiles):
                    sums[tile][n] = lane_pairs.mma_int8(sums[tile][n], keys, numbers, kind)
        rows = [(unit, base), (next_unit, next_base)]
        return [
            [lanes.fma(lanes.number(high * 256 + low), *rows[i % 2]) for i, (high, low) in enumerate(zip(*both, strict=True))]
            for both in sums
        ]

    def _operands(self, ring_s, at: Scalar):
        """(two blocks of 16 channels, per 16 keys the operand)."""
        lane, pieces = lanes.lane(), self.row_bytes // 16
        for piece in range(pieces):
            words = lane_pairs.load_matrices(ring_s, at + lane_copies.swizzled(lane & (self.keys - 1), lanes.i32(piece), self.row_bytes))
            words = words[: self.keys // 8]
            for field in range(0, 8 // self.bits, 2):
                first, second = ([self._numbers(word, field + n) for word in words] for n in range(2))
                tiles = [[*first[i : i + 2], *second[i : i + 2]] for i in range(0, len(words), 2)]
                yield (piece + field * pieces, piece + (field + 1) * pieces), tiles

    def _numbers(self, word: Scalar, field: int) -> Scalar:
        """Codes number `field` of four bytes."""
        return (word >> self.bits * field if field else word) & ((2**self.bits - 1) * 0x01010101)

    def _levels(self, ring_s, at: Scalar, block: int) -> list[list[Scalar]]:
        """The lowest levels and the distances of four channels, in the order of `query_words`."""
        found = []
        for kind in range(2):
            first = at + (self.code_words + kind * self.head_dim // 2 + 8 * block) + (lanes.lane() & 3) * 2
            a, b, c, d = (x for word in lanes.load_shared(ring_s, first, count=2) for x in lane_pairs.unpack(word, "bfloat16"))
            found.append([a, c, b, d])
        return found


def _bytes_of(numbers: list[Scalar]) -> list[Scalar]:
    """Of channels e, e + 2, e + 1, e + 3, whole numbers in 16 bits: the high bytes of the channels in order, and the
    low bytes."""
    a, c, b, d = numbers
    first, second = lane_pairs.permuted(a, b, 0x5140), lane_pairs.permuted(c, d, 0x5140)
    return [lane_pairs.permuted(first, second, order) for order in (0x7632, 0x5410)]
