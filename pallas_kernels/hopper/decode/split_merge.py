"""Partial attentions of the spans of a (row, KV head) through global memory: what a span writes, and the launch that
merges spans in order.

A span writes its normalised output and LSE, float32, only for the T*G valid rows. With one span, that is the result. Of
a span whose LSE is -inf the output is not read, except that of the first span, which must be finite.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.hopper.decode.wgmma_fold import LAYOUT, LOG2E, Shape
from pallas_kernels.hopper.threads import lane_math, lane_pairs, lanes

THREADS = 128
SCALAR, REF = plgpu.Layout.WG_SPLAT(()), plgpu.RefType()


def outputs(s: Shape) -> list[jax.ShapeDtypeStruct]:
    """What the spans write: `[B, K, splits, T*G, D]` and `[B, K, splits, T*G]`, or with one span out `[B, T, H, D]` and
    lse `[B, T, H]`."""
    if s.splits == 1:
        final = (s.batch, s.num_queries, s.num_heads)
        return [jax.ShapeDtypeStruct((*final, s.head_dim), s.dtype), jax.ShapeDtypeStruct(final, jnp.float32)]
    parts = (s.batch, s.num_kv_heads, s.splits, s.num_queries * s.group)
    return [jax.ShapeDtypeStruct((*parts, s.head_dim), jnp.float32), jax.ShapeDtypeStruct(parts, jnp.float32)]


def store(s: Shape, folded, row, head, split, out_ref, lse_ref) -> None:
    """By a span's warpgroups, one for each query tile: write the results of `tiles.fold`."""
    types = ((LAYOUT, LAYOUT.reduce(1), LAYOUT.reduce(1)), SCALAR, SCALAR, SCALAR, REF, REF)

    @plgpu.inline_mgpu(arg_types=types)
    def stage(_, folded, row, head, split, out_ref, lse_ref):
        row, head, split = (lanes.of_splat(x) for x in (row, head, split))
        acc, m, total = (x.registers.reshape(-1) for x in folded)  # per lane: acc by 8 columns, then by row half; pairs of columns
        lane = lanes.lane()
        g, t = lane >> 2, lane & 3
        for half in range(2):
            r = (lanes.warp() << 4) + (g + 8 * half)
            with lanes.when(r < s.num_queries * s.group):
                (m_r,), (total_r,) = (lanes.elements(x[half], 1) for x in (m, total))
                nothing = total_r == 0.0
                scale = lanes.f32(1.0) / lanes.where(nothing, 1.0, total_r)
                lse = lanes.where(nothing, float("-inf"), (m_r + lanes.log2(lanes.where(nothing, 1.0, total_r))) * (1.0 / LOG2E))
                if s.splits == 1:
                    at = (row * s.num_queries + r // s.group) * s.num_heads + head * s.group + r % s.group
                else:
                    at = ((row * s.num_kv_heads + head) * s.splits + split) * (s.num_queries * s.group) + r
                for j in range(s.head_dim // 8):
                    pair = [x * scale for x in lanes.elements(acc[2 * j + half], 2)]
                    offset = at * s.head_dim + t * 2 + 8 * j
                    if s.splits == 1:
                        lanes.store_global(out_ref, offset // 2, lane_pairs.pack(*pair, s.dtype.name))
                    else:
                        lanes.store_global(out_ref, offset, *pair)
                with lanes.when(t == 0):
                    lanes.store_global(lse_ref, at, lse)

    stage(folded, row, head, split, out_ref, lse_ref)


def merge(s: Shape, out, lse):
    """Merge the parts of all spans: out `[B, T, H, D]` in the storage type, lse `[B, T, H]`. A CTA per query row; the
    formula is that of `pallas_kernels.core.merge`. Parts whose LSE is -inf need not have been written, except the
    first."""
    quads, rows = s.head_dim // 4, s.num_queries * s.group
    strands = THREADS // quads

    def merge_kernel(out_ref, lse_ref, merged_ref, merged_lse_ref, sums_s):
        @lanes.stage(unit=lax.axis_index("unit"), r=lax.axis_index("row"))
        def run(arrays, sums_s, unit, r):
            out_ref, lse_ref, merged_ref, merged_lse_ref = arrays
            quad, strand = lanes.thread() % quads, lanes.thread() // quads
            found = [lanes.load_global(lse_ref, (unit * s.splits + n) * rows + r, "f32") for n in range(s.splits)]
            m = functools.reduce(lanes.maximum, found)
            m = lanes.where(m == float("-inf"), 0.0, m)
            total, columns = lanes.f32(0.0), [lanes.f32(0.0)] * 4
            for x in found:
                total = total + lane_math.exp2((x - m) * LOG2E)
            for first in range(0, s.splits, strands):
                n = lanes.minimum(strand + first, s.splits - 1)
                at = (unit * s.splits + n) * rows + r
                lse = lanes.load_global(lse_ref, at, "f32")
                at = lanes.where(lse == float("-inf"), unit * s.splits * rows + r, at)
                values = lanes.load_global_16_bytes(out_ref, (at * quads + quad) * 16)
                weight = lanes.where(strand + first < s.splits, lane_math.exp2((lse - m) * LOG2E), 0.0)
                columns = [c + weight * lanes.bits(x) for c, x in zip(columns, values, strict=True)]
            lanes.store_shared(sums_s, lanes.thread() * 4, *columns)
            lanes.cta_barrier(THREADS)
            with lanes.when(strand == 0):
                columns = [lanes.load_shared(sums_s, (n * quads + quad) * 4, "f32", 4) for n in range(strands)]
                nothing = total == 0.0
                scale = lanes.f32(1.0) / lanes.where(nothing, 1.0, total)
                merged = [functools.reduce(lambda a, b: a + b, [c[i] for c in columns]) * scale for i in range(4)]
                row, head = unit // s.num_kv_heads, unit % s.num_kv_heads
                at = (row * s.num_queries + r // s.group) * s.num_heads + head * s.group + r % s.group
                words = [lane_pairs.pack(*merged[i : i + 2], s.dtype.name) for i in (0, 2)]
                lanes.store_global(merged_ref, at * (s.head_dim // 2) + quad * 2, *words)
                with lanes.when(quad == 0):
                    lse = m + lanes.log2(lanes.where(nothing, 1.0, total)) * (1.0 / LOG2E)
                    lanes.store_global(merged_lse_ref, at, lanes.where(nothing, float("-inf"), lse))

        run((out_ref, lse_ref, merged_ref, merged_lse_ref), sums_s)

    final = (s.batch, s.num_queries, s.num_heads)
    return plgpu.kernel(
        merge_kernel,
        out_type=[jax.ShapeDtypeStruct((*final, s.head_dim), s.dtype), jax.ShapeDtypeStruct(final, jnp.float32)],
        grid=(s.batch * s.num_kv_heads, rows),
        grid_names=("unit", "row"),
        scratch_types=[plgpu.SMEM((THREADS * 4,), jnp.float32)],
    )(out, lse)
