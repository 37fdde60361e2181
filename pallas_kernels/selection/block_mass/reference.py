"""block_mass by definition, in float32: for each whole sequence, the weights of every query; those that count are added
up.

Slow, and needs T x S per head: only for tests and debugging.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from pallas_kernels.core.soft_cap import scaled
from pallas_kernels.selection.block_mass.api import Call


@functools.partial(jax.jit, static_argnames="call")
def block_mass(call: Call, q, pages, table, starts, lengths, lse, first_query):
    """See `pallas_kernels.block_mass`; takes no config."""
    num_kv_heads, page_size, head_dim = pages.kv_heads, pages.page_size, pages.head_dim

    def of_row(q, table, start, length, lse, first):  # q [T, H, D]
        pos, query_pos = jnp.arange(table.size * page_size), start + jnp.arange(q.shape[0])
        there = (jnp.repeat(table, page_size) >= 0) & (pos < length)
        counts = ((query_pos >= first) & (query_pos < length))[:, None] & (lse != -jnp.inf)  # [T, H]
        seen = there & (pos <= query_pos[:, None]) & counts.T[:, :, None]  # [H, T, S]

        def logits_of(pool, rows):
            keys = jnp.where(there[:, None, None], pool[rows].swapaxes(1, 2).reshape(-1, num_kv_heads, head_dim), 0)
            keys = jnp.repeat(keys.astype(jnp.float32), q.shape[1] // num_kv_heads, axis=1)
            return scaled(jnp.einsum("thd,shd->hts", q.astype(jnp.float32), keys, precision="highest"), call.sm_scale)

        logits = logits_of(pages.keys, table)
        if pages.open is not None:
            own = pos // page_size == query_pos[:, None] // page_size
            logits = jnp.where(own, logits_of(pages.open.k, pages.open.row_of[table]), logits)
        weights = jnp.where(seen, jnp.exp(logits - lse.T[:, :, None]), 0)
        return weights.sum(1).reshape(q.shape[1], -1, call.block_size).sum(2)

    return jax.vmap(of_row)(q, table, starts, lengths, lse, first_query)
