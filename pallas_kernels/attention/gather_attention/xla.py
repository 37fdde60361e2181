"""gather_attention for any backend: online softmax over tiles of the list, several rows of the batch at a time.

Dense attention uses the list of all blocks. Tiles are fixed ranges of list entries, so for dense attention fixed spans
of absolute positions. Each row folds its own tiles in order. Tiles behind its last readable one leave its bits as they
are. So its bits depend neither on the width of the page table nor on the lengths of other rows. Memory traffic: each
listed block is read once and copied once, a tile at a time. Memory needed: that copy (`rows * K * tile_tokens * D`
elements for keys, and as many for values unless V is a view of K) and its logits.
"""

from __future__ import annotations

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from pallas_kernels.attention.gather_attention.api import Call
from pallas_kernels.core.pages import Pages, read, read_open, visible
from pallas_kernels.xla import key_tiles, online_softmax


@dataclasses.dataclass(frozen=True)
class Config:
    """tile_tokens: keys per tile, rounded down to whole blocks, at least one. rows: rows of the batch computed
    together."""

    tile_tokens: int = 512
    rows: int = 4

    def __post_init__(self):
        for name in ("tile_tokens", "rows"):
            if not isinstance(getattr(self, name), int) or getattr(self, name) < 1:
                raise ValueError(f"{name} must be a positive int, got {getattr(self, name)!r}")


def gather_attention(call: Call, q, pages, table, lengths, blocks, block_frames=None):
    """See `pallas_kernels.gather_attention`. config: a `Config`; None: tiles that fit a CPU's caches, and on other
    devices all rows together, in tiles as large as `tiles.MEMORY` allows."""
    if call.config is None and key_tiles.on_cpu():
        call = dataclasses.replace(call, config=Config())
    return _attend(call, q, pages, table, lengths, blocks, block_frames)


@functools.partial(jax.jit, static_argnames="call")
def _attend(call: Call, q, pages, table, lengths, blocks, block_frames):
    block_size, num_kv_heads, page_size = call.block_size, pages.kv_heads, pages.page_size
    width = table.shape[1] * (page_size // block_size) if blocks is None else blocks.shape[2]
    cut, rows = _cut(call, q, pages, width, listed=blocks is not None)

    def row(args):
        q, table, length, ids, frames = args
        num_queries, num_heads, head_dim = q.shape
        q = q.reshape(num_queries, num_kv_heads, -1, head_dim).swapaxes(0, 1).reshape(num_kv_heads, -1, head_dim)
        query_pos = length - num_queries + jnp.arange(num_queries, dtype=jnp.int32)
        query_pos = jnp.repeat(query_pos, num_heads // num_kv_heads)
        ids, frames = _list(ids, frames, table, length, num_kv_heads, page_size, block_size, cut.width)
        used = jnp.max(jnp.where(ids >= 0, jnp.arange(ids.shape[1], dtype=jnp.int32) + 1, 0))

        def fold(start, size, carry):
            partial, block_lse = carry
            block, frame = (jax.lax.dynamic_slice_in_dim(x, start, size, axis=1) for x in (ids, frames))
            pos = (block[..., None] * block_size + jnp.arange(block_size, dtype=jnp.int32)).reshape(num_kv_heads, -1)
            keys, values = read(pages, frame, block * block_size % page_size, block_size)
            seen = visible(pos[:, None, :], query_pos[:, None], call.window)
            if pages.open is not None:  # a query's own page is folded at the end
                pos = jnp.where(pos < (length - 1) // page_size * page_size, pos, -1)
                seen &= (pos[:, None, :] >= 0) & (pos[:, None, :] // page_size != query_pos[:, None] // page_size)
            logits = jnp.where(seen, online_softmax.scaled_logits(q, keys, call.sm_scale), -jnp.inf)
            values = jnp.where(((pos >= 0) & (pos < length))[..., None], values, 0)  # unwritten values may be NaN
            if call.return_block_lse:
                of_tile = jax.nn.logsumexp(logits.reshape(*logits.shape[:2], size, block_size), axis=-1)
                block_lse = jax.lax.dynamic_update_slice_in_dim(block_lse, of_tile, start, axis=2)
            return online_softmax.fold(partial, logits, values, rounded=not key_tiles.on_cpu()), block_lse

        block_lse = jnp.full((*q.shape[:2], ids.shape[1]), -jnp.inf, jnp.float32) if call.return_block_lse else None
        partial, block_lse = key_tiles.walk(cut, used, fold, (online_softmax.empty(q.shape[:2], pages.v_head_dim), block_lse))
        if pages.open is not None:
            own = query_pos, num_queries, ids, table, length, pages
            partial, block_lse = _own_pages(call, q, *own, partial, block_lse)
        out, lse = online_softmax.finish(partial)
        found = (out.astype(q.dtype), lse, block_lse) if call.return_block_lse else (out.astype(q.dtype), lse)
        heads_last = (x.reshape(num_kv_heads, num_queries, -1, *x.shape[2:]).swapaxes(0, 1) for x in found)
        return tuple(x.reshape(num_queries, num_heads, *x.shape[3:]) for x in heads_last)

    out, lse, *block_lse = jax.lax.map(row, (q, table, lengths, blocks, block_frames), batch_size=math.gcd(q.shape[0], rows))
    return (out, lse, *(x[..., :width] for x in block_lse))


def _own_pages(call: Call, q, query_pos, num_queries, ids, table, length, pages, partial, block_lse):
    """Fold the open pages of a row's queries, in which each reads the listed blocks of its own page. ids: the row's
    list `[K, W]`."""
    page_size, block_size = pages.page_size, call.block_size
    per_page = page_size // block_size
    first = jnp.maximum(length - num_queries, 0) // page_size
    for i in range((num_queries - 2) // page_size + 2):
        page = first + i
        frames = jnp.broadcast_to(table.at[page].get(mode="fill", fill_value=-1), (pages.kv_heads, 1))
        pos = page * page_size + jnp.arange(page_size, dtype=jnp.int32)
        pos = jnp.where((frames[0] >= 0) & (pos < length), pos, -1)
        keys, values = read_open(pages, frames, jnp.zeros_like(frames), page_size)
        blocks = page * per_page + jnp.arange(per_page, dtype=jnp.int32)
        of_block = ids[:, :, None] == blocks  # [K, W, blocks of the page]
        listed = jnp.repeat(of_block.any(axis=1), block_size, axis=1)[:, None, :]
        seen = listed & visible(pos, query_pos[:, None], call.window) & (pos // page_size == query_pos[:, None] // page_size)
        logits = jnp.where(seen, online_softmax.scaled_logits(q, keys, call.sm_scale), -jnp.inf)
        if call.return_block_lse:
            found = jax.nn.logsumexp(logits.reshape(*logits.shape[:2], per_page, block_size), axis=-1)  # [K, R, blocks]
            of_entry = jnp.where(of_block[:, None], found[:, :, None, :], -jnp.inf).max(axis=-1)
            block_lse = jnp.maximum(block_lse, of_entry)  # one of the two is -inf
        values = jnp.where((pos >= 0)[:, None], values, 0)  # unwritten values may be NaN
        partial = online_softmax.fold(partial, logits, values, rounded=not key_tiles.on_cpu())
    return partial, block_lse


def _cut(call: Call, q: Array, pages: Pages, width: int, *, listed: bool) -> tuple[key_tiles.Cut, int]:
    """The tiles of a list of `width` entries, and how many rows of the batch walk through theirs together."""
    if call.config is not None:
        largest = max(1, call.config.tile_tokens // call.block_size)
        largest = -(-width // -(-width // largest)) if listed else largest  # tiles alike, with little padding
        return key_tiles.Cut(width, largest, largest), call.config.rows
    batch, num_queries, num_heads, _ = q.shape
    # Unpacking makes two arrays of 32-bit numbers on the way.
    of_key, of_value = (each.dtype.itemsize + 8 * each.packed for each in (pages.k_format, pages.v_format))
    copied = pages.kv_heads * (pages.head_dim * of_key + (0 if pages.v is None else pages.v_head_dim * of_value))
    found = key_tiles.cut(width, call.block_size, batch * call.block_size * (copied + 8 * num_queries * num_heads))  # logits and weights
    if not listed:
        return found, batch
    # A list has the same width for every width of the page table, so it needs no small tiles.
    largest = min(found.largest, width)
    return key_tiles.Cut(width, largest, largest, stride=width), batch


def _list(
    ids: Int[Array, "K W"] | None,
    frames: Int[Array, "K W"] | None,
    table: Int[Array, "M"],
    length: Array,
    num_kv_heads: int,
    page_size: int,
    block_size: int,
    width: int,
) -> tuple[Array, Array]:
    """Block ids to walk through and the frames of their pages, `[K, width]`. frames: of the ids; None: as the table
    says.

    Both are -1 where the block does not exist, has no page, or has no written token.
    """
    per_page = page_size // block_size
    if ids is None:
        ids = jnp.broadcast_to(jnp.arange(table.shape[0] * per_page, dtype=jnp.int32), (num_kv_heads, table.shape[0] * per_page))
    if frames is None:
        frames = table.at[jnp.maximum(ids, 0) // per_page].get(mode="fill", fill_value=-1)
    there = (ids >= 0) & (frames >= 0) & (ids * block_size < length)
    padding = ((0, 0), (0, width - ids.shape[1]))
    return tuple(jnp.pad(jnp.where(there, x, -1), padding, constant_values=-1) for x in (ids, frames))
