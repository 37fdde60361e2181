"""Score blocks against the query and list which to read: sink, the best distant ones, local."""

from pallas_kernels.selection.select_blocks.api import select_blocks, selection_width
from pallas_kernels.selection.select_blocks.coded import block_lse
from pallas_kernels.selection.select_blocks.shares import block_shares
from pallas_kernels.selection.select_blocks.xla import score_blocks, score_listed

__all__ = ["block_lse", "block_shares", "score_blocks", "score_listed", "select_blocks", "selection_width"]
