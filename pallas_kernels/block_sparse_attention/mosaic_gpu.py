"""block_sparse_attention in Pallas Mosaic GPU (Hopper): `pallas_kernels.hopper.query_tiles` over sinks, window and a list of blocks.

A tile's walk takes the blocks that sinks and window touch, in ascending order, then the listed ones in list order, two blocks of 64 keys to
a tile of keys. In the first group a query reads exactly its sinks and window, in the second exactly the rest. So a block in both groups is
read twice and counted once, and no list has to be sorted or cleaned. A row's bits depend only on its own list, keys and window.

Memory traffic: q and out once; each listed block once per tile of 128 queries and query head. Source: "Measure Once, Mask Once", Algorithm
1, step 3; FlashAttention-3 (arXiv 2407.08608).
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.block_sparse_attention.api import Call
from pallas_kernels.hopper import query_tiles
from pallas_kernels.hopper.query_tiles import TILE_ROWS
from pallas_kernels.pages import unlike


def unsupported(call: Call, q, pages, table, starts, lengths, blocks) -> str | None:
    """Why this kernel cannot take this valid input, or None if it can."""
    if call.query_tile % TILE_ROWS:
        return f"query_tile must be a multiple of {TILE_ROWS}, got {call.query_tile}"
    if call.block_size % 16:
        return f"block_size must be a multiple of 16, got {call.block_size}"
    return unlike(pages) or query_tiles.unsupported(q, pages.k, call.sm_scale)


def block_sparse_attention(call: Call, q, pages, table, starts, lengths, blocks):
    """See `pallas_kernels.block_sparse_attention.block_sparse_attention`; takes no config."""
    reason = unsupported(call, q, pages, table, starts, lengths, blocks)
    if reason:
        raise NotImplementedError(f"block_sparse_attention 'mosaic_gpu': {reason}")
    return _attend(call, q, pages, table, starts, lengths, blocks)


@functools.partial(jax.jit, static_argnames="call")
def _attend(call: Call, q, pages, table, starts, lengths, blocks):
    s = query_tiles.shape_of(q, pages.k, sm_scale=call.sm_scale, block_size=call.block_size)
    plain_end = query_tiles.plain_ends(table, lengths, s.page_size)
    counts = jnp.max(jnp.where(blocks >= 0, jnp.arange(1, blocks.shape[3] + 1, dtype=jnp.int32), 0), axis=3)
    walk = functools.partial(_walk, s, call.block_size, call.query_tile, call.window)
    out, lse = query_tiles.launch(s, "block_sparse_attention_kernel", walk)(
        query_tiles.padded(q), (pages.k, pages.v), table, starts, lengths, plain_end, blocks, counts
    )
    return query_tiles.cut(s, out, lse)


def _walk(s: query_tiles.Shape, block_size: int, query_tile: int, window, refs, row, head, tile):
    """The pieces of keys that sinks and window touch, padded to whole tiles of keys, then those of the listed blocks."""
    table_ref, starts_ref, lengths_ref, plain_ref, blocks_ref, counts_ref = refs
    first, length = starts_ref[row] + tile * TILE_ROWS, lengths_ref[row]
    of_list = lax.div(tile, jnp.int32(query_tile // TILE_ROWS))
    parts, num_blocks = block_size // s.piece, table_ref.shape[1] * s.page_size // block_size
    sinks, resume, near = 0, 0, 0
    sink_tokens, window_tokens = window or (0, 0)
    if window is not None:
        end = lax.div(first + (TILE_ROWS + s.piece - 1), jnp.int32(s.piece))
        sinks = jnp.minimum(-(-sink_tokens // s.piece), end)
        resume = jnp.maximum(lax.div(jnp.maximum(first - window_tokens + 1, 0), jnp.int32(s.piece)), sinks)
        near = lax.div(sinks + end - resume + (s.pieces - 1), jnp.int32(s.pieces))
    listed = counts_ref[row, of_list, head] * parts
    steps = jnp.where(first < length, near + lax.div(listed + (s.pieces - 1), jnp.int32(s.pieces)), 0)

    def starts(step):
        found = []
        for p in range(s.pieces):
            of_near = step * s.pieces + p
            of_near = jnp.where(of_near < sinks, of_near, of_near - sinks + resume)
            at = (step - near) * s.pieces + p
            there = (at >= 0) & (at < listed)
            at = jnp.where(there, at, 0)
            block = blocks_ref[row, of_list, head, lax.div(at, jnp.int32(parts))]
            exists = there & (block >= 0) & (block < num_blocks)
            of_block = jnp.where(exists, block * parts + lax.rem(at, jnp.int32(parts)), -1)
            found.append(jnp.where(step < near, of_near, of_block) * s.piece)
        return tuple(found)

    def page_of(position):
        return table_ref[row, lax.div(position, jnp.int32(s.page_size))]

    def unmasked(step, starts, first, last):
        inside = [(start + s.piece <= sink_tokens) | (start > last - window_tokens) for start in starts]
        outside = [(start >= sink_tokens) & (start + (s.piece - 1) <= first - window_tokens) for start in starts]
        inside, outside = (functools.reduce(jnp.logical_and, x) for x in (inside, outside))
        return jnp.where(step < near, inside, outside)

    def seen(step, pos, query_pos):
        inside = (pos < sink_tokens) | (pos > query_pos - window_tokens)
        return inside == (step < near)

    masks = {} if window is None else {"unmasked": unmasked, "seen": seen}
    return query_tiles.Walk(steps, starts, page_of, plain_ref[row], length, **masks), first
