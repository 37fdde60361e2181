"""Token-sparse selection (DeepSeek sparse attention): the tokens that a lightning indexer scores best, blocks of one token.

Source: DeepSeek-V3.2-Exp technical report (DeepSeek-AI, 2025), section 1; the hint from "Guess-Verify-Refine: Data-Aware Top-K for
Sparse-Attention Decoding".
"""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp

from kvjax.cache.types import INDEXER, INDEXER_SCALES, LatentPages
from kvjax.policies.decode.base import Blocks, State, Stateless, StateSpec
from pallas_kernels.gather_attention import gather_attention
from pallas_kernels.indexer_scores import indexer_scores
from pallas_kernels.top_k import top_k


@dataclasses.dataclass(frozen=True)
class TopTokens(Stateless):
    """Each query reads the `k` tokens that score best, exactly, of equal scores the earlier; a query that sees at most k reads them all.

    For layers of `LatentPages` whose model has a lightning indexer (`SelectContext.indexer`). The state of a layer is the list of the
    step before, `[B, k]` int32, -1 where there is none: neighbouring steps choose nearly the same tokens, so it is handed to `top_k` as a
    hint where to start, which by that op's promise changes no answer. hinted: False carries no state (`()`).

    T queries have T lists (ids `[B, T, k]`), each among the tokens up to its own; all are given the hint of the step before. A token whose
    page is not in the table is never listed: where too few others are left its place holds -1.
    """

    k: int = 2048
    hinted: bool = True

    def __post_init__(self):
        if not isinstance(self.k, int) or self.k < 1:
            raise ValueError(f"k must be an int of at least 1, got {self.k!r}")

    @property
    def keys(self) -> int:
        """Most tokens a query reads."""
        return self.k

    def init(self, spec: StateSpec, batch: int) -> State:
        """No step before: no hint."""
        return jnp.full((batch, self.k), -1, jnp.int32) if self.hinted else ()

    def select(self, query, layer, ctx, state):
        """Tokens of each query, ascending, and the last query's as the next hint."""
        if ctx.indexer is None or not isinstance(layer, LatentPages):
            raise ValueError(
                f"policy {self} ranks tokens by a lightning indexer; this layer of {type(layer).__name__} has none: list blocks"
            )
        scales = layer.index.get(INDEXER_SCALES)
        scores = indexer_scores(ctx.indexer.q, ctx.indexer.weights, layer.index[INDEXER], ctx.page_table, ctx.lengths, scales=scales)
        batch, num_queries, width = scores.shape
        if self.hinted and getattr(state, "shape", None) != (batch, self.k):
            given = "()" if isinstance(state, tuple) else type(state).__name__ + str(list(getattr(state, "shape", ())))
            raise ValueError(
                f"policy {self} carries a state int32 [{batch}, {self.k}], got {given}: start from policy.init, or hinted=False"
            )
        hint = jnp.repeat(state, num_queries, axis=0) if self.hinted else None
        _, ids = top_k(scores.reshape(-1, width), self.k, hint=hint, lengths=_seen(ctx, num_queries))
        ids = _with_pages(ids.reshape(batch, num_queries, self.k), ctx)
        if self.hinted:  # an inactive row keeps its hint
            state = jnp.where((ctx.lengths > 0)[:, None], ids[:, -1], state)
        return Blocks(ids, 1), state

    def attend(self, query, layer, ctx, state):
        """Select, then attend: every query is a row of its own, as its list is."""
        blocks, state = self.select(query, layer, ctx, state)
        batch, num_queries, *of_query = query.shape
        out, _ = gather_attention(
            query.reshape(-1, 1, *of_query),
            layer.pages,
            jnp.repeat(ctx.page_table, num_queries, axis=0),
            _seen(ctx, num_queries),
            blocks=blocks.ids.reshape(-1, 1, self.k),
            block_size=1,
            sm_scale=ctx.sm_scale,
        )
        return out.reshape(batch, num_queries, *out.shape[2:]), blocks, state

    def keys_read(self, length: int, layer: int, page_size: int) -> int | None:
        """Tokens a query attends to in a sequence of `length` tokens, its own included."""
        return min(length, self.k)

    def __str__(self) -> str:
        return f"TopTokens({self.k})" if self.hinted else f"TopTokens({self.k}, hinted=False)"

    def describe(self) -> str:
        """For reports."""
        return f"{self} ({self.k:,} keys: the tokens that score best)"


def _with_pages(ids, ctx):
    """-1 for tokens without a page: they score -inf, so `top_k` takes them where it finds no others."""
    pages = jnp.take_along_axis(ctx.page_table[:, None], jnp.maximum(ids, 0) // ctx.page_size, axis=2)
    return jnp.where(pages >= 0, ids, -1)


def _seen(ctx, num_queries: int):
    """Tokens that each query may attend to, its own included: int32 `[B * T]`, 0 for queries before the sequence."""
    return jnp.maximum(ctx.lengths[:, None] - num_queries + 1 + jnp.arange(num_queries, dtype=jnp.int32), 0).reshape(-1)
