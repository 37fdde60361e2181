"""selected_attention by definition: the references of the two ops it is made of."""

from __future__ import annotations

from pallas_kernels.gather_attention import gather_attention
from pallas_kernels.select_blocks import select_blocks


def selected_attention(q, k, v, index, page_table, lengths, *, kind, block_size, budget, sink, local, sm_scale, config):
    """See `pallas_kernels.selected_attention.selected_attention`; takes no config."""
    if config is not None:
        raise ValueError(f"implementation 'reference' of selected_attention takes no config, got {config!r}")
    sizes = {"page_size": k.shape[2], "block_size": block_size, "k": budget, "sink": sink, "local": local}
    blocks = select_blocks(q, index, page_table, lengths, kind=kind, **sizes, implementation="reference")
    listed = {"blocks": blocks, "block_size": block_size, "implementation": "reference"}
    out, lse = gather_attention(q, k, v, page_table, lengths, **listed, sm_scale=sm_scale)
    return out, lse, blocks
