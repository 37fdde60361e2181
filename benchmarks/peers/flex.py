"""Blocks chosen until they hold a share of attention. Of two estimates, each head uses the one that fits its last
queries."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from benchmarks.estimates import blocks_and_bands, fewest_that_hold, mean_keys, mean_queries, ranked_until, share_text
from kvjax.policies.prefill.lists import TileLists, check_sizes, distant_blocks, sorted_lists
from pallas_kernels.core.soft_cap import scaled


@dataclasses.dataclass(frozen=True)
class FlexPrefill(TileLists):
    """Per tile of `chi` queries and query head, sinks, window and the blocks that an estimate says hold `gamma` of
    attention.

    A chunk's last `chi` queries test the estimate by means: their mean query against the mean key of every block,
    softmax over blocks. If the square root of its Jensen-Shannon divergence (natural log) from these queries' true
    attention is below `tau`, the head lists for every tile the fewest blocks that hold `gamma` by that estimate. Other
    heads list verticals and diagonal bands: the fewest of each that hold `gamma` of the last queries' attention.
    Simplified: the share is reached tile by tile, not over the map of a whole prompt; verticals and bands are as wide
    as blocks; and a chunk takes the place of a prompt, so another prefill_chunk may list other blocks.

    Source: FlexPrefill (arXiv 2502.20766), algorithms 1 to 4.
    """

    gamma: float = 0.9
    tau: float = 0.1
    chi: int = 128
    key_block: int = 64
    sink_tokens: int = 64
    window_tokens: int = 1024

    k = 1
    """The fewest blocks that measures compare with."""

    def __post_init__(self):
        check_sizes(self, chi=1, key_block=1, sink_tokens=0, window_tokens=1)
        for name, least in (("gamma", 1e-9), ("tau", 0)):
            if not isinstance(getattr(self, name), float) or not least <= getattr(self, name) <= 1:
                raise ValueError(f"{name} must be a fraction, at most 1, got {getattr(self, name)!r}")

    def lists(self, query, layer, ctx):
        """The blocks of every tile and query head, `[B, C, H, M * P / key_block]`."""
        sizes = {"key_block": self.key_block, "sink_tokens": self.sink_tokens, "window_tokens": self.window_tokens}
        distant = distant_blocks(ctx, layer.pages.page_size, query.shape[1], chi=self.chi, **sizes)
        number = jnp.arange(distant.shape[2], dtype=jnp.int32)
        columns, bands = blocks_and_bands(query, layer, ctx, self.chi, self.key_block)

        def of_row(args):
            q, table, start, length, distant, columns, bands = args
            rows = min(self.chi, q.shape[0])
            at = jnp.clip(length - start - rows, 0, q.shape[0] - rows)
            last = jax.lax.dynamic_slice_in_dim(q, at, rows)
            keys = mean_keys(layer.pages.k, table, length, self.key_block)[:, : distant.shape[1]]
            ends = jnp.minimum(start + jnp.arange(1, distant.shape[0] + 1) * self.chi, length)

            def estimated(pooled, ends):
                grouped = pooled.reshape(pooled.shape[0], keys.shape[0], -1, keys.shape[2])
                scores = scaled(jnp.einsum("ckgd,ksd->ckgs", grouped, keys, precision=jax.lax.Precision.HIGHEST), ctx.sm_scale)
                seen = (number * self.key_block < ends[:, None])[:, None]
                return jax.nn.softmax(jnp.where(seen, scores.reshape(*pooled.shape[:2], -1), -jnp.inf), axis=-1)

            guess = estimated(mean_queries(last, start + at, length, rows), length[None])[0]
            by_means = jnp.sqrt(_divergence(guess, columns / columns.sum(-1, keepdims=True))) < self.tau
            means = ranked_until(estimated(mean_queries(q, start, length, self.chi), ends), distant[:, None], self.gamma)
            first = start + jnp.arange(0, q.shape[0], self.chi, dtype=jnp.int32)
            crossed = _crossed(fewest_that_hold(bands, self.gamma), first, first + self.chi - 1, number, self.key_block)
            lines = (fewest_that_hold(columns, self.gamma)[None] | crossed) & distant[:, None]
            return jnp.where(by_means[:, None], means, sorted_lists(jnp.where(lines, number, -1)))

        return jax.lax.map(of_row, (query, ctx.frames, ctx.starts, ctx.lengths, distant, columns, bands))

    def __str__(self) -> str:
        return f"flex:{share_text(self.gamma)}" if self == FlexPrefill(self.gamma) else repr(self)

    def describe(self) -> str:
        """For reports."""
        return (
            f"{self} prefill (per {self.chi} queries the blocks of {self.key_block} that mean keys, or verticals and bands, say hold "
            f"{self.gamma:g} of attention, {self.sink_tokens} sink + {self.window_tokens} latest keys)"
        )


def _divergence(first, second):
    """Jensen-Shannon divergence of two distributions over the last axis, natural log, at least 0."""
    middle = (first + second) / 2
    return jnp.maximum((jax.scipy.special.rel_entr(first, middle) + jax.scipy.special.rel_entr(second, middle)).sum(-1) / 2, 0)


def _crossed(bands, first, last, number, key_block: int):
    """`[C, H, S]`: whether any of a head's bands `[H, S]` meets a block and a tile of queries first to last."""
    count = jnp.pad(jnp.cumsum(bands, axis=-1), ((0, 0), (1, 0)))
    nearest = (first[:, None] - number * key_block - key_block + 1) // key_block
    farthest = (last[:, None] - number * key_block) // key_block
    span = (jnp.clip(edge, 0, bands.shape[1]) for edge in (nearest, farthest + 1))
    low, high = (jnp.moveaxis(count[:, edge], 0, 1) for edge in span)
    return high > low
