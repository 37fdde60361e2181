"""A design that was measured against `bounds:K`: one list for all query heads of a KV head, so that keys could be
loaded once for all.

    kvjax recall --prefill bounds:32+sparse --prefill benchmarks/designs/group_lists.py:GroupLists:32

It takes the scores of each head's own walk, adds them up over the heads of a group, and lists the best for all. Only
what it recalls is measured with it: it attends through the same kernel, head by head.
"""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp

from kvjax.policies.prefill import BoundsBlocks
from kvjax.policies.prefill.lists import best_blocks, distant_blocks
from pallas_kernels.selection.select_tiles import mosaic_gpu, xla


@dataclasses.dataclass(frozen=True)
class GroupLists(BoundsBlocks):
    """`bounds:K+sparse` with one list per KV head."""

    dense_below: int | None = 0

    def __str__(self) -> str:
        return f"bounds:{self.k}, one list per KV head"

    def lists(self, query, layer, ctx):
        """The k best distant blocks of every tile and KV head, for each of its query heads, `[B, C, H, W]`."""
        bounds, num_heads = layer.index[self.indexes()[0].name], query.shape[2]
        page_size = layer.pages.page_size
        there = xla.sealed_blocks(ctx.page_table, ctx.lengths, bounds, self.key_block)
        rows = xla.table_bounds(bounds, ctx.page_table, there, -there.shape[1] % mosaic_gpu.TILE)
        sizes = (*query.shape[:3], bounds.shape[1], query.shape[3], rows.shape[2] // mosaic_gpu.TILE)
        shape = mosaic_gpu.Shape(*sizes, self.key_block, self.pooling, ctx.sm_scale, query.dtype)
        sealed = jnp.minimum(ctx.lengths // page_size, ctx.page_table.shape[1]) * bounds.shape[2]
        padded = mosaic_gpu.prefill_fold.padded(query)
        admitted = mosaic_gpu.admitted_blocks(there, self.sink_tokens // self.key_block, rows.shape[2])
        paid = mosaic_gpu.launch(shape)(padded, rows, admitted, ctx.starts, ctx.lengths, sealed)[..., : there.shape[1]]
        window = {"sink_tokens": self.sink_tokens, "window_tokens": self.window_tokens}
        distant = distant_blocks(ctx, page_size, query.shape[1], chi=self.chi, key_block=self.key_block, **window) & there[:, None]
        scores = jnp.where(distant[:, None], paid, 0).reshape(paid.shape[0], bounds.shape[1], -1, *paid.shape[2:]).sum(2).swapaxes(1, 2)
        lists = best_blocks(scores, distant[:, :, None], self.k)
        return jnp.repeat(lists, num_heads // bounds.shape[1], axis=2)
