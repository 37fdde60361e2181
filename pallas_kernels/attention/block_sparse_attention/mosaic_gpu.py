"""block_sparse_attention in Pallas Mosaic GPU (Hopper): `pallas_kernels.hopper.prefill.prefill_fold` over sinks, window
and a list of blocks.

A tile's walk takes the blocks that sinks and window touch, in ascending order, then the listed ones in list order, two
blocks of 64 keys to a tile of keys. In the first group a query reads exactly its sinks and window, in the second
exactly the rest. So a block in both groups is read twice and counted once, and no list has to be sorted or cleaned. A
row's bits depend only on its own list, keys and window.

Packed pages are unpacked by each CTA that reads them, or all of a chunk's once, before (`widens`), with the same bits.

Memory traffic: q and out once; each listed block once per tile of 128 queries and query head; where pages are unpacked
before, also the codes of all of them once and their numbers once. Source: "Measure Once, Mask Once", Algorithm 1, step
3; FlashAttention-3 (arXiv 2407.08608).
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.attention.block_sparse_attention.api import Call
from pallas_kernels.hopper.prefill import packed_tiles, prefill_fold, wide_pages
from pallas_kernels.hopper.prefill.prefill_fold import TILE_ROWS

WIDE_BYTES = 2**28
"""Most bytes of the numbers of all pages of a table that are unpacked before: 128K tokens of 4 KV heads of head dim
128."""

MIN_READS = 8
"""How often lists and window must have room to read a key, in the mean over all keys of the table, to unpack all of
them before."""


def unsupported(call: Call, q, pages, table, starts, lengths, blocks) -> str | None:
    """Why this kernel cannot take this valid input, or None if it can."""
    if call.query_tile % TILE_ROWS:
        return f"query_tile must be a multiple of {TILE_ROWS}, got {call.query_tile}"
    if call.block_size % 16:
        return f"block_size must be a multiple of 16, got {call.block_size}"
    if reason := packed_tiles.unsupported(q, pages, call.sm_scale):
        return reason
    s = packed_tiles.shape_of(q, pages, sm_scale=call.sm_scale, block_size=call.block_size)
    if pages.packed and s.piece % (s.tile // 2):
        return f"over packed pages of head dim {s.head_dim}, block_size must be a multiple of {s.tile // 2}, got {call.block_size}"
    return packed_tiles.unsupported_window(pages, call.window)


def block_sparse_attention(call: Call, q, pages, table, starts, lengths, blocks):
    """See `pallas_kernels.block_sparse_attention`; takes no config."""
    reason = unsupported(call, q, pages, table, starts, lengths, blocks)
    if reason:
        raise NotImplementedError(f"block_sparse_attention 'mosaic_gpu': {reason}")
    return _attend(call, q, pages, table, starts, lengths, blocks)


def widens(s: prefill_fold.Shape, call: Call, pages, table, blocks) -> bool:
    """Whether all packed pages of a chunk are unpacked once, before lists are read. Spans of them, as `flash_attention`
    has, would cut lists."""
    tokens = table.shape[1] * s.page_size
    keys = min(blocks.shape[3] * call.block_size + sum(call.window or (0, 0)), tokens)
    fits = wide_pages.span_bytes(s, wide_pages.whole_span(s, table.shape[1])) <= WIDE_BYTES
    return pages.packed and fits and s.query_tiles * s.group * keys >= MIN_READS * tokens


@functools.partial(jax.jit, static_argnames="call")
def _attend(call: Call, q, pages, table, starts, lengths, blocks):
    s = packed_tiles.shape_of(q, pages, sm_scale=call.sm_scale, block_size=call.block_size)
    fetcher, pools = packed_tiles.fetcher_of(s, pages), packed_tiles.pools_of(pages)
    if widens(s, call, pages, table, blocks):
        span = wide_pages.whole_span(s, table.shape[1])
        fetcher, pools = wide_pages.fetcher(span), wide_pages.pools_of(s, pages, table, starts, lengths, jnp.zeros(1, jnp.int32), span)
    plain_end = prefill_fold.plain_ends(table, lengths, s.page_size)
    counts = jnp.max(jnp.where(blocks >= 0, jnp.arange(1, blocks.shape[3] + 1, dtype=jnp.int32), 0), axis=3)
    walk = functools.partial(_walk, s, call, pages.open is not None)
    launch = prefill_fold.launch(s, "block_sparse_attention_kernel", walk, fetcher=fetcher)
    out, lse = launch(prefill_fold.padded(q), pools, table, starts, lengths, plain_end, blocks, counts)
    return prefill_fold.cut(s, out, lse)


def _walk(s: prefill_fold.Shape, call: Call, opened: bool, refs, row, head, tile):
    """The pieces of keys that sinks and window touch, padded to whole tiles of keys, then those of the listed blocks.
    opened: then those of the queries' own pages again."""
    table_ref, starts_ref, lengths_ref, plain_ref, blocks_ref, counts_ref = refs
    first, length = starts_ref[row] + tile * TILE_ROWS, lengths_ref[row]
    of_list = lax.div(tile, jnp.int32(call.query_tile // TILE_ROWS))
    parts, num_blocks = call.block_size // s.piece, table_ref.shape[1] * s.page_size // call.block_size
    packed_end, own, open_steps = length, 0, 0
    if opened:
        packed_end, own, open_steps = packed_tiles.own_tiles(s, first, starts_ref[row], length)
    sinks, resume, near = 0, 0, 0
    sink_tokens, window_tokens = call.window or (0, 0)
    if call.window is not None:
        end = lax.div((packed_end if opened else first + TILE_ROWS) + (s.piece - 1), jnp.int32(s.piece))
        sinks = jnp.minimum(-(-sink_tokens // s.piece), end)
        resume = jnp.clip(lax.div(jnp.maximum(first - window_tokens + 1, 0), jnp.int32(s.piece)), sinks, end)
        near = lax.div(sinks + end - resume + (s.pieces - 1), jnp.int32(s.pieces))
    listed = counts_ref[row, of_list, head] * parts
    packed_steps = jnp.where(first < length, near + lax.div(listed + (s.pieces - 1), jnp.int32(s.pieces)), 0)
    steps = packed_steps + open_steps

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
            start = jnp.where(step < near, of_near, of_block) * s.piece
            if opened:
                start = jnp.where(step < packed_steps, start, own + (step - packed_steps) * s.tile + p * s.piece)
            found.append(start)
        return tuple(found)

    def page_of(position):
        return table_ref[row, lax.div(position, jnp.int32(s.page_size))]

    def by_window(step):
        return (step < near) | (step >= packed_steps) if opened else step < near

    def unmasked(step, starts, first, last):
        inside = [(start + s.piece <= sink_tokens) | (start > last - window_tokens) for start in starts]
        outside = [(start >= sink_tokens) & (start + (s.piece - 1) <= first - window_tokens) for start in starts]
        inside, outside = (functools.reduce(jnp.logical_and, x) for x in (inside, outside))
        return jnp.where(by_window(step), inside, outside)

    def seen(step, pos, query_pos):
        inside = (pos < sink_tokens) | (pos > query_pos - window_tokens)
        return inside == by_window(step)

    masks = {} if call.window is None else {"unmasked": unmasked, "seen": seen}
    if opened:
        masks = packed_tiles.own_masks(s, (packed_steps, packed_end), **masks)
    return prefill_fold.Walk(steps, starts, page_of, plain_ref[row], length, packed=(packed_steps, packed_end), **masks), first
