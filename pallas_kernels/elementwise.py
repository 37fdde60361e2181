"""What ops do to tokens beside products, in plain JAX; models use it alone too."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32


def rms_norm(x: Float[Array, "... E"], weight: Float[Array, "E"], eps: float) -> Float[Array, "... E"]:
    """x / sqrt(mean(x^2) + eps) * weight over the last axis; computed in float32, returned in x's dtype."""
    y = x.astype(jnp.float32)
    y = y * jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + eps)
    return (y * weight.astype(jnp.float32)).astype(x.dtype)


def rotate(x: Float[Array, "... N D"], cos: Float32[Array, "... 1 D2"], sin: Float32[Array, "... 1 D2"]) -> Float[Array, "... N D"]:
    """RoPE: rotate pair (i, i + D/2) of every head; computed in float32, returned in x's dtype."""
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)
