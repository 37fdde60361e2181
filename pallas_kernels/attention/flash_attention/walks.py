"""Which keys a tile of queries of flash_attention meets, as a `hopper.prefill.prefill_fold.Walk`."""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax

from pallas_kernels.hopper.prefill import packed_tiles, prefill_fold


def over_keys(s: prefill_fold.Shape, window, opened: bool, span: int | None, refs, row, head, tile):
    """Every tile of keys up to the last query, or those that sinks and window touch; none for a tile of queries that
    nobody needs. opened: then tiles of the queries' own pages again. span: only tiles of so many positions, from the
    number that follows `fresh` in `refs` on; a multiple of tile and page. None: all."""
    table_ref, starts_ref, lengths_ref, plain_ref, fresh_ref, *more_refs = refs
    first, length = starts_ref[row] + tile * prefill_fold.TILE_ROWS, lengths_ref[row]
    stop = jnp.minimum(first + prefill_fold.TILE_ROWS, length)
    packed_end, own, open_steps = length, 0, 0
    if opened:
        stop, own, open_steps = packed_tiles.own_tiles(s, first, starts_ref[row], length)
        packed_end = stop
    fresh = fresh_ref[row]

    def needed(position, rows=prefill_fold.ROWS):
        return (position < length) & (position + rows > fresh)

    some = needed(first, prefill_fold.TILE_ROWS)
    end, open_steps = (jnp.where(some, tiles, 0) for tiles in (lax.div(stop + (s.tile - 1), jnp.int32(s.tile)), open_steps))
    begin = 0
    if span is not None:
        begin = more_refs[0][0]
        end = jnp.clip(end - lax.div(begin, jnp.int32(s.tile)), 0, span // s.tile)
        own, own_end = jnp.maximum(own, begin), jnp.minimum(own + open_steps * s.tile, begin + span)
        open_steps = lax.div(jnp.maximum(own_end - own, 0), jnp.int32(s.tile))
    packed_steps, sinks, resume, masks = end, 0, 0, {}
    if window is not None:
        sinks = jnp.minimum(-(-window[0] // s.tile), end)
        resume = jnp.clip(lax.div(jnp.maximum(first - window[1] + 1, 0), jnp.int32(s.tile)), sinks, end)
        packed_steps = sinks + end - resume
        masks = prefill_fold.window_masks(s, window)
    if opened:
        masks = packed_tiles.own_masks(s, (packed_steps, packed_end), **masks)

    def starts(step):
        at = step
        if window is not None:
            at = jnp.where(step < sinks, step, step - sinks + resume)
        at = begin + at * s.tile
        if opened:
            at = jnp.where(step < packed_steps, at, own + (step - packed_steps) * s.tile)
        return tuple(at + p * s.piece for p in range(s.pieces))

    def page_of(position):
        return table_ref[row, lax.div(position, jnp.int32(s.page_size))]

    steps, packed = packed_steps + open_steps, (packed_steps, packed_end)
    if s.splits > 1:  # where few queries wait for a long history
        masks |= {"needed": needed}
    return prefill_fold.Walk(steps, starts, page_of, plain_ref[row], length, packed=packed, **masks), first
