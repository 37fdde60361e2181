"""flash_attention for any backend: tiles of queries against tiles of keys with online softmax (FlashAttention-2, arXiv
2307.08691).

Key tiles are fixed spans of absolute positions, read from their pages. Each tile of queries walks in order from the
first to the last key that one of its rows may read, and skips tiles that a window leaves out. So a row's bits depend
neither on the width of the page table, nor on how the history was written, nor on the other rows. Memory traffic: the
keys and values of a sequence are read once per tile of queries. Memory needed: a tile of keys and values, and its
logits, `H * query_tile * key_tile` float32.
"""

from __future__ import annotations

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
from jaxtyping import Array

from pallas_kernels.attention.flash_attention.api import Call
from pallas_kernels.core.pages import read, read_open, visible
from pallas_kernels.xla import key_tiles, online_softmax


@dataclasses.dataclass(frozen=True)
class Config:
    """query_tile: tokens. key_tile: tokens, rounded down to whole pages, at least one. rows: rows of the batch computed
    together."""

    query_tile: int = 256
    key_tile: int = 512
    rows: int = 1

    def __post_init__(self):
        for name in ("query_tile", "key_tile", "rows"):
            if not isinstance(getattr(self, name), int) or getattr(self, name) < 1:
                raise ValueError(f"{name} must be a positive int, got {getattr(self, name)!r}")


def default_config(q: Array) -> Config:
    """Tiles that fit a CPU's caches; on other devices, tiles whose logits and weights fit into `tiles.MEMORY`, one row
    at a time."""
    if key_tiles.on_cpu():
        return Config()
    query_tile = min(1024, q.shape[1])
    return Config(query_tile, key_tile=key_tiles.fitting(8 * q.shape[2] * query_tile, 2048))


def flash_attention(call: Call, q, pages, table, starts, lengths, fresh):
    """See `pallas_kernels.flash_attention`. config: a `Config`, or None for `default_config()`."""
    return _attend(dataclasses.replace(call, config=call.config or default_config(q)), q, pages, table, starts, lengths, fresh)


@functools.partial(jax.jit, static_argnames="call")
def _attend(call: Call, q, pages, table, starts, lengths, fresh):
    batch, num_queries, num_heads, head_dim = q.shape
    num_kv_heads, page_size, config = pages.kv_heads, pages.page_size, call.config
    query_tile = min(config.query_tile, num_queries)
    pages_per_tile = max(1, config.key_tile // page_size)
    table = jnp.pad(table, ((0, 0), (0, -table.shape[1] % pages_per_tile)), constant_values=-1)
    q = jnp.pad(q, ((0, 0), (0, -num_queries % query_tile), (0, 0), (0, 0)))

    def row(args):
        q, table, start, length, fresh = args

        def tile(args):
            q, first = args
            q = q.reshape(query_tile, num_kv_heads, -1, head_dim).transpose(1, 2, 0, 3).reshape(num_kv_heads, -1, head_dim)
            partial = _walk(call, q, first, query_tile, table, length, fresh, pages, pages_per_tile)
            if pages.open is not None:
                partial = _own_pages(call, q, first, query_tile, table, length, pages, partial)
            out, lse = online_softmax.finish(partial)
            heads_last = (x.reshape(num_heads, query_tile, *x.shape[2:]).swapaxes(0, 1) for x in (out.astype(q.dtype), lse))
            return tuple(heads_last)

        first = start + jnp.arange(0, q.shape[0], query_tile, dtype=jnp.int32)
        out, lse = jax.lax.map(tile, (q.reshape(-1, query_tile, num_heads, head_dim), first))
        return out.reshape(-1, num_heads, pages.v_head_dim)[:num_queries], lse.reshape(-1, num_heads)[:num_queries]

    return jax.lax.map(row, (q, table, starts, lengths, fresh), batch_size=math.gcd(batch, config.rows))


def _walk(call: Call, q, first, query_tile, table, length, fresh, pages, pages_per_tile):
    """Fold every key tile that the queries at positions first, first + 1, ... may read. q is `[K, G * query_tile,
    D]`."""
    page_size, window = pages.page_size, call.window
    key_tile = pages_per_tile * page_size
    query_pos = jnp.tile(first + jnp.arange(query_tile, dtype=jnp.int32), q.shape[1] // query_tile)[:, None]
    needed = (first + query_tile > fresh) & (first < length)  # a tile of rows that nobody needs reads nothing
    end = jnp.where(needed, -(-jnp.minimum(first + query_tile, length) // key_tile), 0)
    sinks, resume = 0, 0
    if window is not None:
        sinks = jnp.minimum(-(-window[0] // key_tile), end)
        resume = jnp.clip((first - window[1] + 1) // key_tile, sinks, end)

    def step(i, partial):
        i = jnp.where(i < sinks, i, i - sinks + resume)
        frames = jax.lax.dynamic_slice_in_dim(table, i * pages_per_tile, pages_per_tile)
        pos = i * key_tile + jnp.arange(key_tile, dtype=jnp.int32)
        pos = jnp.where((jnp.repeat(frames, page_size) >= 0) & (pos < length), pos, -1)
        page = jnp.broadcast_to(frames, (pages.kv_heads, pages_per_tile))
        keys, values = read(pages, page, jnp.zeros_like(page), page_size)
        if pages.open is not None:  # a query's own page is folded at the end
            pos = jnp.where(pos < (jnp.minimum(first + query_tile, length) - 1) // page_size * page_size, pos, -1)
        seen = visible(pos, query_pos, window)
        if pages.open is not None:
            seen &= pos // page_size != query_pos // page_size
        logits = jnp.where(seen, online_softmax.scaled_logits(q, keys, call.sm_scale), -jnp.inf)
        values = jnp.where((pos >= 0)[:, None], values, 0)  # unwritten values may be NaN
        return online_softmax.fold(partial, logits, values, rounded=True)

    return jax.lax.fori_loop(0, sinks + end - resume, step, online_softmax.empty(q.shape[:2], pages.v_head_dim))


def _own_pages(call: Call, q, first, query_tile, table, length, pages, partial):
    """Fold the open pages of the queries at positions first, first + 1, ...: each query reads its own page. Arguments
    as of `_walk`."""
    page_size = pages.page_size
    query_pos = jnp.tile(first + jnp.arange(query_tile, dtype=jnp.int32), q.shape[1] // query_tile)[:, None]

    def step(i, partial):
        page = first // page_size + i
        frames = jnp.broadcast_to(table.at[page].get(mode="fill", fill_value=-1), (pages.kv_heads, 1))
        pos = page * page_size + jnp.arange(page_size, dtype=jnp.int32)
        pos = jnp.where((frames[0] >= 0) & (pos < length), pos, -1)
        keys, values = read_open(pages, frames, jnp.zeros_like(frames), page_size)
        seen = visible(pos, query_pos, call.window) & (pos // page_size == query_pos // page_size)
        logits = jnp.where(seen, online_softmax.scaled_logits(q, keys, call.sm_scale), -jnp.inf)
        values = jnp.where((pos >= 0)[:, None], values, 0)  # unwritten values may be NaN
        return online_softmax.fold(partial, logits, values, rounded=True)

    return jax.lax.fori_loop(0, (query_tile - 2) // page_size + 2, step, partial)
