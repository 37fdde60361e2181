"""Blocks chosen by mean queries against mean keys."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from benchmarks.estimates import mean_keys, mean_queries
from kvjax.policies.prefill.lists import BestBlocks, best_blocks


@dataclasses.dataclass(frozen=True)
class MeanPooled(BestBlocks):
    """Per tile of `chi` queries and query head, sinks, window and the `k` distant blocks whose mean key has the largest
    dot product with the tile's mean query.

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
