"""Folding listed keys into an online softmax without `wgmma`: what decode kernels run on GPUs that do not have it (Blackwell).

Each warp of a CTA takes turns of 16 keys. It copies their K and V ahead into a ring of its own. In `mma.m16n8k16` the 16 keys are the rows
and 8 queries the columns, so little of a product is padding. The weights, turned round in registers (`movmatrix`), are an operand of the
product with the values. In the end the CTA merges what its warps found. All of it runs on `hopper.lanes`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence

from pallas_kernels.hopper import decode_tiles, lane_copies, lane_math, lane_pairs, lanes
from pallas_kernels.hopper.decode_tiles import LOG2E, LOWEST
from pallas_kernels.hopper.lanes import Scalar

KEYS = 16
"""Keys of a turn: rows of a product."""


def most_rows(head_dim: int, windowed: bool) -> int:
    """Most query rows (T*G) of a launch: their sums for all columns stay in registers. A window's bounds for each row take some, too."""
    most = min(64, 4096 // head_dim)
    return most * 3 // 4 if windowed and head_dim <= 128 else most


@dataclasses.dataclass(frozen=True)
class Shape(decode_tiles.Shape):
    """`tile` is `KEYS`, `stages` the turns that a warp has in flight, `warpgroups` counts four warps each."""

    @property
    def parts(self) -> int:
        """Partial results of a (row, KV head): one of each CTA."""
        return self.splits

    @property
    def warps(self) -> int:
        """Warps of a CTA."""
        return 4 * self.warpgroups

    @property
    def threads(self) -> int:
        """Threads of a CTA."""
        return 128 * self.warpgroups

    @property
    def column_tiles(self) -> int:
        """Products of 8 query rows each."""
        return self.rows // 8

    @property
    def turn_words(self) -> int:
        """Words of 16 keys, or of their values."""
        return KEYS * self.head_dim // 2

    def scratch_words(self) -> dict[str, int]:
        """Words of shared memory: queries; the rings of the warps, which hold their results in the end; their maxima and sums."""
        results = self.warps * self.rows * _stride(self)
        ring = self.warps * self.stages * 2 * self.turn_words
        return {"q_s": self.rows * self.head_dim // 2, "ring_s": max(ring, results), "warps_s": 2 * self.warps * self.rows}


def _stride(s: Shape) -> int:
    """Words from one row of a warp's results to the next: what lanes store at once lies in different banks."""
    return s.head_dim + 4


def load_queries(s: Shape, row: Scalar, head: Scalar, q_ref, q_s) -> None:
    """By all threads of a CTA: the T*G query rows of `[B, T, H, D]` as operands of `mma`. Rows past them repeat the last.

    Word w of lane (column g, t) of chunk j holds elements 32j + 8w + 2t, + 1 of column g.
    """
    chunks = s.head_dim // 32
    for start in range(0, s.column_tiles * chunks * 32, s.threads):
        i = lanes.thread() + start
        with lanes.when(i < s.column_tiles * chunks * 32):
            r = lanes.minimum(i // (chunks * 32) * 8 + i % 32 // 4, s.num_queries * s.group - 1)
            d = i // 32 % chunks * 32 + i % 4 * 2
            at = ((row * s.num_queries + r // s.group) * s.num_heads + head * s.group + r % s.group) * s.head_dim + d
            lanes.store_shared(q_s, i * 4, *(lanes.load_global(q_ref, at // 2 + 4 * n) for n in range(4)))
    lanes.cta_barrier(s.threads)


@dataclasses.dataclass
class Folded:
    """What a warp has found, in each lane (g, t): of query rows 2t and 2t + 1 of each column tile the maximum (log2 units) and this lane's
    part of the sum, and of these rows' outputs columns g, g + 8 of every 16: (2t, g), (2t + 1, g), (2t, g + 8), (2t + 1, g + 8)."""

    m: list[list[Scalar]]
    total: list[list[Scalar]]
    acc: list[list[list[Scalar]]]

    @classmethod
    def empty(cls, s: Shape) -> Folded:
        """Of no keys."""
        tiles = range(s.column_tiles)
        zeros = [[[lanes.f32(0.0)] * 4 for _ in range(s.head_dim // 16)] for _ in tiles]
        return cls([[lanes.f32(LOWEST)] * 2 for _ in tiles], [[lanes.f32(0.0)] * 2 for _ in tiles], zeros)

    def flat(self) -> list[Scalar]:
        """All numbers, for a loop to carry."""
        return [x for pairs in (self.m, self.total) for pair in pairs for x in pair] + [x for t in self.acc for four in t for x in four]

    @classmethod
    def of_flat(cls, s: Shape, flat: Sequence[Scalar]) -> Folded:
        """The inverse of `flat`."""
        numbers = iter(flat)

        def take(count):
            return [next(numbers) for _ in range(count)]

        tiles = range(s.column_tiles)
        m, total = ([take(2) for _ in tiles] for _ in range(2))
        return cls(m, total, [[take(4) for _ in range(s.head_dim // 16)] for _ in tiles])


def fold(
    s: Shape,
    pools,
    scratch,
    head: Scalar,
    length: Scalar,
    turns: Scalar,
    place: Callable,
    queries: Callable,
    report: Callable | None = None,
) -> Folded:
    """By each warp: fold turns 0 to `turns` - 1 of its own, in order.

    pools: K and V. scratch: `Shape.scratch_words`. place: a turn -> its page, its first token there, the position of its first key, and
    how many of its keys are written (0 or less: none). It may be called with turns past the last. queries: makes the queries available to
    the CTA; all its warps call it once, after their first copies have started. report: called with a turn and, per column tile, the LSE
    (log2 units) of its keys for the two query rows of the lane, the same in all g.
    """
    ring_s, q_s = scratch["ring_s"], scratch["q_s"]
    row_bytes, page_bytes = 2 * s.head_dim, 2 * s.num_kv_heads * s.page_size * s.head_dim

    def slot(n):
        return (lanes.warp() * s.stages + n % s.stages) * (2 * s.turn_words)

    def fetch(n, found):
        page, token, _, written = found
        for i, ref in enumerate(pools):

            def row_place(row, ref=ref):
                return ref, page, page_bytes, (head * s.page_size + token + row) * row_bytes, row < written

            lane_copies.copy_rows_async(ring_s, slot(n) + i * s.turn_words, row_place, rows=KEYS, row_bytes=row_bytes)

    def consume(n, found, *carry):
        start, written = found[2:]
        folded = Folded.of_flat(s, carry)
        logits = _logits(s, ring_s, slot(n), q_s)
        for tile, x in enumerate(logits):
            seen = _seen(s, tile, start, written, length)
            logits[tile] = [lanes.where(a, b * (s.sm_scale * LOG2E), float("-inf")) for a, b in zip(seen, x, strict=True)]
        if report is not None:
            report(n, [_lse(x) for x in logits])
        weights = [_rescale(s, folded, tile, x) for tile, x in enumerate(logits)]
        _add_values(s, folded, ring_s, slot(n) + s.turn_words, weights)
        return folded.flat()

    carry = lane_copies.pipeline(turns, s.stages, place, fetch, consume, Folded.empty(s).flat(), meanwhile=queries)
    folded = Folded.of_flat(s, carry)
    folded.total = [[_over_keys(x, lambda a, b: a + b) for x in pair] for pair in folded.total]
    return folded


def _logits(s: Shape, ring_s, slot: Scalar, q_s) -> list[list[Scalar]]:
    """Per column tile, unscaled: keys g, g, g + 8, g + 8 by query rows 2t, 2t + 1, 2t, 2t + 1."""
    lane = lanes.lane()
    sums = [[lanes.f32(0.0)] * 4 for _ in range(s.column_tiles)]
    for chunk in range(s.head_dim // 32):
        queries = [lanes.load_shared(q_s, ((tile * (s.head_dim // 32) + chunk) * 32 + lane) * 4, count=4) for tile in range(s.column_tiles)]
        for half in range(2):
            piece = (lane >> 4) + 2 * (2 * chunk + half)
            keys = lane_pairs.load_matrices(ring_s, slot + lane_copies.swizzled(lane & 15, piece, 2 * s.head_dim))
            for tile in range(s.column_tiles):
                sums[tile] = lane_pairs.mma(sums[tile], keys, queries[tile][2 * half :][:2], s.dtype.name)
    return sums


def _seen(s: Shape, tile: int, start: Scalar, written: Scalar, length: Scalar) -> list[Scalar]:
    """Which of the four logits count, in the order of `_logits`."""
    lane = lanes.lane()
    found = []
    for i in range(4):
        key, r = (lane >> 2) + 8 * (i // 2), (lane & 3) * 2 + (8 * tile + i % 2)
        seen = key < written
        if s.num_queries > 1 or s.window is not None:
            pos, query_pos = start + key, length - s.num_queries + r // s.group
            seen = seen & (pos <= query_pos)
            if s.window is not None:
                sink_tokens, window_tokens = s.window
                seen = seen & ((pos < sink_tokens) | (pos > query_pos - window_tokens))
        found.append(seen)
    return found


def _over_keys(x: Scalar, merge: Callable) -> Scalar:
    """Over the lanes that have the same query rows; every lane gets the result."""
    for distance in (4, 8, 16):
        x = merge(x, lanes.shuffle_xor(x, distance))
    return x


def _lse(x: Sequence[Scalar]) -> list[Scalar]:
    """LSE (log2 units) of the 16 keys for the two query rows, -inf where none counts."""
    found = []
    for j in range(2):
        m = _over_keys(lanes.maximum(lanes.maximum(x[j], x[j + 2]), lanes.f32(LOWEST)), lanes.maximum)
        total = _over_keys(lane_math.exp2(x[j] - m) + lane_math.exp2(x[j + 2] - m), lambda a, b: a + b)
        found.append(lanes.where(total == 0.0, float("-inf"), m + lanes.log2(lanes.where(total == 0.0, 1.0, total))))
    return found


def _rescale(s: Shape, folded: Folded, tile: int, x: Sequence[Scalar]) -> list[Scalar]:
    """Raise the maxima to these logits, scale what was found before, add to the sums. Returns the weights as the operand of a product."""
    weights = [lanes.f32(0.0)] * 4
    alphas = []
    for j in range(2):
        m = lanes.maximum(folded.m[tile][j], _over_keys(lanes.maximum(x[j], x[j + 2]), lanes.maximum))
        alphas.append(lane_math.exp2(folded.m[tile][j] - m))
        weights[j], weights[j + 2] = (lane_math.exp2(x[i] - m) for i in (j, j + 2))
        folded.total[tile][j] = folded.total[tile][j] * alphas[j] + (weights[j] + weights[j + 2])
        folded.m[tile][j] = m
    folded.acc[tile] = [[a * alphas[i % 2] for i, a in enumerate(four)] for four in folded.acc[tile]]
    return [lane_pairs.transposed(lane_pairs.pack(*weights[i : i + 2], s.dtype.name)) for i in (0, 2)]


def _add_values(s: Shape, folded: Folded, ring_s, slot: Scalar, weights: list[list[Scalar]]) -> None:
    lane = lanes.lane()
    key = (lane & 7) + (lane >> 4) * 8
    for i in range(s.head_dim // 16):
        piece = ((lane >> 3) & 1) + 2 * i
        values = lane_pairs.load_matrices(ring_s, slot + lane_copies.swizzled(key, piece, 2 * s.head_dim), transposed=True)
        for tile in range(s.column_tiles):
            folded.acc[tile][i] = lane_pairs.mma(folded.acc[tile][i], values, weights[tile], s.dtype.name)


# What the warps of a CTA found, merged.


def share(s: Shape, folded: Folded, scratch) -> None:
    """By all threads of a CTA: put what each warp found into shared memory, for `merged` and `merged_total`."""
    lane = lanes.lane()
    g, t = lane >> 2, lane & 3
    lanes.cta_barrier(s.threads)  # the rings of all warps are free
    for tile in range(s.column_tiles):
        for j in range(2):
            at = lanes.warp() * s.rows + t * 2 + (8 * tile + j)
            for i, four in enumerate(folded.acc[tile]):
                for half in range(2):
                    lanes.store_shared(scratch["ring_s"], at * _stride(s) + g + (16 * i + 8 * half), four[2 * half + j])
            with lanes.when(g == 0):
                lanes.store_shared(scratch["warps_s"], at * 2, folded.m[tile][j], folded.total[tile][j])
    lanes.cta_barrier(s.threads)


def merged(s: Shape, r: Scalar, column: Scalar, scratch) -> tuple[Scalar, Scalar, list[Scalar]]:
    """Maximum (log2 units) and sum of query row `r`, and columns `column`, `column` + 1 of its output, not divided by the sum."""
    m, weights, total = merged_total(s, r, scratch)
    low, high = lanes.f32(0.0), lanes.f32(0.0)
    for w, weight in enumerate(weights):
        a, b = lanes.load_shared(scratch["ring_s"], (r + w * s.rows) * _stride(s) + column, "f32", 2)
        low, high = low + weight * a, high + weight * b
    return m, total, [low, high]


def merged_total(s: Shape, r: Scalar, scratch) -> tuple[Scalar, list[Scalar], Scalar]:
    """Maximum (log2 units) of query row `r`, the weight of each warp, and the sum."""
    stats = [lanes.load_shared(scratch["warps_s"], (r + w * s.rows) * 2, "f32", 2) for w in range(s.warps)]
    m = functools.reduce(lanes.maximum, [x for x, _ in stats])
    weights = [lane_math.exp2(x - m) for x, _ in stats]
    total = functools.reduce(lambda a, b: a + b, [weight * x for weight, (_, x) in zip(weights, stats, strict=True)])
    return m, weights, total
