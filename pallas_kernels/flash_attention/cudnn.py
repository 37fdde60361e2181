"""flash_attention by cuDNN, for NVIDIA GPUs from Ampere on: one causal call for the chunk's own keys, one for each tile of the history.

Memory traffic: the history is read, copied and read again once per chunk; cuDNN reads a tile's keys once per tile of queries. Memory
needed: a tile of keys and values, and the output in float32. A chunk of which a page is missing (-1) takes `xla`.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp

from pallas_kernels import cudnn, tiles
from pallas_kernels.flash_attention import xla
from pallas_kernels.flash_attention.api import Call
from pallas_kernels.merge import merge_attention


@dataclasses.dataclass(frozen=True)
class Config:
    """tile_tokens: of the history, copied at a time, rounded down to whole pages, at least one."""

    tile_tokens: int = 32768

    def __post_init__(self):
        if not isinstance(self.tile_tokens, int) or self.tile_tokens < 1:
            raise ValueError(f"tile_tokens must be a positive int, got {self.tile_tokens!r}")


def unsupported(call: Call, q, pages, table, starts, lengths) -> str | None:
    """Why this implementation cannot take this valid input, or None if it can."""
    return cudnn.unsupported(q, pages, call.window)


def flash_attention(call: Call, q, pages, table, starts, lengths):
    """See `pallas_kernels.flash_attention.flash_attention`. config: a `Config`, or None for the default."""
    if reason := unsupported(call, q, pages, table, starts, lengths):
        raise NotImplementedError(f"flash_attention 'cudnn': {reason}")
    return _attend(dataclasses.replace(call, config=call.config or Config()), q, pages, table, starts, lengths)


@functools.partial(jax.jit, static_argnames="call")
def _attend(call: Call, q, pages, table, starts, lengths):
    position = starts[:, None] + jnp.arange(q.shape[1], dtype=jnp.int32)
    frame = jnp.take_along_axis(table, position // pages.page_size, axis=1, mode="fill", fill_value=-1)
    missing = ((frame < 0) & (position < lengths[:, None])).any()
    history = jnp.minimum(starts, lengths)

    def beginning():
        out, lse = cudnn.attend_chunk(q, pages, table, starts, lengths, call.sm_scale)
        nothing = lse == -jnp.inf
        return jnp.where(nothing[..., None], 0, out), lse

    def with_history():
        tile = max(1, call.config.tile_tokens // pages.page_size)
        before = cudnn.attend_history(tiles.Cut(table.shape[1], tile, tile), q, pages, table, history, call.sm_scale)
        out, lse = cudnn.attend_chunk(q, pages, table, starts, lengths, call.sm_scale)
        out, lse = merge_attention((before[0], out.astype(jnp.float32)), (before[1], lse))
        return out.astype(q.dtype), lse

    def by_xla():
        return xla.flash_attention(dataclasses.replace(call, config=None), q, pages, table, starts, lengths)

    # One question to the device, for which the host waits.
    case = jnp.where(missing, 2, (history > 0).any().astype(jnp.int32))
    return jax.lax.switch(case, (beginning, with_history, by_xla))
