"""selected_attention as two ops, each by the implementation that its own dispatch picks. Runs wherever they do.

A shortlist is refined between the two, in plain XLA (`refined_list`).
"""

from __future__ import annotations

import dataclasses

from pallas_kernels.gather_attention import gather_attention
from pallas_kernels.select_blocks import select_blocks
from pallas_kernels.selected_attention.api import Call
from pallas_kernels.selected_attention.shortlist import refined_list


def selected_attention(call: Call, q, pages, index, table, lengths, frames, codes):
    """See `pallas_kernels.selected_attention.selected_attention`; takes no config."""
    blocks = select_blocks(q, index, table, lengths, **dataclasses.asdict(call.selection(pages.page_size)))
    if call.refines:
        blocks = refined_list(call, q, pages, codes, table, lengths, frames, blocks)
    out, lse = gather_attention(
        q, pages, table if frames is None else frames, lengths, blocks=blocks, block_size=call.block_size, sm_scale=call.sm_scale
    )
    return out, lse, blocks
