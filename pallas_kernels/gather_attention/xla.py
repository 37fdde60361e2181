"""gather_attention for any backend: online softmax over groups of tiles of the list, several rows of the batch at a time.

Dense attention uses the list of all blocks. Tiles are fixed ranges of list entries, so for dense attention fixed spans of absolute
positions. Each row folds its own groups in order: first the logits of all tiles, then their values. Tiles behind its last readable one
leave its bits as they are. So its bits depend neither on the width of the page table nor on the lengths of other rows. Memory traffic: each
listed block is read once and copied once, a tile at a time. Memory needed: the copy of a tile's keys or values (`rows * K * tile_tokens *
D` elements), and the logits of a group.
"""

from __future__ import annotations

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from pallas_kernels import online_softmax, tiles
from pallas_kernels.gather_attention.api import Call
from pallas_kernels.pages import Pages, read_tile, visible


@dataclasses.dataclass(frozen=True)
class Config:
    """tile_tokens: keys per tile, rounded down to whole blocks, at least one. rows: rows of the batch computed together."""

    tile_tokens: int = 512
    rows: int = 4

    def __post_init__(self):
        for name in ("tile_tokens", "rows"):
            if not isinstance(getattr(self, name), int) or getattr(self, name) < 1:
                raise ValueError(f"{name} must be a positive int, got {getattr(self, name)!r}")


def gather_attention(call: Call, q, pages, table, lengths, blocks):
    """See `pallas_kernels.gather_attention.gather_attention`. config: a `Config`; None: tiles that fit a CPU's caches, and on other devices
    all rows together, in tiles as large as `tiles.MEMORY` allows."""
    if call.config is None and tiles.on_cpu():
        call = dataclasses.replace(call, config=Config())
    return _attend(call, q, pages, table, lengths, blocks)


@functools.partial(jax.jit, static_argnames="call")
def _attend(call: Call, q, pages, table, lengths, blocks):
    block_size, num_kv_heads, page_size = call.block_size, pages.kv_heads, pages.page_size
    width = table.shape[1] * (page_size // block_size) if blocks is None else blocks.shape[2]
    cut, rows = _cut(call, q, pages, width, listed=blocks is not None)

    def row(args):
        q, table, length, ids = args
        num_queries, num_heads, head_dim = q.shape
        q = q.reshape(num_queries, num_kv_heads, -1, head_dim).swapaxes(0, 1).reshape(num_kv_heads, -1, head_dim)
        query_pos = length - num_queries + jnp.arange(num_queries, dtype=jnp.int32)
        query_pos = jnp.repeat(query_pos, num_heads // num_kv_heads)
        ids, frames = _list(ids, table, length, num_kv_heads, page_size, block_size, cut.width)
        used = jnp.max(jnp.where(ids >= 0, jnp.arange(ids.shape[1], dtype=jnp.int32) + 1, 0))

        def tile(start, size):
            """Blocks, frames and positions of a tile."""
            block, frame = (jax.lax.dynamic_slice_in_dim(x, start, size, axis=1) for x in (ids, frames))
            pos = (block[..., None] * block_size + jnp.arange(block_size, dtype=jnp.int32)).reshape(num_kv_heads, -1)
            return frame, block * block_size % page_size, pos

        def logits_of(start, size):
            frame, token, pos = tile(start, size)
            seen = visible(pos[:, None, :], query_pos[:, None], call.window)
            keys = read_tile(pages.k, frame, token, block_size)
            logits = jnp.where(seen, online_softmax.scaled_logits(q, keys, call.sm_scale), -jnp.inf)
            return logits.reshape(*logits.shape[:2], size, block_size)

        def values_of(start, size):
            frame, token, pos = tile(start, size)
            values = read_tile(pages.k if pages.v is None else pages.v, frame, token, block_size)[..., : pages.v_head_dim]
            return jnp.where(((pos >= 0) & (pos < length))[..., None], values, 0)  # unwritten values may be NaN

        def fold(runs, carry):
            partial, block_lse = carry
            logits = [run.scan(lambda start, _, x, size=run.size: (None, logits_of(start, size)), None)[1] for run in runs]
            in_order = jnp.concatenate([jnp.moveaxis(x, 0, 2).reshape(*q.shape[:2], -1, block_size) for x in logits], axis=2)
            if call.return_block_lse:
                block_lse = jax.lax.dynamic_update_slice_in_dim(block_lse, jax.nn.logsumexp(in_order, axis=-1), runs[0].start, axis=2)
            partial, shift = online_softmax.raised(partial, in_order.max(-1).max(-1))
            # By blocks, and as many as a group may have, so that sums have the same order in groups of all sizes.
            totals = jnp.exp(in_order - shift[..., None, None]).sum(-1)
            totals = jnp.pad(totals, ((0, 0), (0, 0), (0, max(0, cut.group - totals.shape[2]))))

            def add(start, weighted, x):
                weights = jnp.exp(x - shift[..., None, None]).reshape(*x.shape[:2], -1)
                return weighted + online_softmax.weighted(weights, values_of(start, x.shape[2])), None

            weighted = partial.weighted
            for run, x in zip(runs, logits, strict=True):
                weighted, _ = run.scan(add, weighted, x)
            return partial._replace(total=partial.total + totals.sum(-1), weighted=weighted), block_lse

        block_lse = jnp.full((*q.shape[:2], ids.shape[1]), -jnp.inf, jnp.float32) if call.return_block_lse else None
        partial, block_lse = tiles.walk(cut, used, fold, (online_softmax.empty(q.shape[:2], pages.v_head_dim), block_lse))
        out, lse = online_softmax.finish(partial)
        found = (out.astype(q.dtype), lse, block_lse) if call.return_block_lse else (out.astype(q.dtype), lse)
        heads_last = (x.reshape(num_kv_heads, num_queries, -1, *x.shape[2:]).swapaxes(0, 1) for x in found)
        return tuple(x.reshape(num_queries, num_heads, *x.shape[3:]) for x in heads_last)

    out, lse, *block_lse = jax.lax.map(row, (q, table, lengths, blocks), batch_size=math.gcd(q.shape[0], rows))
    return (out, lse, *(x[..., :width] for x in block_lse))


def _cut(call: Call, q: Array, pages: Pages, width: int, *, listed: bool) -> tuple[tiles.Cut, int]:
    """The tiles of a list of `width` entries, and how many rows of the batch walk through theirs together."""
    if call.config is not None:
        largest = max(1, call.config.tile_tokens // call.block_size)
        largest = min(largest, width) if listed else largest
        return tiles.Cut(width, largest, largest), call.config.rows
    batch, num_queries, num_heads, _ = q.shape
    values = 0 if pages.v is None else pages.v_head_dim * pages.v.dtype.itemsize
    copied = pages.kv_heads * max(pages.head_dim * pages.k.dtype.itemsize, values)
    logits = 4 * num_queries * num_heads
    found = tiles.cut(width, call.block_size, batch * call.block_size * (copied + logits), batch * call.block_size * logits)
    if not listed:
        return found if values else dataclasses.replace(found, stride=1), batch  # where V is a view of K, a tile is read once for both
    # A list has the same width for every width of the page table, so it needs no small tiles.
    largest = min(found.largest, width)
    return tiles.Cut(width, largest, largest, stride=found.stride), batch


def _list(
    ids: Int[Array, "K W"] | None, table: Int[Array, "M"], length: Array, num_kv_heads: int, page_size: int, block_size: int, width: int
) -> tuple[Array, Array]:
    """Block ids to walk through and the frames of their pages, `[K, width]`.

    Both are -1 where the block does not exist, has no page, or has no written token.
    """
    per_page = page_size // block_size
    if ids is None:
        ids = jnp.broadcast_to(jnp.arange(table.shape[0] * per_page, dtype=jnp.int32), (num_kv_heads, table.shape[0] * per_page))
    frames = table.at[jnp.maximum(ids, 0) // per_page].get(mode="fill", fill_value=-1)
    there = (ids >= 0) & (frames >= 0) & (ids * block_size < length)
    padding = ((0, 0), (0, width - ids.shape[1]))
    return tuple(jnp.pad(jnp.where(there, x, -1), padding, constant_values=-1) for x in (ids, frames))
