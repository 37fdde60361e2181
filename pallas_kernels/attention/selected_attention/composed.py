"""selected_attention as several ops, each by the implementation that its own dispatch picks. Runs wherever they do.

Without a shortlist: select, then attend. With one, see `shortlist`, in plain XLA: sink and local blocks are attended to
first, which also gives their part of the softmax by which blocks are chosen; then the chosen ones; the two are merged.
"""

from __future__ import annotations

import dataclasses

import jax

from pallas_kernels.attention.gather_attention import gather_attention
from pallas_kernels.attention.selected_attention import shortlist
from pallas_kernels.attention.selected_attention.api import Call
from pallas_kernels.core.merge import merge_attention
from pallas_kernels.selection.select_blocks import select_blocks


def selected_attention(call: Call, q, pages, index, table, lengths, frames, codes):
    """See `pallas_kernels.selected_attention`; takes no config."""
    places = table if frames is None else frames, lengths
    sizes = {"block_size": call.block_size, "sm_scale": call.sm_scale}
    if not call.refines:
        blocks = select_blocks(q, index, table, lengths, **dataclasses.asdict(call.selection(pages.page_size)))
        out, lse = gather_attention(q, pages, *places, blocks=blocks, **sizes)
        return out, lse, blocks
    always, candidates = shortlist.parts(call, q, pages, index, table, lengths)
    near = gather_attention(q, pages, *places, blocks=always, **sizes)
    chosen = shortlist.best(call, q, pages, codes, table, lengths, frames, candidates, near[1])
    if not call.budget:
        return *near, always
    # No chosen block lies in an open page, so packed pages are read without those.
    distant = gather_attention(q, pages.replace(open=None), *places, blocks=chosen, **sizes)
    # The same bits whatever follows: a watched policy's rows run in two programs.
    out, lse = jax.lax.optimization_barrier(merge_attention(*zip(near, distant, strict=True)))
    return out, lse, shortlist.ascending(always, chosen)
