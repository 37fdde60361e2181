"""Packed pages for the threads of `hopper.threads.lanes`: codes of 16 tokens in shared memory become operands of `mma`,
and scales are read.

Codes are never written back as numbers. `ldmatrix` gives each lane words of four bytes: of keys, four channels of a
token; of values (turned round), two channels of two tokens. Either way bytes 0 and 2 of a word make one pair of
bfloat16 of an operand, bytes 1 and 3 another. That is exact. Scales of tokens multiply logits and weights; scales of
channels multiply the queries, or sums of weighted values.
"""

from __future__ import annotations

import dataclasses

from pallas_kernels.core.page_format import GGML, GGML_GROUP, LARGEST, PageFormat
from pallas_kernels.hopper.threads import lane_codes, lane_copies, lane_pairs, lanes
from pallas_kernels.hopper.threads.lanes import Scalar

KEYS = 16
"""Keys of a key tile: rows of a product."""

NUMBERS = "bfloat16"
"""What codes become. Its 8 bits of precision hold every code. float16 would lose small weights times small scales."""


def unsupported(name: str, format: PageFormat) -> str | None:
    """Why pages of this format cannot be read, or None if they can. name: "keys" or "values"."""
    if format.codes not in (*LARGEST, *GGML):
        return f"it does not unpack {name} of {format.codes}; it unpacks {', '.join((*LARGEST, *GGML))}"
    if format.rotate:
        return f"it does not unpack rotated {name}"
    if format.scale == "page":
        return f"it unpacks {name} with scales per token or channel, not per page"
    if format.group is not None and format.group % 16:
        return f"groups of numbers that share a scale must be multiples of 16, got {format.group} for {name}"
    return None if format.read_as == NUMBERS else f"it unpacks {name} to {NUMBERS} alone, got read_as {format.read_as}"


@dataclasses.dataclass(frozen=True)
class Codes:
    """The packed keys or values of a key tile: 16 rows of codes, 16-byte pieces swizzled, then their scales as in
    global memory."""

    format: PageFormat
    head_dim: int

    @property
    def row_bytes(self) -> int:
        """Bytes of a token's codes."""
        return self.format.width(self.head_dim)

    @property
    def per_channel(self) -> bool:
        """Whether a scale is for a channel of the page."""
        return self.format.scale == "channel"

    @property
    def has_scales(self) -> bool:
        """Whether scales lie beside the codes."""
        return self.format.scale_dtype is not None

    @property
    def groups(self) -> int:
        """Scales of a token; 0 where scales are for channels, or there are none."""
        shape = self.format.scale_shape(KEYS, self.head_dim)
        return 0 if shape is None or self.per_channel else shape[1]

    @property
    def code_words(self) -> int:
        """Words of the key tile's codes."""
        return KEYS * self.row_bytes // 4

    @property
    def words(self) -> int:
        """Words of its codes and scales."""
        return self.code_words + (self.head_dim if self.per_channel else KEYS * self.groups) // 2

    def blocks(self, piece: int) -> tuple[int, ...]:
        """The blocks of 16 channels that a piece of 16 bytes holds: one, or of 4-bit codes those of the low and of the
        high bits."""
        if self.format.codes == "int4":
            return piece, piece + self.head_dim // 32
        return (2 * piece, 2 * piece + 1) if self.format.codes == "q4_0" else (piece,)

    def group_of(self, block: int) -> int:
        """Which of a token's scales is that of a block of 16 channels."""
        size = GGML_GROUP if self.format.codes in GGML else self.format.group or self.head_dim
        return 16 * block // size

    def copy(self, ring_s, at: Scalar, refs, place, head: Scalar, *, num_kv_heads: int, page_size: int) -> None:
        """By one warp: start copying a key tile to word `at`. refs: codes, scales or None. place: page, token there,
        how many tokens are written. What is not written is zero in the end, but for scales of tokens behind a written
        one, which may be anything."""
        page, token, written = place
        rows, of_row = num_kv_heads * page_size, self.row_bytes

        start, block = (head * page_size + token) * of_row, {"block": page, "block_bytes": rows * of_row}
        lane_copies.copy_tile_async(ring_s, at, refs[0], start, rows=KEYS, row_bytes=of_row, count=written, **block)
        if self.per_channel:
            of_head = 2 * self.head_dim
            lane_copies.copy_bytes_async(
                ring_s,
                at + self.code_words,
                refs[1],
                head * of_head,
                of_head,
                block=page,
                block_bytes=num_kv_heads * of_head,
                there=written > 0,
            )
        elif self.groups:
            of_token = 2 * self.groups
            start, size = (head * page_size + token) * of_token, KEYS * of_token
            lane_copies.copy_bytes_async(
                ring_s, at + self.code_words, refs[1], start, size, block=page, block_bytes=rows * of_token, there=written > 0
            )

    def token_scales(self, ring_s, at: Scalar, key: Scalar) -> list[Scalar]:
        """The scales of a token of the key tile at word `at`, one for each group."""
        first = at + self.code_words
        if self.groups == 1:
            (word,) = lanes.load_shared(ring_s, first + (key >> 1))
            return [lanes.where((key & 1) == 0, *self._pair(word))]
        words = [lanes.load_shared(ring_s, first + key * (self.groups // 2) + n)[0] for n in range(self.groups // 2)]
        return [x for word in words for x in self._pair(word)]

    def _pair(self, word: Scalar) -> list[Scalar]:
        return lane_pairs.unpack(word, self.format.scale_dtype.name)

    def channel_pairs(self, ring_s, at: Scalar, block: int) -> tuple[Scalar, Scalar]:
        """The scales of channels as pairs, in the order of `key_pairs`, of a block."""
        first = at + (self.code_words + 8 * block)
        return interleaved(*lanes.load_shared(ring_s, first + (lanes.lane() & 3) * 2, count=2))

    def value_scales(self, ring_s, at: Scalar, block: int) -> list[Scalar]:
        """The scales of the two channels of a block that the lane has sums of, see `value_operand`."""
        (word,) = lanes.load_shared(ring_s, at + (self.code_words + 8 * block) + (lanes.lane() >> 2))
        return self._pair(word)

    def key_operands(self, ring_s, at: Scalar):
        """(block, operand) for each block of 16 channels: keys are the rows; columns are channels in the order of
        `interleaved`."""
        lane = lanes.lane()
        for first in range(0, self.row_bytes // 16, 2):
            words = lane_pairs.load_matrices(ring_s, at + lane_copies.swizzled(lane & 15, (lane >> 4) + first, self.row_bytes))
            for piece in range(2):
                halves = zip(*(numbers(self.format, word) for word in words[2 * piece :][:2]), strict=True)
                for block, ((a, b), (c, d)) in zip(self.blocks(first + piece), halves, strict=True):
                    yield block, [a, c, b, d]

    def value_operands(self, ring_s, at: Scalar):
        """(block, operand) for each block of 16 channels: row g is channel 2g of the block, row g + 8 channel 2g + 1;
        columns are keys."""
        lane = lanes.lane()
        key, odd = (lane & 7) + (lane >> 4) * 8, (lane >> 3) & 1
        for first in range(0, self.row_bytes // 16, 2):
            words = lane_pairs.load_matrices(ring_s, at + lane_copies.swizzled(key, odd + first, self.row_bytes), transposed=True)
            for piece in range(2):
                halves = zip(*(numbers(self.format, word) for word in words[piece::2]), strict=True)
                for block, (low, high) in zip(self.blocks(first + piece), halves, strict=True):
                    yield block, [*low, *high]


def numbers(format: PageFormat, word: Scalar) -> list[tuple[Scalar, Scalar]]:
    """The codes in a word as pairs of bfloat16: those of bytes 0 and 2, and of bytes 1 and 3. Of 4-bit codes, first the
    low ones, then the high ones."""
    if format.codes == "fp8_e4m3" and format.scale is None:  # else the scale of a NaN is NaN
        return [lane_pairs.of_e4m3(word)]
    pairs = lane_codes.numbers(word, {"q8_0": "int8", "q4_0": "int4"}.get(format.codes, format.codes), NUMBERS)
    return [tuple(pairs)] if len(pairs) == 2 else [tuple(pairs[::2]), tuple(pairs[1::2])]


def interleaved(first: Scalar, second: Scalar) -> tuple[Scalar, Scalar]:
    """Of the pairs (a, b), (c, d): (a, c), (b, d). Of channels 4t to 4t + 3, these are the pairs of
    `Codes.key_operands`."""
    return (first & 0xFFFF) | (second << 16), ((first >> 16) & 0xFFFF) | (second & -65536)


def coded_order(acc: list[list[Scalar]]) -> list[list[Scalar]]:
    """The inverse of `natural_order`."""
    lane = lanes.lane()
    low, sources = (lane >> 4) == 0, [((lane >> 2) * 2 + half) % 8 * 4 + (lane & 3) for half in range(2)]
    found = []
    for four in acc:
        rows = [[lanes.bits(lanes.shuffle(lanes.bits(x), source)) for x in four] for source in sources]
        found.append([lanes.where(low, row[i], row[i + 2]) for row in rows for i in range(2)])
    return found


def natural_order(acc: list[list[Scalar]]) -> list[list[Scalar]]:
    """Sums whose rows are as in `Codes.value_operands`, as `mma` gives them where row g of a block is its channel g."""
    lane = lanes.lane()
    even, sources = ((lane >> 2) & 1) == 0, [(lane >> 3) * 4 + (lane & 3) + by for by in (0, 16)]
    found = []
    for four in acc:
        rows = [[lanes.bits(lanes.shuffle(lanes.bits(x), source)) for x in four] for source in sources]
        found.append([lanes.where(even, row[i], row[i + 2]) for row in rows for i in range(2)])
    return found
