"""Softmax-weighted sums over tiles of keys, one tile at a time: the arithmetic that the `xla` attention ops share.

Tiles are folded in the order given. A tile in which a row may read nothing (all its logits -inf) leaves that row's bits
unchanged. So a row's result does not depend on how many such tiles it walks through because of other rows.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.core.soft_cap import Scale, scaled


class Partial(NamedTuple):
    """Attention over the keys folded in so far, all float32: greatest logit, and sum of exponentials and weighted
    values relative to it."""

    top: Float[Array, "*rows"]
    total: Float[Array, "*rows"]
    weighted: Float[Array, "*rows D"]


def empty(rows: tuple[int, ...], head_dim: int) -> Partial:
    """Attention over no key."""
    return Partial(jnp.full(rows, -jnp.inf, jnp.float32), jnp.zeros(rows, jnp.float32), jnp.zeros((*rows, head_dim), jnp.float32))


def scaled_logits(q: Float[Array, "K R D"], k: Float[Array, "K S D"], sm_scale: Scale) -> Float[Array, "K R S"]:
    """Dot products in float32, scaled by `sm_scale`; the factors are multiplied in the wider of the two dtypes."""
    dtype = jnp.promote_types(q.dtype, k.dtype)
    logits = jnp.einsum("krd,ksd->krs", q.astype(dtype), k.astype(dtype), precision=_precision(dtype), preferred_element_type=jnp.float32)
    return scaled(logits, sm_scale)


def fold(partial: Partial, logits: Float[Array, "K R S"], values: Float[Array, "K S D"], *, rounded: bool = False) -> Partial:
    """Add a tile of keys. Logits are -inf where a row may not read; values there must be finite.

    rounded: multiply values by weights in the values' dtype, as FlashAttention does, not in float32. Faster where many
    queries are multiplied, and on accelerators.
    """
    top = jnp.maximum(partial.top, logits.max(-1))
    shift = jnp.where(top == -jnp.inf, 0.0, top)  # -inf minus -inf would be NaN
    weights, kept = jnp.exp(logits - shift[..., None]), jnp.exp(partial.top - shift)
    dtype = values.dtype if rounded else jnp.float32
    factors = weights.astype(dtype), values.astype(dtype)
    tile = jnp.einsum("krs,ksd->krd", *factors, precision=_precision(values.dtype), preferred_element_type=jnp.float32)
    return Partial(top, partial.total * kept + weights.sum(-1), partial.weighted * kept[..., None] + tile)


def finish(partial: Partial) -> tuple[Float[Array, "*rows D"], Float[Array, "*rows"]]:
    """Output and log-sum-exp, float32; 0 and -inf for rows that read nothing."""
    nothing = partial.top == -jnp.inf
    out = partial.weighted / jnp.where(nothing, 1.0, partial.total)[..., None]
    return out, jnp.where(nothing, -jnp.inf, partial.top + jnp.log(jnp.where(nothing, 1.0, partial.total)))


def _precision(dtype: jnp.dtype) -> jax.lax.Precision:
    """Accelerators multiply float32 with fewer bits by default; products of shorter types are exact in float32."""
    return jax.lax.Precision.HIGHEST if dtype == jnp.float32 else jax.lax.Precision.DEFAULT
