"""select_tiles by definition, in numpy: one sequence, one head, one query at a time."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.core.soft_cap import SoftCap
from pallas_kernels.selection.select_tiles.api import Call


def paid_by(query, bounds, begins, position, sm_scale):
    """What one query may pay each block: softmax over the blocks that begin at or before it. query [D], bounds [S, 2,
    D], begins [S]."""
    logits = (np.maximum(query, 0) * bounds[:, 0] + np.minimum(query, 0) * bounds[:, 1]).sum(-1)
    if isinstance(sm_scale, SoftCap):
        logits = sm_scale.cap * np.tanh(logits * (sm_scale.factor / sm_scale.cap))
    else:
        logits = logits * np.float32(sm_scale)
    seen = (begins >= 0) & (begins <= position)
    if not seen.any():
        return np.zeros(len(begins), np.float32)
    logits = np.where(seen, logits, -np.inf)
    weights = np.exp(logits - logits[seen].max())
    return (weights / weights.sum()).astype(np.float32)


@functools.partial(jax.jit, static_argnames="call")
def select_tiles(call: Call, q, bounds, table, starts, lengths):
    """See `pallas_kernels.select_tiles`."""
    batch, num_queries, num_heads, _ = q.shape
    block_size, query_tile, window, sm_scale = call.block_size, call.query_tile, call.window, call.sm_scale
    num_kv_heads, per_page = bounds.shape[1:3]
    num_blocks = table.shape[1] * per_page
    tiles, width = -(-num_queries // query_tile), min(call.k, num_blocks)

    def of_all(q, bounds, table, starts, lengths):
        q, bounds = np.asarray(q, np.float32), np.asarray(bounds, np.float32)
        table, starts, lengths = (np.asarray(x) for x in (table, starts, lengths))  # JAX arrays are slow to index
        found = np.full((batch, tiles, num_heads, width), -1, np.int32)
        for b, tile, head in np.ndindex(batch, tiles, num_heads):
            sealed = [page >= 0 and (i + 1) * block_size * per_page <= lengths[b] for i, page in enumerate(table[b])]
            begins = np.where(np.repeat(sealed, per_page), np.arange(num_blocks) * block_size, -1)
            rows = bounds[table[b], head * num_kv_heads // num_heads].reshape(num_blocks, 2, -1)
            rows = np.where(begins[:, None, None] >= 0, rows, 0)
            queries = range(tile * query_tile, min((tile + 1) * query_tile, num_queries))
            positions = [starts[b] + t for t in queries if starts[b] + t < lengths[b]]
            if not positions:
                continue
            paid = [paid_by(q[b, p - starts[b], head], rows, begins, p, sm_scale) for p in positions]
            worth = np.sum(paid, axis=0) if call.pooling == "sum" else np.max(paid, axis=0)
            candidates = [
                j for j, begin in enumerate(begins) if begin >= 0 and begin + block_size > window[0] and begin <= positions[-1] - window[1]
            ]
            best = sorted(candidates, key=lambda j: (-worth[j], j))[:width]
            found[b, tile, head, : len(best)] = best if call.ranked else sorted(best)
        return found

    result = jax.ShapeDtypeStruct((batch, tiles, num_heads, width), jnp.int32)
    return jax.pure_callback(of_all, result, q, bounds, table, starts, lengths)
