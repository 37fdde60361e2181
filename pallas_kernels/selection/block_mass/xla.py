"""block_mass for any backend: for each tile of keys, a walk over the tiles of queries that see it.

A tile's keys are a fixed span of absolute positions, read from their pages once. The walk goes in order over the tiles
of queries, from the first that counts and lies behind the tile's first key to the last that counts. So a row's bits
depend neither on the width of the page table nor on the other rows. Memory traffic: queries once per tile of keys.
Memory needed: a tile of keys and its weights, `rows * H * query_tile * key_tile` float32.
"""

from __future__ import annotations

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp

from pallas_kernels.core.pages import read_keys, read_open, visible
from pallas_kernels.selection.block_mass.api import Call
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


def default_config() -> Config:
    """Tiles that fit a CPU's caches; on other devices, several rows at once to occupy the device."""
    return Config() if key_tiles.on_cpu() else Config(query_tile=512, key_tile=1024, rows=16)


def block_mass(call: Call, q, pages, table, starts, lengths, lse, first_query):
    """See `pallas_kernels.block_mass`. config: a `Config`, or None for `default_config()`."""
    call = dataclasses.replace(call, config=call.config or default_config())
    return _sum_up(call, q, pages, table, starts, lengths, lse, first_query)


@functools.partial(jax.jit, static_argnames="call")
def _sum_up(call: Call, q, pages, table, starts, lengths, lse, first_query):
    block_size, sm_scale, config = call.block_size, call.sm_scale, call.config
    batch, num_queries, num_heads, head_dim = q.shape
    num_kv_heads, page_size = pages.kv_heads, pages.page_size
    num_blocks = table.shape[1] * page_size // block_size
    query_tile = min(config.query_tile, num_queries)
    pages_per_tile = min(max(1, config.key_tile // page_size), table.shape[1])
    table = jnp.pad(table, ((0, 0), (0, -table.shape[1] % pages_per_tile)), constant_values=-1)
    behind = ((0, 0), (0, -num_queries % query_tile), (0, 0))
    q, lse = jnp.pad(q, (*behind, (0, 0))), jnp.pad(lse, behind, constant_values=-jnp.inf)  # padded queries add nothing

    def row(args):
        q, table, start, length, lse, first = args
        # Per tile, the queries of one KV head's group lie side by side: [C, K, G * query_tile, ...].
        q = q.reshape(-1, query_tile, num_kv_heads, num_heads // num_kv_heads, head_dim)
        q = q.transpose(0, 2, 3, 1, 4).reshape(-1, num_kv_heads, query_tile * num_heads // num_kv_heads, head_dim)
        lse = lse.reshape(-1, query_tile, num_heads).swapaxes(1, 2).reshape(*q.shape[:3])
        keep = jnp.maximum(start, first), jnp.minimum(start + num_queries, length)

        def tile(args):
            frames, position = args
            sums = _walk(q, lse, start, keep, query_tile, frames, position, pages, length, sm_scale)
            return sums.reshape(num_heads, -1, block_size).sum(2)

        tables = table.reshape(-1, pages_per_tile)
        positions = jnp.arange(tables.shape[0], dtype=jnp.int32) * (pages_per_tile * page_size)
        mass = jax.lax.map(tile, (tables, positions))
        return mass.swapaxes(0, 1).reshape(num_heads, -1)[:, :num_blocks]

    return jax.lax.map(row, (q, table, starts, lengths, lse, first_query), batch_size=math.gcd(batch, config.rows))


def _walk(q, lse, start, keep, query_tile, frames, position, pages, length, sm_scale):
    """Sums of weights `[K, G, key_tile]` of the keys from `position` on, over the queries at positions keep[0] <= p <
    keep[1]."""
    num_kv_heads, page_size = pages.kv_heads, pages.page_size
    group = q.shape[2] // query_tile
    page = jnp.broadcast_to(frames, (num_kv_heads, frames.size))
    keys = read_keys(pages, page, jnp.zeros_like(page), page_size)
    pos = position + jnp.arange(keys.shape[1], dtype=jnp.int32)
    pos = jnp.where((jnp.repeat(frames, page_size) >= 0) & (pos < length), pos, -1)
    open_keys = None if pages.open is None else read_open(pages, page, jnp.zeros_like(page), page_size)[0]
    begin = jnp.maximum(jnp.maximum(keep[0], position) - start, 0) // query_tile
    end = -(-jnp.maximum(keep[1] - start, 0) // query_tile)

    def step(i, sums, opened=False):
        query_pos = jnp.tile(start + i * query_tile + jnp.arange(query_tile, dtype=jnp.int32), group)[:, None]
        counts = (query_pos >= keep[0]) & (query_pos < keep[1]) & (lse[i] != -jnp.inf)[:, :, None]
        seen = visible(pos, query_pos, None) & counts
        logits = online_softmax.scaled_logits(q[i], keys, sm_scale)
        if opened:  # each query reads its own page open, and earlier ones as packed
            own = pos // page_size == query_pos // page_size
            logits = jnp.where(own, online_softmax.scaled_logits(q[i], open_keys, sm_scale), logits)
        logits -= lse[i][:, :, None]
        weights = jnp.exp(jnp.where(seen, logits, -jnp.inf))
        return sums + weights.reshape(num_kv_heads, group, query_tile, -1).sum(2)

    sums = jnp.zeros((num_kv_heads, group, keys.shape[1]), jnp.float32)
    if pages.open is not None:  # tiles of queries of which some lie in these pages
        behind = -(-jnp.maximum(position + keys.shape[1] - start, 0) // query_tile)
        behind = jnp.clip(behind, begin, jnp.maximum(begin, end))
        sums = jax.lax.fori_loop(begin, jnp.minimum(behind, end), functools.partial(step, opened=True), sums)
        begin = behind
    return jax.lax.fori_loop(begin, end, step, sums)
