"""selected_attention in Pallas Mosaic GPU (Hopper): one launch, a cluster of CTAs per query and KV head.

The stages of `select_blocks` write the same list to the shared memory of every CTA of the cluster. Then each warpgroup
folds its part of the list (`hopper.decode.wgmma_fold`), and the cluster merges the parts
(`gather_attention.cluster_merge`). Two barriers of the cluster replace the boundaries between launches, and the list
never passes through global memory.

Packed pages are folded by `hopper.decode.decode_fold`, in the same launch. So are, on every GPU, lists that are chosen
from a shortlist (`refined`). There queries come to shared memory while the first index rows do, so that attention does
not wait for them. (With `wgmma` that gained nothing, and batches were slower.)

The T queries of a sequence are T rows that share its page table. Each has its own list and cluster, so a drafted step
gives by construction what steps of one token would. Blocks that several queries list are read by each of them, after
the first time mostly from the L2 cache.

Memory traffic, per query: the candidates' index rows, the codes or keys of a shortlist, the listed keys and values,
output and list.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
from jax import lax

from pallas_kernels.attention.gather_attention import listed, mma
from pallas_kernels.attention.gather_attention import mosaic_gpu as gather
from pallas_kernels.attention.selected_attention import refined
from pallas_kernels.attention.selected_attention.api import Call
from pallas_kernels.hopper.decode import decode_fold, index_scores
from pallas_kernels.hopper.decode import wgmma_fold as tiles
from pallas_kernels.hopper.decode.index_scores import CodedKeys
from pallas_kernels.hopper.decode.key_scores import PageKeys
from pallas_kernels.hopper.threads import lanes
from pallas_kernels.selection.select_blocks import mosaic_gpu as select


def unsupported(call: Call, q, pages, index, table, lengths, frames, codes) -> str | None:
    """Why this kernel cannot take this valid input, or None if it can."""
    chosen_by = call.selection(pages.page_size)
    attended = gather.Call(call.block_size, None, call.sm_scale, False, None)
    rows = _rows(q)
    reason = select.unsupported(chosen_by, q, index, table, lengths) or gather.unsupported(attended, rows, pages, table, lengths, None)
    if reason:
        return reason
    chosen = select.shape_of(chosen_by, q, index, table)
    if call.refines:
        return _not_refined(call, q, pages, chosen, frames)
    sizes = {"width": chosen.width, "block_size": call.block_size, "words": chosen.scratch_words()}
    if gather.multiplies_by_wgmma(pages):
        return listed.unsupported(rows, pages, **sizes)
    if reason := mma.unsupported_list(rows, pages, **sizes):
        return reason
    s = mma.list_shape(rows, pages, **sizes, window=None, sm_scale=call.sm_scale)
    if reason := _no_index_row(chosen, s):
        return reason
    return select.too_many_blocks(dataclasses.replace(chosen, threads=s.threads))


def _no_index_row(chosen: select.Shape, s: decode_fold.Shape) -> str | None:
    """Why the rings of keys, in which index rows arrive first, cannot hold a key tile of them, or None if they can."""
    if dataclasses.replace(chosen, threads=s.threads).with_ring(s.scratch_words()["ring_s"]).depth:
        return None
    return f"the keys of a warp have no room for {chosen.slot_words} words of index rows"


def _not_refined(call: Call, q, pages, chosen: select.Shape, frames) -> str | None:
    """Why a list cannot be chosen from a shortlist by one launch, or None if it can."""
    rows = _rows(q)
    unread = None if call.codes_kind is None else index_scores.unsupported(call.codes_kind, q.shape[3])
    if reason := unread or listed.unsupported_rows(rows, pages, call.block_size):
        return reason
    r = _refined_shape(call, q, pages, chosen, frames)
    if r.attend.stages == 0:
        return f"a shortlist of {call.shortlist} blocks and the selection leave no shared memory for keys of head dim {q.shape[3]}"
    if reason := _no_index_row(chosen, r.attend):
        return reason
    return select.too_many_blocks(dataclasses.replace(chosen, threads=r.attend.threads))


def _refined_shape(call: Call, q, pages, chosen: select.Shape, frames) -> refined.Shape:
    """The sizes of a call with a shortlist. The `stages` of its `attend` are 0 if shared memory cannot hold one."""
    sizes = {"width": chosen.width, "block_size": call.block_size, "window": None, "sm_scale": call.sm_scale}
    # Only codes are found by page id.
    of_list = call.shortlist, call.budget, call.width(pages.page_size), frames is not None and call.codes_kind is not None

    def shape(words: dict[str, int]) -> refined.Shape:
        attend = mma.list_shape(_rows(q), pages, **sizes, words=words)
        keys = PageKeys(attend) if call.codes_kind is None else CodedKeys(call.codes_kind, call.block_size, q.shape[3])
        return refined.Shape(attend, keys, *of_list)

    return shape(shape({}).scratch_beside(chosen))


def _rows(q) -> jax.ShapeDtypeStruct:
    """Every query as a row of its own: `[B*T, 1, H, D]`, shape and dtype."""
    return jax.ShapeDtypeStruct((q.shape[0] * q.shape[1], 1, *q.shape[2:]), q.dtype)


def selected_attention(call: Call, q, pages, index, table, lengths, frames, codes):
    """See `pallas_kernels.selected_attention`; takes no config."""
    reason = unsupported(call, q, pages, index, table, lengths, frames, codes)
    if reason:
        raise NotImplementedError(f"selected_attention 'mosaic_gpu': {reason}")
    chosen, s, attend = _form(call, q, pages, index, table, frames, codes)
    return attend(chosen, s, q, pages, index, (table,) if frames is None else (table, frames), lengths)


def _form(call: Call, q, pages, index, table, frames, codes):
    """The sizes of the choice and of what attends, and the function that launches both, of a call that is supported."""
    chosen = select.shape_of(call.selection(pages.page_size), q, index, table)
    words = chosen.scratch_words()
    sizes = {"width": chosen.width, "block_size": call.block_size, "window": None, "sm_scale": call.sm_scale}
    if call.refines:
        s = _refined_shape(call, q, pages, chosen, frames)
        ring, attend = s.attend.scratch_words()["ring_s"], functools.partial(_attend_refined, codes=codes)
        chosen = dataclasses.replace(chosen, threads=s.attend.threads)
    elif gather.multiplies_by_wgmma(pages):
        s = listed.shape_of(_rows(q), pages, **sizes, words=words)
        ring, attend = listed.ring_words(s), _attend
    else:
        s = mma.list_shape(_rows(q), pages, **sizes, words=words)
        ring, attend = s.scratch_words()["ring_s"], _attend_key_tiles
        chosen = dataclasses.replace(chosen, threads=s.threads)
    return chosen.with_ring(ring), s, attend


def scratch_of_key_tiles(chosen: select.Shape, s: decode_fold.Shape | refined.Shape) -> dict[str, int]:
    """Words of shared memory of a kernel without `wgmma`, array by array."""
    if isinstance(s, refined.Shape):
        return mma.list_scratch(s.attend, s.scratch_beside(chosen))
    return mma.list_scratch(s, chosen.scratch_words())


@functools.partial(jax.jit, static_argnames=("chosen", "s"))
def _attend(chosen: select.Shape, s: listed.Shape, q, pages, index, tables, lengths):
    """tables: of page ids and of frames, or the one table that is both."""

    def selected_kernel(q_ref, k_ref, v_ref, index_ref, lengths_ref, *refs, **scratch):
        table_refs, (out_ref, lse_ref, ids_ref) = refs[: len(tables)], refs[len(tables) :]
        unit, cta = lax.axis_index("unit"), lax.axis_index("cta")

        @lanes.stage(unit=unit, cta=cta)
        def choose(arrays, words, unit, cta):
            (q_ref, index_ref, lengths_ref), table_refs, ids_ref = arrays
            select.select(chosen, unit, cta, (q_ref, index_ref, table_refs[0], lengths_ref), words)
            select.store_list(chosen, unit, cta, ids_ref, words["ids_s"])
            lanes.publish_to_tensor_cores()  # the ring held index rows; next, TMA writes to it
            row = unit // s.num_kv_heads
            length = select.tokens_seen(chosen.num_queries, lengths_ref, row)
            listed.locate(s, length, table_refs[-1], row // chosen.num_queries, chosen.table_width, words)

        names = chosen.scratch_words() | listed.list_words(s)
        words = {name: scratch[name] for name in names} | {"ring_s": lanes.Swizzled(scratch["kv_s"], tiles.SWIZZLED)}
        choose(((q_ref, index_ref, lengths_ref), table_refs, ids_ref), words)
        listed.attend(s, unit, cta, scratch["ids_s"][s.width], (q_ref, k_ref, v_ref), (out_ref, lse_ref), scratch)

    out_type = [*listed.outputs(s), *select.outputs(chosen)]
    kernel = listed.launch(s, selected_kernel, out_type, listed.scratch(s, chosen.scratch_words()), **listed.APPROXIMATE)
    out, lse, ids = kernel(q.reshape(_rows(q).shape), pages.k, pages.v, index, lengths, *tables)
    return out.reshape(q.shape), lse.reshape(q.shape[:3]), ids


@functools.partial(jax.jit, static_argnames=("chosen", "s"))
def _attend_key_tiles(chosen: select.Shape, s: decode_fold.Shape, q, pages, index, tables, lengths):
    """`_attend` without `wgmma`, and over packed pages: all of it is one stage of single threads."""
    words, pool = scratch_of_key_tiles(chosen, s), mma.arrays_of(pages)

    def selected_kernel(*refs):
        refs, scratch = refs[: -len(words)], refs[-len(words) :]

        @lanes.stage(unit=lax.axis_index("unit"), cta=lax.axis_index("cta"))
        def run(arrays, scratch, unit, cta):
            (q_ref, *pools), (index_ref, lengths_ref, *table_refs) = arrays[: 1 + len(pool)], arrays[1 + len(pool) : -3]
            *outputs, ids_ref = arrays[-3:]
            queries = mma.queries_of(s, unit, q_ref, scratch)
            select.select(chosen, unit, cta, (q_ref, index_ref, table_refs[0], lengths_ref), scratch, queries)
            select.store_list(chosen, unit, cta, ids_ref, scratch["ids_s"])
            row = unit // s.num_kv_heads
            length = select.tokens_seen(chosen.num_queries, lengths_ref, row)
            listed.locate(s, length, table_refs[-1], row // chosen.num_queries, chosen.table_width, scratch)
            (number,) = lanes.load_shared(scratch["ids_s"], s.width)
            mma.attend(s, unit, cta, number, pools, outputs, scratch)

        run(refs, dict(zip(words, scratch, strict=True)))

    out_type = [*listed.outputs(s), *select.outputs(chosen)]
    kernel = listed.launch(s, selected_kernel, out_type, mma.scratch_types(words))
    out, lse, ids = kernel(q.reshape(_rows(q).shape), *pool, index, lengths, *tables)
    return out.reshape(q.shape), lse.reshape(q.shape[:3]), ids


@functools.partial(jax.jit, static_argnames=("chosen", "r"))
def _attend_refined(chosen: select.Shape, r: refined.Shape, q, pages, index, tables, lengths, codes):
    """`_attend` of the best of a shortlist: one stage of single threads, too. codes: None: keys of the shortlist are
    those of pages."""
    s, pool = r.attend, mma.arrays_of(pages)
    index_of_keys = [] if codes is None else [codes]
    words = scratch_of_key_tiles(chosen, r)

    def refined_kernel(*refs):
        refs, scratch = refs[: -len(words)], refs[-len(words) :]

        @lanes.stage(unit=lax.axis_index("unit"), cta=lax.axis_index("cta"))
        def run(arrays, scratch, unit, cta):
            *codes_ref, q_ref = arrays[: len(index_of_keys) + 1]
            rest = arrays[len(index_of_keys) + 1 : -3]
            of_pages, (index_ref, lengths_ref, *table_refs) = rest[: len(pool)], rest[len(pool) :]
            inputs = codes_ref[0] if codes_ref else None, *of_pages
            queries = functools.partial(refined.load_queries, r, unit, q_ref, scratch)
            parts = select.select(chosen, unit, cta, (q_ref, index_ref, table_refs[0], lengths_ref), scratch, queries)
            row = unit // s.num_kv_heads
            length = select.tokens_seen(chosen.num_queries, lengths_ref, row)
            names = ("page_ids_s", "pages_s") if r.framed else ("pages_s",)
            for table_ref, name in zip(table_refs[-len(names) :], names, strict=True):
                places = {"ids_s": scratch["ids_s"], "pages_s": scratch[name]}
                listed.locate(s, length, table_ref, row // chosen.num_queries, chosen.table_width, places)
            refined.attend(r, unit, cta, parts, inputs, arrays[-3:], scratch)

        arrays = dict(zip(words, scratch, strict=True))
        run(refs, arrays | {"survivors_s": arrays["codes_s"]})

    lists = jax.ShapeDtypeStruct((*q.shape[:2], s.num_kv_heads, r.width), "int32")
    kernel = listed.launch(s, refined_kernel, [*listed.outputs(s), lists], mma.scratch_types(words))
    out, lse, ids = kernel(*index_of_keys, q.reshape(_rows(q).shape), *pool, index, lengths, *tables)
    return out.reshape(q.shape), lse.reshape(q.shape[:3]), ids
