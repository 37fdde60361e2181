"""Codes of half a tile of keys or values, by a warpgroup of `hopper.threads.lanes`: to registers, then to shared memory
as bfloat16 numbers.

A thread loads pieces of 16 bytes of codes, each with its scale, long before it needs them. Later it makes bfloat16
numbers of them, times their scales, rounded once as `page_format.unpack` does it, and stores them where `wgmma` reads
them. The order of the threads lets 8 of them, which store 16 bytes each at once, meet all banks of shared memory, and a
warp load whole rows.
"""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.core.page_format import GGML, PageFormat
from pallas_kernels.hopper.decode import packed_operands
from pallas_kernels.hopper.decode.wgmma_fold import SWIZZLED
from pallas_kernels.hopper.threads import lane_pairs, lanes
from pallas_kernels.hopper.threads.lanes import Scalar

THREADS = 128


@dataclasses.dataclass(frozen=True)
class HalfTile:
    """Sizes of half a tile: `rows` consecutive tokens of a page and KV head. tile: rows of a whole one."""

    format: PageFormat
    head_dim: int
    tile: int
    page_size: int
    num_kv_heads: int

    @property
    def rows(self) -> int:
        """Tokens."""
        return self.tile // 2

    @property
    def row_bytes(self) -> int:
        """Bytes of a token's codes."""
        return self.format.width(self.head_dim)

    @property
    def pieces(self) -> int:
        """Pieces of 16 bytes of a token's codes."""
        return self.row_bytes // 16

    @property
    def pass_rows(self) -> int:
        """Tokens of which the warpgroup loads all pieces at once."""
        return THREADS // self.pieces

    @property
    def passes(self) -> int:
        """Pieces per thread."""
        return self.rows // self.pass_rows

    @property
    def of_codes(self) -> packed_operands.Codes:
        """What decode kernels know of these codes."""
        return packed_operands.Codes(self.format, self.head_dim)

    @property
    def token_scales(self) -> int:
        """Scales of a piece, where scales are for tokens or groups of their numbers."""
        codes = self.of_codes
        return len({codes.group_of(block) for block in codes.blocks(0)}) if codes.groups else 0

    @property
    def channel_words(self) -> int:
        """Words of a piece's scales, where scales are for channels: the same for all pieces of a thread."""
        codes = self.of_codes
        return 8 * len(codes.blocks(0)) if codes.per_channel else 0

    @property
    def registers(self) -> int:
        """Words that a thread holds of half a tile."""
        return self.passes * (4 + self.token_scales) + self.channel_words

    def bring(self, refs, page, head, token):
        """`load` in a Pallas kernel, by the threads of a warpgroup: what its threads hold, one array."""
        splat = plgpu.Layout.WG_SPLAT(())
        types = (*(plgpu.RefType(),) * len(refs), splat, splat, splat)

        @plgpu.inline_mgpu(arg_types=types, return_type=lanes.per_thread(self.registers, jnp.int32))
        def inline(_, *args):
            return lanes.holding(self.load(args[:-3], *map(lanes.of_splat, args[-3:])))

        return inline(*refs, page, head, token)

    def put(self, ring_s, slot, half: int, held) -> None:
        """`store` of what `bring` gave; to be published (`commit_smem`) before `wgmma` reads it."""
        types = plgpu.RefType(SWIZZLED), plgpu.Layout.WG_SPLAT(()), lanes.per_thread(self.registers, jnp.int32).layout

        @plgpu.inline_mgpu(arg_types=types)
        def inline(_, ring_s, slot, held):
            self.store(ring_s, lanes.of_splat(slot), half, lanes.held(held))

        inline(ring_s, slot, held)

    @property
    def order(self) -> tuple[tuple[str, int], ...]:
        """What each bit of a thread's number is a bit of: the number of a token, or of a piece. `wgmma` has bit n of a
        16-byte place in a row of 128 bytes exclusive-or'd with bit n of the token. So with these first three, 8 threads
        store to 8 places."""
        lowest = 2 if self.format.codes == "q4_0" else 1  # bits of a place in what one piece becomes
        of_pieces = self.pieces.bit_length() - 1
        near = [("piece", n - lowest) if 0 <= n - lowest < of_pieces else ("row", n) for n in range(3)]
        every = [("piece", n) for n in range(of_pieces)] + [("row", n) for n in range(7 - of_pieces)]
        return (*near, *(bit for bit in every if bit not in near))

    def place(self) -> tuple[Scalar, Scalar]:
        """The first token of this thread's pieces, and which piece of a token they are."""
        thread, found = lanes.thread() & (THREADS - 1), {"row": lanes.i32(0), "piece": lanes.i32(0)}
        for place, (name, bit) in enumerate(self.order):
            found[name] = found[name] | (((thread >> place) & 1) << bit)
        return found["row"], found["piece"]

    def load(self, refs, page: Scalar, head: Scalar, token: Scalar) -> list[Scalar]:
        """This thread's codes and scales of the half tile from a token of a page on, `registers` words. refs: codes,
        and scales if there are any. What was never written may be anything."""
        codes, (row, piece) = self.of_codes, self.place()
        of_page, first = self.num_kv_heads * self.page_size, head * self.page_size + token + row
        ref = lanes.part(refs[0], first * self.row_bytes + piece * 16, page, of_page * self.row_bytes)
        found = [word for n in range(self.passes) for word in lanes.load_ahead(ref, n * self.pass_rows * self.row_bytes, 16)]
        if codes.per_channel:
            ref = lanes.part(refs[1], (head * self.head_dim + piece * 16) * 2, page, 2 * self.num_kv_heads * self.head_dim)
            ends = [32 * block + 16 * n for block in codes.blocks(0) for n in range(2)]
            return found + [word for end in ends for word in lanes.load_ahead(ref, end, 16)]
        of_token = 2 * codes.groups
        for block in codes.blocks(0)[: self.token_scales]:
            group = (piece * self.blocks_apart + block) // (self.head_dim // 16 // codes.groups)
            ref = lanes.part(refs[1], first * of_token + group * 2, page, of_page * of_token)
            found += [word for n in range(self.passes) for word in lanes.load_ahead(ref, n * self.pass_rows * of_token, 2)]
        return found

    def store(self, ring_s, slot: Scalar, half: int, words: list[Scalar]) -> None:
        """Store what `load` gave to half 0 or 1 of a slot of a ring of tiles, as bfloat16."""
        codes, scales = words[: 4 * self.passes], words[4 * self.passes :]
        (row, piece), lines = self.place(), self.head_dim // 64  # a line: 8 tokens of 64 channels, 1024 bytes
        targets = []
        for block in self.of_codes.blocks(0):
            for n in range(2):
                number = (piece * self.blocks_apart + block) * 2 + n
                at = ((row >> 3) * lines + (number >> 3)) * 64 + (row & 7) * 8 + ((number & 7) ^ (row & 7))
                targets.append(lanes.part(ring_s, slot * (2 * self.tile * self.head_dim) + at * 16))
        for number in range(self.passes):
            offset = (half * self.rows + number * self.pass_rows) // 8 * lines * 1024
            numbers = self._numbers(codes[4 * number :][:4], scales, number)
            for place, target in enumerate(targets):
                lanes.store_shared(target, offset // 4, *numbers[4 * place :][:4])

    @property
    def blocks_apart(self) -> int:
        """How many blocks of 16 channels lie between the first ones of two neighbouring pieces."""
        return 2 if self.format.codes == "q4_0" else 1

    def _numbers(self, words: list[Scalar], scales: list[Scalar], number: int) -> list[Scalar]:
        """The numbers of a piece of codes as pairs, in their order, those of its second block of channels last."""
        if self.format.codes == "q8_0":
            return _of_q8_0(words, scales[number])
        parts = zip(*(packed_operands.numbers(self.format, lane_pairs.permuted(word, word, 0x3120)) for word in words), strict=True)
        blocks = [[pair for of_word in part for pair in of_word] for part in parts]
        return [x for n, block in enumerate(blocks) for x in self._scaled(block, n, scales, number)]

    def _scaled(self, pairs: list[Scalar], block: int, scales: list[Scalar], number: int) -> list[Scalar]:
        """Pairs of numbers times their scales, each product rounded once."""
        if self.channel_words:
            return [lane_pairs.multiply_pairs(x, y, packed_operands.NUMBERS) for x, y in zip(pairs, scales[8 * block :][:8], strict=True)]
        if not self.token_scales:
            return pairs
        scale = scales[min(block, self.token_scales - 1) * self.passes + number]
        if self.format.codes not in GGML:
            both = scale | scale << 16
            return [lane_pairs.multiply_pairs(x, both, packed_operands.NUMBERS) for x in pairs]
        # A float16 scale is the sum of two bfloat16. A code of 4 bits times the smaller one is exact.
        scale = lane_pairs.unpack(scale, "float16")[0]
        large = lane_pairs.pack(scale, scale, packed_operands.NUMBERS)
        rest = scale - lane_pairs.unpack(large, packed_operands.NUMBERS)[0]
        small = lane_pairs.pack(rest, rest, packed_operands.NUMBERS)
        rests = [lane_pairs.multiply_pairs(x, small, packed_operands.NUMBERS) for x in pairs]
        return [lane_pairs.multiply_add_pairs(x, large, y, packed_operands.NUMBERS) for x, y in zip(pairs, rests, strict=True)]


def _of_q8_0(words: list[Scalar], scale: Scalar) -> list[Scalar]:
    """Codes of 8 bits times a float16 scale as pairs. A code is put into the mantissa of 2^15 + 128, and taken out by a
    fused product, all of which is exact in float32."""
    scale = lane_pairs.unpack(scale, "float16")[0]
    less = scale * -(2.0**15 + 128)
    found = []
    for word in words:
        word = word ^ -0x7F7F7F80  # 0x80808080: codes from 0 on
        wide = [lanes.bits(lane_pairs.permuted(word, lanes.i32(0x47000000), 0x7404 | n << 4)) for n in range(4)]
        exact = [lanes.fma(x, scale, less) for x in wide]
        found += [lane_pairs.pack(*exact[n : n + 2], packed_operands.NUMBERS) for n in (0, 2)]
    return found
