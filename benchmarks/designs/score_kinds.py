"""Scores of blocks that `block_scores.py` compares: each estimates, from fewer bytes than the keys, what a block's keys
give a query.

Every score is a function of one layer's recording that returns an estimate in logits, `[K, G, T, N]`, for N blocks of
128 tokens.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float32, Int32

from kvjax.model.layers import Rope
from kvjax.model.rope import frequencies, turned

BLOCK = 128
"""Tokens of a block."""

Estimate = Float32[Array, "K G T N"]
Keys = Float32[Array, "N S K D"]


@flax.struct.dataclass
class Layer:
    """One layer of one context. q: the last queries. k: all keys, as a cache of 16 bits holds them. positions: of the
    queries.

    other_q, other_k: of another context, by which rotations are calibrated. sm_scale: factor of logits. rope: how q and
    k were rotated.
    """

    q: Float32[Array, "T K G D"]
    k: Float32[Array, "S K D"]
    positions: Int32[Array, " T"]
    other_q: Float32[Array, "T K G D"]
    other_k: Float32[Array, "S K D"]
    sm_scale: float = flax.struct.field(pytree_node=False)
    rope: Rope | None = flax.struct.field(pytree_node=False)

    @property
    def blocks(self) -> Keys:
        """The keys by block."""
        return self.k.reshape(-1, BLOCK, *self.k.shape[1:])


def products(q, rows):
    """Logits without their scale of queries [T, K, G, D] and rows [N, P, K, D], as [K, G, T, N, P]."""
    return jnp.einsum("tkgd,npkd->kgtnp", q, rows, precision="highest")


def true_logits(x: Layer) -> Float32[Array, "K G T N S"]:
    """Exact logits; -inf for keys after the query."""
    logits = products(x.q, x.blocks) * x.sm_scale
    place = jnp.arange(x.k.shape[0]).reshape(-1, BLOCK)
    return jnp.where(place <= x.positions[:, None, None], logits, -jnp.inf)


def true_lse(x: Layer) -> Estimate:
    """Log-sum-exp of each block's logits: what its attention mass is made from."""
    return jax.nn.logsumexp(true_logits(x), axis=-1)


def boxes(blocks: Keys, part: int, bits: int = 16):
    """Centre and radius, [N, P, K, D] each, of the bounds of `part` tokens; codes of fewer bits are rounded outwards.

    A row of codes has one scale. What the centre's rounding moves is added to the radius, so that the bounds still
    hold.
    """
    parts = blocks.reshape(blocks.shape[0], -1, part, *blocks.shape[2:])
    high, low = parts.max(2), parts.min(2)
    center, radius = (high + low) / 2, (high - low) / 2
    if bits == 16:
        return center, radius
    step = _nonzero(jnp.abs(center).max(-1, keepdims=True) / (2 ** (bits - 1) - 1))
    rounded = jnp.round(center / step) * step
    radius = radius + jnp.abs(center - rounded)
    step = _nonzero(radius.max(-1, keepdims=True) / (2**bits - 1))
    return rounded, jnp.ceil(radius / step) * step


def _nonzero(step):
    return jnp.where(step == 0, 1, step)


def bounds(x: Layer, part: int = BLOCK, bits: int = 16, radius: float = 1.0) -> Estimate:
    """The largest logit that a box of keys allows: of the best part of a block. radius: factor of it; below 1 it is no
    bound."""
    return _boxed(x.q, x.blocks, part, bits, radius) * x.sm_scale


def _boxed(q, blocks, part, bits=16, radius=1.0):
    center, half = boxes(blocks, part, bits)
    return (products(q, center) + radius * products(jnp.abs(q), half)).max(-1)


def less_a_mean(x: Layer) -> Estimate:
    """Bounds of keys less the other context's mean. What the query gives the mean is left out: the order within a head
    is as before."""
    return _boxed(x.q, x.blocks - x.other_k.mean(0), BLOCK) * x.sm_scale


def principal(x: Layer, weighted: bool):
    """Mean and rotations of keys and queries, [K, D, D] each, strongest first, calibrated on the other context.

    weighted: by how much queries use a direction. Then the rotations are no rotations, but each other's inverse
    transposed.
    """
    dim, mean = x.k.shape[-1], x.other_k.mean(0)
    to_keys = to_queries = jnp.broadcast_to(jnp.eye(dim), (x.k.shape[1], dim, dim))
    if weighted:
        use = jnp.einsum("tkgd,tkge->kde", x.other_q, x.other_q, precision="highest")
        use += 1e-3 * jnp.trace(use, axis1=1, axis2=2)[:, None, None] * jnp.eye(dim) / dim
        values, vectors = jnp.linalg.eigh(use)
        to_keys = jnp.einsum("kde,ke,kfe->kdf", vectors, jnp.sqrt(values), vectors, precision="highest")
        to_queries = jnp.einsum("kde,ke,kfe->kdf", vectors, 1 / jnp.sqrt(values), vectors, precision="highest")
    moved = jnp.einsum("skd,kde->ske", x.other_k - mean, to_keys, precision="highest")
    vectors = jnp.linalg.eigh(jnp.einsum("skd,ske->kde", moved, moved, precision="highest"))[1][..., ::-1]
    return mean, *(jnp.einsum("kde,kef->kdf", each, vectors, precision="highest") for each in (to_keys, to_queries))


def _turned_by(x: Layer, weighted: bool):
    """Keys by block and queries after the rotation, and what each query gives the mean, [K, G, T, 1]."""
    mean, to_keys, to_queries = principal(x, weighted)
    keys = jnp.einsum("nskd,kde->nske", x.blocks - mean, to_keys, precision="highest")
    queries = jnp.einsum("tkgd,kde->tkge", x.q, to_queries, precision="highest")
    return keys, queries, jnp.einsum("tkgd,kd->kgt", x.q, mean, precision="highest")[..., None]


def rotated_bounds(x: Layer, weighted: bool, part: int = BLOCK) -> Estimate:
    """Bounds after a rotation to principal directions."""
    keys, queries, constant = _turned_by(x, weighted)
    return (_boxed(queries, keys, part) + constant) * x.sm_scale


def mean(x: Layer) -> Estimate:
    """The logit of the mean key."""
    return products(x.q, x.blocks.mean(1, keepdims=True))[..., 0] * x.sm_scale


def mean_and_spread(x: Layer) -> Estimate:
    """Log of the mean weight of keys that are spread as a Gaussian, with independent channels."""
    spread = products(x.q**2, x.blocks.var(1, keepdims=True))[..., 0] * x.sm_scale**2
    return mean(x) + spread / 2


def fast_channels(rope: Rope | None, dim: int) -> Bool[Array, " D"]:
    """Which channels RoPE turns by a whole turn or more within a block."""
    rates = jnp.zeros(0) if rope is None else jnp.asarray(frequencies(rope))
    fast = 2 * math.pi / jnp.maximum(rates, 1e-30) < BLOCK
    return jnp.concatenate([fast, fast, jnp.zeros(dim - 2 * rates.size, bool)])


def bounds_before_rope(x: Layer, fast: str = "before") -> Estimate:
    """Bounds of keys that were not rotated; the query is turned to its distance from the middle of each block.

    fast: what becomes of channels that turn by a whole turn or more within a block: "before" as others, "after" bounds
    of rotated keys, "mean" the mean of rotated keys.
    """
    if x.rope is None or not x.rope.dim:
        return bounds(x)
    plain = turned(x.k[None], x.rope, -jnp.arange(x.k.shape[0])[None])[0].reshape(x.blocks.shape)
    count, (num_queries, *heads) = plain.shape[0], x.q.shape
    middle = jnp.arange(count) * BLOCK + (BLOCK - 1) // 2
    queries = jnp.broadcast_to(x.q[None], (count, *x.q.shape)).reshape(count, num_queries, -1, heads[-1])
    queries = turned(queries, x.rope, -jnp.broadcast_to(middle[:, None], (count, num_queries))).reshape(count, num_queries, *heads)
    is_fast = fast_channels(x.rope, heads[-1])
    kept = jnp.ones_like(is_fast) if fast == "before" else ~is_fast
    high, low = (jnp.where(kept, of(plain, axis=1), 0) for of in (jnp.max, jnp.min))
    est = jnp.einsum("ntkgd,nkd->kgtn", jnp.maximum(queries, 0), high, precision="highest")
    est += jnp.einsum("ntkgd,nkd->kgtn", jnp.minimum(queries, 0), low, precision="highest")
    if fast == "after":
        est += _boxed(jnp.where(is_fast, x.q, 0), x.blocks, BLOCK)
    if fast == "mean":
        est += products(jnp.where(is_fast, x.q, 0), x.blocks.mean(1, keepdims=True))[..., 0]
    return est * x.sm_scale


def k_means(x: Layer, count: int, bits: int = 16, rounds: int = 3) -> Estimate:
    """Log-sum-exp over centroids of a block's keys, each counted by its keys. The first centroids are keys far from
    each other."""
    keys = x.blocks.swapaxes(1, 2)

    def choose(number, state):
        distance, centers = state
        key = jnp.take_along_axis(keys, jnp.argmax(distance, -1)[..., None, None], 2)[:, :, 0]
        distance = jnp.minimum(distance, ((keys - key[:, :, None]) ** 2).sum(-1))
        return distance, jax.lax.dynamic_update_index_in_dim(centers, key, number, 2)

    def assign(_, state):
        centers, _ = state
        apart = (centers**2).sum(-1)[:, :, None] - 2 * jnp.einsum("nksd,nkcd->nksc", keys, centers, precision="highest")
        member = jax.nn.one_hot(apart.argmin(-1), count)
        size = member.sum(2)
        sums = jnp.einsum("nksc,nksd->nkcd", member, keys, precision="highest")
        return jnp.where(size[..., None] > 0, sums / jnp.maximum(size, 1)[..., None], centers), size

    distance = ((keys - keys.mean(2, keepdims=True)) ** 2).sum(-1)
    centers = jnp.zeros((*keys.shape[:2], count, keys.shape[3]))
    centers = jax.lax.fori_loop(0, count, choose, (distance, centers))[1]
    centers, size = jax.lax.fori_loop(0, rounds, assign, (centers, jnp.zeros(centers.shape[:3])))
    rows = centers.swapaxes(1, 2)
    if bits < 16:
        rows = codes(rows, bits)
    return jax.nn.logsumexp(products(x.q, rows) * x.sm_scale + jnp.log(size).swapaxes(0, 1)[:, None, None], axis=-1)


def codes(rows: Keys, bits: int) -> Keys:
    """Rows rounded to 2**bits even steps between the ends of each channel of a block."""
    low = rows.min(1, keepdims=True)
    step = _nonzero((rows.max(1, keepdims=True) - low) / (2**bits - 1))
    return jnp.round((rows - low) / step) * step + low


def signs(blocks: Keys) -> Keys:
    """Keys in one bit: the side of each channel's mean, by the mean distance from it."""
    apart = blocks - blocks.mean(1, keepdims=True)
    return blocks.mean(1, keepdims=True) + jnp.sign(apart) * jnp.abs(apart).mean(1, keepdims=True)


def coded_keys(x: Layer, bits: int) -> Estimate:
    """Log-sum-exp over all keys of a block in few bits, with two ends for each channel."""
    rows = signs(x.blocks) if bits == 1 else codes(x.blocks, bits)
    return jax.nn.logsumexp(products(x.q, rows) * x.sm_scale, axis=-1)


def low_rank(x: Layer, rank: int, bits: int) -> Estimate:
    """Log-sum-exp over tokens of which the strongest directions are kept, weighted by queries, in few bits."""
    keys, queries, constant = _turned_by(x, weighted=True)
    logits = products(queries[..., :rank], codes(keys[..., :rank], bits)) + constant[..., None]
    return jax.nn.logsumexp(logits * x.sm_scale, axis=-1)


@dataclasses.dataclass(frozen=True)
class Score:
    """name: as in tables. estimate: of a layer. numbers: how many numbers of 16 bits an index holds for a block, by
    head dim."""

    name: str
    estimate: Callable[[Layer], Estimate]
    numbers: Callable[[int], float]
    heads: str = "maximum"

    def share(self, dim: int) -> float:
        """Bytes as a share of the block's keys in 16 bits."""
        return self.numbers(dim) / (BLOCK * dim)


def _bounds_of(part: int, bits: int = 16, radius: float = 1.0) -> Score:
    name = f"bounds of {part}" + (f" in {bits} bits" if bits < 16 else "") + (f", radius times {radius}" if radius < 1 else "")
    rows = 2 * BLOCK // part
    return Score(name, lambda x: bounds(x, part, bits, radius), lambda dim: rows * (dim * bits / 16 + (bits < 16)))


def _keys_in(bits: int) -> Score:
    return Score(f"keys in {bits} bit{'s' * (bits > 1)}", lambda x: coded_keys(x, bits), lambda dim: dim * (BLOCK * bits / 16 + 2))


def _two(dim: int) -> float:
    return 2 * dim


def _means(count: int, bits: int = 16) -> Score:
    name = f"k-means, {count} centroids" + (f" in {bits} bits" if bits < 16 else "")
    return Score(name, lambda x: k_means(x, count, bits), lambda dim: count * (dim * bits / 16 + 0.5) + 2 * dim * (bits < 16))


SINGLE = (
    Score("exact", true_lse, lambda dim: BLOCK * dim),
    *(_bounds_of(part) for part in (128, 64, 32, 16)),
    *(_bounds_of(*sizes) for sizes in ((64, 8), (32, 8), (32, 4), (16, 4))),
    *(_bounds_of(128, radius=factor) for factor in (0.25, 0.5, 0.75)),
    _bounds_of(32, radius=0.5),
    Score("bounds of 128 less a mean", less_a_mean, _two),
    Score("bounds of 128, principal directions", lambda x: rotated_bounds(x, False), _two),
    Score("bounds of 128, directions weighted by queries", lambda x: rotated_bounds(x, True), _two),
    Score("bounds of 32, directions weighted by queries", lambda x: rotated_bounds(x, True, 32), lambda dim: 8 * dim),
    Score("mean", mean, lambda dim: dim),
    Score("mean and spread", mean_and_spread, _two),
    Score("bounds of 128 before RoPE", bounds_before_rope, _two),
    Score("bounds of 128, slow pairs before RoPE", lambda x: bounds_before_rope(x, "after"), _two),
    Score("bounds of 128, slow pairs before RoPE, mean of fast pairs", lambda x: bounds_before_rope(x, "mean"), _two),
    _means(8),
    _means(8, 4),
    _means(16),
    Score("tokens, 1/8 of directions in 2 bits", lambda x: low_rank(x, x.k.shape[-1] // 8, 2), lambda dim: BLOCK * dim / 64 + dim / 4),
    Score("tokens, 1/16 of directions in 4 bits", lambda x: low_rank(x, x.k.shape[-1] // 16, 4), lambda dim: BLOCK * dim / 64 + dim / 8),
    *(_keys_in(bits) for bits in (1, 2, 3, 4)),
)
"""Combined over the query heads of a KV head by the maximum."""

COMBINED = ("exact", "bounds of 128", "bounds of 32", "k-means, 8 centroids", "keys in 4 bits")
"""Those that are also combined by log-sum-exp, and by the sum of shares."""

SCORES = SINGLE + tuple(
    dataclasses.replace(score, heads=heads) for heads in ("log-sum-exp", "shares") for score in SINGLE if score.name in COMBINED
)


def combined(estimate: Estimate, heads: str, lse: Estimate, candidates: Bool[Array, " N"]) -> Float32[Array, "K T N"]:
    """One score for each KV head. "shares": the sum of the shares of attention that heads would give a block; what
    blocks that are read anyway get is known exactly, as a step's first launch knows it."""
    if heads == "maximum":
        return estimate.max(1)
    if heads == "log-sum-exp":
        return jax.nn.logsumexp(estimate, axis=1)
    return jnp.log(jax.nn.softmax(jnp.where(candidates, estimate, lse), axis=-1).sum(1) + 1e-37)
