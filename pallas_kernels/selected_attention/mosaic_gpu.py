"""selected_attention in Pallas Mosaic GPU (Hopper): one launch, a cluster of CTAs per sequence and KV head.

The stages of `select_blocks` leave the same list in the shared memory of every CTA of the cluster; each warpgroup then folds its part of
the list (`gather_attention.tiles`), and the cluster merges the parts (`gather_attention.cluster_merge`). Two barriers of the cluster stand
where two launches would, and the list never passes through global memory.

Memory traffic: the candidates' index rows, the listed keys and values, the output and the list.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
from jax import lax

from pallas_kernels.gather_attention import listed
from pallas_kernels.gather_attention import mosaic_gpu as gather
from pallas_kernels.hopper import decode_tiles as tiles
from pallas_kernels.hopper import lanes
from pallas_kernels.select_blocks import mosaic_gpu as select


def unsupported(q, k, v, index, page_table, lengths, *, kind, block_size, budget, sink, local, sm_scale, config) -> str | None:
    """Why this valid input is none for this kernel, or None if it is one."""
    sizes = {"kind": kind, "page_size": k.shape[2], "block_size": block_size, "k": budget, "sink": sink, "local": local}
    rest = {"blocks": None, "block_size": block_size, "window": None, "sm_scale": sm_scale, "return_block_lse": False, "config": None}
    reason = select.unsupported(q, index, page_table, lengths, **sizes) or gather.unsupported(q, k, v, page_table, lengths, **rest)
    if reason:
        return reason
    chosen = select.shape_of(q, index, page_table, **sizes)
    return listed.unsupported(q, k, width=chosen.width, block_size=block_size, words=chosen.scratch_words())


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
    words = chosen.scratch_words()
    s = listed.shape_of(q, k, width=chosen.width, block_size=block_size, window=None, sm_scale=sm_scale, words=words)
    depth = listed.ring_words(s) // (chosen.threads // 32 * chosen.slot_words)  # a tile for each warpgroup holds a turn of index rows
    return _attend(dataclasses.replace(chosen, depth=min(3, depth)), s, q, k, v, index, page_table, lengths)


@functools.partial(jax.jit, static_argnames=("chosen", "s"))
def _attend(chosen: select.Shape, s: listed.Shape, q, k, v, index, page_table, lengths):
    def selected_kernel(q_ref, k_ref, v_ref, index_ref, table_ref, lengths_ref, out_ref, lse_ref, ids_ref, **scratch):
        unit, cta = lax.axis_index("unit"), lax.axis_index("cta")

        @lanes.stage(unit=unit, cta=cta)
        def choose(arrays, words, unit, cta):
            inputs, ids_ref = arrays
            select.select(chosen, unit, cta, inputs, words)
            select.store_list(chosen, unit, cta, ids_ref, words["ids_s"])
            lanes.publish_to_tensor_cores()  # the ring held index rows; TMA writes to it next
            listed.locate(s, unit, chosen.table_width, *inputs[2:], words)

        names = chosen.scratch_words() | listed.list_words(s)
        words = {name: scratch[name] for name in names} | {"ring_s": lanes.Swizzled(scratch["kv_s"], tiles.SWIZZLED)}
        choose(((q_ref, index_ref, table_ref, lengths_ref), ids_ref), words)
        listed.attend(s, unit, cta, scratch["ids_s"][s.width], (q_ref, k_ref, v_ref), (out_ref, lse_ref), scratch)

    out_type = [*listed.outputs(s), *select.outputs(chosen)]
    kernel = listed.launch(s, selected_kernel, out_type, chosen.scratch_words())
    return tuple(kernel(q, k, v, index, page_table, lengths))
