"""query_sparse_attention for any backend: tiles of measured queries against tiles of keys with online softmax and
online selection.

Key tiles are fixed spans of absolute positions, read from their pages. Each tile of queries walks in order from the
first key to the last that one of its rows may read. A tile's logits also give its block scores, which the selectors
take one block after another. So a row's bits depend neither on the width of the page table, nor on how the history was
written, nor on the other rows. Memory traffic: the keys and values of a sequence are read once per tile of queries.
Memory needed: a tile of keys and values, its logits, `H * query_tile * key_tile` float32, and the lists of a tile of
queries.
"""

from __future__ import annotations

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.attention.query_sparse_attention import online_selection
from pallas_kernels.attention.query_sparse_attention.api import Call
from pallas_kernels.core.pages import read, read_open, visible
from pallas_kernels.xla import key_tiles, online_softmax


@dataclasses.dataclass(frozen=True)
class Config:
    """query_tile: measured queries. key_tile: tokens, rounded down to whole pages, at least one. rows: batch rows
    computed together."""

    query_tile: int = 64
    key_tile: int = 512
    rows: int = 1

    def __post_init__(self):
        for name in ("query_tile", "key_tile", "rows"):
            if not isinstance(getattr(self, name), int) or getattr(self, name) < 1:
                raise ValueError(f"{name} must be a positive int, got {getattr(self, name)!r}")


def default_config() -> Config:
    """Tiles that fit a CPU's caches; on other devices, several rows at once to occupy the device."""
    return Config() if key_tiles.on_cpu() else Config(query_tile=512, key_tile=1024, rows=16)


def query_sparse_attention(call: Call, q, pages, table, starts, lengths):
    """See `pallas_kernels.query_sparse_attention`. config: a `Config`, or None for `default_config()`."""
    return _measure(dataclasses.replace(call, config=call.config or default_config()), q, pages, table, starts, lengths)


@functools.partial(jax.jit, static_argnames="call")
def _measure(call: Call, q, pages, table, starts, lengths):
    gamma, config = call.gamma, call.config
    q = q[:, ::gamma]
    batch, num_rows, num_heads, head_dim = q.shape
    num_kv_heads, page_size = pages.kv_heads, pages.page_size
    query_tile = min(config.query_tile, num_rows)
    pages_per_tile = max(1, config.key_tile // page_size)
    table = jnp.pad(table, ((0, 0), (0, -table.shape[1] % pages_per_tile)), constant_values=-1)
    q = jnp.pad(q, ((0, 0), (0, -num_rows % query_tile), (0, 0), (0, 0)))

    def row(args):
        q, table, start, length = args
        position = start + gamma * jnp.arange(q.shape[0], dtype=jnp.int32)
        position = jnp.where(position < length, position, -1)  # padding sees nothing

        def tile(args):
            q, position = args
            q = q.reshape(query_tile, num_kv_heads, -1, head_dim).transpose(1, 2, 0, 3).reshape(num_kv_heads, -1, head_dim)
            partial, selection = _walk(call, q, position, table, length, pages, pages_per_tile)
            out, lse = online_softmax.finish(partial)
            results = out.astype(q.dtype), lse, selection.ids, selection.scores
            return tuple(x.reshape(num_heads, query_tile, *x.shape[2:]).swapaxes(0, 1) for x in results)

        tiles = jax.lax.map(tile, (q.reshape(-1, query_tile, num_heads, head_dim), position.reshape(-1, query_tile)))
        return tuple(x.reshape(-1, *x.shape[2:])[:num_rows] for x in tiles)

    return jax.lax.map(row, (q, table, starts, lengths), batch_size=math.gcd(batch, config.rows))


def _walk(call: Call, q, position, table, length, pages, pages_per_tile):
    """Fold every key tile that the queries at these positions may read, and offer its blocks. q is `[K, G * query_tile,
    D]`."""
    page_size, block_size = pages.page_size, call.block_size
    key_tile = pages_per_tile * page_size
    query_pos = jnp.tile(position, q.shape[1] // position.size)
    slots = {"k_blocks": call.k_blocks, "k_exact": call.k_exact, "tournament": call.tournament}
    offered = {"k_exact": call.k_exact, "estimate": call.estimate}
    first, end = _candidates(query_pos, block_size, call.window)

    def step(i, state, opened=False):
        partial, selection = state
        frames = jax.lax.dynamic_slice_in_dim(table, i * pages_per_tile, pages_per_tile)
        pos = i * key_tile + jnp.arange(key_tile, dtype=jnp.int32)
        pos = jnp.where((jnp.repeat(frames, page_size) >= 0) & (pos < length), pos, -1)
        page = jnp.broadcast_to(frames, (pages.kv_heads, pages_per_tile))
        keys, values = read(pages, page, jnp.zeros_like(page), page_size)
        seen = visible(pos, query_pos[:, None], None)
        logits = jnp.where(seen, online_softmax.scaled_logits(q, keys, call.sm_scale), -jnp.inf)
        values = jnp.where((pos >= 0)[:, None], values, 0)  # unwritten values may be NaN
        if opened:  # each query reads its own page open, earlier ones as packed; others are not packed yet
            own = pos // page_size == query_pos[:, None] // page_size
            logits, values = jnp.where(own, -jnp.inf, logits), jnp.where((pos < last_page * page_size)[:, None], values, 0)
        partial = online_softmax.fold(partial, logits, values)
        if opened:
            keys, values = read_open(pages, page, jnp.zeros_like(page), page_size)
            of_own = jnp.where(seen & own, online_softmax.scaled_logits(q, keys, call.sm_scale), -jnp.inf)
            partial = online_softmax.fold(partial, of_own, jnp.where((pos >= first_page * page_size)[:, None], values, 0))
            logits = jnp.where(own, of_own, logits)
        scores = _block_scores(logits, block_size)
        block = i * scores.shape[0]

        def offer(j, selection):
            return online_selection.offer(selection, scores[j], block + j, first, end, **offered)

        return partial, jax.lax.fori_loop(0, scores.shape[0], offer, selection)

    tiles = jnp.minimum(-(-(position.max() + 1) // key_tile), table.size // pages_per_tile)
    state = online_softmax.empty(q.shape[:2], pages.v_head_dim), online_selection.empty(q.shape[:2], **slots)
    if pages.open is None:
        return jax.lax.fori_loop(0, tiles, step, state)
    last_page = position.max() // page_size
    first_page = jnp.min(jnp.where(position >= 0, position, position.max())) // page_size
    closed = jnp.clip(first_page // pages_per_tile, 0, tiles)
    state = jax.lax.fori_loop(0, closed, step, state)
    return jax.lax.fori_loop(closed, tiles, functools.partial(step, opened=True), state)


def _candidates(position: Array, block_size: int, window: tuple[int, int] | None) -> tuple[Array | int, Array]:
    """The first candidate of each row, and the block after its last one. No candidates where the position is -1."""
    if window is None:
        return 0, position // block_size + 1
    return window[0] // block_size, (position - window[1]) // block_size + 1


def _block_scores(logits: Float[Array, "K R S"], block_size: int) -> Float[Array, "S/bs K R"]:
    """Log-sum-exp of every block; -inf where a row reads none of it."""
    logits = logits.reshape(*logits.shape[:2], -1, block_size)
    top = logits.max(-1)
    shift = jnp.where(top == -jnp.inf, 0.0, top)  # -inf minus -inf would be NaN
    scores = top + jnp.log(jnp.exp(logits - shift[..., None]).sum(-1))
    return jnp.moveaxis(jnp.where(top == -jnp.inf, -jnp.inf, scores), -1, 0)
