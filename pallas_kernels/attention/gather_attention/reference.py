"""gather_attention by definition, in float32: all listed keys of a head, softmax over those that each query may see.

Slow: only for tests and debugging.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from pallas_kernels.attention.gather_attention.api import Call
from pallas_kernels.core.pages import open_numbers
from pallas_kernels.core.soft_cap import scaled


@functools.partial(jax.jit, static_argnames="call")
def gather_attention(call: Call, q, pages, table, lengths, blocks, block_frames=None):
    """See `pallas_kernels.gather_attention`; takes no config."""
    window, block_size, sm_scale = call.window, call.block_size, call.sm_scale
    page_size, num_queries, num_heads, num_kv_heads = pages.page_size, q.shape[1], q.shape[2], pages.kv_heads

    def of_head(q, kv_head, listed, frames, table, length):  # q [T, D]
        pos = listed[:, None] * block_size + jnp.arange(block_size)
        page = table[jnp.clip(pos // page_size, 0, table.size - 1)] if block_frames is None else frames[:, None]
        there = (listed >= 0)[:, None] & (page >= 0) & (pos < length)
        at = (length - num_queries + jnp.arange(num_queries))[:, None, None]
        seen = there & (pos <= at)

        def numbers(pool, frame, there):
            return jnp.where(there[..., None], pool[frame, kv_head, pos % page_size].astype(jnp.float32), 0)

        closed = there if pages.open is None else there & (pos < (length - 1) // page_size * page_size)
        keys, values = (numbers(pool, page, closed) for pool in (pages.keys, pages.values))
        if pages.open is not None:  # a query's own page is read as it was before it was packed, every other page as packed
            own, rows = pos // page_size == at // page_size, pages.open.row_of[page]
            open_keys, open_values = (numbers(x, rows, there & (rows >= 0)) for x in open_numbers(pages))
        if window is not None:
            seen &= (pos < window[0]) | (pos > at - window[1])
        logits = scaled(jnp.einsum("td,wsd->tws", q.astype(jnp.float32), keys, precision="highest"), sm_scale)
        if pages.open is not None:
            of_open = scaled(jnp.einsum("td,wsd->tws", q.astype(jnp.float32), open_keys, precision="highest"), sm_scale)
            logits = jnp.where(own, of_open, logits)
        logits = jnp.where(seen, logits, -jnp.inf)
        lse = jax.nn.logsumexp(logits, axis=(1, 2))
        weights = jnp.where(seen, jax.nn.softmax(logits, axis=(1, 2)), 0)
        if pages.open is None:
            out = jnp.einsum("tws,wsd->td", weights, values, precision="highest")
        else:
            out = jnp.einsum("tws,wsd->td", jnp.where(own, weights, 0), open_values, precision="highest")
            out += jnp.einsum("tws,wsd->td", jnp.where(own, 0, weights), values, precision="highest")
        return out.astype(q.dtype), lse, jax.nn.logsumexp(logits, axis=2)

    if blocks is None:
        blocks = jnp.tile(jnp.arange(table.shape[1] * page_size // block_size), (q.shape[0], num_kv_heads, 1))
    group = num_heads // num_kv_heads
    of_heads = jax.vmap(of_head, in_axes=(1, 0, 0, 0, None, None), out_axes=1)
    of_rows = jax.vmap(of_heads, in_axes=(0, None, 0, 0, 0, 0))
    lists, frames = (jnp.repeat(each, group, axis=1) for each in (blocks, blocks if block_frames is None else block_frames))
    results = of_rows(q, jnp.arange(num_heads) // group, lists, frames, table, lengths)
    return results if call.return_block_lse else results[:2]
