"""Dense gather_attention by cuDNN, for NVIDIA GPUs from Ampere on: a decode step of one token per sequence.

Tiles of the sequences' pages are copied, attended to, and combined. Memory traffic: every key and value is read, copied and read again.
Memory needed: a tile's copy, at most `tiles.MEMORY`. Bits: tiles are fixed spans of positions, as in `xla`.
"""

from __future__ import annotations

import functools

import jax

from pallas_kernels import cudnn, tiles
from pallas_kernels.gather_attention.api import Call


def unsupported(call: Call, q, pages, table, lengths, blocks) -> str | None:
    """Why this implementation cannot take this valid input, or None if it can."""
    if blocks is not None or call.return_block_lse:
        return "it reads every block, without a log-sum-exp for each"
    if q.shape[1] > 1:
        return f"it takes one token of each sequence, not {q.shape[1]}"
    if call.config is not None:
        return f"it takes no config, got {call.config!r}"
    return cudnn.unsupported(q, pages, call.window)


def gather_attention(call: Call, q, pages, table, lengths, blocks):
    """See `pallas_kernels.gather_attention.gather_attention`; takes no config."""
    if reason := unsupported(call, q, pages, table, lengths, blocks):
        raise NotImplementedError(f"gather_attention 'cudnn': {reason}")
    return _attend(call, q, pages, table, lengths)


@functools.partial(jax.jit, static_argnames="call")
def _attend(call: Call, q, pages, table, lengths):
    copied = 2 * pages.kv_heads * pages.page_size * pages.head_dim * pages.k.dtype.itemsize  # bytes of a page
    cut = tiles.cut(table.shape[1], pages.page_size, q.shape[0] * copied)
    out, lse = cudnn.attend_history(cut, q, pages, table, lengths, call.sm_scale)
    return out.astype(q.dtype), lse
