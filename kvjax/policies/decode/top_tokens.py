"""Token-sparse selection (DeepSeek sparse attention): the tokens that a lightning indexer scores best, blocks of one
token.

Source: DeepSeek-V3.2-Exp technical report (DeepSeek-AI, 2025), section 1; the hint from "Guess-Verify-Refine:
Data-Aware Top-K for Sparse-Attention Decoding".
"""

from __future__ import annotations

import dataclasses
import re
from typing import TYPE_CHECKING

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax.axes import ONE_DEVICE, Shards
from kvjax.cache.arrays import INDEXER, INDEXER_SCALES, LatentPages, LayerCache
from kvjax.policies.decode.base import Blocks, IndexerQuery, SelectContext, State, Stateless, StateSpec
from kvjax.policies.decode.candidates import ascending, best_candidates
from pallas_kernels.attention.gather_attention import gather_attention
from pallas_kernels.core.soft_cap import Scale
from pallas_kernels.selection.indexer_scores import indexer_scores
from pallas_kernels.selection.top_k import top_k

if TYPE_CHECKING:
    from kvjax.policies.prefill.base import PrefillContext


@dataclasses.dataclass(frozen=True)
class TopTokens(Stateless):
    """Each query reads exactly the `k` tokens that score best; of equal scores the earlier. A query that sees at most k
    tokens reads all.

    For layers of `LatentPages` whose model has a lightning indexer (`SelectContext.indexer`). T queries have T lists
    (ids `[B, T, k]`), each among the tokens up to its own. A token whose page is not in the table is never listed. If
    too few others are left, the list is filled with -1.

    hinted: the state of a layer is then the list of the step before, `[B, k]` int32, -1 where there is none, instead of
    `()`. Neighbouring steps choose nearly the same tokens, so `top_k` gets this list as a hint where to start. The hint
    never changes the result. The op's default start ignores it.
    """

    k: int = 2048
    hinted: bool = False

    chooses_over_devices = True
    needs_indexer = True
    block_size = 1

    def __post_init__(self):
        if not isinstance(self.k, int) or self.k < 1:
            raise ValueError(f"k must be an int of at least 1, got {self.k!r}")

    @property
    def keys(self) -> int:
        """The most tokens that a query reads."""
        return self.k

    def init(self, spec: StateSpec, batch: int) -> State:
        """If hinted: no step before, so no hint."""
        return jnp.full((batch, self.k), -1, jnp.int32) if self.hinted else ()

    def select(self, query, layer, ctx, state):
        """Tokens of each query, ascending, and the last query's as the next hint."""
        if not has_indexer(layer, ctx):
            raise ValueError(
                f"policy {self} ranks tokens by a lightning indexer; this layer of {type(layer).__name__} has none: name a policy of blocks"
            )
        batch, num_queries = query.shape[:2]
        if self.hinted and getattr(state, "shape", None) != (batch, self.k):
            given = "()" if isinstance(state, tuple) else type(state).__name__ + str(list(getattr(state, "shape", ())))
            raise ValueError(
                f"policy {self} carries a state int32 [{batch}, {self.k}], got {given}: start from policy.init, or leave hinted out"
            )
        hint = jnp.repeat(state, num_queries, axis=0) if self.hinted else None
        ids = best_tokens(self.k, ctx.indexer, layer, ctx.page_table, ctx.lengths, _seen(ctx, num_queries), hint, ctx.shards)
        if self.hinted:  # an inactive row keeps its hint
            state = jnp.where((ctx.lengths > 0)[:, None], ids[:, -1], state)
        return Blocks(ids, 1), state

    def attend(self, query, layer, ctx, state):
        """Select, then attend. Every query is a separate row, as every query has its own list."""
        blocks, state = self.select(query, layer, ctx, state)
        return read_tokens(query, layer, ctx.frames, _seen(ctx, query.shape[1]), blocks.ids, ctx.sm_scale), blocks, state

    one_op = select, attend

    def keys_read(self, length: int, layer: int, page_size: int) -> int | None:
        """Tokens a query attends to in a sequence of `length` tokens, its own included."""
        return min(length, self.k)

    def __str__(self) -> str:
        return f"TopTokens({self.k}, hinted=True)" if self.hinted else f"tokens:{self.k}"

    def describe(self) -> str:
        """For reports."""
        return f"{self} ({self.k:,} keys: the tokens that score best)"


def has_indexer(layer: LayerCache, ctx: SelectContext | PrefillContext) -> bool:
    """Whether tokens of a layer can be ranked by a lightning indexer."""
    return ctx.indexer is not None and isinstance(layer, LatentPages)


def best_tokens(
    k: int,
    indexer: IndexerQuery,
    layer: LatentPages,
    page_table: Int[Array, "B M"],
    ends: Int[Array, "B"],
    seen: Int[Array, "B T"],
    hint: Int[Array, "B*T k"] | None = None,
    shards: Shards = ONE_DEVICE,
) -> Int[Array, "B T k"]:
    """The k tokens that score best for each query, ascending, -1 where there is none. Of equal scores the earlier token
    wins.

    shards: the mesh over whose devices pages are sharded; page_table then names those of this device, and the list is
    over all of them. ends: positions of the queries are [ends - T, ends). seen: tokens that each query may attend to,
    its own included; 0 for none.
    """
    scales = layer.index.get(INDEXER_SCALES)
    scores = indexer_scores(indexer.q, indexer.weights, layer.index[INDEXER], page_table, ends, scales=scales)
    best, ids = top_k(scores.reshape(-1, scores.shape[2]), k, hint=hint, lengths=seen.reshape(-1))
    ids = ids.reshape(*seen.shape, k)
    # Tokens without a page score -inf, so `top_k` takes them where it finds no others.
    pages = jnp.take_along_axis(page_table[:, None], jnp.maximum(ids, 0) // layer.pages.page_size, axis=2)
    ids = jnp.where(pages >= 0, ids, -1)
    if shards.context == 1:
        return ids
    return ascending(best_candidates(*shards.candidates(best.reshape(ids.shape), ids), k))


def read_tokens(
    query: Float[Array, "B T H D"],
    layer: LatentPages,
    frames: Int[Array, "B M"],
    seen: Int[Array, "B T"],
    ids: Int[Array, "B T k"],
    sm_scale: Scale,
) -> Float[Array, "B T H Dv"]:
    """Attention of each query to its own list. Every query is a separate row."""
    batch, num_queries, *of_query = query.shape
    out, _ = gather_attention(
        query.reshape(-1, 1, *of_query),
        layer.pages,
        jnp.repeat(frames, num_queries, axis=0),
        seen.reshape(-1),
        blocks=ids.reshape(-1, 1, ids.shape[2]),
        block_size=1,
        sm_scale=sm_scale,
    )
    return out.reshape(batch, num_queries, *out.shape[2:])


def _seen(ctx: SelectContext, num_queries: int) -> Int[Array, "B T"]:
    """Tokens that each query may attend to, its own included; 0 for queries before the sequence."""
    return jnp.maximum(ctx.lengths[:, None] - num_queries + 1 + jnp.arange(num_queries, dtype=jnp.int32), 0)


def named(text: str) -> TopTokens | None:
    """The policy of a name, None for other names."""
    match = re.fullmatch(r"tokens:(\d+)", text)
    return None if match is None else TopTokens(int(match[1]))
