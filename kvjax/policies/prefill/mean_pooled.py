"""Blocks chosen by mean queries against mean keys."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from kvjax.policies.prefill.key_walk import padded_tokens, tile_tokens, walk_keys
from kvjax.policies.prefill.lists import BestBlocks, best_blocks


@dataclasses.dataclass(frozen=True)
class MeanPooled(BestBlocks):
    """Per tile of `chi` queries and query head, sinks, window and the `k` distant blocks whose mean key has the largest dot product with
    the tile's mean query.

    Mean queries leave padding out, mean keys what is not written. The keys are read once per chunk to average them.

    Source: the block-sparse pattern of MInference (arXiv 2407.02490); "Measure Once, Mask Once", equation 1.
    """

    word = "mean"

    def lists(self, query, layer, ctx):
        """The k best distant blocks of every tile and query head, `[B, C, H, W]`."""
        candidates = self.distant(query, layer, ctx)

        def of_row(args):
            q, table, start, length, candidates = args
            pooled = mean_queries(q, start, length, self.chi)
            keys = mean_keys(layer.pages.k, table, length, self.key_block)[:, : candidates.shape[-1]]
            grouped = pooled.reshape(pooled.shape[0], keys.shape[0], -1, keys.shape[2])
            scores = jnp.einsum("ckgd,ksd->ckgs", grouped, keys, precision=jax.lax.Precision.HIGHEST)
            return best_blocks(scores.reshape(*pooled.shape[:2], -1), candidates[:, None], self.k)

        return jax.lax.map(of_row, (query, ctx.frames, ctx.starts, ctx.lengths, candidates))


def mean_queries(q, start, length, chi):
    """`[C, H, D]` float32, the mean of each tile's written queries; 0 where there are none."""
    q = jnp.pad(q, ((0, -q.shape[0] % chi), (0, 0), (0, 0))).astype(jnp.float32)
    written = (start + jnp.arange(q.shape[0], dtype=jnp.int32) < length).reshape(-1, chi)
    total = jnp.where(written[..., None, None], q.reshape(-1, chi, *q.shape[1:]), 0).sum(1)
    return total / jnp.maximum(written.sum(1), 1)[:, None, None]


def mean_keys(pool, table, length, key_block):
    """`[K, S, D]` float32, the mean of each block's written keys; 0 where there are none."""
    num_kv_heads, page_size, head_dim = pool.shape[1:]
    per_tile = tile_tokens(page_size) // key_block

    def step(means, i, keys, pos):
        total = keys.astype(jnp.float32).reshape(num_kv_heads, per_tile, key_block, head_dim).sum(2)
        count = (pos >= 0).reshape(per_tile, key_block).sum(1)
        return jax.lax.dynamic_update_slice_in_dim(means, total / jnp.maximum(count, 1)[:, None], i * per_tile, axis=1)

    means = jnp.zeros((num_kv_heads, padded_tokens(table.shape[0], page_size) // key_block, head_dim), jnp.float32)
    return walk_keys(pool, table, length, means, step)
