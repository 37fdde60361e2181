"""The blocks of a shortlist that get the most attention by their keys, in few bits or as pages have them, for any
backend.

Where the page table has no more distant blocks than the shortlist, all of them are candidates, and no bounds are read.

Memory traffic: the bounds, where they are needed; the codes or keys of the shortlist.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float32, Int

from pallas_kernels.attention.gather_attention import gather_attention
from pallas_kernels.attention.selected_attention.api import Call
from pallas_kernels.selection.select_blocks import block_lse, block_shares, select_blocks

_NONE = jnp.iinfo(jnp.int32).max  # sorts behind every block


def parts(call: Call, q, pages, index, table, lengths) -> tuple[Int[Array, "B T K A"], Int[Array, "B T K S"]]:
    """Sink and local blocks, ascending, -1 at the end; and the candidates, ascending, -1 anywhere.

    S does not depend on the width of the page table, so that no later sum does.
    """
    selection, per_page = call.selection(pages.page_size), pages.page_size // call.block_size
    position = (lengths[:, None] - q.shape[1] + jnp.arange(q.shape[1], dtype=jnp.int32))[..., None, None]
    last = jnp.where(position >= 0, position // call.block_size, -1)
    first_local = jnp.clip(jnp.minimum(last - call.local + 1, position // pages.page_size * per_page), 0)
    # Of n sinks before m local blocks, entry i is i below n, and then first_local + i - n.
    entry, sinks = jnp.arange(selection.width - call.shortlist, dtype=jnp.int32), jnp.minimum(call.sink, first_local)
    always = jnp.where(entry < sinks, entry, first_local + entry - sinks)
    always = jnp.where(always <= last, always, -1)
    lists = *q.shape[:2], pages.kv_heads
    if table.shape[1] * per_page - call.sink - call.local <= call.shortlist:
        ids = jnp.arange(selection.width, dtype=jnp.int32)
        there = table.at[:, ids // per_page].get(mode="fill", fill_value=-1) >= 0
        ids = jnp.where(there[:, None, None], ids, -1)
    else:
        ids = select_blocks(q, index, table, lengths, **dataclasses.asdict(selection))
    candidates = jnp.where((ids >= call.sink) & (ids < first_local), ids, -1)
    return tuple(jnp.broadcast_to(x, (*lists, x.shape[3])) for x in (always, candidates))


def best(
    call: Call, q, pages, codes, table, lengths, frames, candidates: Int[Array, "B T K S"], near: Float32[Array, "B T H"]
) -> Int[Array, "B T K budget"]:
    """The candidates that `selected_attention` lists, best first, -1 at the end. near: log-sum-exp of sink and local
    keys."""
    if codes is None:
        places = table if frames is None else frames, lengths
        sizes = {"block_size": call.block_size, "sm_scale": call.sm_scale}
        _, _, found = gather_attention(q, pages.without_values, *places, blocks=candidates, return_block_lse=True, **sizes)
    else:
        per_page = pages.page_size // call.block_size
        page = jnp.take_along_axis(table[:, None, None], jnp.maximum(candidates, 0) // per_page, axis=3)
        rows = jnp.where(candidates >= 0, page * per_page + candidates % per_page, -1)
        found = block_lse(q, codes, rows, kind=call.codes_kind, sm_scale=call.sm_scale)
    scores, _ = block_shares(near, found, candidates.shape[2])

    lowest = jnp.finfo(jnp.float32).min
    scores = jnp.where(scores >= lowest, scores, lowest)  # NaN and -inf count as the lowest number
    scores = jnp.where(candidates >= 0, jnp.where(scores == 0, 0.0, scores), -jnp.inf)
    kept, places = jax.lax.top_k(scores, min(call.budget, scores.shape[-1]))  # of equal ones the lower block
    return jnp.where(kept > -jnp.inf, jnp.take_along_axis(candidates, places, axis=3), -1)


def ascending(*lists: Int[Array, "B T K n"]) -> Int[Array, "B T K W"]:
    """All blocks of some lists, ascending, -1 at the end."""
    ids = jnp.concatenate(lists, axis=3)
    ids = jnp.sort(jnp.where(ids < 0, _NONE, ids), axis=3)
    return jnp.where(ids == _NONE, -1, ids)
