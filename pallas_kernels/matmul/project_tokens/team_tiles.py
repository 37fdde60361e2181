"""Tiles of weights and up to 64 tokens in `mosaic_gpu`, by a team of CTAs (a cluster).

A CTA cannot copy so many tokens for every tile: that would be more than the weights. So each CTA of a team sums one
part of the inputs, the part that one warp sums in `tiles`, and needs only this part of the tokens. Its warps divide the
rows, and each has a ring for the weights of its own. All read the tokens of some chunks, a phase, while those of the
next phase are copied; or of all chunks, if they fit. At the end of a tile, each CTA finishes 8 of the tokens, with the
sums that the others send it, in the order of `tiles`. So a token has the bits that it has among fewer.
"""

from __future__ import annotations

import dataclasses
import functools
import operator

from pallas_kernels.hopper.threads import lane_copies, lanes
from pallas_kernels.matmul.project_tokens.shape import Shape
from pallas_kernels.matmul.project_tokens.tiles import Tiles

MOST_ROWS, LEAST_DEPTH = (384, 256, 128), 3
"""Most rows of weights in a tile: the first that leaves room for so many chunks per warp."""

MOST_DEPTH = 5
"""Most chunks in flight per warp."""

TOKEN_BYTES = 64 << 10
"""Bytes of shared memory for tokens."""

COLUMNS = 8
"""Tokens that a CTA finishes: the columns of a matrix instruction."""

LEAST_WORDS = 37 << 10
"""Words of shared memory in which the lowest tiles fit."""


@dataclasses.dataclass(frozen=True)
class TeamShape(Shape):
    """A `Shape` of a team. split: CTAs of a team, as many as a CTA of `tiles` has warps."""

    split: int = 8

    @property
    def teams(self) -> int:
        """As many as are on the GPU at once: 15 of 8 on an H200, whose multiprocessors lie in groups of 16 and 18, or
        fewer."""
        return max(1, self.ctas // self.split - 1)

    @property
    def token_rows(self) -> int:
        """Rows of tokens in a chunk."""
        return self.tokens

    @property
    def turns(self) -> int:
        """Chunks of a CTA per tile."""
        return -(-(self.width // self.operands.chunk) // self.split)

    @property
    def own(self) -> int:
        """Rows of a warp in a tile: some are empty."""
        return -(-self.rows // (16 * self.warps)) * 16

    @property
    def groups(self) -> int:
        """Of 16 rows, in a tile, that a warp multiplies: those of its own."""
        return self.own // 16

    @property
    def slot_words(self) -> int:
        """Words of a chunk of a warp."""
        return self.own * self.row_words

    @property
    def resident(self) -> bool:
        """Whether the tokens of all chunks fit into shared memory."""
        return self.turns * self.token_rows * self.token_words * 4 <= TOKEN_BYTES

    @property
    def phase(self) -> int:
        """Chunks of which the tokens are copied together."""
        return self.turns if self.resident else TOKEN_BYTES // 2 // (self.token_rows * self.token_words * 4)

    def scratch_words(self) -> dict[str, int]:
        """Words of shared memory: the rings, tokens of one phase or two, the sums of a tile that the CTAs of the team
        send, and sums of squares."""
        return {
            "ring_s": self.warps * self.depth * self.slot_words,
            "tokens_s": (1 if self.resident else 2) * self.phase * self.token_rows * self.token_words,
            "sums_s": self.split * self.rows * COLUMNS,
            "squares_s": self.warps * COLUMNS,
        }

    def fitted(self) -> TeamShape:
        """The same with tiles and rings that fit into shared memory."""
        for most_rows in MOST_ROWS:
            s = dataclasses.replace(self, most_rows=most_rows, depth=0)
            rest = lanes.shared_words() - sum(s.scratch_words().values())
            depth = min(MOST_DEPTH, rest // (s.warps * s.slot_words), MOST_DEPTH if s.resident else s.phase)
            if depth >= LEAST_DEPTH:
                return dataclasses.replace(s, depth=depth)
        raise AssertionError(f"no tile fits into {lanes.shared_words()} words of shared memory")


@dataclasses.dataclass(frozen=True)
class TeamTiles(Tiles):
    """The work of a CTA of a team."""

    s: TeamShape

    def run(self) -> None:
        """All tiles."""
        s = self.s
        acc = [lanes.f32(0.0)] * (s.groups * s.sums)

        def meanwhile():
            if s.norm_eps is not None:
                self._add_squares()
            lanes.cluster_arrive()

        def first_tokens():
            self._fetch_phase(lanes.i32(0))

        chunks = lanes.i32(s.tiles * s.turns)
        lane_copies.pipeline(chunks, s.depth, lambda n: [], self._fetch, self._consume, acc, meanwhile, first_tokens)
        self._finish_sent(lanes.i32(s.tiles - 1))
        lanes.cluster_wait()

    @property
    def part(self) -> lanes.Scalar:
        """Which part of the inputs this CTA sums."""
        return self.rank

    @property
    def tokens_here(self) -> tuple[lanes.Scalar, int]:
        """The first token that this CTA finishes, and how many there are at most."""
        return self.rank * COLUMNS, COLUMNS

    def _fetch(self, n, place) -> None:
        """Start copying this warp's weights of chunk number `n`."""
        s = self.s
        chunk, inside = self._chunk(n)

        def weight_row(row):
            row = row + lanes.warp() * s.own
            unit, there = self._unit(n // s.turns, row % s.stride)
            ref, row_of_ref, _ = self._row(self.inputs["weights"], unit, row // s.stride)
            return ref, row_of_ref, s.width * 2, chunk * s.operands.row_bytes, there & inside & (row < s.rows)

        lane_copies.copy_rows_async(self.scratch["ring_s"], self._slot(n), weight_row, rows=s.own, row_bytes=s.operands.row_bytes)

    def _fetch_phase(self, first) -> None:
        """Start copying the tokens of a phase, from chunk number `first` on, by all threads."""
        s = self.s

        def fetch(turn):
            chunk, inside = self._chunk(first + turn)
            at, place = self._tokens_of(first + turn)[1], self._token_row(chunk, inside)
            lane_copies.copy_rows_async(
                self.scratch["tokens_s"], at, place, rows=s.token_rows, row_bytes=s.token_words * 4, threads=self.threads
            )
            return []

        lanes.loop(s.phase, [], fetch)

    def _tokens_of(self, n):
        s = self.s
        return self.scratch["tokens_s"], n % (s.phase if s.resident else 2 * s.phase) * (s.token_rows * s.token_words)

    def _consume(self, n, place, *acc):
        s = self.s
        with lanes.when(n == 0 if s.resident else n % s.phase == 0):
            lanes.cta_barrier(self.threads)  # all copies of these tokens are there, and nobody reads those before them
            if not s.resident:
                self._fetch_phase(n + s.phase)
            if s.norm_eps is not None:
                self._multiply_by_norm(n)
                lanes.cta_barrier(self.threads)
        with lanes.when((n % s.turns == min(1, s.turns - 1)) & (n >= s.turns)):
            self._finish_sent(n // s.turns - 1)
        return super()._consume(n, place, *acc)

    def _multiply_by_norm(self, first) -> None:
        """Multiply the tokens of a phase, from chunk number `first` on, by the norm's weight, by all threads."""
        s, tokens_s, pieces = self.s, self.scratch["tokens_s"], self.s.token_words // 4

        def multiply(turn):
            (chunk, inside), at = self._chunk(first + turn), self._tokens_of(first + turn)[1]
            for start in range(0, s.tokens * pieces, self.threads):
                i = lanes.thread() + start
                place = at + lane_copies.swizzled(i // pieces, i % pieces, s.token_words * 4)
                with lanes.when((i < s.tokens * pieces) & inside):
                    norm = lanes.load_global_16_bytes(self.inputs["norm"], (chunk * pieces + i % pieces) * 16)
                    lanes.store_shared(tokens_s, place, *self._times_norm(lanes.load_shared(tokens_s, place, count=4), norm))
            return []

        lanes.loop(s.phase, [], multiply)

    def _tokens(self, ring_s, start) -> list:
        s, column = self.s, lanes.lane() & 7
        return [s.operands.tokens(ring_s, start, lanes.minimum(column + 8 * n, s.tokens - 1)) for n in range(s.column_tiles)]

    def _finish(self, tile, acc) -> None:
        """Send each CTA the sums of its tokens. All threads of the team call this."""
        s, sums_s = self.s, self.scratch["sums_s"]
        g, t = lanes.lane() >> 2, lanes.lane() & 3
        lanes.cluster_wait()  # all have read the sums of the tile before
        for m in range(s.groups):
            first = lanes.warp() * s.own + 16 * m
            with lanes.when(first < s.rows):
                for column in range(s.column_tiles):
                    sums = acc[m * s.sums + 4 * column :][:4]
                    for half in range(2):
                        at = self._sum_at(t * 2, first + 8 * half + g, self.rank)
                        lanes.store_cluster(column, sums_s, at, *sums[2 * half :][:2])
        lanes.cluster_arrive()

    def _finish_sent(self, tile) -> None:
        """Finish this CTA's tokens of a tile, a chunk after the sums were sent, so that nobody waits for them. All
        threads of the team call this."""
        s = self.s
        lanes.cluster_wait()
        for start in range(0, COLUMNS * s.stride // 2, self.threads):
            i = lanes.thread() + start
            column, row = i % COLUMNS, i // COLUMNS * 2
            token, (unit, there) = self.rank * COLUMNS + column, self._unit(tile, row)
            with lanes.when((token < s.tokens) & there):
                self._write(lambda row, column=column: self._totals(0, row, column), token, row, unit)
        lanes.cluster_arrive()

    def _sum_at(self, token, row, part=0):
        """Where the sum of a part of the inputs, of one of this CTA's tokens and a row of the tile, is."""
        return (part * self.s.rows + row) * COLUMNS + token

    def _totals(self, buffer, row, token) -> list:
        """The sums of all parts, of rows `row` and `row + 1` of the tile."""

        def load(one, part):
            return lanes.load_shared(self.scratch["sums_s"], self._sum_at(token, one, part), "f32")[0]

        return [functools.reduce(operator.add, [load(one, part) for part in range(self.s.split)]) for one in (row, row + 1)]
