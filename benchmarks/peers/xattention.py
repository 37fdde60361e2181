"""Blocks chosen by sums along antidiagonals of their logits."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from benchmarks.estimates import ranked_until, share_text
from kvjax.evaluation.key_walk import padded_tokens, tile_tokens, walk_keys
from kvjax.policies.prefill.lists import TileLists, check_sizes
from pallas_kernels.core.soft_cap import divided
from pallas_kernels.xla import online_softmax


@dataclasses.dataclass(frozen=True)
class XAttention(TileLists):
    """Per tile of `chi` queries and query head, sinks, window and the blocks that reach `threshold` of what
    antidiagonals estimate.

    Every block of logits is cut into squares of `stride` x `stride`; the sum along a square's antidiagonal estimates
    the square. It is one dot product: `stride` queries in order, concatenated, with `stride` keys in reverse order.
    Each row of squares takes the softmax of the sums / stride over all earlier squares; a block's worth is the sum of
    its squares. The largest blocks are listed until they, sinks and window hold `threshold` of the whole. Simplified:
    one threshold for all heads (the source finds one per head), sinks and window are always read, as in every policy
    here, and the window takes the place of the diagonal. Memory: float32 sums, H x T / stride x blocks of the table.

    Source: XAttention (arXiv 2503.16428), sections 2.1 and 2.2.
    """

    threshold: float = 0.9
    stride: int = 8
    chi: int = 128
    key_block: int = 64
    sink_tokens: int = 64
    window_tokens: int = 1024

    k = 1
    """The fewest blocks that measures compare with."""

    def __post_init__(self):
        check_sizes(self, stride=1, chi=1, key_block=1, sink_tokens=0, window_tokens=1)
        if not isinstance(self.threshold, float) or not 0 < self.threshold <= 1:
            raise ValueError(f"threshold must be a fraction above 0, at most 1, got {self.threshold!r}")
        if self.chi % self.stride or self.key_block % self.stride:
            raise ValueError(f"stride {self.stride} must divide chi {self.chi} and key_block {self.key_block}")

    def lists(self, query, layer, ctx):
        """The best blocks until the threshold, the best first, `[B, C, H, M * P / key_block]`."""
        distant = self.distant(query, layer, ctx)

        def of_row(args):
            q, table, start, length, distant = args
            worth = self._worth(q, layer.pages.k, table, start, length, ctx.sm_scale)[..., : distant.shape[1]]
            return ranked_until(worth, distant[:, None], self.threshold)

        return jax.lax.map(of_row, (query, ctx.frames, ctx.starts, ctx.lengths, distant))

    def _worth(self, q, pool, table, start, length, sm_scale):
        """`[C, H, S]` float32: each tile's share of every block, summing to 1 over the blocks; 0 for padding."""
        num_kv_heads, page_size, head_dim = pool.shape[1:]
        tile, num_heads, stride = tile_tokens(page_size), q.shape[1], self.stride
        q = jnp.where((start + jnp.arange(q.shape[0]) < length)[:, None, None], q, 0)
        q = jnp.pad(q, ((0, -q.shape[0] % self.chi), (0, 0), (0, 0)))
        squares = q.shape[0] // stride
        rows = q.reshape(squares, stride, num_kv_heads, -1, head_dim).transpose(2, 3, 0, 1, 4)
        rows = rows.reshape(num_kv_heads, -1, stride * head_dim)
        first = start + jnp.arange(squares, dtype=jnp.int32) * stride

        def step(state, i, keys, pos):
            grouped = keys.reshape(num_kv_heads, -1, stride, head_dim)[:, :, ::-1].reshape(num_kv_heads, -1, stride * head_dim)
            sums = online_softmax.scaled_logits(rows, grouped, divided(sm_scale, stride)).reshape(num_heads, squares, -1)
            begins = pos.reshape(-1, stride)
            seen = (begins[:, -1] >= 0) & (begins[:, -1] < first[:, None] + stride) & (first < length)[:, None]
            sums = jnp.where(seen, sums, -jnp.inf).reshape(num_heads, squares, tile // self.key_block, -1)
            return jax.lax.dynamic_update_slice_in_dim(state, jax.nn.logsumexp(sums, axis=-1), i * (tile // self.key_block), axis=2)

        room = padded_tokens(table.shape[0], page_size) // self.key_block
        worth = walk_keys(pool, table, length, jnp.full((num_heads, squares, room), -jnp.inf, jnp.float32), step)
        worth = jnp.exp(worth - jnp.maximum(jax.nn.logsumexp(worth, axis=-1, keepdims=True), jnp.finfo(jnp.float32).min))
        tiles = worth.reshape(num_heads, -1, self.chi // stride, room).sum(2).swapaxes(0, 1)
        return tiles / jnp.maximum(tiles.sum(-1, keepdims=True), jnp.finfo(jnp.float32).tiny)

    def __str__(self) -> str:
        return f"xattention:{share_text(self.threshold)}" if self == XAttention(self.threshold) else repr(self)

    def describe(self) -> str:
        """For reports."""
        return (
            f"{self} prefill (per {self.chi} queries the blocks of {self.key_block} that antidiagonals of {self.stride} say hold "
            f"{self.threshold:g} of attention, {self.sink_tokens} sink + {self.window_tokens} latest keys)"
        )
