"""Merging the partial attentions of a cluster's CTAs through distributed shared memory, in order of their numbers.

Each CTA owns some columns of the output. Every CTA sends each owner its columns and all of them its (m, l); after one barrier of the
cluster each owner merges what it received. The formula is `pallas_kernels.merge`'s.
"""

from __future__ import annotations

import functools

from pallas_kernels import lanes
from pallas_kernels.gather_attention.warps import LOG2E, Shape


def columns(s: Shape) -> int:
    """Columns of the output that a CTA owns (the last one perhaps fewer)."""
    return -(-s.head_dim // (4 * s.ctas)) * 4


def words(s: Shape) -> tuple[int, int]:
    """Words of shared memory for what a CTA receives: columns of all CTAs' outputs, and their (m, l)."""
    return s.ctas * s.rows * columns(s), s.ctas * s.rows * 2


def send(s: Shape, cta, parts_s, stats_s, r, quad, m, l, values) -> None:
    """One row's four columns from 4 * quad on to their owner; the first quads also carry (m, l), one to each CTA."""
    column = quad * 4
    at = cta * s.rows + r
    lanes.store_cluster(column // columns(s), parts_s, at * columns(s) + column % columns(s), *values)
    quads = s.head_dim // 4
    for first in range(0, s.ctas, quads):
        with lanes.when(quad + first < s.ctas):
            lanes.store_cluster(quad + first, stats_s, at * 2, m, l)


def merge_and_store(s: Shape, row, head, cta, parts_s, stats_s, out_ref, lse_ref) -> None:
    """Once all have sent: write the columns this CTA owns, two of a row per thread and turn, and (the first CTA) the LSE."""
    pairs = columns(s) // 2
    for start in range(0, s.rows * pairs, s.threads):
        i = lanes.thread() + start
        r, pair = i // pairs, i % pairs
        column = cta * columns(s) + pair * 2
        with lanes.when((i < s.rows * pairs) & (column < s.head_dim)):
            stats = [lanes.load_shared(stats_s, (r + c * s.rows) * 2, "f32", 2) for c in range(s.ctas)]
            m = functools.reduce(lanes.maximum, [x for x, _ in stats])
            total, low, high = (lanes.f32(0.0) for _ in range(3))
            for c, (m_c, l_c) in enumerate(stats):
                weight = lanes.exp2(m_c - m)
                a, b = lanes.load_shared(parts_s, (r + c * s.rows) * columns(s) + pair * 2, "f32", 2)
                total, low, high = total + weight * l_c, low + weight * a, high + weight * b
            nothing = total == 0.0
            scale = lanes.f32(1.0) / lanes.where(nothing, 1.0, total)
            at = (row * s.num_queries + r // s.group) * s.num_heads + head * s.group + r % s.group
            lanes.store_global(out_ref, (at * s.head_dim + column) // 2, lanes.pack(low * scale, high * scale, s.dtype))
            with lanes.when((cta == 0) & (pair == 0)):
                lse = (m + lanes.log2(lanes.where(nothing, 1.0, total))) * (1.0 / LOG2E)
                lanes.store_global(lse_ref, at, lanes.where(nothing, float("-inf"), lse))
