"""selected_attention in Pallas Mosaic GPU (Hopper): one launch, a cluster of CTAs per sequence and KV head.

The stages of `select_blocks` leave the same list in the shared memory of every CTA of the cluster; then each warp folds its slices of
the list (`gather_attention.warps`), and the CTAs of the cluster merge what they have (`gather_attention.cluster_merge`). Two barriers of
the cluster stand where two launches would, and the list never passes through global memory.

Memory traffic: the candidates' index rows, the listed keys and values, the output and the list.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import lanes
from pallas_kernels.gather_attention import listed
from pallas_kernels.select_blocks import mosaic_gpu as select


def unsupported(q, k, v, index, page_table, lengths, *, kind, block_size, budget, sink, local, sm_scale, config) -> str | None:
    """Why this valid input is none for this kernel, or None if it is one."""
    sizes = {"kind": kind, "page_size": k.shape[2], "block_size": block_size, "k": budget, "sink": sink, "local": local}
    return select.unsupported(q, index, page_table, lengths, **sizes) or listed.unsupported(q, k, block_size=block_size)


def selected_attention(q, k, v, index, page_table, lengths, *, kind, block_size, budget, sink, local, sm_scale, config):
    """See `pallas_kernels.selected_attention.selected_attention`; takes no config."""
    if config is not None:
        raise ValueError(f"implementation 'mosaic_gpu' of selected_attention takes no config, got {config!r}")
    static = {"kind": kind, "block_size": block_size, "budget": budget, "sink": sink, "local": local, "sm_scale": sm_scale}
    reason = unsupported(q, k, v, index, page_table, lengths, **static, config=config)
    if reason:
        raise NotImplementedError(f"selected_attention 'mosaic_gpu': {reason}")
    sizes = {"kind": kind, "page_size": k.shape[2], "block_size": block_size, "k": budget, "sink": sink, "local": local}
    chosen = select.shape_of(q, index, page_table, **sizes)
    s = listed.shape_of(
        q, k, page_table, width=chosen.width, block_size=block_size, window=None, sm_scale=sm_scale, other_words=chosen.scratch_words()
    )
    depth = max(1, min(listed.MOST_DEPTH, s.ring_words // (s.warps * chosen.slot_words)))
    return _attend(dataclasses.replace(chosen, depth=depth), s, q, k, v, index, page_table, lengths)


@functools.partial(jax.jit, static_argnames=("chosen", "s"))
def _attend(chosen: select.Shape, s: listed.Shape, q, k, v, index, page_table, lengths):
    lanes.check_version()
    ring = max(s.ring_words, s.warps * chosen.depth * chosen.slot_words)
    sizes = listed.scratch_words(s) | chosen.scratch_words() | {"ring_s": ring}

    def selected_kernel(q_ref, k_ref, v_ref, index_ref, table_ref, lengths_ref, out_ref, lse_ref, ids_ref, *scratch):
        @lanes.stage(unit=lax.axis_index("unit"), cta=lax.axis_index("cta"))
        def run(arrays, scratch, unit, cta):
            q_ref, k_ref, v_ref, index_ref, table_ref, lengths_ref, out_ref, lse_ref, ids_ref = arrays
            select.select(chosen, unit, cta, q_ref, index_ref, table_ref, lengths_ref, scratch)
            select.store_list(chosen, unit, cta, ids_ref, scratch["ids_s"])
            number = lanes.load_shared(scratch["ids_s"], s.width)[0]
            listed.attend(s, unit, cta, number, (q_ref, k_ref, v_ref, table_ref, lengths_ref), (out_ref, lse_ref), scratch)

        arrays = (q_ref, k_ref, v_ref, index_ref, table_ref, lengths_ref, out_ref, lse_ref, ids_ref)
        run(arrays, dict(zip(sizes, scratch, strict=True)))

    rows = (s.batch, s.num_queries, s.num_heads)
    return plgpu.kernel(
        selected_kernel,
        out_type=[
            jax.ShapeDtypeStruct((*rows, s.head_dim), q.dtype),
            jax.ShapeDtypeStruct(rows, jnp.float32),
            jax.ShapeDtypeStruct((s.batch, s.num_kv_heads, s.width), jnp.int32),
        ],
        grid=(s.batch * s.num_kv_heads,),
        grid_names=("unit",),
        cluster=(s.ctas,),
        cluster_names=("cta",),
        num_threads=s.threads // 128,
        thread_name="warpgroup",
        scratch_types=[plgpu.SMEM((n,), jnp.int32) for n in sizes.values()],
    )(q, k, v, index, page_table, lengths)
