"""Measure once, mask once: exact attention of a few queries chooses the blocks for all queries and corrects their
output."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import jax.numpy as jnp

from kvjax.policies.prefill.delta import delta_correction
from kvjax.policies.prefill.lists import TileLists, check_sizes, covered_tokens
from pallas_kernels.attention.query_sparse_attention import query_sparse_attention
from pallas_kernels.attention.query_sparse_attention.api import ESTIMATES
from pallas_kernels.selection.union_blocks import union_blocks


@dataclasses.dataclass(frozen=True)
class MeasureOnceMaskOnce(TileLists):
    """Every `gamma`-th query attends to all keys, and lists the `k` distant blocks with the largest log-sum-exp of
    logits, per query head: `k_exact` exactly, the others estimated. The lists of the `chi / gamma` such queries of a
    tile are united. The tile attends to the `k_trim` best blocks of the union (None: all), to its sinks and its window.
    Then the output of the exact queries corrects the others.

    rank: the order in which blocks are trimmed: "mass", the summed attention of the tile's exact queries, or "score",
    the mean of their log-sum-exps, as published (Algorithm 2). estimate: how the other k - k_exact blocks are found: in
    "buckets", or by a "quantile", as published (equation 6; see `query_sparse_attention`). delta: "damped"
    (`delta_correction`), "plain" (equation 3 as published) or "off".

    Blocks that sinks or window hold anyway are not listed. dense_below: sequences up to this many tokens are dense,
    although lists would not hold everything, because that is faster there (0: none).

    Source: "Measure Once, Mask Once: Delta Refined Block Sparse Attention", Algorithms 1 and 2; as published with rank
    "score", estimate "quantile" and delta "plain".
    """

    reads_packed = True

    gamma: int = 16
    chi: int = 128
    k: int = 128
    k_exact: int = 8
    k_trim: int | None = 128
    key_block: int = 64
    sink_tokens: int = 64
    window_tokens: int = 1024
    dense_below: int = 0
    rank: str = "mass"
    estimate: str = "buckets"
    delta: str = "damped"

    def __post_init__(self):
        check_sizes(self, gamma=1, chi=1, k=1, k_exact=0, key_block=1, sink_tokens=0, window_tokens=1, dense_below=0)
        if self.k_trim is not None:
            check_sizes(self, k_trim=1)
        if self.chi % self.gamma:
            raise ValueError(f"chi {self.chi} must be a multiple of gamma {self.gamma}: a tile unites the lists of chi / gamma queries")
        for name, choices in (("rank", ("mass", "score")), ("estimate", ESTIMATES), ("delta", ("damped", "plain", "off"))):
            if getattr(self, name) not in choices:
                raise ValueError(f"{name} must be one of {', '.join(choices)}; got {getattr(self, name)!r}")
        if self.k_exact > self.k:
            raise ValueError(f"k_exact {self.k_exact} exceeds k {self.k}, of which it is a part")

    @property
    def query_tile(self) -> int:
        """Queries that share a list."""
        return self.chi

    @property
    def row_window(self) -> int:
        """The window, in tokens, that a row's lists leave out: keys that the windows of all its gamma queries hold."""
        return max(1, self.window_tokens - self.gamma + 1)

    @property
    def listing(self) -> dict[str, Any]:
        """The settings of the measured queries' lists, as `query_sparse_attention` takes them."""
        window = (self.sink_tokens, self.row_window)
        slots = {"k_blocks": self.k, "k_exact": self.k_exact, "estimate": self.estimate}
        return {"gamma": self.gamma, "block_size": self.key_block, "window": window} | slots

    @property
    def dense_tokens(self) -> int:
        """Up to here the lists would hold everything, or `dense_below` says that dense attention is faster."""
        kept = self.k if self.k_trim is None else min(self.k, self.k_trim)
        return max(self.dense_below, covered_tokens(kept, self.key_block, self.sink_tokens, self.row_window))

    def sparsity(self, tokens: int) -> float:
        """The share of a context of `tokens` tokens that a query does not read (equation 9); K is `k_trim`; without
        trimming, the largest possible union."""
        kept = self.k * self.chi // self.gamma if self.k_trim is None else self.k_trim
        read = self.key_block * kept + self.sink_tokens + self.window_tokens + tokens / self.gamma
        return 1 - min(1, read / tokens)

    def measure(self, query, layer, ctx):
        """Exact output of every gamma-th query, `[B, R, H, D]`, and the united lists of the tiles, `[B, C, H, W]`."""
        exact, lse, ids, scores = query_sparse_attention(
            *(query, layer.pages, ctx.frames, ctx.starts, ctx.lengths),
            **self.listing,
            sm_scale=ctx.sm_scale,
        )
        num_blocks = ctx.page_table.shape[1] * layer.pages.page_size // self.key_block
        return exact, self.unite(lse, ids, scores, num_blocks=num_blocks)

    def unite(self, lse, ids, scores, *, num_blocks: int, implementation: str | None = None):
        """The united lists of the tiles, `[B, C, H, W]`, from what `query_sparse_attention` gave every gamma-th query:
        lse `[B, R, H]`, ids and scores `[B, R, H, k]`. num_blocks: a number that no block reaches."""
        rows, rank = self.chi // self.gamma, "mean"
        if self.rank == "mass":
            scores, rank = jnp.exp(scores - lse[..., None]), "sum"
        k_trim = rows * self.k if self.k_trim is None else self.k_trim
        static = {"rows": rows, "k_trim": k_trim, "rank": rank, "num_blocks": num_blocks}
        return union_blocks(ids, scores, **static, implementation=implementation)

    def lists(self, query, layer, ctx):
        """The united lists of every tile and query head, `[B, C, H, W]`."""
        return self.measure(query, layer, ctx)[1]

    def attend_sparse(self, query, layer, ctx):
        """The four steps of Algorithm 1."""
        exact, blocks = self.measure(query, layer, ctx)
        return self.corrected(self.attend_listed(blocks, query, layer, ctx), exact)

    def corrected(self, sparse, exact):
        """Sparse output `[B, T, H, D]`, corrected by the exact output of every gamma-th query, `[B, R, H, D]`."""
        if self.delta == "off":
            return sparse
        return delta_correction(sparse, exact, self.gamma, damping_rows=self.chi // self.gamma if self.delta == "damped" else None)

    def __str__(self) -> str:
        short = MeasureOnceMaskOnce(k=self.k, k_exact=self.k_exact, k_trim=self.k)
        return f"momo:{self.k}/{self.k_exact}" if self == short else repr(self)

    def describe(self) -> str:
        """For reports."""
        trimmed = "untrimmed" if self.k_trim is None else f"trimmed to {self.k_trim} by {self.rank}"
        how = {"buckets": "in buckets", "quantile": "by a quantile"}[self.estimate]
        estimated = f", the others {how}" if self.k > self.k_exact else ""
        corrected = "no delta correction" if self.delta == "off" else f"{self.delta} delta correction"
        return (
            f"{self} prefill (every {self.gamma}th query lists {self.k} blocks of {self.key_block}, {self.k_exact} of them exactly"
            f"{estimated}; per {self.chi} queries {trimmed}, {self.sink_tokens} sink + {self.window_tokens} latest keys; {corrected}; "
            f"dense up to {self.dense_tokens:,} tokens)"
        )


def named(text: str) -> MeasureOnceMaskOnce | None:
    """The policy of a name, None for other names; ValueError for numbers that it cannot have."""
    if (match := re.fullmatch(r"momo:(\d+)/(\d+)", text)) is None:
        return None
    k, k_exact = map(int, match.groups())
    return MeasureOnceMaskOnce(k=k, k_exact=k_exact, k_trim=k)
