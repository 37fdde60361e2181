"""Folding listed keys into an online softmax without `wgmma`: what decode kernels run on GPUs that do not have it
(Blackwell).

Each warp of a CTA takes key tiles of 16 keys. It copies their K and V ahead into a ring of its own. In `mma.m16n8k16`
the 16 keys are the rows and 8 queries the columns, so little of a product is padding. The weights, turned round in
registers (`movmatrix`), are an operand of the product with the values. In the end the CTA merges what its warps found.
All of it runs on `hopper.threads.lanes`.

Packed pages are read so on every GPU: `packed_operands` makes operands of codes. Where pages are open beside them, each
warp folds the key tiles of its queries' own pages last, from there; the first of them is copied while it folds the
others.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

from pallas_kernels.hopper.decode import packed_operands, wgmma_fold
from pallas_kernels.hopper.decode.packed_operands import KEYS, Codes
from pallas_kernels.hopper.decode.wgmma_fold import LOG2E, LOWEST
from pallas_kernels.hopper.threads import lane_copies, lane_math, lane_pairs, lanes
from pallas_kernels.hopper.threads.lanes import Scalar


def most_rows(head_dim: int, windowed: bool) -> int:
    """Most query rows (T*G) of a launch: their sums for all columns stay in registers. A window's bounds for each row
    take some, too."""
    most = min(64, 4096 // head_dim)
    return most * 3 // 4 if windowed and head_dim <= 128 else most


@dataclasses.dataclass(frozen=True)
class Shape(wgmma_fold.Shape):
    """`tile` is `KEYS`, `stages` the key tiles that a warp has in flight, `warpgroups` counts four warps each.

    k_codes, v_codes: of packed pages; None: pages hold the numbers. opened: whether queries read their own pages open.
    """

    k_codes: Codes | None = None
    v_codes: Codes | None = None
    opened: bool = False

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
    def key_tile_words(self) -> int:
        """Words of 16 keys, or of their values, as numbers."""
        return KEYS * self.head_dim // 2

    @property
    def slot_words(self) -> tuple[int, int]:
        """Words of the keys and of the values of a key tile in the ring."""
        return tuple(self.key_tile_words if codes is None else codes.words for codes in (self.k_codes, self.v_codes))

    @property
    def open_words(self) -> int:
        """Words that a warp has for a key tile of open pages, behind the slots of its ring."""
        return 2 * self.key_tile_words * self.opened

    @property
    def query_orders(self) -> tuple[bool, ...]:
        """The orders in which queries lie in shared memory: whether for codes (`packed_operands.interleaved`), or for
        numbers."""
        return (False, True) if self.k_codes and self.opened else (self.k_codes is not None,)

    def scratch_words(self) -> dict[str, int]:
        """Words of shared memory: queries; the rings of the warps, which hold their results in the end; their maxima
        and sums."""
        results = self.warps * self.rows * _stride(self)
        ring = self.warps * (self.stages * sum(self.slot_words) + self.open_words)
        queries = len(self.query_orders) * self.rows * self.head_dim // 2
        return {"q_s": queries, "ring_s": max(ring, results), "warps_s": 2 * self.warps * self.rows}


@dataclasses.dataclass(frozen=True)
class Pools:
    """References to what pages consist of; None: they have no such part. row_of: see `pages.OpenPages`."""

    k: Any
    v: Any
    k_scales: Any = None
    v_scales: Any = None
    open_k: Any = None
    open_v: Any = None
    row_of: Any = None

    @classmethod
    def of(cls, s: Shape, refs: Sequence) -> Pools:
        """Of references in the order of `pages.Pages.arrays`."""
        there = ["k", "v"]
        there += [f"{name}_scales" for name, codes in (("k", s.k_codes), ("v", s.v_codes)) if codes is not None and codes.has_scales]
        there += ["open_k", "open_v", "row_of"] if s.opened else []
        return cls(**dict(zip(there, refs, strict=True)))


def _stride(s: Shape) -> int:
    """Words from one row of a warp's results to the next: what lanes store at once lies in different banks."""
    return s.head_dim + 4


def load_queries(s: Shape, row: Scalar, head: Scalar, q_ref, q_s) -> None:
    """By all threads of a CTA: the T*G query rows of `[B, T, H, D]` as operands of `mma`. Rows past them repeat the
    last.

    For numbers, word w of lane (column g, t) of chunk j holds elements 32j + 8w + 2t, + 1 of column g. For codes, words
    2h and 2h + 1 hold elements e, e + 2 and e + 1, e + 3, where e is 32j + 16h + 4t.
    """
    for n, for_codes in enumerate(s.query_orders):
        store_queries(s, row, head, q_ref, q_s, n * s.rows * s.head_dim // 2, for_codes)
    lanes.cta_barrier(s.threads)


def store_queries(s: Shape, row: Scalar, head: Scalar, q_ref, q_s, first: int, for_codes: bool) -> None:
    """`load_queries` in one of its orders, from word `first` on. A barrier must follow."""
    chunks = s.head_dim // 32
    for start in range(0, s.column_tiles * chunks * 32, s.threads):
        i = lanes.thread() + start
        with lanes.when(i < s.column_tiles * chunks * 32):
            r = lanes.minimum(i // (chunks * 32) * 8 + i % 32 // 4, s.num_queries * s.group - 1)
            d = i // 32 % chunks * 32 + i % 4 * (4 if for_codes else 2)
            at = ((row * s.num_queries + r // s.group) * s.num_heads + head * s.group + r % s.group) * s.head_dim + d
            words = [lanes.load_global(q_ref, at // 2 + n) for n in ((0, 1, 8, 9) if for_codes else (0, 4, 8, 12))]
            if for_codes:
                words = [*packed_operands.interleaved(*words[:2]), *packed_operands.interleaved(*words[2:])]
            lanes.store_shared(q_s, i * 4 + first, *words)


@dataclasses.dataclass
class Folded:
    """What a warp has found, in each lane (g, t): of query rows 2t and 2t + 1 of each column tile the maximum (log2
    units) and this lane's part of the sum, and of these rows' outputs columns g, g + 8 of every 16: (2t, g), (2t + 1,
    g), (2t, g + 8), (2t + 1, g + 8)."""

    m: list[list[Scalar]]
    total: list[list[Scalar]]
    acc: list[list[list[Scalar]]]

    @classmethod
    def empty(cls, s: Shape) -> Folded:
        """Of no keys."""
        tiles = range(s.column_tiles)
        zeros = [[[lanes.f32(0.0)] * 4 for _ in range(s.head_dim // 16)] for _ in tiles]
        return cls([[lanes.f32(LOWEST)] * 2 for _ in tiles], [[lanes.f32(0.0)] * 2 for _ in tiles], zeros)

    def to_go_on(self) -> Folded:
        """What `fold` has returned, as it was before it added up the sums of the lanes."""
        first = (lanes.lane() >> 2) == 0
        return Folded(self.m, [[lanes.where(first, x, 0.0) for x in pair] for pair in self.total], self.acc)

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
    pools: Pools,
    scratch,
    head: Scalar,
    length: Scalar,
    key_tiles: Scalar,
    place: Callable,
    queries: Callable,
    report: Callable | None = None,
    first_from: Callable | None = None,
    before: Folded | None = None,
) -> Folded:
    """By each warp: fold key tiles 0 to `key_tiles` - 1 of its own, in order; then those of its queries' own pages that
    are open.

    scratch: `Shape.scratch_words`. place: a key tile -> its page, its first token there, the position of its first key,
    and how many of its keys are written (0 or less: none). It may be called with key tiles past the last. queries:
    makes the queries available to the CTA; all its warps call it once, after their first copies have started. report:
    called with a key tile and, per column tile, the LSE (log2 units) of its keys for the two query rows of the lane,
    the same in all g; of a key tile of an open page a second time, which counts. first_from: a position -> the first
    key tile with keys from there on; None: they are in any order. before: what this warp has folded before.
    """
    ring_s = scratch["ring_s"]
    own = _own_start(s, length - 1)
    opened = _Opened(s, pools, ring_s, head, length, key_tiles, place) if s.opened else None

    def packed_place(n):
        """Of it what is not read open by the last query."""
        page, token, start, written = place(n)
        return [page, token, start, lanes.where(start < own, written, 0) if s.opened else written]

    def slot(n):
        return lanes.warp() * (s.stages * sum(s.slot_words) + s.open_words) + n % s.stages * sum(s.slot_words)

    def fetch(n, found):
        page, token, _, written = found
        sides = (pools.k, pools.k_scales, s.k_codes), (pools.v, pools.v_scales, s.v_codes)
        for at, side in zip((slot(n), slot(n) + s.slot_words[0]), sides, strict=True):
            copy_side(s, ring_s, at, side, (page, token, written), head)

    def consume(n, found, *carry):
        start, written = found[2:]
        seen = [_seen(s, tile, start, written, length, **({"own": False} if s.opened else {})) for tile in range(s.column_tiles)]
        found = logits(s, ring_s, slot(n), scratch["q_s"], s.k_codes)
        return _fold_key_tile(s, Folded.of_flat(s, carry), n, found, seen, ring_s, slot(n) + s.slot_words[0], s.v_codes, written, report)

    def meanwhile():
        if opened is not None:
            opened.begin(first_from)
        queries()

    closed_key_tiles = key_tiles if opened is None or first_from is None else lanes.minimum(key_tiles, first_from(own))
    carry = Folded.empty(s) if before is None else before.to_go_on()
    if before is not None and s.v_codes is not None:
        carry.acc = [packed_operands.coded_order(tile) for tile in carry.acc]
    carry = lane_copies.pipeline(closed_key_tiles, s.stages, packed_place, fetch, consume, carry.flat(), meanwhile=meanwhile)
    folded = Folded.of_flat(s, carry)
    if s.v_codes is not None:
        folded.acc = [packed_operands.natural_order(tile) for tile in folded.acc]
    if opened is not None:
        folded = opened.fold(folded, scratch["q_s"], report)
    folded.total = [[_over_keys(x, lambda a, b: a + b) for x in pair] for pair in folded.total]
    return folded


def copy_side(s: Shape, ring_s, at: Scalar, side, place, head: Scalar) -> None:
    """By one warp: start copying the keys, or the values, of a key tile to word `at`. side: numbers or codes, their
    scales, their `Codes`; of numbers the last two are None. place: page, token there, how many tokens are written."""
    ref, scales, codes = side
    if codes is None:
        _copy_numbers(s, ring_s, at, ref, *place, head)
    else:
        codes.copy(ring_s, at, (ref, scales), place, head, num_kv_heads=s.num_kv_heads, page_size=s.page_size)


def _copy_numbers(s: Shape, ring_s, at: Scalar, ref, block: Scalar, token: Scalar, written: Scalar, head: Scalar) -> None:
    """By one warp: start copying 16 tokens of a page, or of a row of open pages, to word `at`; zeros past the written
    ones."""
    row_bytes = 2 * s.head_dim
    start, block_bytes = (head * s.page_size + token) * row_bytes, s.num_kv_heads * s.page_size * row_bytes
    lane_copies.copy_tile_async(ring_s, at, ref, start, rows=KEYS, row_bytes=row_bytes, count=written, block=block, block_bytes=block_bytes)


class _Opened:
    """The key tiles of a warp that are read open: in the own page of the first query, or behind it."""

    def __init__(self, s: Shape, pools: Pools, ring_s, head: Scalar, length: Scalar, key_tiles: Scalar, place: Callable):
        self.s, self.pools, self.ring_s, self.head, self.length = s, pools, ring_s, head, length
        self.key_tiles, self.place = key_tiles, place
        self.start = _own_start(s, lanes.maximum(length - s.num_queries, 0))
        per_warp = s.stages * sum(s.slot_words) + s.open_words
        self.slot = lanes.warp() * per_warp + s.stages * sum(s.slot_words)
        self.first: list[Scalar] = []

    def begin(self, first_from: Callable | None) -> None:
        """Find the first of them, and start copying it."""
        self.first = self._next(lanes.i32(0) if first_from is None else first_from(self.start))
        self._fetch(self.first)

    def _next(self, n: Scalar) -> list[Scalar]:
        """The next of them from key tile n on, and its place."""

        def other(n, page, token, start, written):
            return (n < self.key_tiles) & ((start < self.start) | (written <= 0))

        return lanes.while_loop(other, lambda n, *_: [n + 1, *self.place(n + 1)], [n, *self.place(n)])

    def _fetch(self, found) -> None:
        n, page, token, _, written = found
        with lanes.when(n < self.key_tiles):
            row = lanes.load_global(self.pools.row_of, page)
            written = lanes.where(row >= 0, written, 0)
            for i, ref in enumerate((self.pools.open_k, self.pools.open_v)):
                at = self.slot + i * self.s.key_tile_words
                _copy_numbers(self.s, self.ring_s, at, ref, lanes.maximum(row, 0), token, written, self.head)

    def fold(self, folded: Folded, q_s, report: Callable | None) -> Folded:
        """Fold them after the others."""
        s = self.s

        def key_tile(n, page, token, start, written, *carry):
            lane_copies.commit_copies()
            lane_copies.wait_for_copies(0)
            seen = [_seen(s, tile, start, written, self.length, own=True) for tile in range(s.column_tiles)]
            keys = logits(s, self.ring_s, self.slot, q_s, None)
            values = self.slot + s.key_tile_words
            after = _fold_key_tile(s, Folded.of_flat(s, carry), n, keys, seen, self.ring_s, values, None, written, report)
            found = self._next(n + 1)
            self._fetch(found)
            return [*found, *after]

        carry = lanes.while_loop(lambda n, *_: n < self.key_tiles, key_tile, [*self.first, *folded.flat()])
        return Folded.of_flat(s, carry[len(self.first) :])


def _own_start(s: Shape, position: Scalar) -> Scalar:
    """The first position of the page of a position."""
    return position // s.page_size * s.page_size


def _fold_key_tile(
    s: Shape, folded: Folded, n: Scalar, logits, seen, ring_s, values_at: Scalar, codes, written: Scalar, report
) -> list[Scalar]:
    """Add a key tile to what was folded, from its unscaled logits and its values at a word of the ring."""
    for tile, x in enumerate(logits):
        logits[tile] = [lanes.where(a, b * (s.sm_scale * LOG2E), float("-inf")) for a, b in zip(seen[tile], x, strict=True)]
    if report is not None:
        report(n, [_lse(x) for x in logits])
    weights = [_rescale(s, folded, tile, x) for tile, x in enumerate(logits)]
    if codes is None:
        _add_values(s, folded, ring_s, values_at, weights)
    else:
        _add_codes(s, folded, codes, ring_s, values_at, weights, written)
    return folded.flat()


def logits(s: Shape, ring_s, slot: Scalar, q_s, codes: Codes | None) -> list[list[Scalar]]:
    """Of the keys of a key tile at word `slot`. Per column tile, unscaled: keys g, g, g + 8, g + 8 by query rows 2t, 2t
    + 1, 2t, 2t + 1."""
    lane = lanes.lane()
    sums = [[lanes.f32(0.0)] * 4 for _ in range(s.column_tiles)]
    if codes is not None:
        return _logits_of_codes(s, ring_s, slot, q_s, codes)
    for chunk in range(s.head_dim // 32):
        queries = [_queries(s, q_s, tile, chunk, for_codes=False) for tile in range(s.column_tiles)]
        for half in range(2):
            piece = (lane >> 4) + 2 * (2 * chunk + half)
            keys = lane_pairs.load_matrices(ring_s, slot + lane_copies.swizzled(lane & 15, piece, 2 * s.head_dim))
            for tile in range(s.column_tiles):
                sums[tile] = lane_pairs.mma(sums[tile], keys, queries[tile][2 * half :][:2], s.dtype.name)
    return sums


def _queries(s: Shape, q_s, tile: int, chunk: int, *, for_codes: bool) -> list[Scalar]:
    """The lane's words of 32 channels, see `load_queries`."""
    first = s.query_orders.index(for_codes) * s.rows * s.head_dim // 2
    return lanes.load_shared(q_s, lanes.lane() * 4 + (first + (tile * (s.head_dim // 32) + chunk) * 128), count=4)


def _logits_of_codes(s: Shape, ring_s, slot: Scalar, q_s, codes: Codes) -> list[list[Scalar]]:
    """`logits`, of packed keys."""
    zeros, queries = [lanes.f32(0.0)] * 4, functools.cache(functools.partial(_queries, s, q_s, for_codes=True))
    sums = [[zeros] * max(codes.groups, 1) for _ in range(s.column_tiles)]
    for block, keys in codes.key_operands(ring_s, slot):
        group = codes.group_of(block) if codes.groups else 0
        scales = codes.channel_pairs(ring_s, slot, block) if codes.per_channel else None
        for tile in range(s.column_tiles):
            columns = queries(tile, block // 2)[2 * (block % 2) :][:2]
            if scales is not None:
                columns = [lane_pairs.multiply_pairs(a, b, s.dtype.name) for a, b in zip(columns, scales, strict=True)]
            sums[tile][group] = lane_pairs.mma(sums[tile][group], keys, columns, s.dtype.name)
    if not codes.groups:
        return [of_groups[0] for of_groups in sums]
    of_key = [codes.token_scales(ring_s, slot, (lanes.lane() >> 2) + 8 * half) for half in range(2)]
    return [
        [functools.reduce(lambda a, b: a + b, [x[i] * of_key[i // 2][n] for n, x in enumerate(of_groups)]) for i in range(4)]
        for of_groups in sums
    ]


def _seen(s: Shape, tile: int, start: Scalar, written: Scalar, length: Scalar, own: bool | None = None) -> list[Scalar]:
    """Which of the four logits count, in the order of `logits`. own: only those in the query's own page, or only those
    before it; with one query, none of a key tile before its page lies there, nor the other way round."""
    lane = lanes.lane()
    found = []
    for i in range(4):
        key, r = (lane >> 2) + 8 * (i // 2), (lane & 3) * 2 + (8 * tile + i % 2)
        seen = key < written
        if s.num_queries > 1 or s.window is not None:
            pos, query_pos = start + key, length - s.num_queries + r // s.group
            seen = seen & (pos <= query_pos)
            if own is not None and s.num_queries > 1:
                of_own = pos >= _own_start(s, query_pos)
                seen = seen & (of_own if own else ~of_own)
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
    """Raise the maxima to these logits, scale what was found before, add to the sums. Returns the weights, in the order
    of `logits`."""
    weights = [lanes.f32(0.0)] * 4
    alphas = []
    for j in range(2):
        m = lanes.maximum(folded.m[tile][j], _over_keys(lanes.maximum(x[j], x[j + 2]), lanes.maximum))
        alphas.append(lane_math.exp2(folded.m[tile][j] - m))
        weights[j], weights[j + 2] = (lane_math.exp2(x[i] - m) for i in (j, j + 2))
        folded.total[tile][j] = folded.total[tile][j] * alphas[j] + (weights[j] + weights[j + 2])
        folded.m[tile][j] = m
    folded.acc[tile] = [[a * alphas[i % 2] for i, a in enumerate(four)] for four in folded.acc[tile]]
    return weights


def _operand(s: Shape, weights: Sequence[Scalar]) -> list[Scalar]:
    """Weights of 16 keys as the operand of a product with their values."""
    return [lane_pairs.transposed(lane_pairs.pack(*weights[i : i + 2], s.dtype.name)) for i in (0, 2)]


def _add_codes(s: Shape, folded: Folded, codes: Codes, ring_s, at: Scalar, weights: list[list[Scalar]], written: Scalar) -> None:
    """Add weighted values that are packed. A scale of a token multiplies its weight."""
    operands = [[_operand(s, x)] for x in weights]
    if codes.groups:
        of_key = []
        for key in ((lanes.lane() >> 2) + 8 * half for half in range(2)):
            of_key.append([lanes.where(key < written, x, 0.0) for x in codes.token_scales(ring_s, at, key)])  # of others it may be NaN
        of_group = [[of_key[i // 2][n] for i in range(4)] for n in range(codes.groups)]
        operands = [[_operand(s, [a * b for a, b in zip(x, scales, strict=True)]) for scales in of_group] for x in weights]
    for block, values in codes.value_operands(ring_s, at):
        group = codes.group_of(block) if codes.groups else 0
        scales = codes.value_scales(ring_s, at, block) if codes.per_channel else None
        for tile in range(s.column_tiles):
            before = folded.acc[tile][block]
            if scales is None:
                folded.acc[tile][block] = lane_pairs.mma(before, values, operands[tile][group], s.dtype.name)
            else:
                sums = lane_pairs.mma([lanes.f32(0.0)] * 4, values, operands[tile][group], s.dtype.name)
                folded.acc[tile][block] = [lanes.fma(x, scales[i // 2], a) for i, (x, a) in enumerate(zip(sums, before, strict=True))]


def _add_values(s: Shape, folded: Folded, ring_s, slot: Scalar, weights: list[list[Scalar]]) -> None:
    lane, operands = lanes.lane(), [_operand(s, x) for x in weights]
    key = (lane & 7) + (lane >> 4) * 8
    for i in range(s.head_dim // 16):
        piece = ((lane >> 3) & 1) + 2 * i
        values = lane_pairs.load_matrices(ring_s, slot + lane_copies.swizzled(key, piece, 2 * s.head_dim), transposed=True)
        for tile in range(s.column_tiles):
            folded.acc[tile][i] = lane_pairs.mma(folded.acc[tile][i], values, operands[tile], s.dtype.name)


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
    share_totals(s, folded, scratch)
    lanes.cta_barrier(s.threads)


def share_totals(s: Shape, folded: Folded, scratch) -> None:
    """By all threads of a CTA: the maxima and sums that each warp found, for `merged_total`. A barrier must follow."""
    lane = lanes.lane()
    for tile in range(s.column_tiles):
        for j in range(2):
            at = lanes.warp() * s.rows + (lane & 3) * 2 + (8 * tile + j)
            with lanes.when(lane < 4):
                lanes.store_shared(scratch["warps_s"], at * 2, folded.m[tile][j], folded.total[tile][j])


def merged(s: Shape, r: Scalar, column: Scalar, scratch) -> tuple[Scalar, Scalar, list[Scalar]]:
    """Maximum (log2 units) and sum of query row `r`, and columns `column`, `column` + 1 of its output, not divided by
    the sum."""
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
