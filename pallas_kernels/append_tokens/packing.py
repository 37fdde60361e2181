"""Packing a page that fills, by the threads of `hopper.lanes`: the bits of `pack_pages.xla` on the same GPU.

A piece is 8 numbers of a token. The threads that have a token's pieces are neighbours in a warp, so shuffles find the largest of what
shares a scale. A thread has its piece of several consecutive tokens, which it loads together. Codes and scales go to the pool. Keys, as
they are read from then on, go to shared memory too, where indexes are built from them.
"""

from __future__ import annotations

import dataclasses

from pallas_kernels.hopper import lane_math, lane_pairs, lanes
from pallas_kernels.hopper.lanes import Scalar
from pallas_kernels.pack_pages.xla import SMALLEST
from pallas_kernels.page_format import GGML, GGML_GROUP, LARGEST, LATTICES, PageFormat

PIECE = 8
"""Numbers of a token that a thread has, 16 bytes."""

INFINITY = 0x7F800000
"""The bits of the float32. Those of NaN without their sign are larger."""


def unsupported(format: PageFormat | None, page_size: int, head_dim: int) -> str | None:
    """Why pages cannot be packed so, or None if they can."""
    pieces, rest = divmod(head_dim, PIECE)
    if rest or pieces & (pieces - 1) or not 2 <= pieces <= 32:
        return f"it packs tokens of 16, 32, 64, 128 or 256 numbers, got head dim {head_dim}"
    if page_size % 2:
        return f"it packs pages of an even number of tokens, got page size {page_size}"
    if format is None:
        return None
    if format.rotate or format.codes in LATTICES:
        return f"it does not pack {format.codes}{' with rotation' * format.rotate}"
    if format.scale in ("channel", "page"):
        return f"it finds scales within a token, not of a whole {format.scale}"
    if format.group is not None and (format.group % PIECE or format.group & (format.group - 1)):
        return f"numbers that share a scale must be 8, 16, 32, ..., got {format.group}"
    return None


def divisor(format: PageFormat | None) -> float:
    """What the largest magnitude is divided by for a scale."""
    return float(LARGEST.get(format.codes, LARGEST["int8"])) if format else 1.0


@dataclasses.dataclass(frozen=True)
class Packing:
    """How the pages of keys or of values are packed. format: None: numbers as they are. dtype: of the numbers, of 16 bits."""

    format: PageFormat | None
    page_size: int
    head_dim: int
    dtype: str

    @property
    def pieces(self) -> int:
        """Pieces of a token."""
        return self.head_dim // PIECE

    @property
    def sharing(self) -> int:
        """Pieces that share a scale."""
        group = GGML_GROUP if self.format.codes in GGML else self.format.group or self.head_dim
        return group // PIECE

    @property
    def page_words(self) -> int:
        """Words of a page's numbers, of one head."""
        return self.page_size * self.head_dim // 2

    @property
    def token_words(self) -> int:
        """Words of a token's codes."""
        return self.head_dim // 2 if self.format is None else self.format.width(self.head_dim) // 4

    def pack(self, rows_ref, at_row: Scalar, codes_ref, scales_ref, at: Scalar, most: Scalar, keys_s, threads: int) -> None:
        """Pack number `at_row` of the open pages of each head to number `at` of the pool's. scales_ref: None without scales. most:
        `divisor`, from memory. keys_s: where numbers go as they are read, `page_words` words; or None. By all threads of the CTA."""
        together = 4 if self.page_size % 4 == 0 else 2
        rows = lanes.part(rows_ref, lanes.i32(0), at_row, 4 * self.page_words)
        codes = lanes.part(codes_ref, lanes.i32(0), at, 4 * self.page_size * self.token_words)
        piece = lanes.thread() % self.pieces

        def turn(first):
            group = lanes.thread() // self.pieces + first
            inside = group * together < self.page_size
            token = lanes.where(inside, group * together, 0)
            places = [(token + n) * (self.head_dim // 2) + piece * 4 for n in range(together)]
            loaded = [lanes.load_written_16_bytes(rows, place * 4, block=lanes.i32(0), block_bytes=0) for place in places]
            packed = [self._piece(words, piece, most) for words in loaded]
            self._put_scales(scales_ref, at, token, piece, inside, [scale for _, scale, _ in packed])
            with lanes.when(inside):
                for n, (words, _, read) in enumerate(packed):
                    self._put_codes(codes, token + n, piece, words)
                    if keys_s is not None:
                        lanes.store_shared(keys_s, places[n], *read)
            return []

        lanes.loop(self.page_size // together, [], turn, step=threads // self.pieces)

    def _piece(self, words: list[Scalar], piece: Scalar, most: Scalar) -> tuple[list[Scalar], Scalar | None, list[Scalar]]:
        """Words of codes, which `_put_codes` stores; the scale; and words of the numbers as they are read."""
        if self.format is None:
            return words, None, words
        numbers = [x for word in words for x in lane_pairs.unpack(word, self.dtype)]
        if self.format.codes in GGML:
            scale, units = self._ggml_units(numbers, most)
        elif self.format.scale is None:
            scale, units = None, numbers
        else:
            scale, units = self._units(numbers, most)
        if self.format.codes == "fp8_e4m3":
            units = [lanes.where(_magnitude(x) < INFINITY, x, float("nan")) for x in units]
            codes = [lane_pairs.to_e4m3(*units[n : n + 4]) for n in (0, 4)]
            read = [x for word in codes for x in _of_e4m3(word)]
        else:
            whole = [self._code(x) for x in units]
            codes, read = self._bytes(whole), [lanes.number(x) for x in whole]
        if scale is not None:
            stored = lane_pairs.unpack(lane_pairs.pack(scale, scale, self._scale_dtype), self._scale_dtype)[0]
            read = [lane_math.multiply(x, stored) for x in read]
        return codes, scale, [lane_pairs.pack(*read[n : n + 2], self.dtype) for n in range(0, PIECE, 2)]

    @property
    def _scale_dtype(self) -> str:
        return self.format.scale_dtype.name

    def _largest(self, magnitudes: list[Scalar]) -> Scalar:
        """The largest of what shares a scale, as bits; those of a NaN if there is one."""
        found = magnitudes[0]
        for x in magnitudes[1:]:
            found = lanes.maximum(found, x)
        distance = 1
        while distance < self.sharing:
            found = lanes.maximum(found, lanes.shuffle_xor(found, distance))
            distance *= 2
        return found

    def _units(self, numbers: list[Scalar], most: Scalar) -> tuple[Scalar, list[Scalar]]:
        """The scale, NaN where a number is not finite; and numbers in units of it."""
        largest = self._largest([_magnitude(x) for x in numbers])
        scale = lanes.bits((lanes.bits(lane_math.quotient_of_xla(lanes.bits(largest), most)) + 0xFFFF) & -0x10000)
        scale = lanes.where(scale < SMALLEST, 0.0, scale)
        divides = scale > 0.0
        by = lanes.where(divides, scale, 1.0)
        units = [lanes.where(divides, lane_math.quotient_of_xla(x, by), 0.0) for x in numbers]
        return lanes.where(largest < INFINITY, scale, float("nan")), units

    def _ggml_units(self, numbers: list[Scalar], most: Scalar) -> tuple[Scalar, list[Scalar]]:
        """The same for ggml's formats."""
        magnitudes = [_magnitude(x) for x in numbers]
        largest = self._largest(magnitudes)
        finite = largest < INFINITY
        if self.format.codes == "q8_0":
            unit = lane_math.quotient_of_xla(lanes.bits(largest), most)
        else:
            unit = lane_math.multiply(self._first(numbers, magnitudes, largest), -0.125)
        unit = lanes.where(finite & (_magnitude(unit) >= _BITS_OF_SMALLEST), unit, 0.0)
        inverse = lanes.where(unit != 0.0, lane_math.inverse_of_xla(lanes.where(unit != 0.0, unit, 1.0)), 0.0)
        units = [lane_math.multiply(lanes.where(finite, x, 0.0), inverse) for x in numbers]
        return lanes.where(finite, unit, float("nan")), units

    def _first(self, numbers: list[Scalar], magnitudes: list[Scalar], largest: Scalar) -> Scalar:
        """The first number that has the largest magnitude of its group."""
        bits = [lanes.bits(x) for x in numbers]
        place, found = lanes.i32(PIECE), lanes.i32(0)
        for n in reversed(range(PIECE)):
            here = magnitudes[n] == largest
            place, found = lanes.where(here, lanes.i32(n), place), lanes.where(here, bits[n], found)
        place = lanes.thread() % self.sharing * PIECE + lanes.where(place < PIECE, place, PIECE * self.sharing)
        distance = 1
        while distance < self.sharing:
            other_place, other = (lanes.shuffle_xor(x, distance) for x in (place, found))
            found = lanes.where(other_place < place, other, found)
            place = lanes.minimum(place, other_place)
            distance *= 2
        return lanes.bits(found)

    def _code(self, x: Scalar) -> Scalar:
        """The code of a number in units of the scale, as the integer that it stands for."""
        if self.format.codes == "q4_0":
            return lanes.minimum(lane_math.truncated(x + 8.5), 15) - 8
        if self.format.codes == "q8_0":  # halves away from zero
            whole = lane_math.truncated(x)
            away = lanes.where(x < 0.0, lanes.i32(-1), lanes.i32(1))
            return whole + lanes.where(_magnitude(x - lanes.number(whole)) >= _BITS_OF_HALF, away, 0)
        most = LARGEST[self.format.codes]
        return lanes.maximum(lanes.minimum(lane_math.nearest(x), most), -most)

    def _bytes(self, codes: list[Scalar]) -> list[Scalar]:
        """Two words of the codes of a piece. Codes of 4 bits share bytes with those of another piece of the token."""
        half = self._half
        if half:
            codes = [x + 8 for x in codes]
        words = []
        for n in range(0, PIECE, 4):
            a, b, c, d = (x & 255 for x in codes[n : n + 4])
            words.append(a | b << 8 | c << 16 | d << 24)
        return [word | lanes.shuffle_xor(word, half) << 4 for word in words] if half else words

    @property
    def _half(self) -> int:
        """So many pieces of lower bits come before as many of upper bits; 0: a code is a byte."""
        return {"int4": self.pieces // 2, "q4_0": GGML_GROUP // PIECE // 2}.get(self.format.codes, 0) if self.format else 0

    def _put_codes(self, codes, token: Scalar, piece: Scalar, words: list[Scalar]) -> None:
        place, half = token * self.token_words, self._half
        if not half:
            lanes.store_global(codes, place + piece * len(words), *words)
            return
        with lanes.when(piece % (2 * half) < half):
            lanes.store_global(codes, place + (piece // (2 * half) * half + piece % half) * 2, *words)

    def _put_scales(self, scales_ref, at: Scalar, token: Scalar, piece: Scalar, inside: Scalar, scales: list[Scalar | None]) -> None:
        """Store scales, two in a word: of two tokens, or of two groups of one."""
        if scales[0] is None:
            return
        count = self.pieces // self.sharing
        own = lanes.part(scales_ref, lanes.i32(0), at, 2 * self.page_size * count)
        if count == 1:
            with lanes.when(inside & (piece == 0)):
                for n in range(0, len(scales), 2):
                    lanes.store_global(own, (token + n) // 2, lane_pairs.pack(*scales[n : n + 2], self._scale_dtype))
            return
        others = [lanes.bits(lanes.shuffle_xor(lanes.bits(scale), self.sharing)) for scale in scales]
        with lanes.when(inside & (piece % (2 * self.sharing) == 0)):
            for n, pair in enumerate(zip(scales, others, strict=True)):
                place = (token + n) * (count // 2) + piece // (2 * self.sharing)
                lanes.store_global(own, place, lane_pairs.pack(*pair, self._scale_dtype))


_BITS_OF_SMALLEST = 0x00800000
_BITS_OF_HALF = 0x3F000000


def _magnitude(x: Scalar) -> Scalar:
    """The bits of the magnitude, in the order of magnitudes."""
    return lanes.bits(x) & 0x7FFFFFFF


def _of_e4m3(word: Scalar) -> list[Scalar]:
    """Four numbers in the order of their bytes."""
    even, odd = (lane_pairs.unpack(pair, "bfloat16") for pair in lane_pairs.of_e4m3(word))
    return [even[0], odd[0], even[1], odd[1]]
