"""select_blocks by definition: a block is listed if it is sink or local, or if fewer than k distant candidates beat
it."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from pallas_kernels.selection.select_blocks.api import Call


@functools.partial(jax.jit, static_argnames="call")
def select_blocks(call: Call, q, index, table, lengths):
    """See `pallas_kernels.select_blocks`."""
    page_size, block_size, sink = call.page_size, call.block_size, call.sink
    (batch, num_queries, _, head_dim), num_kv_heads, per_page = q.shape, index.shape[1], page_size // block_size
    block = jnp.arange(max(table.shape[1] * per_page, call.width))

    def of_head(q, kv_head, table, length):  # q [G, D]; length: tokens up to the query's own
        current = (length - 1) // block_size
        written_page = (length - 1) // page_size
        first_local = jnp.maximum(jnp.minimum(current - call.local + 1, written_page * per_page), 0)
        page = table[jnp.minimum(block // per_page, table.size - 1)]
        rows = index[page, kv_head, block % per_page].astype(jnp.float32)
        if call.kind == "bounds":
            score = jnp.maximum(q[:, None] * rows[:, 0], q[:, None] * rows[:, 1]).sum(-1).max(0)
        else:
            score = (q.mean(0) * rows[:, 0]).sum(-1)
        score = jnp.where(jnp.isnan(score), -jnp.inf, score).clip(jnp.finfo(jnp.float32).min)
        candidate = (block >= sink) & (block < first_local) & (page >= 0)
        beaten_by = candidate & ((score > score[:, None]) | ((score == score[:, None]) & (block < block[:, None])))
        best = candidate & (beaten_by.sum(1) < call.k)
        listed = ((block < sink) | best | (block >= first_local)) & (block <= current) & (length > 0)
        ids = jnp.sort(jnp.where(listed, block, block.size))[: call.width]
        return jnp.where(ids == block.size, -1, ids).astype(jnp.int32)

    grouped = q.astype(jnp.float32).reshape(batch, num_queries, num_kv_heads, -1, head_dim)
    seen = lengths[:, None] - num_queries + 1 + jnp.arange(num_queries)
    of_heads = jax.vmap(of_head, in_axes=(0, 0, None, None))
    of_queries = jax.vmap(of_heads, in_axes=(0, None, None, 0))
    return jax.vmap(of_queries, in_axes=(0, None, 0, 0))(grouped, jnp.arange(num_kv_heads), table, seen)
