"""A CTA's work in `mosaic_gpu`: tiles of weights and up to 32 tokens, of which each warp multiplies a part of the
inputs."""

from __future__ import annotations

import dataclasses
import functools

import jax.numpy as jnp

from pallas_kernels.core.matrices import PackedMatrix
from pallas_kernels.hopper.threads import lane_codes, lane_copies, lane_math, lane_pairs, lanes
from pallas_kernels.matmul.project_tokens.shape import Shape

SQUARED = 16
"""Loads of 16 bytes of a thread whose squares are added up together."""

LINES = 256
"""Bytes of packed weights that memory should bring together: a warp copies 64 of a row, and the others of its CTA the
next to them."""


@dataclasses.dataclass(frozen=True)
class Tiles:
    """The work of a CTA. team: the number of its team. rank: its own in the team, if it is not alone. inputs: by name.
    outs: the results. scratch: shared memory, by name."""

    s: Shape
    team: lanes.Scalar
    rank: lanes.Scalar | None
    inputs: dict
    outs: tuple
    scratch: dict

    @property
    def threads(self) -> int:
        return self.s.warps * 32

    def run(self) -> None:
        s = self.s
        acc = [lanes.f32(0.0)] * (s.groups * s.sums)

        def meanwhile():
            if s.format and not s.in_blocks and not s.half:  # rows of heads are found by divisions, which take longer than it saves
                self._prefetch_scales()
            if s.norm_eps is not None:
                self._add_squares()

        locate = self._blocks if s.in_blocks else lambda n: []
        lane_copies.pipeline(lanes.i32(s.tiles * s.turns), s.depth, locate, self._fetch, self._consume, acc, meanwhile)

    @property
    def part(self) -> lanes.Scalar:
        """Which part of the inputs is summed by itself: each warp's."""
        return lanes.warp()

    @property
    def tokens_here(self) -> tuple[lanes.Scalar, int]:
        """The first token whose results this CTA finishes, and how many there are."""
        return lanes.i32(0), self.s.tokens

    def _chunk(self, n):
        """Number of the chunk n of this part, and whether there is one."""
        if self.s.format is None:
            chunk = self.part * self.s.turns + n % self.s.turns
        else:
            chunk = n % self.s.turns * (self.s.warps * self.s.split) + lanes.warp()
            chunk = chunk if self.rank is None else chunk + self.rank * self.s.warps
        return chunk, chunk < self.s.width // self.s.operands.chunk

    def _slot(self, n):
        return (lanes.warp() * self.s.depth + n % self.s.depth) * self.s.slot_words

    def _tokens_of(self, n):
        """Where the tokens of chunk number `n` are: shared memory, and the first word."""
        return self.scratch["ring_s"], self._slot(n) + self.s.rows * self.s.row_words

    def _fetch(self, n, place) -> None:
        """Start copying chunk number `n` of this warp: weights, tokens, norm."""
        s, row_bytes = self.s, self.s.operands.row_bytes
        chunk, inside = self._chunk(n)
        tile = n // s.turns
        ring_s, slot = self.scratch["ring_s"], self._slot(n)
        refs = [w.codes if isinstance(w, PackedMatrix) else w for w in self.inputs["weights"]]

        def weight_row(part):
            def place(row):
                unit, there = self._unit(tile, row)
                ref, row, _ = self._row(refs, unit, part)
                return ref, row, s.width // s.operands.chunk * row_bytes, chunk * row_bytes, there & inside

            return place

        for part in range(s.parts):
            start = slot + part * s.stride * s.row_words
            around = LINES if s.format else None
            lane_copies.copy_rows_async(ring_s, start, weight_row(part), rows=s.stride, row_bytes=row_bytes, around=around)
        lane_copies.copy_rows_async(
            ring_s, slot + s.rows * s.row_words, self._token_row(chunk, inside), rows=s.token_rows, row_bytes=s.token_words * 4
        )

    def _token_row(self, chunk, inside):
        """Where to copy rows of a chunk from, as `copy_rows_async` takes it: the tokens, and the norm's weight if there
        is one."""
        s = self.s

        def place(row):
            ref = self.inputs["x"]
            if s.norm_eps is not None:
                ref, row = lanes.either(row < s.tokens, ref, self.inputs["norm"]), lanes.where(row < s.tokens, row, 0)
            return ref, row, s.width * 2, chunk * (s.token_words * 4), inside

        return place

    def _blocks(self, n) -> list[lanes.Scalar]:
        """Scales, as bits of float32, and `zero_word`s, if there are zeros, of chunk number `n` of this warp: lane r
        has those of rows r, r + 32, ... of the tile. They are loaded here, whole or not at the end of the matrix."""
        s, weights = self.s, self.inputs["weights"]
        chunk, inside = self._chunk(n)
        scales, zeros = [], []
        for first in range(0, s.rows, 32):
            row = lanes.lane() + first
            unit, there = self._unit(n // s.turns, row % s.stride)
            part = row // s.stride
            there = there & inside & (part < s.parts)
            ref, row, _ = self._row([w.scales for w in weights], unit, part)
            at = lanes.where(there, self._block_of(row, chunk), 0)
            scales.append(lanes.bits(self._load_scale(ref, at)))
            if s.zeros:
                ref, _, _ = self._row([w.zeros for w in weights], unit, part)
                zeros.append(lane_codes.zero_word(lanes.load_global_now(ref, at, 1), s.dtype))
        return scales + zeros

    def _prefetch_scales(self) -> None:
        """Bring the scales of whole rows into the cache, 32 bytes by each thread: tiles end without waiting for
        memory."""
        s, each = self.s, 32 // jnp.dtype(self.s.scales).itemsize
        for part in range(s.parts):
            for start in range(0, s.per_team + each, each * self.threads):
                mine = lanes.thread() * each + start
                unit = lanes.minimum(self.team * s.per_team + lanes.minimum(mine, s.per_team - 1), s.units - 1)
                with lanes.when(mine < s.per_team + each):
                    ref, row, _ = self._row([w.scales for w in self.inputs["weights"]], unit, part)
                    lane_copies.prefetch(ref, self._block_of(row) * (32 // each))

    def _block_of(self, row, chunk=None):
        """Number of the scale of a row of a matrix; chunk: of inputs, where a row has several scales."""
        format = self.s.format
        at = row // format.rows if format.rows > 1 else row
        if format.columns is None:
            return at
        return at * -(-self.s.width // format.columns) + chunk // (format.columns // self.s.operands.chunk)

    def _load_scale(self, ref, at):
        if self.s.scales == "float32":
            return lanes.bits(lanes.load_global_now(ref, at))
        return lane_pairs.unpack(lanes.load_global_now(ref, at, 2), self.s.scales)[0]

    def _unit(self, tile, row):
        """Number of the unit in row `row` of a tile's part, and whether there is one."""
        s = self.s
        mine = tile * s.per_tile + row
        unit = self.team * s.per_team + mine
        return unit, (row < s.per_tile) & (mine < s.per_team) & (unit < s.units)

    def _row(self, refs, unit, part):
        """The array (one per matrix) that holds a part of a unit, the row in it, and how many rows that array has."""
        s = self.s
        if s.gated:
            return refs[part] if isinstance(part, int) else lanes.either(part == 0, *refs), unit, lanes.i32(s.features[0])
        row = unit // s.half * (2 * s.half) + (unit % s.half + part * s.half) if s.half else unit
        ref, local, count = refs[0], row, lanes.i32(s.features[0])
        first = 0
        for before, following, size in zip(s.features, refs[1:], s.features[1:], strict=False):
            first += before
            ref = lanes.either(row < first, ref, following)
            local = lanes.where(row < first, local, row - first)
            count = lanes.where(row < first, count, size)
        return ref, local, count

    def _consume(self, n, place, *acc):
        s = self.s
        scales, zeros = place[: -(-s.rows // 32)], place[-(-s.rows // 32) :]
        acc = self._add_digits(n, scales, acc) if s.digits else self._add_numbers(n, scales, zeros, acc)
        last = n % s.turns == s.turns - 1
        with lanes.when(last):
            self._finish(n // s.turns, acc)
        return [lanes.where(last, 0.0, x) for x in acc]

    def _add_numbers(self, n, scales, zeros, acc) -> list:
        """The sums after chunk number `n`, from those before, by products of numbers."""
        s, ring_s, slot = self.s, self.scratch["ring_s"], self._slot(n)
        before = [list(acc[4 * at : 4 * at + 4]) for at in range(len(acc) // 4)]
        tokens = self._tokens(*self._tokens_of(n))
        sums = [[lanes.f32(0.0)] * 4 for _ in before] if s.in_blocks else before
        for step in range(s.operands.steps):
            for m in range(s.groups):
                own = tuple(self._of_rows(zeros, m)) if s.zeros else (None, None)
                operands = s.operands.weights(ring_s, slot + m * 16 * s.row_words, step, own)
                for number, words in enumerate(operands, step * s.operands.mmas):
                    for at, of_tokens in enumerate(tokens, m * len(tokens)):
                        sums[at] = lane_pairs.mma(sums[at], words, of_tokens[2 * number :][:2], s.dtype)
        for m in range(s.groups if s.in_blocks else 0):
            low, high = map(lanes.bits, self._of_rows(scales, m))
            for at in range(m * len(tokens), (m + 1) * len(tokens)):
                scaled = zip(sums[at], (low, low, high, high), before[at], strict=True)
                sums[at] = [lanes.fma(x, scale, y) for x, scale, y in scaled]
        return [x for four in sums for x in four]

    def _add_digits(self, n, scales, acc) -> list:
        """The same by products of codes and digits."""
        s, ring_s, slot = self.s, self.scratch["ring_s"], self._slot(n)
        words, ones = s.digits.operands(functools.partial(self._of_unit, ring_s, slot + s.rows * s.row_words))
        sums = []
        for m in range(s.groups):
            found = [[lanes.i32(0)] * 4 for _ in words]
            for step in range(s.operands.steps):
                weights = s.operands.words(ring_s, slot + m * 16 * s.row_words, step)
                found = [s.digits.products(weights, step, *both) for both in zip(words, found, strict=True)]
            of_rows = list(map(lanes.bits, self._of_rows(scales, m))) if s.in_blocks else None
            sums += s.digits.added(acc[m * s.sums :][: s.sums], found, ones, of_rows)
        return sums

    def _of_unit(self, ring_s, start, token, unit, count: int) -> list:
        """`count` words, of two inputs each, of a chunk of a token, as they are multiplied."""
        s, row_bytes = self.s, self.s.operands.chunk * 2
        piece, half = (unit >> 1, (unit & 1) * 2) if count == 2 else (unit, 0)
        rows = [token] if s.norm_eps is None else [token, lanes.i32(s.tokens)]
        found = [lanes.load_shared(ring_s, start + lane_copies.swizzled(row, piece, row_bytes) + half, count=count) for row in rows]
        return found[0] if s.norm_eps is None else self._times_norm(*found)

    def _times_norm(self, words, norm) -> list:
        """Words of tokens times those of the norm's weight."""
        dtype = self.s.dtype
        if self.s.norm_offset:
            return [lane_pairs.multiply_add_pairs(a, b, a, dtype) for a, b in zip(words, norm, strict=True)]
        return [lane_pairs.multiply_pairs(a, b, dtype) for a, b in zip(words, norm, strict=True)]

    def _of_rows(self, values, m: int):
        """What is held for this lane's rows of 16: g and g + 8. values: by `_blocks`."""
        return [lanes.shuffle(values[row // 32], (lanes.lane() >> 2) + row % 32) for row in (16 * m, 16 * m + 8)]

    def _tokens(self, ring_s, start) -> list:
        """The tokens of a chunk as the other operand, 8 by 8: words with two inputs of token g. Empty columns repeat
        the last token."""
        s, lane = self.s, lanes.lane()
        of_column = lane & 7 if s.format is None else lane >> 2
        found = [s.operands.tokens(ring_s, start, lanes.minimum(of_column + 8 * n, s.tokens - 1)) for n in range(s.column_tiles)]
        if s.norm_eps is None:
            return found
        norm = s.operands.tokens(ring_s, start, lanes.i32(s.tokens))
        return [self._times_norm(words, norm) for words in found]

    def _add_squares(self) -> None:
        """Sums of squares of `tokens_here`, by each warp over its part; `_scale` adds them up."""
        s, pieces = self.s, self.s.width // 8
        first_token, count = self.tokens_here
        starts = range(0, pieces, self.threads)
        together = max(1, SQUARED // len(starts))  # of so many tokens all loads come before the first sum, which waits for its own
        for first in range(0, count, together):
            tokens = range(first, min(first + together, count))
            loaded = {
                (token, start): self._piece(lanes.minimum(first_token + token, s.tokens - 1), start) for token in tokens for start in starts
            }
            for token in tokens:
                total = lanes.f32(0.0)
                for start in starts:
                    values = [x for word in loaded[token, start] for x in lane_pairs.unpack(word, s.dtype)]
                    squares = functools.reduce(lambda a, b: a + b, [x * x for x in values])
                    total = total + lanes.where(lanes.thread() + start < pieces, squares, 0.0)
                for distance in (16, 8, 4, 2, 1):
                    total = total + lanes.shuffle_xor(total, distance)
                with lanes.when(lanes.lane() == 0):
                    lanes.store_shared(self.scratch["squares_s"], lanes.warp() * count + token, total)

    def _piece(self, token: lanes.Scalar, start: int) -> list:
        """8 numbers of a token, in words: piece `start` and so many more as this thread's number; the first one where
        there are no more."""
        i = lanes.thread() + start
        piece = lanes.where(i < self.s.width // 8, i, 0)
        return lanes.load_ahead(self.inputs["x"], piece * 16 + token * self.s.width * 2, 16)

    def _scale(self, token):
        s, (first, count) = self.s, self.tokens_here
        squares = [lanes.load_shared(self.scratch["squares_s"], token - first + w * count, "f32")[0] for w in range(s.warps)]
        return lane_math.rsqrt(functools.reduce(lambda a, b: a + b, squares) * (1.0 / s.width) + s.norm_eps)

    def _finish(self, tile, acc) -> None:
        """Add up the warps' sums of a tile, and write its features. All threads call this together."""
        s, g = self.s, lanes.lane() >> 2
        # Two buffers alternate. When a warp writes to one, all threads have finished the tile that used it before.
        buffer = tile % 2 * s.sums_words
        sums_s = self.scratch["sums_s"]
        of_tokens = s.digits.of_tokens if s.digits else _of_tokens
        for results in zip(*(of_tokens(acc[m * s.sums :][: s.sums]) for m in range(s.groups)), strict=True):
            token, _, own = results[0]
            there = token < s.tokens if own is None else own & (token < s.tokens)
            with lanes.when(there):
                for m, (_, halves, _) in enumerate(results):
                    for half, values in enumerate(halves):
                        for n, value in enumerate(values):
                            at = self._sum_at(token + n, 16 * m + 8 * half + g, lanes.warp())
                            lanes.store_shared(sums_s, buffer + at, value)
        lanes.cta_barrier(self.threads)
        if s.split == 1:
            self._for_pairs(tile, lambda token, row, unit: self._write(lambda row: self._totals(buffer, row, token), token, row, unit))
            return
        # Each CTA of the team finishes one half of the rows, which are one tile (`Shape.fitted`).
        others_s = self.scratch["others_s"]

        def is_mine(row):
            return (row // 2 < -(-s.stride // 4)) == (self.rank == 0)

        def send(token, row, unit):
            for two in (row + part * s.stride for part in range(s.parts)):
                lanes.store_cluster(1 - self.rank, others_s, self._sum_at(token, two), *self._totals(buffer, two, token))

        def finish(token, row, unit):
            def totals(row):
                other = lanes.load_shared(others_s, self._sum_at(token, row), "f32", 2)
                return _add(self._totals(buffer, row, token), other)

            self._write(totals, token, row, unit)

        self._for_pairs(tile, send, lambda row: ~is_mine(row))
        lanes.cluster_barrier()
        self._for_pairs(tile, finish, is_mine)

    def _for_pairs(self, tile, function, chosen=None) -> None:
        """Call function(token, row, unit) for each token and two rows of a tile's parts, `row` and the next; chosen:
        row -> whether."""
        s = self.s
        pairs = s.stride // 2
        for start in range(0, s.tokens * pairs, self.threads):
            i = lanes.thread() + start
            token, row = i // pairs, i % pairs * 2
            unit, there = self._unit(tile, row)
            there = there if chosen is None else there & chosen(row)
            with lanes.when((token < s.tokens) & there):
                function(token, row, unit)

    def _sum_at(self, token, row, warp=0):
        """Where a warp's sum of a token and a row of the tile is, from the buffer's start on. Those of two rows, the
        first an even one, lie side by side."""
        return warp * self.s.sums_words_of_a_warp + token * self.s.sum_rows + row

    def _totals(self, buffer, row, token) -> list:
        """The sums of the warps' sums of rows `row` and `row + 1` of the tile."""
        places = [buffer + self._sum_at(token, row, warp) for warp in range(self.s.warps)]
        return functools.reduce(_add, [lanes.load_shared(self.scratch["sums_s"], place, "f32", 2) for place in places])

    def _write(self, totals, token, row, unit) -> None:
        """Write the results of a token's units `unit` and `unit + 1`. totals: row of the tile -> its sum and that of
        the next row."""
        s = self.s
        if s.format and not s.in_blocks:  # loaded first, since they come from far
            rows = [self._row([w.scales for w in self.inputs["weights"]], unit, part) for part in range(s.parts)]
            scales = [[self._load_scale(ref, self._block_of(row + n)) for n in range(2)] for ref, row, _ in rows]
        results = [totals(row + part * s.stride) for part in range(s.parts)]
        if s.format and not s.in_blocks:
            results = [[x * scale for x, scale in zip(*twos, strict=True)] for twos in zip(results, scales, strict=True)]
        if s.norm_eps is not None:
            scale = self._scale(token)
            results = [[x * scale for x in two] for two in results]
        if s.biased:
            rows = [self._row(self.inputs["biases"], unit, part) for part in range(s.parts)]
            biases = [lane_pairs.unpack(lanes.load_global(ref, row // 2), s.dtype) for ref, row, _ in rows]
            results = [_add(*twos) for twos in zip(results, biases, strict=True)]
        if s.half:
            results = self._rotate(results, token, unit)
        if s.gated:
            results = [[_activated(gate, s.gated) * up for gate, up in zip(*results, strict=True)]]
        if s.residual:
            word = lanes.load_global(self.inputs["residual"], (token * s.units + unit) // 2)
            results = [_add(results[0], lane_pairs.unpack(word, s.dtype))]
        for part, two in enumerate(results):
            self._store(token, unit, part, two)

    def _rotate(self, results, token, unit):
        s = self.s
        at = token * s.half + unit % s.half
        there = unit < sum(s.features[: s.rotated]) // 2
        turned = []
        for n, (first, second) in enumerate(zip(*results, strict=True)):
            cos, sin = (lanes.load_global(ref, at + n, "f32") for ref in self.inputs["rotation"])
            cos, sin = lanes.where(there, cos, 1.0), lanes.where(there, sin, 0.0)
            turned.append((first * cos - second * sin, second * cos + first * sin))
        return list(zip(*turned, strict=True))

    def _store(self, token, unit, part, two) -> None:
        s = self.s
        ref, row, count = self._row(self.outs, unit, part)
        at = token * count + row
        if s.out_dtype == "float32":
            lanes.store_global(ref, at, *two)
        else:
            lanes.store_global(ref, at // 2, lane_pairs.pack(*two, s.dtype))


def _of_tokens(sums):
    """As `Digits.of_tokens`, where columns are tokens."""
    t = lanes.lane() & 3
    return [(t * 2 + 2 * n, [sums[n : n + 2], sums[n + 2 : n + 4]], None) for n in range(0, len(sums), 4)]


def _add(a, b):
    return [x + y for x, y in zip(a, b, strict=True)]


def _activated(x, activation: str):
    """silu is x * sigmoid(x); gelu_tanh is x * sigmoid(2 u), where u is the argument of its tanh."""
    inner = x if activation == "silu" else (x * x * 0.044715 + 1.0) * x * 1.5957691216057308
    return x / (lane_math.exp2(inner * -1.4426950408889634) + 1.0)
