"""block_sparse_attention for any backend: one walk per tile of queries over the blocks it reads, with online softmax.

A tile's walk takes the blocks that sinks and window touch, then the listed ones. In the first group a query reads
exactly its sinks and window, in the second exactly the rest. So a block in both groups is read twice and counted once,
and no list has to be sorted or cleaned. Each row walks its own tiles in order and stops after the last entry that any
of its heads has. So its bits depend neither on the width of lists and tables nor on the other rows. Memory traffic:
each block once per tile and query head. Memory needed: keys and values of one step, `rows * H * key_tile * D` each, and
its logits, `rows * H * query_tile * key_tile` float32.

Source: "Measure Once, Mask Once", Algorithm 1, step 3; FlashAttention-2 (arXiv 2307.08691) for the online softmax.
"""

from __future__ import annotations

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.attention.block_sparse_attention.api import Call
from pallas_kernels.core.pages import read, read_open, visible
from pallas_kernels.xla import key_tiles, online_softmax


@dataclasses.dataclass(frozen=True)
class Config:
    """key_tile: keys per step, in tokens, rounded down to whole blocks, at least one. rows: tiles of queries computed
    together."""

    key_tile: int = 512
    rows: int = 1

    def __post_init__(self):
        for name in ("key_tile", "rows"):
            if not isinstance(getattr(self, name), int) or getattr(self, name) < 1:
                raise ValueError(f"{name} must be a positive int, got {getattr(self, name)!r}")


def default_config() -> Config:
    """Steps that fit a CPU's caches; on other devices, several tiles at once to occupy the device."""
    return Config() if key_tiles.on_cpu() else Config(key_tile=1024, rows=4)


def block_sparse_attention(call: Call, q, pages, table, starts, lengths, blocks):
    """See `pallas_kernels.block_sparse_attention`. config: a `Config`, or None for `default_config()`."""
    return _attend(dataclasses.replace(call, config=call.config or default_config()), q, pages, table, starts, lengths, blocks)


@functools.partial(jax.jit, static_argnames="call")
def _attend(call: Call, q, pages, table, starts, lengths, blocks):
    num_queries, num_heads, head_dim = q.shape[1:]
    query_tile = call.query_tile
    q = jnp.pad(q, ((0, 0), (0, -num_queries % query_tile), (0, 0), (0, 0)))
    num_tiles = q.shape[1] // query_tile

    def row(args):
        q, table, start, length, lists = args

        def tile(args):
            q, first, ids = args
            always = _always_read(first, query_tile, call.block_size, call.window)
            partial = _walk(call, q.swapaxes(0, 1), first, always, ids, table, length, pages)
            if pages.open is not None:
                partial = _own_pages(call, q.swapaxes(0, 1), first, ids, table, length, pages, partial)
            out, lse = online_softmax.finish(partial)
            return out.swapaxes(0, 1).astype(q.dtype), lse.T

        first = start + jnp.arange(num_tiles, dtype=jnp.int32) * query_tile
        tiles = (q.reshape(num_tiles, query_tile, num_heads, head_dim), first, lists)
        out, lse = jax.lax.map(tile, tiles, batch_size=math.gcd(num_tiles, call.config.rows))
        return out.reshape(-1, num_heads, pages.v_head_dim)[:num_queries], lse.reshape(-1, num_heads)[:num_queries]

    return jax.lax.map(row, (q, table, starts, lengths, blocks))


def _always_read(first: Int[Array, ""], query_tile: int, block_size: int, window: tuple[int, int] | None) -> Int[Array, "A"]:
    """The blocks that the sinks or the window of a tile's queries touch, each once. Blocks beyond the last query are
    -1."""
    if window is None:
        return jnp.zeros(0, jnp.int32)
    sinks = -(-window[0] // block_size)
    oldest = jnp.maximum((first - window[1] + 1) // block_size, sinks)
    recent = oldest + jnp.arange((window[1] + query_tile - 3) // block_size + 2, dtype=jnp.int32)
    ids = jnp.concatenate([jnp.arange(sinks, dtype=jnp.int32), recent])
    return jnp.where(ids * block_size < first + query_tile, ids, -1)


def _walk(call: Call, q: Float[Array, "H R D"], first, always, listed: Int[Array, "H W"], table, length, pages) -> online_softmax.Partial:
    """Fold the keys that the R queries at positions first, first + 1, ... read: sinks and window of `always`, the rest
    of `listed`."""
    num_heads, query_tile = q.shape[:2]
    block_size, window, page_size = call.block_size, call.window, pages.page_size
    per_step = max(1, call.config.key_tile // block_size)
    query_pos = (first + jnp.arange(query_tile, dtype=jnp.int32))[:, None]
    ids = jnp.concatenate([jnp.broadcast_to(always, (num_heads, always.shape[0])), listed], axis=1)
    frames = table.at[jnp.maximum(ids, 0) // (page_size // block_size)].get(mode="fill", fill_value=-1)
    there = (ids >= 0) & (frames >= 0) & (ids * block_size < jnp.minimum(length, first + query_tile))
    is_listed = jnp.arange(ids.shape[1]) >= always.shape[0]
    padding = -ids.shape[1] % per_step
    ids, frames = (jnp.pad(jnp.where(there, x, -1), ((0, 0), (0, padding)), constant_values=-1) for x in (ids, frames))
    is_listed = jnp.pad(is_listed, (0, padding))
    steps = jnp.max(jnp.where(ids >= 0, jnp.arange(ids.shape[1], dtype=jnp.int32) // per_step + 1, 0))

    def step(i, partial):
        block, page = (jax.lax.dynamic_slice_in_dim(x, i * per_step, per_step, axis=1) for x in (ids, frames))
        from_list = jnp.repeat(jax.lax.dynamic_slice_in_dim(is_listed, i * per_step, per_step), block_size)
        pos = (block[..., None] * block_size + jnp.arange(block_size, dtype=jnp.int32)).reshape(num_heads, -1)
        written = (pos >= 0) & (pos < length)
        if pages.open is not None:  # a query's own page is folded at the end
            written &= pos < (jnp.minimum(first + query_tile, length) - 1) // page_size * page_size
        pos = jnp.where(written, pos, -1)[:, None, :]
        keys, values = read(pages, page, block * block_size % page_size, block_size)
        near = visible(pos, query_pos, window) if window is not None else jnp.zeros((), bool)
        seen = visible(pos, query_pos, None) & (near != from_list)
        if pages.open is not None:
            seen &= pos // page_size != query_pos // page_size
        logits = jnp.where(seen, online_softmax.scaled_logits(q, keys, call.sm_scale), -jnp.inf)
        return online_softmax.fold(partial, logits, jnp.where(written[..., None], values, 0))  # unwritten values may be NaN

    return jax.lax.fori_loop(0, steps, step, online_softmax.empty(q.shape[:2], pages.v_head_dim))


def _own_pages(call: Call, q: Float[Array, "H R D"], first, listed: Int[Array, "H W"], table, length, pages, partial):
    """Fold the open pages of the R queries at positions first, first + 1, ...: of its own page each reads what it would
    read packed."""
    num_heads, query_tile = q.shape[:2]
    page_size, per_page = pages.page_size, pages.page_size // call.block_size
    query_pos = (first + jnp.arange(query_tile, dtype=jnp.int32))[:, None]

    def step(i, partial):
        page = first // page_size + i
        frames = jnp.broadcast_to(table.at[page].get(mode="fill", fill_value=-1), (num_heads, 1))
        pos = page * page_size + jnp.arange(page_size, dtype=jnp.int32)
        pos = jnp.where((frames[0] >= 0) & (pos < length), pos, -1)
        keys, values = read_open(pages, frames, jnp.zeros_like(frames), page_size)
        blocks = page * per_page + jnp.arange(per_page, dtype=jnp.int32)
        in_list = jnp.repeat((listed[:, :, None] == blocks).any(axis=1), call.block_size, axis=1)[:, None, :]
        near = visible(pos, query_pos, call.window) if call.window is not None else jnp.zeros((), bool)
        seen = visible(pos, query_pos, None) & (near | in_list) & (pos // page_size == query_pos // page_size)
        logits = jnp.where(seen, online_softmax.scaled_logits(q, keys, call.sm_scale), -jnp.inf)
        return online_softmax.fold(partial, logits, jnp.where((pos >= 0)[:, None], values, 0))  # unwritten values may be NaN

    return jax.lax.fori_loop(0, (query_tile - 2) // page_size + 2, step, partial)
