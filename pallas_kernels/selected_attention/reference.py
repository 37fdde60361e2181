"""selected_attention by definition: the references of its two ops."""

from __future__ import annotations

import dataclasses

from pallas_kernels.gather_attention import gather_attention
from pallas_kernels.select_blocks import select_blocks
from pallas_kernels.selected_attention.api import Call


def selected_attention(call: Call, q, pages, index, table, lengths, frames):
    """See `pallas_kernels.selected_attention.selected_attention`; takes no config."""
    blocks = select_blocks(q, index, table, lengths, **dataclasses.asdict(call.selection(pages.page_size)), implementation="reference")
    listed = {"blocks": blocks, "block_size": call.block_size, "implementation": "reference"}
    out, lse = gather_attention(q, pages, table if frames is None else frames, lengths, **listed, sm_scale=call.sm_scale)
    return out, lse, blocks
