"""The operands of the matrix instruction in `mosaic_gpu`: weights and tokens of a chunk, from shared memory to
registers.

Each warp multiplies 16 rows of weights by 8 tokens, 16 inputs at a time (`mma.m16n8k16`); what `digits` multiplies, 32
at a time. In which order the inputs come does not matter if weights and tokens agree. Arrays come as they lie. Of
packed weights a lane loads words of 4 or 8 codes, so it loads the same 4 or 8 inputs of the tokens, and both are paired
as `lane_codes` pairs them.
"""

from __future__ import annotations

import dataclasses

from pallas_kernels.hopper.threads import lane_codes, lane_copies, lane_pairs, lanes

PACKED_ROW_BYTES = 64
"""Bytes of a row of packed weights in a chunk: half of an array's, so that there are enough chunks for all warps."""


@dataclasses.dataclass(frozen=True)
class Operands:
    """dtype: of the tokens. codes: the kind of codes of packed weights; None: arrays of the tokens' dtype."""

    dtype: str
    codes: str | None = None

    @property
    def row_bytes(self) -> int:
        """Bytes of a row of weights in a chunk."""
        return PACKED_ROW_BYTES if self.codes else 128

    @property
    def chunk(self) -> int:
        """Inputs that a warp multiplies at a time."""
        return self.row_bytes // 4 * self.per_word

    @property
    def per_word(self) -> int:
        """Weights in a word."""
        return lane_codes.PER_WORD[self.codes] if self.codes else 2

    @property
    def steps(self) -> int:
        """Calls of `weights` for a chunk."""
        return self.row_bytes // 32

    @property
    def mmas(self) -> int:
        """Matrix instructions of a step, for 8 tokens."""
        return self.per_word // 2

    def weights(self, ring_s, start, step: int, zeros: tuple) -> list[list[lanes.Scalar]]:
        """Weights of 16 rows from word `start` on, for each matrix instruction of a step. zeros: `zero_word` of this
        lane's two rows."""
        words = self.words(ring_s, start, step)
        if not self.codes:
            return [words]
        found = []
        for two in (words[:2], words[2:]):  # the same codes of rows g and g + 8
            low, high = (lane_codes.numbers(word, self.codes, self.dtype, zero) for word, zero in zip(two, zeros, strict=True))
            found += [[low[n], high[n], low[n + 1], high[n + 1]] for n in range(0, len(low), 2)]
        return found

    def words(self, ring_s, start, step: int) -> list[lanes.Scalar]:
        """This lane's words of rows g and g + 8 of a step: of its first 16 bytes, and of the others."""
        at = start + lane_copies.swizzled(lanes.lane() & 15, (lanes.lane() >> 4) + 2 * step, self.row_bytes)
        return lane_pairs.load_matrices(ring_s, at)

    def tokens(self, ring_s, start, row) -> list[lanes.Scalar]:
        """Two words for each matrix instruction of a chunk: of row `row` of the rows of 16-bit numbers from word
        `start` on. Lanes of one token name its row; arrays: lane 8m + r names the row of token r."""
        row_bytes, t = self.chunk * 2, lanes.lane() & 3
        if not self.codes:
            pieces = [(lanes.lane() >> 3) + 4 * half for half in range(2)]
            return [x for piece in pieces for x in lane_pairs.load_matrices(ring_s, start + lane_copies.swizzled(row, piece, row_bytes))]
        found = []
        for n in range(self.row_bytes // 16):  # the tokens that go with 16 bytes of weights, of which a lane has a word
            if self.per_word == 4:
                at, count = lane_copies.swizzled(row, (t >> 1) + 2 * n, row_bytes) + (t & 1) * 2, 2
            else:
                at, count = lane_copies.swizzled(row, t + 4 * n, row_bytes), 4
            found += lane_codes.paired(lanes.load_shared(ring_s, start + at, count=count))
        return found
