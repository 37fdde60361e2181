"""flash_attention by definition, in float32: for each whole sequence, every logit of every query, softmax over those it may see.

Slow, and needs T x S per head: only for tests and debugging.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from pallas_kernels.flash_attention.api import Call


@functools.partial(jax.jit, static_argnames="call")
def flash_attention(call: Call, q, pages, table, starts, lengths):
    """See `pallas_kernels.flash_attention.flash_attention`; takes no config."""
    num_kv_heads, page_size, window = pages.kv_heads, pages.page_size, call.window

    def of_row(q, table, start, length):  # q [T, H, D]
        pos, query_pos = jnp.arange(table.size * page_size), start + jnp.arange(q.shape[0])[:, None]
        there = (jnp.repeat(table, page_size) >= 0) & (pos < length)
        seen = there & (pos <= query_pos)
        if window is not None:
            seen &= (pos < window[0]) | (pos > query_pos - window[1])
        keys, values = (pool[table].swapaxes(1, 2).reshape(-1, num_kv_heads, pool.shape[3]) for pool in (pages.k, pages.values))
        keys, values = (jnp.where(there[:, None, None], x, 0).astype(jnp.float32) for x in (keys, values))
        keys, values = (jnp.repeat(x, q.shape[1] // num_kv_heads, axis=1) for x in (keys, values))
        logits = jnp.einsum("thd,shd->hts", q.astype(jnp.float32), keys, precision="highest") * call.sm_scale
        logits = jnp.where(seen, logits, -jnp.inf)
        lse = jax.nn.logsumexp(logits, axis=-1)
        weights = jnp.where(seen, jax.nn.softmax(logits, axis=-1), 0)
        return jnp.einsum("hts,shd->thd", weights, values, precision="highest").astype(q.dtype), lse.T

    return jax.vmap(of_row)(q, table, starts, lengths)
