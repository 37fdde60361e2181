"""Base classes of the policies that give every tile of queries its own list of key blocks."""

from __future__ import annotations

import dataclasses
import functools
import logging

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kvjax.cache.arrays import PagedKV
from kvjax.policies.prefill.base import PrefillContext
from kvjax.policies.prefill.dense import DensePrefill
from pallas_kernels.attention.block_sparse_attention import block_sparse_attention

logger = logging.getLogger(__name__)

_NONE = jnp.iinfo(jnp.int32).max  # sorts behind every block


class DenseWhereCovered:
    """Policies that attend sparsely (`attend_sparse`) to sequences of more than `dense_tokens` tokens, and densely to
    others.

    Up to that length their lists would hold every key, or `dense_below` was set. The length is the longest of the batch
    at the chunk's end.
    """

    queries_stand_alone = False

    def attend(self, query, layer, ctx):
        """Dense or sparse, by the length at the end of the chunk."""
        capacity = ctx.page_table.shape[1] * layer.pages.page_size
        dense = DensePrefill()
        if capacity <= self.dense_tokens:
            _say_dense(self, capacity)
            return dense.attend(query, layer, ctx)
        few = jnp.max(ctx.lengths) <= self.dense_tokens
        return jax.lax.cond(few, lambda: dense.attend(query, layer, ctx), lambda: self.attend_sparse(query, layer, ctx))

    def describe(self) -> str:
        """For reports: the policy alone, unless a class says more."""
        return str(self)


@functools.cache
def _say_dense(policy: DenseWhereCovered, capacity: int) -> None:
    """Log once that the policy is dense."""
    logger.info("%s: dense, because no sequence of this page table (%d tokens) exceeds %d", policy, capacity, policy.dense_tokens)


class TileLists(DenseWhereCovered):
    """Policies whose attention is their lists, sinks and window: they define `lists`, `chi`, `key_block`, `sink_tokens`
    and `window_tokens`."""

    @property
    def dense_tokens(self) -> int:
        """Up to here sinks and window hold everything."""
        return covered_tokens(0, self.key_block, self.sink_tokens, self.window_tokens)

    def check_pages(self, page_size: int) -> None:
        """ValueError unless pages of `page_size` tokens are whole blocks."""
        if page_size % self.key_block:
            raise ValueError(
                f"prefill {self} lists blocks of {self.key_block} tokens, which pages of {page_size} do not hold whole: choose a page_size "
                f"that is a multiple of {self.key_block}, or a policy with smaller blocks (momo has 64)"
            )

    def distant(self, query: Float[Array, "B T H D"], layer: PagedKV, ctx: PrefillContext) -> Bool[Array, "B C S"]:
        """`distant_blocks` of this policy's tiles, blocks, sinks and window."""
        sizes = {"chi": self.chi, "key_block": self.key_block, "sink_tokens": self.sink_tokens, "window_tokens": self.window_tokens}
        return distant_blocks(ctx, layer.pages.page_size, query.shape[1], **sizes)

    def attend_sparse(self, query, layer, ctx):
        """Attention over sinks, window and lists, whatever the length."""
        return self.attend_listed(self.lists(query, layer, ctx), query, layer, ctx)

    def attend_listed(self, blocks: Int[Array, "B C H W"], query: Float[Array, "B T H D"], layer: PagedKV, ctx: PrefillContext):
        """Attention over sinks, window and the given lists."""
        out, _ = block_sparse_attention(
            *(query, layer.pages, ctx.frames, ctx.starts, ctx.lengths),
            blocks=blocks,
            block_size=self.key_block,
            query_tile=self.chi,
            window=(self.sink_tokens, self.window_tokens),
            sm_scale=ctx.sm_scale,
        )
        return out


@dataclasses.dataclass(frozen=True)
class BestBlocks(TileLists):
    """Policies that list, per tile of `chi` queries and query head, the `k` distant blocks of `key_block` keys that
    they score best.

    word: the policy's name is `word:k` if its other sizes are the defaults.
    """

    k: int = 128
    chi: int = 128
    key_block: int = 64
    sink_tokens: int = 64
    window_tokens: int = 1024

    def __post_init__(self):
        check_sizes(self, k=1, chi=1, key_block=1, sink_tokens=0, window_tokens=1)

    @property
    def dense_tokens(self) -> int:
        """Up to here the lists would hold everything."""
        return covered_tokens(self.k, self.key_block, self.sink_tokens, self.window_tokens)

    def __str__(self) -> str:
        return f"{self.word}:{self.k}" if self == type(self)(self.k) else repr(self)

    def describe(self) -> str:
        """For reports."""
        return (
            f"{self} prefill (per {self.chi} queries {self.k} blocks of {self.key_block}, {self.sink_tokens} sink + "
            f"{self.window_tokens} latest keys; dense up to {self.dense_tokens:,} tokens)"
        )


def covered_tokens(k: int, key_block: int, sink_tokens: int, window_tokens: int) -> int:
    """The longest sequence, in tokens, whose keys all fit into `k` distant blocks, sinks and window."""
    return (k + sink_tokens // key_block) * key_block + window_tokens


def last_positions(ctx: PrefillContext, num_queries: int, chi: int) -> Int[Array, "B C"]:
    """Position of the last query of each tile that is not padding."""
    ends = jnp.minimum(jnp.arange(chi, num_queries + chi, chi, dtype=jnp.int32), num_queries)
    return jnp.minimum(ctx.starts[:, None] + ends, ctx.lengths[:, None]) - 1


def distant_blocks(
    ctx: PrefillContext, page_size: int, num_queries: int, *, chi: int, key_block: int, sink_tokens: int, window_tokens: int
) -> Bool[Array, "B C S"]:
    """Which blocks of the tables hold a key that the last query of a tile may see, outside its sinks and window."""
    there = jnp.repeat(ctx.page_table >= 0, page_size // key_block, axis=1)[:, None]
    first = jnp.arange(there.shape[2], dtype=jnp.int32) * key_block
    return there & (first + key_block > sink_tokens) & (first <= last_positions(ctx, num_queries, chi)[..., None] - window_tokens)


def best_blocks(
    scores: Float[Array, "*tiles S"], candidates: Bool[Array, "*tiles S"], k: int, budgets: Int[Array, "*tiles"] | None = None
) -> Int[Array, "*tiles W"]:
    """The k candidates of each row that score highest, ascending, -1 at the end. Of equal ones the lower wins. W =
    min(k, S). budgets: how many a row may have, if fewer than k."""
    scores = jnp.where(scores == 0, 0.0, scores)  # -0.0 and 0.0 are a tie
    best, ids = jax.lax.top_k(jnp.where(candidates, scores, -jnp.inf), min(k, scores.shape[-1]))
    within = True if budgets is None else jnp.arange(ids.shape[-1]) < budgets[..., None]
    return sorted_lists(jnp.where((best > -jnp.inf) & within, ids, -1))


def sorted_lists(ids: Int[Array, "*tiles W"]) -> Int[Array, "*tiles W"]:
    """Each block once, ascending, -1 at the end."""
    ids = jnp.sort(jnp.where(ids < 0, _NONE, ids), axis=-1)
    again = jnp.concatenate([jnp.zeros_like(ids[..., :1], bool), ids[..., 1:] == ids[..., :-1]], axis=-1)
    ids = jnp.sort(jnp.where(again, _NONE, ids), axis=-1)
    return jnp.where(ids == _NONE, -1, ids).astype(jnp.int32)


def check_sizes(policy, **least: int) -> None:
    """ValueError unless the named fields of a policy are ints of at least the given size."""
    for name, smallest in least.items():
        value = getattr(policy, name)
        if not isinstance(value, int) or isinstance(value, bool) or value < smallest:
            raise ValueError(f"{name} must be an int of at least {smallest}, got {value!r}")
