"""Scores as integers in the same order, and scores by index. Both use only bits, because as floats some backends make
denormals 0."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

NO_KEY = -(2**31)
"""Key of a missing entry."""

NAN_KEY = NO_KEY + 1
"""Key of every NaN."""


def key_of(scores: Float[Array, "*s"]) -> Int[Array, "*s"]:
    """int32 that order as float32, bfloat16 or float16 scores do; NaN lowest, +0 and -0 equal. All above `NO_KEY`."""
    if scores.dtype == jnp.bfloat16:
        bits = jax.lax.bitcast_convert_type(scores, jnp.int16).astype(jnp.int32) << 16
    else:
        bits = jax.lax.bitcast_convert_type(scores.astype(jnp.float32), jnp.int32)
    key = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    key = jnp.where(key == -1, 0, key)  # -0
    return jnp.where((bits & 0x7FFFFFFF) > 0x7F800000, NAN_KEY, key)


def values_at(scores: Float[Array, "B N"], indices: Int[Array, "B k"]) -> Float[Array, "B k"]:
    """The scores at these indices of each row, with the same bits; -inf at -1."""
    words = f"uint{8 * scores.dtype.itemsize}"
    bits, missing = (jax.lax.bitcast_convert_type(x, words) for x in (scores, jnp.array(-jnp.inf, scores.dtype)))
    found = jnp.take_along_axis(bits, jnp.maximum(indices, 0), axis=1)
    return jax.lax.bitcast_convert_type(jnp.where(indices < 0, missing, found), scores.dtype)
