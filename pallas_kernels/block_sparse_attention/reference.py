"""block_sparse_attention by definition, in float32: every logit of every query, softmax over what its list, sinks and window name.

As wasteful as it reads (T x S per head): keep it to tests and debugging.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp


@functools.partial(jax.jit, static_argnames=("block_size", "query_tile", "window", "sm_scale", "config"))
def block_sparse_attention(q, k, v, page_table, starts, lengths, *, blocks, block_size, query_tile, window, sm_scale, config):
    """See `pallas_kernels.block_sparse_attention.block_sparse_attention`; takes no config."""
    if config is not None:
        raise ValueError(f"implementation 'reference' of block_sparse_attention takes no config, got {config!r}")
    group = q.shape[2] // k.shape[1]
    sinks, recent = window or (0, 0)

    def of_head(q, lists, keys, values, there, start):  # q [T, D], lists [C, W], keys [S, D], there [S]
        pos, query_pos = jnp.arange(keys.shape[0]), start + jnp.arange(q.shape[0])[:, None]
        listed = (lists[:, None, :] == (pos // block_size)[:, None]).any(-1)[jnp.arange(q.shape[0]) // query_tile]
        read = there & (pos <= query_pos) & (listed | (pos < sinks) | (pos > query_pos - recent))
        logits = jnp.where(read, jnp.einsum("td,sd->ts", q, keys, precision="highest") * sm_scale, -jnp.inf)
        weights = jnp.where(read, jax.nn.softmax(logits, axis=-1), 0)
        return jnp.einsum("ts,sd->td", weights, values, precision="highest"), jax.nn.logsumexp(logits, axis=-1)

    def of_row(q, lists, table, start, length):  # q [T, H, D], lists [C, H, W]
        there = (jnp.repeat(table, k.shape[2]) >= 0) & (jnp.arange(table.size * k.shape[2]) < length)
        laid_out = (pool[table].swapaxes(1, 2).reshape(-1, *pool.shape[1::2]) for pool in (k, v))
        keys, values = (jnp.where(there[:, None, None], x, 0).astype(jnp.float32).repeat(group, axis=1) for x in laid_out)
        heads = jax.vmap(of_head, in_axes=(1, 1, 1, 1, None, None), out_axes=1)
        return heads(q.astype(jnp.float32), lists, keys, values, there, start)

    out, lse = jax.vmap(of_row)(q, blocks, page_table, starts, lengths)
    return out.astype(q.dtype), lse
