"""Logits of keys that an index holds in few bits (`page_index.codes`), by the threads of `hopper.threads.lanes`.

A key is low + step * code in each channel, so its logit is q . low + (q * step) . code. Codes are whole numbers below 16, which bfloat16
holds exactly. Those of 16 keys are the rows of `mma.m16n8k16`, made in registers from the bytes of the index. The other operand is q * step
as the sum of two bfloat16, which keeps 16 bits of it. q . low is summed in float32, once for all keys of a key tile.

Source of the logits' use: a shortlist chosen by low-bit keys, Twilight (arXiv 2502.02770), HISA (arXiv 2603.28458).
"""

from __future__ import annotations

import dataclasses

from pallas_kernels.hopper.threads import lane_copies, lane_pairs, lanes
from pallas_kernels.hopper.threads.lanes import Scalar
from pallas_kernels.selection.page_index import CODED, index_shape

NUMBERS = "bfloat16"
"""What codes and the two parts of q * step become."""

MAX_BITS = 4
"""Of a code. Wider ones do not fit into the mantissa beside `_WHOLE`."""

_WHOLE = 0x43004300
"""128, twice: the neighbours of this bfloat16 are 1 apart."""


def unsupported(kind: str, head_dim: int) -> str | None:
    """Why an index of this kind cannot be read, or None if it can."""
    row_bytes = head_dim * CODED[kind] // 8
    if CODED[kind] > MAX_BITS:
        return f"it reads codes of at most {MAX_BITS} bits, got {kind}"
    return f"it reads codes of whole 16 bytes; {kind} of head dim {head_dim} has {row_bytes} a key" if row_bytes % 16 else None


@dataclasses.dataclass(frozen=True)
class CodedKeys:
    """A key tile of one warp: up to 32 keys of a block. In shared memory their codes, 16-byte pieces swizzled, then the block's levels."""

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
        """By one warp: start copying a key tile of a block to word `at`. place: number of the block in the index `[N, K, nb, R, W]`; zeros
        where it is -1. levels: whether the block's levels come, too."""
        rows, row_bytes = index_shape(self.kind, self.block_size, self.head_dim)
        block_bytes, there, place = rows * row_bytes, place >= 0, lanes.maximum(place, 0)

        def row_place(row):
            return ref, place, block_bytes, (key_tile * self.keys + row) * row_bytes, there

        lane_copies.copy_rows_async(ring_s, at, row_place, rows=self.keys, row_bytes=row_bytes)
        start, size = lanes.i32(self.block_size * row_bytes), 4 * self.head_dim
        there = there if levels is True else there & levels
        lane_copies.copy_bytes_async(ring_s, at + self.code_words, ref, start, size, block=place, block_bytes=block_bytes, there=there)

    def scaled(self, ring_s, at: Scalar, query_words, dtype: str) -> list[Scalar]:
        """What all keys of a block share: per 16 channels four words of q * step, two rounded ones and the remainders; then q . low
        of the query rows 2t and 2t + 1. `at` is a key tile whose levels came.

        query_words: a block of 16 channels -> two words of 16-bit numbers of the lane's query g: channels e, e + 2 and e + 1, e + 3, where
        e is 16 * block + 4t. dtype: of these numbers.
        """
        base, words = lanes.f32(0.0), []
        for block in range(self.head_dim // 16):
            q = [x for word in query_words(block) for x in lane_pairs.unpack(word, dtype)]
            low, step = self._levels(ring_s, at, block)
            for a, b in zip(q, low, strict=True):
                base = lanes.fma(a, b, base)
            words += [word for part in _in_two([a * b for a, b in zip(q, step, strict=True)]) for word in part]
        for distance in (1, 2):
            base = base + lanes.shuffle_xor(base, distance)
        return words + [lanes.bits(lanes.shuffle(lanes.bits(base), (lanes.lane() & 3) * 8 + 4 * j)) for j in range(2)]

    def nothing_scaled(self) -> list[Scalar]:
        """Values of the types of `scaled`."""
        return [lanes.i32(0)] * (self.head_dim // 4) + [lanes.f32(0.0)] * 2

    def logits(self, ring_s, at: Scalar, scaled: list[Scalar]) -> list[list[Scalar]]:
        """Unscaled logits of a key tile at word `at`, per 16 keys: keys g, g, g + 8, g + 8 by query rows 2t, 2t + 1, 2t, 2t + 1 of a tile.
        scaled: of its block."""
        of_rows = scaled[-2:]
        sums = [[[lanes.f32(0.0)] * 4 for _ in range(2)] for _ in range(self.keys // 16)]
        for block, tiles in self._operands(ring_s, at):
            for n in range(2):
                for tile, keys in enumerate(tiles):
                    sums[tile][n] = lane_pairs.mma(sums[tile][n], keys, scaled[4 * block + 2 * n :][:2], NUMBERS)
        return [[high + less + of_rows[i % 2] for i, (high, less) in enumerate(zip(*both, strict=True))] for both in sums]

    def _operands(self, ring_s, at: Scalar):
        """(block of 16 channels, per 16 keys the operand). Columns are channels in the order of `query_words`."""
        lane = lanes.lane()
        for piece in range(self.row_bytes // 16):
            words = lane_pairs.load_matrices(ring_s, at + lane_copies.swizzled(lane & (self.keys - 1), lanes.i32(piece), self.row_bytes))
            for field in range(8 // self.bits):
                numbers = [self._numbers(word, field) for word in words[: self.keys // 8]]
                tiles = [[a, c, b, d] for (a, b), (c, d) in zip(numbers[::2], numbers[1::2], strict=True)]
                yield piece + field * (self.row_bytes // 16), tiles

    def _numbers(self, word: Scalar, field: int) -> list[Scalar]:
        """Codes number `field` of four bytes, as pairs: those of bytes 0 and 2, of bytes 1 and 3."""
        mask = (2**self.bits - 1) * 0x10001
        shifts = self.bits * field, self.bits * field + 8
        wide = [lanes.masked_or(word >> n if n else word, mask, _WHOLE) for n in shifts]
        return [lane_pairs.subtract_pairs(x, lanes.i32(_WHOLE), NUMBERS) for x in wide]

    def _levels(self, ring_s, at: Scalar, block: int) -> list[list[Scalar]]:
        """The lowest levels and the distances of four channels, in the order of `query_words`."""
        found = []
        for kind in range(2):
            first = at + (self.code_words + kind * self.head_dim // 2 + 8 * block) + (lanes.lane() & 3) * 2
            a, b, c, d = (x for word in lanes.load_shared(ring_s, first, count=2) for x in lane_pairs.unpack(word, "bfloat16"))
            found.append([a, c, b, d])
        return found


def _in_two(numbers: list[Scalar]) -> list[list[Scalar]]:
    """Four float32 as two words, rounded, and as two words what rounding took away."""
    high = [lane_pairs.pack(*numbers[i : i + 2], NUMBERS) for i in (0, 2)]
    rounded = [x for word in high for x in lane_pairs.unpack(word, NUMBERS)]
    less = [a - b for a, b in zip(numbers, rounded, strict=True)]
    return [high, [lane_pairs.pack(*less[i : i + 2], NUMBERS) for i in (0, 2)]]
