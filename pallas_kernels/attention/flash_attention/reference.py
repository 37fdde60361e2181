"""flash_attention by definition, in float32: for each whole sequence, every logit of every query, softmax over those it
may see.

Slow, and needs T x S per head: only for tests and debugging.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from pallas_kernels.attention.flash_attention.api import Call
from pallas_kernels.core.pages import open_numbers
from pallas_kernels.core.soft_cap import scaled


@functools.partial(jax.jit, static_argnames="call")
def flash_attention(call: Call, q, pages, table, starts, lengths, fresh):
    """See `pallas_kernels.flash_attention`; takes no config, and leaves no row out."""
    num_kv_heads, page_size, window = pages.kv_heads, pages.page_size, call.window

    def of_row(q, table, start, length):  # q [T, H, D]
        pos, query_pos = jnp.arange(table.size * page_size), start + jnp.arange(q.shape[0])[:, None]
        there = (jnp.repeat(table, page_size) >= 0) & (pos < length)
        seen = there & (pos <= query_pos)
        if window is not None:
            seen &= (pos < window[0]) | (pos > query_pos - window[1])

        def laid_out(pool, there):
            rows = pool.swapaxes(1, 2).reshape(-1, num_kv_heads, pool.shape[3])
            return jnp.repeat(jnp.where(there[:, None, None], rows, 0).astype(jnp.float32), q.shape[1] // num_kv_heads, axis=1)

        def logits_of(keys):
            return scaled(jnp.einsum("thd,shd->hts", q.astype(jnp.float32), keys, precision="highest"), call.sm_scale)

        def weighted(weights, values):
            return jnp.einsum("hts,shd->thd", weights, values, precision="highest")

        own = jnp.zeros_like(seen)
        if pages.open is not None:  # a query's own page is read as it was before it was packed, every other page as packed
            own = pos // page_size == query_pos // page_size
            there, opened = there & (pos < (jnp.minimum(start + q.shape[0], length) - 1) // page_size * page_size), there
            seen &= own | there
            open_keys, open_values = (laid_out(x[pages.open.row_of[table]], opened) for x in open_numbers(pages))
        keys, values = (laid_out(pool[table], there) for pool in (pages.keys, pages.values))
        logits = logits_of(keys) if pages.open is None else jnp.where(own, logits_of(open_keys), logits_of(keys))
        logits = jnp.where(seen, logits, -jnp.inf)
        lse = jax.nn.logsumexp(logits, axis=-1)
        weights = jnp.where(seen, jax.nn.softmax(logits, axis=-1), 0)
        out = weighted(jnp.where(own, 0, weights), values)
        if pages.open is not None:
            out += weighted(jnp.where(own, weights, 0), open_values)
        return out.astype(q.dtype), lse.T

    return jax.vmap(of_row)(q, table, starts, lengths)
