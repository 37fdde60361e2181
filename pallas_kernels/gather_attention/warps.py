"""Folding listed keys into an online softmax, by single warps: the low-latency form for lists and few query rows (T*G at most 16).

A warp takes 16 keys at a time. It brings them by 16-byte asynchronous copies into a ring of its own in shared memory, several slices
ahead, so no barrier of the CTA stands in its way; `ldmatrix` reads them back as operands, `mma.m16n8k16` multiplies the query rows with
the keys and the weights with the values. Then the warps of a CTA merge, and the CTAs of a cluster (`cluster_merge`), each in order.
"""

from __future__ import annotations

import dataclasses
import functools

from pallas_kernels import lanes

LOG2E = 1.4426950408889634
LOWEST = -1e30
"""Start of the running maximum: below every logit, and finite, so that a slice with nothing to see folds in as zeros."""

SLICE = 16
"""Keys that a warp takes at a time."""

MOST_ROWS = 16


@dataclasses.dataclass(frozen=True)
class Shape:
    """What the stages depend on. width: entries of a list. ctas: of the cluster that serves a (row, KV head). depth: slices on their way."""

    batch: int
    num_queries: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    page_size: int
    block_size: int
    table_width: int
    width: int
    window: tuple[int, int] | None
    sm_scale: float
    dtype: str
    ctas: int
    threads: int
    depth: int

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.num_heads // self.num_kv_heads

    @property
    def rows(self) -> int:
        """Query rows per KV head, T*G."""
        return self.num_queries * self.group

    @property
    def halves(self) -> int:
        """Groups of 8 rows."""
        return -(-self.rows // 8)

    @property
    def warps(self) -> int:
        """Warps of a CTA."""
        return self.threads // 32

    @property
    def slot_words(self) -> int:
        """Words of one warp's slice in flight: 16 keys and values."""
        return SLICE * self.head_dim

    @property
    def ring_words(self) -> int:
        """Words of shared memory for all slices in flight."""
        return self.warps * self.depth * self.slot_words


def fold(s: Shape, k_ref, v_ref, table_ref, q_ref, row, head, length, list_length, ids_s, ring_s, cta):
    """Fold this warp's slices: returns (acc, m, l), by half of the rows: acc[half] has D/4 numbers, m[half] in log2 units.

    Slice i of the list is warp i % (all warps of the cluster)'s. ids_s: the list, its first `list_length` entries blocks.
    acc[half][2 * n + j] of lane (g, t) is row 8 * half + g, column 8 * n + 2 * t + j.
    """
    lane = lanes.lane()
    g, t = lane >> 2, lane & 3
    warp = cta * s.warps + lanes.warp()
    all_warps = s.ctas * s.warps
    per_block = s.block_size // SLICE
    slices = list_length * per_block
    mine = lanes.maximum((slices - warp + (all_warps - 1)) // all_warps, 0)
    query = _query_operand(s, q_ref, row, head, g, t)

    def locate(n):
        i = lanes.minimum(n * all_warps + warp, s.width * per_block - 1)
        block = lanes.load_shared(ids_s, i // per_block)[0]
        start = block * s.block_size + i % per_block * SLICE
        inside = (block >= 0) & (start < lanes.minimum(length, s.table_width * s.page_size))
        page = lanes.load_global(table_ref, row * s.table_width + lanes.where(inside, start // s.page_size, 0))
        return page, start, lanes.where(inside & (page >= 0), lanes.minimum(length - start, SLICE), 0)

    def slot(n):
        return (lanes.warp() * s.depth + n % s.depth) * s.slot_words

    def fetch(n, place):
        page, start, written = place
        for part, ref in enumerate((k_ref, v_ref)):

            def row_place(key):
                at = (start % s.page_size + key) * (s.head_dim * 2)
                return page * s.num_kv_heads + head, s.page_size * s.head_dim * 2, at, key < written

            offset = slot(n) + part * (s.slot_words // 2)
            lanes.copy_rows_async(ring_s, offset, ref, row_place, rows=SLICE, row_bytes=s.head_dim * 2)

    def consume(n, place, *carry):
        return _flatten(*_fold_slice(s, query, ring_s, slot(n), place, length, g, t, *_unflatten(s, carry)))

    columns = s.head_dim // 4
    start = ([[lanes.f32(0.0)] * columns] * s.halves, [lanes.f32(LOWEST)] * s.halves, [lanes.f32(0.0)] * s.halves)
    return _unflatten(s, lanes.pipeline(mine, s.depth, locate, fetch, consume, _flatten(*start)))


def _flatten(acc, m, l):
    return [*(x for half in acc for x in half), *m, *l]


def _unflatten(s: Shape, flat):
    columns = s.head_dim // 4
    acc = [list(flat[half * columns :][:columns]) for half in range(s.halves)]
    rest = flat[s.halves * columns :]
    return acc, list(rest[: s.halves]), list(rest[s.halves :])


def _query_operand(s: Shape, q_ref, row, head, g, t):
    """Words of the A operand: [half][n] columns 8n + 2t, + 1 of query row 8 * half + g (rows past T*G repeat the last)."""
    found = []
    for half in range(s.halves):
        r = lanes.minimum(g + 8 * half, s.rows - 1)
        at = (row * s.num_queries + r // s.group) * s.num_heads + head * s.group + r % s.group
        found.append([lanes.load_global(q_ref, at * (s.head_dim // 2) + (t + 4 * n)) for n in range(s.head_dim // 8)])
    return found


def _fold_slice(s: Shape, query, ring_s, slot, place, length, g, t, acc, m, l):
    lane = lanes.lane()
    scores = []
    for n in range(2):  # 8 keys a product: lane (g, t) gets rows g, g + 8 and keys 8n + 2t, + 1
        product = [lanes.f32(0.0)] * 4
        for j in range(s.head_dim // 32):
            at = lanes.swizzled((lane & 7) + 8 * n, (lane >> 3) + 4 * j, s.head_dim * 2)
            keys = lanes.load_matrices(ring_s, slot + at)
            for pair in range(2):
                columns = (4 * j + 2 * pair, 4 * j + 2 * pair + 1)
                a = [query[min(half, s.halves - 1)][c] for c in columns for half in range(2)]
                product = lanes.mma(product, a, keys[2 * pair :][:2], s.dtype)
        scores.append(product)
    weights = []
    for half in range(s.halves):
        seen = _seen(s, place, length, g + 8 * half, t)
        x = [lanes.where(there, scores[i // 2][2 * half + i % 2] * (s.sm_scale * LOG2E), float("-inf")) for i, there in enumerate(seen)]
        new_m = functools.reduce(lanes.maximum, x, m[half])
        for distance in (1, 2):
            new_m = lanes.maximum(new_m, lanes.shuffle_xor(new_m, distance))
        scale = lanes.exp2(m[half] - new_m)
        p = [lanes.exp2(y - new_m) for y in x]
        m[half] = new_m
        l[half] = l[half] * scale + (p[0] + p[1] + (p[2] + p[3]))  # this lane's keys; summed over t at the end
        acc[half] = [a * scale for a in acc[half]]
        weights.append([lanes.pack(p[0], p[1], s.dtype), lanes.pack(p[2], p[3], s.dtype)])
    _add_values(s, weights, ring_s, slot + s.slot_words // 2, acc)
    return acc, m, l


def _seen(s: Shape, place, length, r, t):
    """Whether query row r may attend to this lane's four keys."""
    _, start, written = place
    found = []
    for i in range(4):
        key = t * 2 + (8 * (i // 2) + i % 2)
        there = key < written
        if s.num_queries > 1 or s.window is not None:
            query_pos = length - s.num_queries + (r // s.group if s.num_queries > 1 else 0)
            pos = start + key
            there = there & (pos <= query_pos)
            if s.window is not None:
                there = there & ((pos < s.window[0]) | (pos > query_pos - s.window[1]))
        found.append(there)
    return found


def _add_values(s: Shape, weights, ring_s, values, acc) -> None:
    """acc += weights @ values."""
    first, second = weights[0], weights[min(1, s.halves - 1)]
    a = [first[0], second[0], first[1], second[1]]
    lane = lanes.lane()
    for n in range(0, s.head_dim // 8, 2):
        at = lanes.swizzled(lane & 15, (lane >> 4) + n, s.head_dim * 2)
        b = lanes.load_matrices(ring_s, values + at, transposed=True)
        for i in range(2):
            places = [2 * (n + i), 2 * (n + i) + 1]
            before = [acc[half][c] if half < s.halves else lanes.f32(0.0) for half in range(2) for c in places]
            after = lanes.mma(before, a, b[2 * i :][:2], s.dtype)
            for half in range(s.halves):
                for c, value in zip(places, after[2 * half : 2 * half + 2], strict=True):
                    acc[half][c] = value


def merge_warps(s: Shape, partial, ring_s, stats_s, send) -> None:
    """Merge the CTA's warps in order; `send(row, quad, m, l, four columns from 4 * quad on)` is called by the thread that has them.

    The ring, whose slices are all consumed, holds the warps' outputs; a warp overwrites only its own part of it.
    """
    acc, m, l = partial
    lane, warp = lanes.lane(), lanes.warp()
    g, t = lane >> 2, lane & 3
    of_warp = s.depth * s.slot_words
    for half in range(s.halves):
        total = l[half]
        for distance in (1, 2):
            total = total + lanes.shuffle_xor(total, distance)
        r = g + 8 * half
        for n in range(s.head_dim // 8):
            lanes.store_shared(ring_s, warp * of_warp + _spread(s, r, t * 2 + 8 * n), *acc[half][2 * n :][:2])
        with lanes.when(t == 0):
            lanes.store_shared(stats_s, (warp * 8 * s.halves + r) * 2, m[half], total)
    lanes.cta_barrier(s.threads)
    quads = s.head_dim // 4
    for start in range(0, s.rows * quads, s.threads):
        i = lanes.thread() + start
        with lanes.when(i < s.rows * quads):
            r, quad = i // quads, i % quads
            stats = [lanes.load_shared(stats_s, (r + w * 8 * s.halves) * 2, "f32", 2) for w in range(s.warps)]
            new_m = functools.reduce(lanes.maximum, [x for x, _ in stats])
            total, columns = lanes.f32(0.0), [lanes.f32(0.0)] * 4
            for w, (m_w, l_w) in enumerate(stats):
                weight = lanes.exp2(m_w - new_m)
                values = lanes.load_shared(ring_s, _spread(s, r, quad * 4) + w * of_warp, "f32", 4)
                total = total + weight * l_w
                columns = [x + weight * y for x, y in zip(columns, values, strict=True)]
            send(r, quad, new_m, total, columns)


def _spread(s: Shape, r, column):
    """Word of an output row's column: eights of columns exchanged by row, so that the rows of a group lie in different banks."""
    return r * s.head_dim + (column ^ ((r & 7) << 3))
