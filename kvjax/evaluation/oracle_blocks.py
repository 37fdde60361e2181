"""The blocks that hold the most attention, by exact attention. Other policies are compared with it."""

from __future__ import annotations

import dataclasses
import re

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax.cache.arrays import PagedKV
from kvjax.evaluation.key_walk import padded_tokens, probabilities, tile_tokens, walk_keys
from kvjax.policies.prefill.base import PrefillContext
from kvjax.policies.prefill.lists import BestBlocks, best_blocks
from pallas_kernels.attention.flash_attention import flash_attention


@dataclasses.dataclass(frozen=True)
class OracleBlocks(BestBlocks):
    """Per tile of `chi` queries and query head, sinks, window and the `k` distant blocks that the tile's queries pay
    most attention to, summed over the tile. It is for measuring only, because it computes dense attention twice.

    Source: the oracle block top-k of "Measure Once, Mask Once", section 1 and figure 2.
    """

    word = "oracle"

    def lists(self, query, layer, ctx):
        """The k best distant blocks of every tile and query head, `[B, C, H, W]`."""
        return self.lists_of(query, layer, ctx, None, self.k)

    def lists_of(
        self, query, layer: PagedKV, ctx: PrefillContext, budgets: Int[Array, "B C H"] | None, width: int
    ) -> Int[Array, "B C H W"]:
        """`lists` with a separate number of blocks for every tile and head, at most `width`; None: `width` for all."""
        candidates = self.distant(query, layer, ctx)
        return best_blocks(attention_mass(query, layer, ctx, self.chi, self.key_block), candidates[:, :, None], width, budgets)


def oracle(k: str = "") -> OracleBlocks | None:
    """The policy that is named `oracle:K`; None where `k` is no number."""
    return OracleBlocks(int(k)) if re.fullmatch(r"[0-9]+", k) else None


def attention_mass(
    query: Float[Array, "B T H D"], layer: PagedKV, ctx: PrefillContext, chi: int, key_block: int
) -> Float[Array, "B C H S"]:
    """The dense attention that each tile of `chi` queries pays every block of `key_block` keys, summed over the tile,
    float32.

    S = M * P / key_block. A tile of n written queries sums to n over its blocks; padding does not count. Memory: the
    result, and the logits of T queries against a tile of keys.
    """
    pages = (layer.pages, ctx.frames, ctx.starts, ctx.lengths)
    _, lse = flash_attention(query, *pages, sm_scale=ctx.sm_scale)
    num_queries, num_heads = query.shape[1:3]
    page_size = layer.pages.page_size
    per_tile = tile_tokens(page_size) // key_block
    num_blocks = ctx.page_table.shape[1] * page_size // key_block

    def of_row(args):
        q, lse, table, start, length = args
        query_pos = start + jnp.arange(num_queries, dtype=jnp.int32)

        def step(masses, i, keys, pos):
            paid = probabilities(q, lse, query_pos, length, keys, pos, ctx.sm_scale)
            paid = jnp.pad(paid.reshape(num_heads, num_queries, per_tile, key_block).sum(3), ((0, 0), (0, -num_queries % chi), (0, 0)))
            of_tiles = paid.reshape(num_heads, -1, chi, per_tile).sum(2).swapaxes(0, 1)
            return jax.lax.dynamic_update_slice_in_dim(masses, of_tiles, i * per_tile, axis=2)

        room = padded_tokens(table.shape[0], page_size) // key_block
        masses = jnp.zeros((-(-num_queries // chi), num_heads, room), jnp.float32)
        return walk_keys(layer.pages.k, table, length, masses, step)[..., :num_blocks]

    return jax.lax.map(of_row, (query, lse, ctx.frames, ctx.starts, ctx.lengths))
