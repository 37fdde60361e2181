"""block_sparse_attention by definition, in float32: every logit of every query, softmax over the keys of its list,
sinks and window.

Slow, and needs T x S per head: only for tests and debugging.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from pallas_kernels.attention.block_sparse_attention.api import Call
from pallas_kernels.core.pages import open_numbers
from pallas_kernels.core.soft_cap import scaled


@functools.partial(jax.jit, static_argnames="call")
def block_sparse_attention(call: Call, q, pages, table, starts, lengths, blocks):
    """See `pallas_kernels.block_sparse_attention`; takes no config."""
    group, page_size = q.shape[2] // pages.kv_heads, pages.page_size
    sinks, recent = call.window or (0, 0)

    def of_head(q, lists, keys, values, open_keys, open_values, there, start):  # q [T, D], lists [C, W], keys [S, D], there [S]
        pos, query_pos = jnp.arange(keys.shape[0]), start + jnp.arange(q.shape[0])[:, None]
        listed = (lists[:, None, :] == (pos // call.block_size)[:, None]).any(-1)[jnp.arange(q.shape[0]) // call.query_tile]
        read = there & (pos <= query_pos) & (listed | (pos < sinks) | (pos > query_pos - recent))
        own = (pos // page_size == query_pos // page_size) & (pages.open is not None)
        logits, of_open = (jnp.einsum("td,sd->ts", q, x, precision="highest") for x in (keys, open_keys))
        logits = jnp.where(own, of_open, logits)
        logits = jnp.where(read, scaled(logits, call.sm_scale), -jnp.inf)
        weights = jnp.where(read, jax.nn.softmax(logits, axis=-1), 0)
        out = jnp.einsum("ts,sd->td", jnp.where(own, 0, weights), values, precision="highest")
        out += jnp.einsum("ts,sd->td", jnp.where(own, weights, 0), open_values, precision="highest")
        return out, jax.nn.logsumexp(logits, axis=-1)

    def of_row(q, lists, table, start, length):  # q [T, H, D], lists [C, H, W]
        there = (jnp.repeat(table, page_size) >= 0) & (jnp.arange(table.size * page_size) < length)

        def laid_out(pool, rows):
            found = jnp.where(there[:, None, None], pool[rows].swapaxes(1, 2).reshape(-1, *pool.shape[1::2]), 0)
            return found.astype(jnp.float32).repeat(group, axis=1)

        closed = tuple(laid_out(pool, table) for pool in (pages.keys, pages.values))
        opened = closed if pages.open is None else tuple(laid_out(pool, pages.open.row_of[table]) for pool in open_numbers(pages))
        heads = jax.vmap(of_head, in_axes=(1, 1, 1, 1, 1, 1, None, None), out_axes=1)
        return heads(q.astype(jnp.float32), lists, *closed, *opened, there, start)

    out, lse = jax.vmap(of_row)(q, blocks, table, starts, lengths)
    return out.astype(q.dtype), lse
