"""Attention over a list by one cluster per (row, KV head), in one launch: `warps`, then `cluster_merge`."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import clusters, lanes
from pallas_kernels.gather_attention import cluster_merge, warps
from pallas_kernels.gather_attention.warps import Shape

THREADS = 256
MOST_DEPTH = 3


def unsupported(q, k, *, block_size) -> str | None:
    """Why this call is none for this form of the kernel, or None."""
    rows = q.shape[1] * q.shape[2] // k.shape[1]
    if rows > warps.MOST_ROWS:
        return f"T * G must be at most {warps.MOST_ROWS} in one launch, got {rows}"
    if q.dtype != k.dtype or q.dtype.name not in ("bfloat16", "float16"):
        return f"it multiplies bfloat16 or float16, q and k alike; got q {q.dtype}, k {k.dtype}"
    if q.shape[3] not in (64, 128, 256):
        return f"the head dim must be 64, 128 or 256, got {q.shape[3]}"
    if block_size % warps.SLICE:
        return f"block_size must be a multiple of {warps.SLICE}, got {block_size}"
    return None


def shape_of(q, k, page_table, *, width: int, block_size: int, window, sm_scale: float, other_words: dict[str, int] | None = None) -> Shape:
    """The sizes of a call. other_words: shared memory that other stages of the same kernel take."""
    batch, num_queries, num_heads, head_dim = q.shape
    _, num_kv_heads, page_size, _ = k.shape
    ctas = clusters.ctas_per_unit(batch * num_kv_heads)
    tokens = (page_size, block_size, page_table.shape[1], width)
    s = Shape(batch, num_queries, num_heads, num_kv_heads, head_dim, *tokens, window, sm_scale, q.dtype.name, ctas, THREADS, depth=1)
    taken = sum((scratch_words(s) | (other_words or {})).values()) - s.ring_words
    depth = min(MOST_DEPTH, (lanes.SHARED_WORDS - taken) // s.ring_words)
    return Shape(batch, num_queries, num_heads, num_kv_heads, head_dim, *tokens, window, sm_scale, q.dtype.name, ctas, THREADS, depth=depth)


def scratch_words(s: Shape) -> dict[str, int]:
    """Words of shared memory: slices in flight, (m, l) of the CTA's warps, what the other CTAs send, the list and its length."""
    parts, stats = cluster_merge.words(s)
    return {
        "ring_s": s.ring_words,
        "warp_stats_s": s.warps * 16 * s.halves,
        "parts_s": parts,
        "stats_s": stats,
        "ids_s": s.width + 1,
    }


def attend(s: Shape, unit, cta, number, inputs, outputs, scratch) -> None:
    """By all threads of all CTAs of a cluster: attention over the first `number` entries of the list in `scratch["ids_s"]`.

    inputs: q, k, v, page table, lengths. outputs: out `[B, T, H, D]`, lse `[B, T, H]`. Ends with everything written.
    """
    q_ref, k_ref, v_ref, table_ref, lengths_ref = inputs
    row, head = unit // s.num_kv_heads, unit % s.num_kv_heads
    length = lanes.load_global(lengths_ref, row)
    ids_s, ring_s, parts_s, stats_s = (scratch[f"{name}_s"] for name in ("ids", "ring", "parts", "stats"))
    partial = warps.fold(s, k_ref, v_ref, table_ref, q_ref, row, head, length, number, ids_s, ring_s, cta)
    send = functools.partial(cluster_merge.send, s, cta, parts_s, stats_s)
    warps.merge_warps(s, partial, ring_s, scratch["warp_stats_s"], send)
    lanes.cluster_barrier() if s.ctas > 1 else lanes.cta_barrier(s.threads)
    cluster_merge.merge_and_store(s, row, head, cta, parts_s, stats_s, *outputs)


@functools.partial(jax.jit, static_argnames="s")
def attend_listed(s: Shape, q, k, v, page_table, lengths, blocks):
    """`attend` as a kernel of its own, over the lists `blocks` `[B, K, W]`."""
    lanes.check_version()
    sizes = scratch_words(s)

    def listed_kernel(q_ref, k_ref, v_ref, table_ref, lengths_ref, blocks_ref, out_ref, lse_ref, *scratch):
        @lanes.stage(unit=lax.axis_index("unit"), cta=lax.axis_index("cta"))
        def run(arrays, scratch, unit, cta):
            blocks_ref, inputs, outputs = arrays
            for start in range(0, s.width, s.threads):
                i = lanes.thread() + start
                with lanes.when(i < s.width):
                    lanes.store_shared(scratch["ids_s"], i, lanes.load_global(blocks_ref, unit * s.width + i))
            lanes.cta_barrier(s.threads)
            attend(s, unit, cta, lanes.i32(s.width), inputs, outputs, scratch)

        arrays = (blocks_ref, (q_ref, k_ref, v_ref, table_ref, lengths_ref), (out_ref, lse_ref))
        run(arrays, dict(zip(sizes, scratch, strict=True)))

    rows = (s.batch, s.num_queries, s.num_heads)
    return plgpu.kernel(
        listed_kernel,
        out_type=[jax.ShapeDtypeStruct((*rows, s.head_dim), q.dtype), jax.ShapeDtypeStruct(rows, jnp.float32)],
        grid=(s.batch * s.num_kv_heads,),
        grid_names=("unit",),
        cluster=(s.ctas,),
        cluster_names=("cta",),
        num_threads=s.threads // 128,
        thread_name="warpgroup",
        scratch_types=[plgpu.SMEM((n,), jnp.int32) for n in sizes.values()],
    )(q, k, v, page_table, lengths, blocks)
