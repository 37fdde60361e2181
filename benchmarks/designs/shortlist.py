"""Policies that were measured against `cascade:K`: another score makes the shortlist, exact keys choose from it.

    kvjax needle -m SmolLM2-135M-Instruct.Q4_1.gguf --length 8192 --trials 200 --distractors 1 \
        -p dense -p benchmarks/designs/shortlist.py:Shortlist:8/part=32/bits=4/short=16

The results `designs-block-scores-needles*.json` come from a longer form of it, whose kinds are `pPARTbBITS` (bounds of
PART tokens in codes of BITS bits) and `km8` (eight centroids in 4 bits). `box64`, `x128`, `w32` and `wtok` in them are
scores without a shortlist: the centre plus a part of the radius, and bounds and token codes after a rotation that was
weighted by queries. It builds every index anew from the pages in each step, so only what it finds is measured with it.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from kvjax.policies.decode import TopBlocks
from kvjax.policies.decode.base import Blocks, Stateless, select_and_attend
from kvjax.policies.decode.candidates import always_read, ascending, ranked
from pallas_kernels.attention.gather_attention import gather_attention
from pallas_kernels.selection.select_blocks import block_shares

BLOCK = 128


def outward_boxes(keys, part: int, bits: int):
    """Centre and radius of the bounds of `part` tokens of keys [N, K, P, D], in codes that are rounded outwards; 16
    bits: not rounded."""
    parts = keys.reshape(*keys.shape[:2], -1, part, keys.shape[3])
    high, low = parts.max(3), parts.min(3)
    center, radius = (high + low) / 2, (high - low) / 2
    if bits == 16:
        return center, radius
    step = jnp.maximum(jnp.abs(center).max(-1, keepdims=True) / (2 ** (bits - 1) - 1), 1e-30)
    coded = jnp.round(center / step) * step
    radius = radius + jnp.abs(center - coded)
    step = jnp.maximum(radius.max(-1, keepdims=True) / (2**bits - 1), 1e-30)
    return coded, jnp.ceil(radius / step) * step


def centroids(keys, count: int):
    """Centroids [N, K, C, D] and their numbers of keys, of keys [N, K, P, D], in codes of 4 bits: three rounds of
    k-means."""
    distance, chosen = ((keys - keys.mean(2, keepdims=True)) ** 2).sum(-1), []
    for _ in range(count):
        chosen.append(jnp.take_along_axis(keys, jnp.argmax(distance, -1)[..., None, None], 2))
        distance = jnp.minimum(distance, ((keys - chosen[-1]) ** 2).sum(-1))
    centers = jnp.concatenate(chosen, 2)
    for _ in range(3):
        apart = (centers**2).sum(-1)[:, :, None] - 2 * jnp.einsum("nksd,nkcd->nksc", keys, centers)
        member = jax.nn.one_hot(apart.argmin(-1), count)
        size = member.sum(2)
        means = jnp.einsum("nksc,nksd->nkcd", member, keys) / jnp.maximum(size, 1)[..., None]
        centers = jnp.where(size[..., None] > 0, means, centers)
    low = centers.min(2, keepdims=True)
    step = jnp.maximum((centers.max(2, keepdims=True) - low) / 15, 1e-30)
    return jnp.round((centers - low) / step) * step + low, size


@dataclasses.dataclass(frozen=True)
class Shortlist(Stateless):
    """part, bits: of the bounds; part=0: centroids. short: blocks of the shortlist, of which exact keys choose k; 0:
    the score chooses."""

    k: int = 8
    part: int = 32
    bits: int = 4
    short: int = 16
    sink: int = 1
    local: int = 4

    def scores(self, query, keys, table, sm_scale):
        """[B, K, M]: the best of a group's heads, of every page."""
        q = query.astype(jnp.float32).reshape(query.shape[0], keys.shape[1], -1, query.shape[-1])
        keys = keys.astype(jnp.float32)
        if not self.part:
            rows, size = centroids(keys, 8)
            logits = jnp.einsum("bkgd,bmkpd->bkgmp", q, rows[table], precision="highest") * sm_scale
            return jax.nn.logsumexp(logits + jnp.log(size)[table].transpose(0, 2, 1, 3)[:, :, None], axis=-1).max(2)
        center, radius = (rows[table] for rows in outward_boxes(keys, self.part, self.bits))
        bound = jnp.einsum("bkgd,bmkpd->bkgmp", q, center, precision="highest")
        bound += jnp.einsum("bkgd,bmkpd->bkgmp", jnp.abs(q), radius, precision="highest")
        return bound.max((2, 4)) * sm_scale

    def select(self, query, layer, ctx, state):
        """The first block, the last four, and k of the shortlist."""
        table, heads = jnp.maximum(ctx.page_table, 0), layer.pages.k.shape[1]
        always, first_local = always_read(ctx, 1, block_size=BLOCK, sink=self.sink, local=self.local)
        always = jnp.broadcast_to(always, (query.shape[0], 1, heads, always.shape[3]))
        ids = jnp.arange(table.shape[1])
        there = (ids >= self.sink) & (ids < first_local[:, 0, 0]) & (ctx.page_table >= 0)
        there = jnp.broadcast_to(jnp.where(there, ids, -1)[:, None, None], (query.shape[0], 1, heads, ids.size))
        score = self.scores(query[:, 0], layer.pages.k, table, ctx.sm_scale)[:, None]
        _, best = ranked(score, there, self.short or self.k)
        if self.short:
            read = {"block_size": BLOCK, "sm_scale": ctx.sm_scale, "return_block_lse": True}
            args = query, layer.pages.without_values, ctx.frames, ctx.lengths
            near = gather_attention(*args, blocks=always, **read)[1]
            shares = block_shares(near, gather_attention(*args, blocks=best, **read)[2], heads)[0]
            _, best = ranked(shares, best, self.k)
        return Blocks(ascending(jnp.concatenate([always, best], axis=3))[:, 0], BLOCK), state

    def attend(self, query, layer, ctx, state):
        """Select, then attend to the list."""
        return select_and_attend(self, query, layer, ctx, state)

    def describe(self):
        """A line for reports."""
        return f"{self} ({(self.sink + self.local + self.k) * BLOCK:,} keys)"

    def keys_read(self, length, layer, page_size):
        """As `top:K` reads."""
        return TopBlocks(self.k).keys_read(length, layer, page_size)

    def budgets(self):
        """Sizes of the list, in blocks."""
        return {"k": (self.k, BLOCK), "sink": (self.sink, BLOCK), "local": (self.local, BLOCK)}
