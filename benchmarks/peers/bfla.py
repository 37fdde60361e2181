"""Blocks chosen by scores between coarse blocks of queries and keys, each pooled to a few long vectors."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from benchmarks.estimates import fewest_that_hold, share_text
from kvjax.evaluation.key_walk import padded_tokens, tile_tokens, walk_keys
from kvjax.policies.prefill.lists import TileLists, check_sizes, sorted_lists
from pallas_kernels.xla import online_softmax


@dataclasses.dataclass(frozen=True)
class BlockFilter(TileLists):
    """Per `coarse` queries and KV head, sinks, window and the blocks of `coarse` keys that pooled logits say hold
    `mass` of attention.

    `group` consecutive tokens, side by side, are one vector: the dot product of a group of queries with one of keys
    adds up the logits of the first query with the first key, the second with the second, and so on. A block of queries
    scores a block of keys by the largest such sum of their groups. Softmax over blocks; a query head keeps the fewest
    blocks that hold `mass`, and a KV head what any of its query heads keeps. The chunk is cut from its first query on;
    groups without a token of the sequence do not count. Simplified: the first block and the local ones are replaced by
    sinks and window, as in every policy here. The optional random rescue of blocks, off in the source's own setting, is
    left out. Memory: float32 scores, H x T / coarse x groups of the table.

    Source: BFLA (arXiv 2605.12193), stage 1 with flattened groups, and the setting its authors publish.
    """

    mass: float = 0.99
    coarse: int = 256
    group: int = 64
    chi: int = 128
    key_block: int = 128
    sink_tokens: int = 128
    window_tokens: int = 1024

    k = 1
    """The fewest blocks that measures compare with."""

    def __post_init__(self):
        check_sizes(self, coarse=1, group=1, chi=1, key_block=1, sink_tokens=0, window_tokens=1)
        if not isinstance(self.mass, float) or not 0 < self.mass <= 1:
            raise ValueError(f"mass must be a fraction above 0, at most 1, got {self.mass!r}")
        for name, size in (("chi", self.chi), ("key_block", self.key_block)):
            if self.coarse % size or size % self.group:
                raise ValueError(f"{name} {size} must divide coarse {self.coarse} and be a multiple of group {self.group}")

    def lists(self, query, layer, ctx):
        """The blocks of every tile and query head, `[B, C, H, M * P / key_block]`."""
        distant = self.distant(query, layer, ctx)
        number = jnp.arange(distant.shape[2], dtype=jnp.int32)

        def of_row(args):
            q, table, start, length, distant = args
            kept = self._kept(q, layer.pages.k, table, start, length, ctx.sm_scale)
            fine = jnp.repeat(jnp.repeat(kept, self.coarse // self.chi, axis=0), self.coarse // self.key_block, axis=2)
            fine = fine[: distant.shape[0], :, : distant.shape[1]] & distant[:, None]
            return sorted_lists(jnp.where(fine, number, -1))

        return jax.lax.map(of_row, (query, ctx.frames, ctx.starts, ctx.lengths, distant))

    def _kept(self, q, pool, table, start, length, sm_scale):
        """`[C', H, S']`: which coarse blocks of keys each coarse block of queries keeps."""
        num_kv_heads, page_size, head_dim = pool.shape[1:]
        num_heads, groups = q.shape[1], self.coarse // self.group
        written = (start + jnp.arange(q.shape[0]) < length)[:, None, None]
        q = jnp.pad(jnp.where(written, q, 0), ((0, -q.shape[0] % self.coarse), (0, 0), (0, 0)))
        rows = q.reshape(-1, self.group, num_kv_heads, num_heads // num_kv_heads, head_dim).transpose(2, 3, 0, 1, 4)
        rows = rows.reshape(num_kv_heads, -1, self.group * head_dim)
        asked = start + jnp.arange(0, q.shape[0], self.group) < length
        per_tile = tile_tokens(page_size) // self.group

        def step(state, i, keys, pos):
            pooled = keys.reshape(num_kv_heads, per_tile, self.group * head_dim)
            sums = online_softmax.scaled_logits(rows, pooled, sm_scale).reshape(num_heads, -1, per_tile)
            there = asked[:, None] & (pos.reshape(per_tile, self.group)[:, 0] >= 0)
            sums = jnp.where(there, sums, -jnp.inf).reshape(num_heads, -1, groups, per_tile).max(2)
            return jax.lax.dynamic_update_slice_in_dim(state, sums, i * per_tile, axis=2)

        room = padded_tokens(table.shape[0], page_size) // self.group
        scores = jnp.full((num_heads, q.shape[0] // self.coarse, room), -jnp.inf, jnp.float32)
        scores = walk_keys(pool, table, length, scores, step)
        scores = jnp.pad(scores, ((0, 0), (0, 0), (0, -room % groups)), constant_values=-jnp.inf)
        scores = scores.reshape(*scores.shape[:2], -1, groups).max(3)
        ends = jnp.minimum(start + jnp.arange(1, scores.shape[1] + 1) * self.coarse, length)
        seen = jnp.arange(scores.shape[2]) * self.coarse < ends[:, None]
        scores = jnp.where(seen & asked.reshape(-1, groups)[:, :1], scores, -jnp.inf)
        shares = jnp.where(jnp.isfinite(scores).any(-1, keepdims=True), jax.nn.softmax(scores, axis=-1), 0)
        kept = fewest_that_hold(shares, self.mass) & seen
        of_group = kept.reshape(num_kv_heads, -1, *kept.shape[1:]).any(1)
        return jnp.repeat(of_group, num_heads // num_kv_heads, axis=0).swapaxes(0, 1)

    def __str__(self) -> str:
        return f"bfla:{share_text(self.mass)}" if self == BlockFilter(self.mass) else repr(self)

    def describe(self) -> str:
        """For reports."""
        return (
            f"{self} prefill (per {self.coarse} queries and KV head the blocks of {self.coarse} that pooled logits say hold "
            f"{self.mass:g} of attention, {self.sink_tokens} sink + {self.window_tokens} latest keys)"
        )
