"""select_blocks made of two ops: scores as in `xla`, then `top_k` where that has a kernel. XLA's own top-k takes
several times as long.

It takes the calls that this op's kernel refuses: float32, other head dims, tables too long for it. Memory traffic: as
`xla`, and the scores.
"""

from __future__ import annotations

from pallas_kernels.core import dispatch
from pallas_kernels.selection.select_blocks import xla
from pallas_kernels.selection.select_blocks.api import Call
from pallas_kernels.selection.top_k import top_k


def unsupported(call: Call, q, index, table, lengths) -> str | None:
    """Why this implementation should not be picked, or None if it should."""
    return None if "mosaic_gpu" in dispatch.candidates("top_k") else "top_k has no kernel here, and xla uses the same top-k of XLA"


def select_blocks(call: Call, q, index, table, lengths):
    """See `pallas_kernels.select_blocks`."""
    return xla.select_blocks(call, q, index, table, lengths, top_k=_top_k)


def _top_k(scores, k):
    return top_k(scores, k) if k else (scores[:, :0], scores[:, :0].astype("int32"))
