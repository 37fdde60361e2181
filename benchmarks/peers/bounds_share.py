"""Blocks chosen by bounds: the fewest that keep the missed share of attention small."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp

from benchmarks.estimates import share_text
from benchmarks.missed import COST, sample
from kvjax.policies.prefill.bounds import ByBounds
from kvjax.policies.prefill.lists import check_sizes, covered_tokens, sorted_lists
from pallas_kernels.selection.select_tiles.api import POOLINGS

EVERY = (16, 64, 256, 1024, 4096)
"""One query in this many is drawn. Longer sequences allow only larger numbers."""


@dataclasses.dataclass(frozen=True)
class BoundsShare(ByBounds):
    """`BoundsBlocks` whose lists widen, per layer, query head and chunk, until drawn queries miss less than `share` of
    their attention.

    The blocks of a tile are ranked once, by bounds. One random query of every 16 to 4,096 of the chunk attends exactly
    (see `benchmarks.missed`), and the head takes the first entry of `ladder` with which these queries miss less than
    `share` on average, or every block if there is none. Draws depend only on positions, and the choice only on the
    chunk, so another prefill_chunk may change it. A chunk without a drawn query lists every block. Shorter sequences
    draw more queries: as many as cost 5% of attention over lists of the ladder's middle entry.

    It bounds an average, not what a single query misses: if only one query looks far back, it is seldom drawn. Memory:
    the drawn queries' shares, R x H x blocks of the table, float32.
    """

    share: float = 0.01
    ladder: tuple[int, ...] = (8, 16, 32, 64, 128)
    chi: int = 128
    key_block: int = 128
    sink_tokens: int = 128
    window_tokens: int = 1024
    pooling: str = "sum"
    seed: int = 0

    def __post_init__(self):
        check_sizes(self, chi=1, key_block=1, sink_tokens=0, window_tokens=1, seed=0)
        if self.pooling not in POOLINGS:
            raise ValueError(f"pooling must be one of {', '.join(POOLINGS)}; got {self.pooling!r}")
        if not isinstance(self.share, float) or not 0 < self.share < 1:
            raise ValueError(f"share must be a fraction between 0 and 1, got {self.share!r}")
        if not self.ladder or self.ladder[0] < 1 or list(self.ladder) != sorted(set(self.ladder)):
            raise ValueError(f"ladder must be ascending numbers of blocks from 1 on, got {self.ladder!r}")

    @property
    def k(self) -> int:
        """The fewest blocks that a list takes, if there are so many."""
        return self.ladder[0]

    @property
    def dense_tokens(self) -> int:
        """Up to here the shortest lists would hold everything."""
        return self._read(self.k)

    def lists(self, query, layer, ctx):
        """Blocks of every tile and query head, the best first, `[B, C, H, M * P / key_block]`; ascending for heads that
        read all."""
        ranked = self.best(query, layer, ctx, self.ladder[-1], ranked=True)
        there = self.distant(query, layer, ctx)
        number = jnp.arange(there.shape[2], dtype=jnp.int32)
        everything = sorted_lists(jnp.where(there, number, -1))[:, :, None]
        rung = self._rungs(ranked, query, layer, ctx)[:, None, :, None]
        budget = jnp.asarray((*self.ladder, 0), jnp.int32)[rung]
        ranked = jnp.pad(ranked, ((0, 0), (0, 0), (0, 0), (0, there.shape[2] - ranked.shape[3])), constant_values=-1)
        return jnp.where(rung == len(self.ladder), everything, jnp.where(number < budget, ranked, -1))

    def _rungs(self, ranked, query, layer, ctx):
        """The place in `ladder` that each row and query head takes, `[B, H]`; one past the last means every block."""
        read = self._read(self.ladder[len(self.ladder) // 2])
        capacity = ctx.page_table.shape[1] * layer.pages.page_size
        affordable = [tokens for every in EVERY[:-1] if (tokens := int(every * 4 * COST * read)) < capacity]

        def measured(ranked, query, here, every):
            found = sample(
                *(query, layer, here),
                every=every,
                seed=self.seed,
                key_block=self.key_block,
                window=(self.sink_tokens, self.window_tokens),
            )
            whole = jnp.logaddexp(found.near, jax.nn.logsumexp(found.far, axis=-1))
            paid = jnp.where(found.counts[..., None, None], jnp.exp(found.far - whole[..., None]), 0)[0]
            tile = jnp.clip((found.positions[0] - here.starts) // self.chi, 0, ranked.shape[0] - 1)
            ids = ranked[tile]
            listed = jnp.where(ids >= 0, jnp.take_along_axis(paid, jnp.maximum(ids, 0), axis=2), 0)
            held = jnp.stack([listed[..., :k].sum((0, 2)) for k in self.ladder])
            count = found.counts.sum()
            enough = (paid.sum((0, 2)) - held < self.share * count) & (count > 0)
            return jnp.argmax(jnp.concatenate([enough, jnp.ones_like(enough[:1])]), axis=0).astype(jnp.int32)

        def of_row(args):
            ranked, query, table, start, length = args
            here = ctx.replace(page_table=table[None], frame_table=None, starts=start[None], lengths=length[None])
            branches = [functools.partial(measured, every=every) for every in EVERY[: len(affordable) + 1]]
            return jax.lax.switch(jnp.searchsorted(jnp.asarray(affordable, jnp.int32), length), branches, ranked, query[None], here)

        return jax.lax.map(of_row, (ranked, query, ctx.frames, ctx.starts, ctx.lengths))

    def _read(self, k: int) -> int:
        """The keys that lists of k blocks read, sinks and window included."""
        return covered_tokens(k, self.key_block, self.sink_tokens, self.window_tokens)

    def __str__(self) -> str:
        return f"bounds:{share_text(self.share)}" if self == BoundsShare(share=self.share) else repr(self)

    def describe(self) -> str:
        """For reports."""
        return (
            f"{self} prefill (per {self.chi} queries {self.ladder[0]} to {self.ladder[-1]} blocks of {self.key_block} by bounds, or all, "
            f"until sampled queries miss less than {self.share:g}; {self.sink_tokens} sink + {self.window_tokens} latest keys; dense up to "
            f"{self.dense_tokens:,} tokens)"
        )
