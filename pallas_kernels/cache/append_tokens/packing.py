"""Packing a page that fills, by the threads of `hopper.threads.lanes`: the bits of `pack_pages.xla` on the same GPU.

A piece is 8 numbers of a token. The threads that have a token's pieces are neighbours in a warp, so shuffles find the
largest of what shares a scale; of channels, with shared memory, before anything is packed. A thread has its piece of
several consecutive tokens, which it loads together. Codes and scales go to the pool. Keys, as
they are read from then on, go to shared memory too, where indexes are built from them.
"""

from __future__ import annotations

import dataclasses

from pallas_kernels.cache.pack_pages.xla import SMALLEST
from pallas_kernels.core.page_format import GGML, GGML_GROUP, LARGEST, LATTICES, PageFormat
from pallas_kernels.hopper.threads import lane_math, lane_pairs, lanes
from pallas_kernels.hopper.threads.lanes import Scalar

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
    if format.scale == "page":
        return "it finds scales of a token or a channel, not of a whole page"
    if format.group is not None and (format.group % PIECE or format.group & (format.group - 1)):
        return f"numbers that share a scale must be 8, 16, 32, ..., got {format.group}"
    return None


def divisor(format: PageFormat | None) -> float:
    """What the largest magnitude is divided by for a scale."""
    return float(LARGEST.get(format.codes, LARGEST["int8"])) if format else 1.0


@dataclasses.dataclass(frozen=True)
class Unit:
    """A scale, NaN where a number is not finite, and what numbers are divided by, if they are not 0."""

    scale: Scalar
    divides: Scalar
    by: Scalar

    def of(self, x: Scalar) -> Scalar:
        """A number in units of the scale."""
        return lanes.where(self.divides, lane_math.quotient_of_xla(x, self.by), 0.0)


@dataclasses.dataclass(frozen=True)
class Packing:
    """How the pages of keys or of values are packed. format: None: numbers as they are. dtype: of the numbers, of 16
    bits."""

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

    @property
    def _together(self) -> int:
        """Tokens that a thread packs together."""
        return 4 if self.page_size % 4 == 0 else 2

    @property
    def _of_channels(self) -> bool:
        return self.format is not None and self.format.scale == "channel"

    def pack(self, rows_ref, at_row: Scalar, codes_ref, scales_ref, at: Scalar, most: Scalar, partial_s, keys_s, threads: int) -> None:
        """Pack number `at_row` of the open pages of each head to number `at` of the pool's. By all threads of the CTA.

        scales_ref: None without scales. most: `divisor`, from memory. partial_s: shared memory, a word for each number
        of a token and each warp, free before and after. keys_s: where numbers go as they are read, `page_words` words;
        or None.
        """
        rows = lanes.part(rows_ref, lanes.i32(0), at_row, 4 * self.page_words)
        codes = lanes.part(codes_ref, lanes.i32(0), at, 4 * self.page_size * self.token_words)
        piece = lanes.thread() % self.pieces
        units = None
        if self._of_channels:
            units = [self._unit(x, most) for x in self._largest_of_channels(rows, partial_s, threads)]
            self._put_channel_scales(scales_ref, at, units)

        def turn(first):
            token, inside, places = self._places(first)
            packed = [self._piece(words, most, units) for words in self._load(rows, places)]
            if units is None:
                self._put_scales(scales_ref, at, token, piece, inside, [scale for _, scale, _ in packed])
            with lanes.when(inside):
                for n, (words, _, read) in enumerate(packed):
                    self._put_codes(codes, token + n, piece, words)
                    if keys_s is not None:
                        lanes.store_shared(keys_s, places[n], *read)
            return []

        lanes.loop(self.page_size // self._together, [], turn, step=threads // self.pieces)

    def _places(self, first: Scalar) -> tuple[Scalar, Scalar, list[Scalar]]:
        """The first of this thread's tokens that are packed together, token 0 where there are none; whether there are;
        and where its pieces of them begin, in words."""
        group = lanes.thread() // self.pieces + first
        inside = group * self._together < self.page_size
        token = lanes.where(inside, group * self._together, 0)
        start = lanes.thread() % self.pieces * 4
        return token, inside, [(token + n) * (self.head_dim // 2) + start for n in range(self._together)]

    def _load(self, rows, places: list[Scalar]) -> list[list[Scalar]]:
        return [lanes.load_written_16_bytes(rows, place * 4, block=lanes.i32(0), block_bytes=0) for place in places]

    def _numbers(self, words: list[Scalar]) -> list[Scalar]:
        return [x for word in words for x in lane_pairs.unpack(word, self.dtype)]

    def _piece(self, words: list[Scalar], most: Scalar, units: list[Unit] | None) -> tuple[list[Scalar], Scalar | None, list[Scalar]]:
        """Words of codes, which `_put_codes` stores; the scale, if it is of a token; and words of the numbers as they
        are read.

        units: of the piece's channels, or None."""
        if self.format is None:
            return words, None, words
        numbers = self._numbers(words)
        if self.format.codes in GGML:
            scale, in_units = self._ggml_units(numbers, most)
            scales = [scale] * PIECE
        elif self.format.scale is None:
            scale, in_units, scales = None, numbers, None
        else:
            units = units or [self._unit(self._largest([_magnitude(x) for x in numbers]), most)] * PIECE
            scale, scales = units[0].scale, [unit.scale for unit in units]
            in_units = [unit.of(x) for x, unit in zip(numbers, units, strict=True)]
        if self.format.codes == "fp8_e4m3":
            in_units = [lanes.where(_magnitude(x) < INFINITY, x, float("nan")) for x in in_units]
            codes = [lane_pairs.to_e4m3(*in_units[n : n + 4]) for n in (0, 4)]
            read = [x for word in codes for x in _of_e4m3(word)]
        else:
            whole = [self._code(x) for x in in_units]
            codes, read = self._bytes(whole), [lanes.number(x) for x in whole]
        if scales is not None:
            read = [lane_math.multiply(x, self._stored(y)) for x, y in zip(read, scales, strict=True)]
        return codes, scale, [lane_pairs.pack(*read[n : n + 2], self.dtype) for n in range(0, PIECE, 2)]

    def _stored(self, scale: Scalar) -> Scalar:
        """A scale as it is stored."""
        return lane_pairs.unpack(lane_pairs.pack(scale, scale, self._scale_dtype), self._scale_dtype)[0]

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

    def _largest_of_channels(self, rows, partial_s, threads: int) -> list[Scalar]:
        """The same of each channel of this thread's piece. It ends with a barrier."""

        def turn(first, *found):
            for words in self._load(rows, self._places(first)[2]):
                found = [lanes.maximum(x, _magnitude(y)) for x, y in zip(found, self._numbers(words), strict=True)]
            return found

        found = lanes.loop(self.page_size // self._together, [lanes.i32(0)] * PIECE, turn, step=threads // self.pieces)
        distance = self.pieces
        while distance < 32:
            found = [lanes.maximum(x, lanes.shuffle_xor(x, distance)) for x in found]
            distance *= 2
        piece = lanes.thread() % self.pieces
        with lanes.when(lanes.lane() < self.pieces):
            for n in (0, 4):
                lanes.store_shared(partial_s, lanes.warp() * self.head_dim + piece * PIECE + n, *found[n : n + 4])
        lanes.cta_barrier(threads)
        for warp in range(threads // 32):
            theirs = [x for n in (0, 4) for x in lanes.load_shared(partial_s, piece * PIECE + (warp * self.head_dim + n), count=4)]
            found = [lanes.maximum(x, y) for x, y in zip(found, theirs, strict=True)]
        lanes.cta_barrier(threads)
        return found

    def _unit(self, largest: Scalar, most: Scalar) -> Unit:
        """From the largest magnitude, as bits."""
        scale = lanes.bits((lanes.bits(lane_math.quotient_of_xla(lanes.bits(largest), most)) + 0xFFFF) & -0x10000)
        scale = lanes.where(scale < SMALLEST, 0.0, scale)
        divides = scale > 0.0
        return Unit(lanes.where(largest < INFINITY, scale, float("nan")), divides, lanes.where(divides, scale, 1.0))

    def _ggml_units(self, numbers: list[Scalar], most: Scalar) -> tuple[Scalar, list[Scalar]]:
        """The scale of ggml's formats, NaN where a number is not finite; and numbers in units of it."""
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

    def _put_channel_scales(self, scales_ref, at: Scalar, units: list[Unit]) -> None:
        """Store the scales of channels."""
        own = lanes.part(scales_ref, lanes.i32(0), at, 2 * self.head_dim)
        words = [lane_pairs.pack(units[n].scale, units[n + 1].scale, self._scale_dtype) for n in range(0, PIECE, 2)]
        with lanes.when(lanes.thread() < self.pieces):
            lanes.store_global(own, lanes.thread() * 4, *words)


_BITS_OF_SMALLEST = 0x00800000
_BITS_OF_HALF = 0x3F000000


def _magnitude(x: Scalar) -> Scalar:
    """The bits of the magnitude, in the order of magnitudes."""
    return lanes.bits(x) & 0x7FFFFFFF


def _of_e4m3(word: Scalar) -> list[Scalar]:
    """Four numbers in the order of their bytes."""
    even, odd = (lane_pairs.unpack(pair, "bfloat16") for pair in lane_pairs.of_e4m3(word))
    return [even[0], odd[0], even[1], odd[1]]
