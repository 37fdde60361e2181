"""flash_attention in Pallas Mosaic GPU (Hopper): `pallas_kernels.hopper.query_tiles` over every tile of keys, or those of sinks and window.

Key tiles are fixed spans of absolute positions, walked in ascending order. So a row's bits depend neither on where its chunk starts, nor on
the width of the page table, nor on the other rows.

A chunk whose heads and tiles of queries are too few CTAs for the multiprocessors of a device has its keys split (`clusters.splits_of`):
tile j of the keys goes to part j modulo the number of parts, and the parts are merged in order. That number depends only on the heads, so
each part of a row has the same keys, in the same order, whatever the length, the table's width and the chunk. Chunks that are split and
chunks that are not differ in their bits. Attention in a window and over packed pages is not split: it has few tiles, or two kinds of them.

Tiles of 128 queries of which none is needed (before `fresh`, or past the end) read no keys. With splits, a warpgroup of 64 such queries
does not multiply (`hopper.query_turns`). Others have the bits that they have beside queries that are needed.

Memory traffic: q and out once; keys and values of a sequence once per 128 queries and head, from L2 where neighbours share them. With
splits, also splits * H * T * (D + 1) float32, written and read; independent of the number of keys. Source: FlashAttention-3 (arXiv
2407.08608); Flash-Decoding for splits; StreamingLLM (arXiv 2309.17453) for sinks and window.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.flash_attention.api import Call
from pallas_kernels.hopper import clusters, packed_tiles, query_tiles


def unsupported(call: Call, q, pages, table, starts, lengths, fresh) -> str | None:
    """Why this kernel cannot take this valid input, or None if it can."""
    return packed_tiles.unsupported(q, pages, call.sm_scale)


def flash_attention(call: Call, q, pages, table, starts, lengths, fresh):
    """See `pallas_kernels.flash_attention.flash_attention`; takes no config."""
    reason = unsupported(call, q, pages, table, starts, lengths, fresh)
    if reason:
        raise NotImplementedError(f"flash_attention 'mosaic_gpu': {reason}")
    return _attend(call, q, pages, table, starts, lengths, fresh)


@functools.partial(jax.jit, static_argnames="call")
def _attend(call: Call, q, pages, table, starts, lengths, fresh):
    s = packed_tiles.shape_of(q, pages, sm_scale=call.sm_scale)
    if call.window is None and not pages.packed:
        s = dataclasses.replace(s, splits=clusters.splits_of(s.num_heads, s.query_tiles))
    plain_end = query_tiles.plain_ends(table, lengths, s.page_size)
    walk = functools.partial(_walk, s, call.window, pages.open is not None)
    launch = query_tiles.launch(s, "flash_attention_kernel", walk, fetcher=packed_tiles.fetcher_of(s, pages))
    out, lse = launch(query_tiles.padded(q), packed_tiles.pools_of(pages), table, starts, lengths, plain_end, fresh)
    if s.splits == 1:
        return query_tiles.cut(s, out, lse)
    return tuple(x[:, : s.num_rows] for x in query_tiles.merge_parts(s, out, lse))


def _walk(s: query_tiles.Shape, window, opened: bool, refs, row, head, tile):
    """Every tile of keys up to the last query, or those that sinks and window touch; none for a tile of queries that nobody needs. opened:
    then tiles of the queries' own pages again."""
    table_ref, starts_ref, lengths_ref, plain_ref, fresh_ref = refs
    first, length = starts_ref[row] + tile * query_tiles.TILE_ROWS, lengths_ref[row]
    stop = jnp.minimum(first + query_tiles.TILE_ROWS, length)
    packed_end, own, open_steps = length, 0, 0
    if opened:
        stop, own, open_steps = packed_tiles.own_tiles(s, first, starts_ref[row], length)
        packed_end = stop
    fresh = fresh_ref[row]

    def needed(position, rows=query_tiles.ROWS):
        return (position < length) & (position + rows > fresh)

    some = needed(first, query_tiles.TILE_ROWS)
    end, open_steps = (jnp.where(some, tiles, 0) for tiles in (lax.div(stop + (s.tile - 1), jnp.int32(s.tile)), open_steps))
    packed_steps, sinks, resume, masks = end, 0, 0, {}
    if window is not None:
        sinks = jnp.minimum(-(-window[0] // s.tile), end)
        resume = jnp.clip(lax.div(jnp.maximum(first - window[1] + 1, 0), jnp.int32(s.tile)), sinks, end)
        packed_steps = sinks + end - resume
        masks = query_tiles.window_masks(s, window)
    if opened:
        masks = packed_tiles.own_masks(s, (packed_steps, packed_end), **masks)

    def starts(step):
        at = step
        if window is not None:
            at = jnp.where(step < sinks, step, step - sinks + resume)
        at *= s.tile
        if opened:
            at = jnp.where(step < packed_steps, at, own + (step - packed_steps) * s.tile)
        return tuple(at + p * s.piece for p in range(s.pieces))

    def page_of(position):
        return table_ref[row, lax.div(position, jnp.int32(s.page_size))]

    steps, packed = packed_steps + open_steps, (packed_steps, packed_end)
    if s.splits > 1:  # where few queries wait for a long history
        masks |= {"needed": needed}
    return query_tiles.Walk(steps, starts, page_of, plain_ref[row], length, packed=packed, **masks), first
