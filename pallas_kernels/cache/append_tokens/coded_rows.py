"""Building an index that holds codes of keys (`page_index.codes`), by the threads of `hopper.threads.lanes`.

First the levels of each channel, from the largest and smallest keys of a block. When these are written, each thread has
four bytes of the codes of some tokens: it loads the levels of their channels once, then token after token the keys.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

from pallas_kernels.hopper.threads import lane_math, lane_pairs, lanes
from pallas_kernels.hopper.threads.lanes import Scalar
from pallas_kernels.selection.page_index import CODED, index_shape

LEVELS = "bfloat16"
"""The dtype of levels, in the index."""

UNROLLED = 4
"""Tokens of which a thread loads keys together."""


def unsupported(kind: str, head_dim: int, dtype: str) -> str | None:
    """Why an index of this kind cannot be built, or None if it can."""
    if dtype == "float32":
        return "it codes keys of 16 bits, got float32"
    row_bytes = head_dim * CODED[kind] // 8
    return f"it writes codes of whole words; {kind} of head dim {head_dim} has {row_bytes} bytes a key" if row_bytes % 4 else None


@dataclasses.dataclass(frozen=True)
class CodedRows:
    """The codes of a page's keys, of one head. dtype: of the keys."""

    kind: str
    block_size: int
    page_size: int
    head_dim: int
    dtype: str

    @property
    def bits(self) -> int:
        """Bits of a code."""
        return CODED[self.kind]

    @property
    def row_bytes(self) -> int:
        """Bytes of a key's codes."""
        return self.head_dim * self.bits // 8

    @property
    def block_words(self) -> int:
        """Words of a block: codes, lowest levels, distances."""
        rows, row_bytes = index_shape(self.kind, self.block_size, self.head_dim)
        return rows * row_bytes // 4

    @property
    def level_words(self) -> int:
        """Words of the lowest levels, and of the distances."""
        return self.head_dim // 2

    def store_levels(self, index_ref, at: Scalar, block: Scalar, piece: Scalar, bounds: list[Scalar]) -> None:
        """Store the levels of 8 channels. at: number of the page and head in the index. bounds: the largest keys of a
        block, then the smallest."""
        most, least = bounds[: len(bounds) // 2], bounds[len(bounds) // 2 :]
        low_words = [lane_pairs.pack(*least[i : i + 2], LEVELS) for i in range(0, len(least), 2)]
        low = [x for word in low_words for x in lane_pairs.unpack(word, LEVELS)]
        steps = [lane_math.multiply(x - y, 1 / (2**self.bits - 1)) for x, y in zip(most, low, strict=True)]
        step_words = [lane_pairs.pack(*steps[i : i + 2], LEVELS) for i in range(0, len(steps), 2)]
        own = self._own(index_ref, at)
        first = block * self.block_words + self.block_size * self.row_bytes // 4 + piece * len(low_words)
        for start, words in ((0, low_words), (self.level_words, step_words)):
            for n, word in enumerate(words, start):
                lanes.store_global(own, first + n, word)

    def store_codes(self, index_ref, at: Scalar, load_word: Callable[[Scalar], Scalar], threads: int) -> None:
        """Store the codes of all keys, after a barrier. load_word: of the page's keys, by its number. By all threads of
        the CTA."""
        words = self.page_size // self.block_size * (self.row_bytes // 4)
        strands = 1  # threads that have the same bytes of a block's codes, each of equally many tokens
        while self.block_size % (2 * strands) == 0 and 2 * strands * words <= threads:
            strands *= 2
        count = self.block_size // strands
        together = next(n for n in range(min(UNROLLED, count), 0, -1) if count % n == 0)
        own = self._own(index_ref, at)

        def task(start):
            i = lanes.thread() + start
            with lanes.when(i < words * strands):
                block, word = i % words // (self.row_bytes // 4), i % words % (self.row_bytes // 4)
                levels = self._levels(own, block, word)
                first = i // words * count

                def tokens(n):
                    found = [self._keys(load_word, block * self.block_size + (first + n + t), word) for t in range(together)]
                    for t, numbers in enumerate(found):
                        place = block * self.block_words + (first + n + t) * (self.row_bytes // 4) + word
                        lanes.store_global(own, place, self._codes(numbers, *levels))
                    return []

                lanes.loop(count, [], tokens, step=together)
            return []

        lanes.loop(words * strands, [], task, step=threads)

    def _own(self, index_ref, at: Scalar):
        return lanes.part(index_ref, lanes.i32(0), at, self.page_size // self.block_size * self.block_words * 4)

    def _channels(self, load_word: Callable[[Scalar], Scalar], start, word: Scalar, dtype: str) -> list[Scalar]:
        """16-bit numbers of the channels of four bytes of codes: of the lowest bits of each byte, then of the next.
        start: number of the word where those of channel 0 lie."""
        pairs = [start + word * 2 + (field * self.row_bytes // 2 + n) for field in range(8 // self.bits) for n in range(2)]
        return [x for pair in [load_word(pair) for pair in pairs] for x in lane_pairs.unpack(pair, dtype)]

    def _keys(self, load_word: Callable[[Scalar], Scalar], token: Scalar, word: Scalar) -> list[Scalar]:
        return self._channels(load_word, token * (self.head_dim // 2), word, self.dtype)

    def _levels(self, own, block: Scalar, word: Scalar) -> tuple[list[Scalar], list[Scalar]]:
        """The lowest levels, and what distances to them are divided by."""
        first = block * self.block_words + self.block_size * self.row_bytes // 4
        load_word = functools.partial(lanes.load_global_now, own)
        low, steps = (self._channels(load_word, first + n * self.level_words, word, LEVELS) for n in range(2))
        return low, [lanes.where(x == 0.0, 1.0, x) for x in steps]

    def _codes(self, keys: list[Scalar], low: list[Scalar], steps: list[Scalar]) -> Scalar:
        """Four bytes of codes. Keys can lie halfway between two levels, where another division would round to another
        code."""
        found = [lane_math.nearest(lane_math.quotient_of_xla(x - y, z)) for x, y, z in zip(keys, low, steps, strict=True)]
        codes = [lanes.maximum(lanes.minimum(x, 2**self.bits - 1), 0) for x in found]
        word = lanes.i32(0)
        for byte in (3, 2, 1, 0):
            for field in reversed(range(8 // self.bits)):
                word = word * 2**self.bits + codes[4 * field + byte]
        return word
