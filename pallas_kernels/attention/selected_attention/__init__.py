"""Select blocks and attend to them: `select_blocks` and `gather_attention` as one op, which a kernel can do in one
launch."""

from pallas_kernels.attention.selected_attention.api import selected_attention

__all__ = ["selected_attention"]
