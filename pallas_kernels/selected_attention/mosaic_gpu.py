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
from pallas_kernels.selected_attention.api import Call


def unsupported(call: Call, q, pages, index, table, lengths) -> str | None:
    """Why this kernel cannot take this valid input, or None if it can."""
    sizes = call.selection(pages.page_size)
    attended = gather.Call(call.block_size, None, call.sm_scale, False, None)
    reason = select.unsupported(q, index, table, lengths, **sizes) or gather.unsupported(attended, q, pages, table, lengths, None)
    if reason:
        return reason
    chosen = select.shape_of(q, index, table, **sizes)
    return listed.unsupported(q, pages, width=chosen.width, block_size=call.block_size, words=chosen.scratch_words())


def selected_attention(call: Call, q, pages, index, table, lengths):
    """See `pallas_kernels.selected_attention.selected_attention`; takes no config."""
    reason = unsupported(call, q, pages, index, table, lengths)
    if reason:
        raise NotImplementedError(f"selected_attention 'mosaic_gpu': {reason}")
    chosen = select.shape_of(q, index, table, **call.selection(pages.page_size))
    words = chosen.scratch_words()
    sizes = {"width": chosen.width, "block_size": call.block_size, "window": None, "sm_scale": call.sm_scale}
    s = listed.shape_of(q, pages, **sizes, words=words)
    depth = listed.ring_words(s) // (chosen.threads // 32 * chosen.slot_words)  # a tile for each warpgroup holds a turn of index rows
    return _attend(dataclasses.replace(chosen, depth=min(3, depth)), s, q, pages, index, table, lengths)


@functools.partial(jax.jit, static_argnames=("chosen", "s"))
def _attend(chosen: select.Shape, s: listed.Shape, q, pages, index, table, lengths):
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
    return tuple(kernel(q, pages.k, pages.v, index, table, lengths))
