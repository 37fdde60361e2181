"""Token-sparse prefill (DeepSeek sparse attention): every query reads the tokens that a lightning indexer scores best.

Source: DeepSeek-V3.2-Exp technical report (DeepSeek-AI, 2025), section 1.
"""

from __future__ import annotations

import dataclasses
import math
import re

import jax
import jax.numpy as jnp

from kvjax.policies.decode.top_tokens import best_tokens, has_indexer, read_tokens
from kvjax.policies.prefill.dense import DensePrefill
from kvjax.policies.prefill.lists import check_sizes

QUERY_TILE = 128
"""The most queries that choose together. Each of them holds a score of every token."""


@dataclasses.dataclass(frozen=True)
class TopTokensPrefill:
    """Each query reads exactly the `k` tokens up to itself that score best; of equal scores the earlier.

    For layers of `LatentPages` whose model has a lightning indexer (`PrefillContext.indexer`). Chunks that end, when
    full, within the first k tokens are dense: their lists would hold every token.
    """

    k: int = 2048

    queries_stand_alone = True
    query_tile = 1
    needs_indexer = True

    def __post_init__(self):
        check_sizes(self, k=1)

    def attend(self, query, layer, ctx):
        """Dense or by lists, depending on where the chunk ends when it is full, even if it is not full yet."""
        if not has_indexer(layer, ctx):
            raise ValueError(f"prefill {self} ranks tokens by a lightning indexer; this layer of {type(layer).__name__} has none")
        within = jnp.max(ctx.starts) + query.shape[1] <= self.k
        return jax.lax.cond(within, lambda: DensePrefill().attend(query, layer, ctx), lambda: self._attend_lists(query, layer, ctx))

    def _attend_lists(self, query, layer, ctx):
        batch, count = query.shape[:2]
        size = math.gcd(count, QUERY_TILE)

        def tile(args):
            number, query, indexer = args
            ends = ctx.starts + (number + 1) * size
            positions = ends[:, None] - size + jnp.arange(size, dtype=jnp.int32)
            seen = jnp.where(positions < ctx.lengths[:, None], positions + 1, 0)  # 0 for padding, which reads nothing
            ids = best_tokens(self.k, indexer, layer, ctx.page_table, ends, seen)
            return read_tokens(query, layer, ctx.frames, seen, ids, ctx.sm_scale)

        tiles = jax.tree.map(lambda x: jnp.moveaxis(x.reshape(batch, -1, size, *x.shape[2:]), 1, 0), (query, ctx.indexer))
        out = jax.lax.map(tile, (jnp.arange(count // size, dtype=jnp.int32), *tiles))
        return jnp.moveaxis(out, 0, 1).reshape(batch, count, *out.shape[3:])

    def __str__(self) -> str:
        return f"tokens:{self.k}"

    def describe(self) -> str:
        """For reports."""
        return f"{self} prefill (per query the {self.k:,} tokens that score best; dense up to there)"


def named(text: str) -> TopTokensPrefill | None:
    """The policy of a name, None for other names."""
    match = re.fullmatch(r"tokens:(\d+)", text)
    return None if match is None else TopTokensPrefill(int(match[1]))
