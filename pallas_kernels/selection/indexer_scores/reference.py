"""indexer_scores by definition, in float32: all keys of a sequence, every head scored and weighted. Only for tests."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from pallas_kernels.selection.indexer_scores.api import Call


@functools.partial(jax.jit, static_argnames="call")
def indexer_scores(call: Call, q, weights, keys, table, lengths, scales):
    """See `pallas_kernels.indexer_scores`; takes no config."""
    page_size, num_queries = keys.shape[1], q.shape[1]
    position = jnp.arange(table.shape[1] * page_size)

    def of_row(q, weights, table, length):  # q [T, H, D]
        page, place = table[position // page_size], position % page_size
        row = keys[page, place].astype(jnp.float32)
        if scales is not None:
            row = row * scales[page, place][:, None]
        dots = jnp.einsum("thd,sd->ths", q.astype(jnp.float32), row, precision="highest")
        scores = (weights[:, :, None] * jnp.maximum(dots, 0)).sum(1)
        at = length - num_queries + jnp.arange(num_queries)
        return jnp.where((page >= 0) & (position <= at[:, None]), scores, -jnp.inf)

    return jax.vmap(of_row)(q, weights, table, lengths)
