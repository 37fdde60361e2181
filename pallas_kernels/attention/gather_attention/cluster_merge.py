"""Merging the partial attentions of a cluster through distributed shared memory, in order of their numbers.

Each CTA owns some columns of the output. Every part (a warpgroup's, or a CTA's with `decode_fold`) sends each owner its
columns, and sends its maximum and sum to all. After one barrier of the cluster, each owner merges what it received. The
formula is that of `pallas_kernels.core.merge`.
"""

from __future__ import annotations

import functools

from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.hopper.decode.wgmma_fold import LAYOUT, LOG2E, Shape
from pallas_kernels.hopper.threads import lane_math, lane_pairs, lanes

SCALAR, REF = plgpu.Layout.WG_SPLAT(()), plgpu.RefType()


def columns(s: Shape) -> int:
    """Columns of the output that a CTA owns: an even number (the last CTAs may own fewer)."""
    return -(-s.head_dim // (2 * s.splits)) * 2


def words(s: Shape) -> dict[str, int]:
    """Words of shared memory for what a CTA receives: its columns of all partial outputs of the cluster, and their
    maxima and sums."""
    received = s.parts * s.rows
    return {"parts_s": received * columns(s), "stats_s": received * 2}


def merge_and_store(s: Shape, folded, place, parts_s, stats_s, out_ref, lse_ref) -> None:
    """By all threads of all CTAs of a cluster: merge the results of `tiles.fold`, and write out `[B, T, H, D]` and lse
    `[B, T, H]`.

    place: (row, KV head, CTA in the cluster, warpgroup in the CTA).
    """
    types = ((LAYOUT, LAYOUT.reduce(1), LAYOUT.reduce(1)), (SCALAR,) * 4, REF, REF, REF, REF)

    @plgpu.inline_mgpu(arg_types=types)
    def stage(_, folded, place, parts_s, stats_s, out_ref, lse_ref):
        row, head, cta, warpgroup = map(lanes.of_splat, place)
        _send(s, folded, cta * s.warpgroups + warpgroup, parts_s, stats_s)
        merge_sent(s, row, head, cta, parts_s, stats_s, out_ref, lse_ref)

    stage(folded, place, parts_s, stats_s, out_ref, lse_ref)


def _send(s: Shape, folded, worker, parts_s, stats_s) -> None:
    acc, m, total = (x.registers.reshape(-1) for x in folded)  # per lane: acc by 8 columns, then by row half; pairs of columns
    lane = lanes.lane()
    g, t = lane >> 2, lane & 3
    for half in range(min(2, s.rows // 8)):
        row = ((lanes.warp() & 3) << 4) + (g + 8 * half)
        with lanes.when(row < s.rows):
            base = worker * s.rows + row
            for j in range(s.head_dim // 8):
                column = t * 2 + 8 * j
                at = base * columns(s) + column % columns(s)
                lanes.store_cluster(column // columns(s), parts_s, at, *lanes.elements(acc[2 * j + half], 2))
            stats = [lanes.elements(x[half], 1)[0] for x in (m, total)]
            for first in range(0, s.splits, 4):
                with lanes.when(t + first < s.splits):
                    lanes.store_cluster(t + first, stats_s, base * 2, *stats)


def merge_sent(s: Shape, row, head, cta, parts_s, stats_s, out_ref, lse_ref) -> None:
    """By all threads of the cluster, when all have sent. Two columns of one row per thread and iteration."""
    lanes.cluster_barrier() if s.splits > 1 else lanes.cta_barrier(s.warpgroups * 128)
    threads, pairs = s.warpgroups * 128, columns(s) // 2
    rows = s.num_queries * s.group
    for start in range(0, rows * pairs, threads):
        i = lanes.thread() + start
        r, pair = i // pairs, i % pairs
        column = cta * columns(s) + pair * 2
        with lanes.when((i < rows * pairs) & (column < s.head_dim)):
            numbers = [r + w * s.rows for w in range(s.parts)]
            stats = [lanes.load_shared(stats_s, n * 2, "f32", 2) for n in numbers]
            m = functools.reduce(lanes.maximum, [x for x, _ in stats])
            total, low, high = (lanes.f32(0.0) for _ in range(3))
            for n, (m_n, l_n) in zip(numbers, stats, strict=True):
                weight = lane_math.exp2(m_n - m)
                a, b = lanes.load_shared(parts_s, n * columns(s) + pair * 2, "f32", 2)
                total, low, high = total + weight * l_n, low + weight * a, high + weight * b
            nothing = total == 0.0
            scale = lanes.f32(1.0) / lanes.where(nothing, 1.0, total)
            at = (row * s.num_queries + r // s.group) * s.num_heads + head * s.group + r % s.group
            lanes.store_global(out_ref, (at * s.head_dim + column) // 2, lane_pairs.pack(low * scale, high * scale, s.dtype.name))
            with lanes.when((cta == 0) & (pair == 0)):
                lse = (m + lanes.log2(lanes.where(nothing, 1.0, total))) * (1.0 / LOG2E)
                lanes.store_global(lse_ref, at, lanes.where(nothing, float("-inf"), lse))
