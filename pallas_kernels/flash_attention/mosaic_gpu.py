"""flash_attention in Pallas Mosaic GPU (Hopper): `pallas_kernels.hopper.query_tiles` over every tile of keys, or those of sinks and window.

Key tiles are fixed spans of absolute positions, walked in ascending order. So a row's bits depend neither on where its chunk starts, nor on
the width of the page table, nor on the other rows.

Memory traffic: q and out once; keys and values of a sequence once per 128 queries and head, from L2 where neighbours share them. Source:
FlashAttention-3 (arXiv 2407.08608); StreamingLLM (arXiv 2309.17453) for sinks and window.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.flash_attention.api import Call
from pallas_kernels.hopper import query_tiles
from pallas_kernels.pages import unlike


def unsupported(call: Call, q, pages, table, starts, lengths) -> str | None:
    """Why this kernel cannot take this valid input, or None if it can."""
    return unlike(pages) or query_tiles.unsupported(q, pages.k, call.sm_scale)


def flash_attention(call: Call, q, pages, table, starts, lengths):
    """See `pallas_kernels.flash_attention.flash_attention`; takes no config."""
    reason = unsupported(call, q, pages, table, starts, lengths)
    if reason:
        raise NotImplementedError(f"flash_attention 'mosaic_gpu': {reason}")
    return _attend(call, q, pages, table, starts, lengths)


@functools.partial(jax.jit, static_argnames="call")
def _attend(call: Call, q, pages, table, starts, lengths):
    s = query_tiles.shape_of(q, pages.k, sm_scale=call.sm_scale)
    plain_end = query_tiles.plain_ends(table, lengths, s.page_size)
    out, lse = query_tiles.launch(s, "flash_attention_kernel", functools.partial(_walk, s, call.window))(
        query_tiles.padded(q), pages.k, pages.v, table, starts, lengths, plain_end
    )
    return query_tiles.cut(s, out, lse)


def _walk(s: query_tiles.Shape, window, refs, row, head, tile):
    """Every tile of keys up to the last query, or those that sinks and window touch."""
    table_ref, starts_ref, lengths_ref, plain_ref = refs
    first, length = starts_ref[row] + tile * query_tiles.TILE_ROWS, lengths_ref[row]
    end = lax.div(jnp.minimum(first + query_tiles.TILE_ROWS, length) + (s.tile - 1), jnp.int32(s.tile))
    end = jnp.where(first < length, end, 0)  # padding
    steps, sinks, resume, of_window = end, 0, 0, {}
    if window is not None:
        sinks = jnp.minimum(-(-window[0] // s.tile), end)
        resume = jnp.clip(lax.div(jnp.maximum(first - window[1] + 1, 0), jnp.int32(s.tile)), sinks, end)
        steps = sinks + end - resume
        of_window = query_tiles.window_masks(s, window)

    def starts(step):
        if window is not None:
            step = jnp.where(step < sinks, step, step - sinks + resume)
        return tuple(step * s.tile + p * s.piece for p in range(s.pieces))

    def page_of(position):
        return table_ref[row, lax.div(position, jnp.int32(s.page_size))]

    return query_tiles.Walk(steps, starts, page_of, plain_ref[row], length, **of_window), first
