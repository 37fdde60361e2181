"""query_sparse_attention in Pallas Mosaic GPU (Hopper): `pallas_kernels.hopper.prefill.prefill_fold` over all keys,
with the selectors beside it.

Softmax handles each block of keys by itself: weights are relative to the block's own greatest logit, and one product
makes them relative to the row's. So a block's score is a by-product. It depends only on the block and the row (equal
blocks have equal bits, however far below the row's maximum they are), and needs no second exponential. The warpgroup
selects (`lane_selection`) while the tensor cores multiply its next tile. Of the scores, only the lists' are written:
neither R x S logits nor R x S / block_size scores.

Up to 16 exact slots are kept in registers. More are kept in the results, where every replacement searches again for the
worst slot. That is slower, also for the tournament, whose slots are the same. The quantile of stage 2 is Giles's
approximation, so its threshold may differ from other implementations' in the last bits, as the interface allows.
Buckets lie in the results. The slot whose turn it is is read before it is replaced.

Memory traffic: the measured rows of q, out and the lists once; keys and values of a sequence once per 128 rows and
head, from L2 where neighbours share them. Source: "Measure Once, Mask Once", appendix A; FlashAttention-3 (arXiv
2407.08608).
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.attention.query_sparse_attention import lane_selection
from pallas_kernels.attention.query_sparse_attention.api import Call
from pallas_kernels.hopper.decode.wgmma_fold import LOG2E, LOWEST
from pallas_kernels.hopper.prefill import packed_tiles, prefill_fold

NO_BLOCK = 1 << 30
"""A block after all those that a row may select."""


def unsupported(call: Call, q, pages, table, starts, lengths) -> str | None:
    """Why this kernel cannot take this valid input, or None if it can."""
    if reason := packed_tiles.unsupported(q, pages, call.sm_scale) or packed_tiles.unsupported_window(pages, call.window):
        return reason
    tile = packed_tiles.shape_of(q, pages, sm_scale=call.sm_scale).tile
    if call.block_size not in (64, tile):
        return f"block_size must be 64 or {tile} at head dim {q.shape[3]}, got {call.block_size}"
    return None


def query_sparse_attention(call: Call, q, pages, table, starts, lengths):
    """See `pallas_kernels.query_sparse_attention`; takes no config."""
    reason = unsupported(call, q, pages, table, starts, lengths)
    if reason:
        raise NotImplementedError(f"query_sparse_attention 'mosaic_gpu': {reason}")
    return _measure(call, q, pages, table, starts, lengths)


@functools.partial(jax.jit, static_argnames="call")
def _measure(call: Call, q, pages, table, starts, lengths):
    q = q[:, :: call.gamma]
    s = packed_tiles.shape_of(q, pages, sm_scale=call.sm_scale, row_stride=call.gamma)
    sizes = (call.block_size, call.k_blocks, call.k_exact, call.estimate, call.gamma, s.num_rows, s.num_heads, call.window)
    selector = lane_selection.Selector(*sizes)  # a tournament gives the same slots
    lists = (*q.shape[:3], call.k_blocks)
    plain_end = prefill_fold.plain_ends(table, lengths, s.page_size)
    kernel = prefill_fold.launch(
        s,
        "query_sparse_attention_kernel",
        functools.partial(_walk, s, pages.open is not None),
        functools.partial(_aside, s, selector),
        [jax.ShapeDtypeStruct(lists, jnp.int32), jax.ShapeDtypeStruct(lists, jnp.float32)],
        packed_tiles.fetcher_of(s, pages),
    )
    out, lse, ids, scores = kernel(prefill_fold.padded(q), packed_tiles.pools_of(pages), table, starts, lengths, plain_end)
    return *prefill_fold.cut(s, out, lse), ids, scores


def _walk(s: prefill_fold.Shape, opened: bool, refs, row, head, tile):
    """Every tile of keys up to the last row's position. Padding sees nothing. opened: then those of the rows' own pages
    again."""
    table_ref, starts_ref, lengths_ref, plain_ref = refs
    span = prefill_fold.TILE_ROWS * s.row_stride
    first, length = starts_ref[row] + tile * span, lengths_ref[row]
    stop = jnp.minimum(first + (span - s.row_stride + 1), length)
    packed_end, own, open_steps = length, 0, 0
    if opened:
        stop, own, open_steps = packed_tiles.own_tiles(s, first, starts_ref[row], length)
        packed_end = stop
    packed_steps = jnp.where(first < length, lax.div(stop + (s.tile - 1), jnp.int32(s.tile)), 0)

    def starts(step):
        at = step * s.tile
        if opened:
            at = jnp.where(step < packed_steps, at, own + (step - packed_steps) * s.tile)
        return tuple(at + p * s.piece for p in range(s.pieces))

    def page_of(position):
        return table_ref[row, lax.div(position, jnp.int32(s.page_size))]

    def unmasked(_, starts, first, last):
        return last < length

    def seen(_, pos, query_pos):
        return query_pos < length

    masks = {"unmasked": unmasked, "seen": seen}
    if opened:
        masks = packed_tiles.own_masks(s, (packed_steps, packed_end), **masks)
    steps, packed = packed_steps + open_steps, (packed_steps, packed_end)
    return prefill_fold.Walk(steps, starts, page_of, plain_ref[row], length, packed=packed, **masks), first


def _aside(s: prefill_fold.Shape, selector: lane_selection.Selector, walk, row, head, first_row, position, refs):
    """Selection from the scores of every tile. Those of open pages lie in the window of every row that sees them."""
    blocks = s.tile // selector.block_size

    def beside(step, report, state):
        return selector.offer(refs, jnp.where(step < walk.packed[0], step * blocks, NO_BLOCK), *report, state)

    nothing = [prefill_fold.all_rows(LOWEST)] * blocks, [prefill_fold.all_rows(0.0)] * blocks
    state = selector.empty(refs, row, head, first_row, position, walk.length)
    weigh = functools.partial(_weigh, s, selector.block_size)
    return prefill_fold.Aside(weigh, beside, nothing, state, functools.partial(selector.finish, refs))


def _weigh(s: prefill_fold.Shape, block_size: int, x, m):
    """As `prefill_fold.weigh_plainly`, but a block at a time. Reports for each block its maximum and its sum of weights
    relative to it."""
    factor = s.sm_scale * LOG2E
    parts = [lax.slice(x, (0, i), (prefill_fold.ROWS, i + block_size)) for i in range(0, s.tile, block_size)]
    tops = [jnp.maximum(part.max(axis=1) * factor, LOWEST) for part in parts]
    weights = [jnp.exp2(part * factor - _across(top, part)) for part, top in zip(parts, tops, strict=True)]
    sums = [p.sum(axis=1) for p in weights]
    new_m = functools.reduce(jnp.maximum, tops, m)
    shares = [jnp.exp2(top - new_m) for top in tops]
    of_tile = sum(total * share for total, share in zip(sums, shares, strict=True))
    weights = [(p * _across(share, p)).astype(s.dtype) for p, share in zip(weights, shares, strict=True)]
    return new_m, of_tile, tuple(weights), (tops, sums)


def _across(of_rows, x):
    return lax.broadcast_in_dim(of_rows, x.shape, [0])
