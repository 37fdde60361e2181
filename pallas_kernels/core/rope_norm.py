"""Norms and RoPE in plain JAX, for ops and models."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32


def rms_norm(x: Float[Array, "... E"], weight: Float[Array, "E"], eps: float, offset: float = 0.0) -> Float[Array, "... E"]:
    """x / sqrt(mean(x^2) + eps) * (offset + weight) over the last axis; computed in float32, returned in x's dtype."""
    y = x.astype(jnp.float32)
    y = y * jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + eps)
    weight = weight.astype(jnp.float32)
    return (y * (weight + offset if offset else weight)).astype(x.dtype)


def layer_norm(
    x: Float[Array, "... E"], weight: Float[Array, "E"], eps: float, bias: Float[Array, "E"] | None = None
) -> Float[Array, "... E"]:
    """LayerNorm over the last axis: as `rms_norm`, of x minus its mean, plus a bias if there is one."""
    y = x.astype(jnp.float32)
    y = y - y.mean(-1, keepdims=True)
    y = y * jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + eps) * weight.astype(jnp.float32)
    return (y if bias is None else y + bias.astype(jnp.float32)).astype(x.dtype)


def rotate(x: Float[Array, "... N D"], cos: Float32[Array, "... 1 D2"], sin: Float32[Array, "... 1 D2"]) -> Float[Array, "... N D"]:
    """RoPE: rotate pair (i, i + D2) of every head; computed in float32, returned in x's dtype. Elements from 2 * D2 on
    stay."""
    half = cos.shape[-1]
    first, second = (part.astype(jnp.float32) for part in (x[..., :half], x[..., half : 2 * half]))
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)
    return turned if x.shape[-1] == 2 * half else jnp.concatenate([turned, x[..., 2 * half :]], axis=-1)
