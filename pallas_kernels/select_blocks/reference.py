"""select_blocks by definition: a block is listed if it is sink or local, or if fewer than k distant candidates beat it."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from pallas_kernels.select_blocks.api import selection_width


@functools.partial(jax.jit, static_argnames=("kind", "page_size", "block_size", "k", "sink", "local"))
def select_blocks(q, index, page_table, lengths, *, kind, page_size, block_size, k, sink, local):
    """See `pallas_kernels.select_blocks.select_blocks`."""
    (batch, num_queries, _, head_dim), num_kv_heads, per_page = q.shape, index.shape[1], page_size // block_size
    width = selection_width(num_queries, page_size=page_size, block_size=block_size, k=k, sink=sink, local=local)
    block = jnp.arange(max(page_table.shape[1] * per_page, width))

    def of_head(q, kv_head, table, length):  # q [T, G, D]
        current = (length - 1) // block_size
        first_written_page = (length - num_queries) // page_size
        first_local = jnp.maximum(jnp.minimum(current - local + 1, first_written_page * per_page), 0)
        page = table[jnp.minimum(block // per_page, table.size - 1)]
        rows = index[page, kv_head, block % per_page].astype(jnp.float32)
        if kind == "bounds":
            score = jnp.maximum(q[:, :, None] * rows[:, 0], q[:, :, None] * rows[:, 1]).sum(-1).max(1)
        else:
            score = (q.mean(1)[:, None] * rows[:, 0]).sum(-1)
        written = (length - num_queries + jnp.arange(num_queries) >= 0)[:, None]
        score = jnp.where(written, score, -jnp.inf).max(0)
        score = jnp.where(jnp.isnan(score), -jnp.inf, score).clip(jnp.finfo(jnp.float32).min)
        candidate = (block >= sink) & (block < first_local) & (page >= 0)
        beaten_by = candidate & ((score > score[:, None]) | ((score == score[:, None]) & (block < block[:, None])))
        best = candidate & (beaten_by.sum(1) < k)
        listed = ((block < sink) | best | (block >= first_local)) & (block <= current) & (length > 0)
        ids = jnp.sort(jnp.where(listed, block, block.size))[:width]
        return jnp.where(ids == block.size, -1, ids).astype(jnp.int32)

    grouped = q.astype(jnp.float32).reshape(batch, num_queries, num_kv_heads, -1, head_dim)
    of_heads = jax.vmap(of_head, in_axes=(1, 0, None, None))
    return jax.vmap(of_heads, in_axes=(0, None, 0, 0))(grouped, jnp.arange(num_kv_heads), page_table, lengths)
