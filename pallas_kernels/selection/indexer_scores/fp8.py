"""Indexer keys in 8 bits: float8 e4m3 codes and one power-of-two scale per token."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float, Float32

LARGEST = 448.0
"""The largest finite float8_e4m3fn."""

SMALLEST = 1e-4
"""If a key's largest element is below this, its scale is computed from this number. So a key of zeros has a scale
too."""


def quantize_keys(keys: Float[Array, "... D"]) -> tuple[Float[Array, "... D"], Float32[Array, "..."]]:
    """Codes float8_e4m3fn `[..., D]` and scales float32 `[...]`: key = code * scale, up to rounding.

    The scale is the smallest power of two for which the key's largest element (at least `SMALLEST`), divided by it, is
    at most `LARGEST`. Codes are key / scale rounded to nearest, ties to even. So no code overflows. An element's error
    is at most 1/16 of it, or 2**-10 scale where it falls among e4m3's denormals (below 2**-6 scale). Keys must be
    finite.

    Source: the scales of DeepSeek-V3.2's indexer ("ue8m0": exponent only), which cover 128 elements, the whole of its
    keys.
    """
    keys = keys.astype(jnp.float32)
    largest = jnp.maximum(jnp.abs(keys).max(-1), SMALLEST)
    mantissa, exponent = jnp.frexp(largest / LARGEST)  # mantissa in [1/2, 1)
    scale = jnp.ldexp(jnp.float32(1), exponent - (mantissa == 0.5))
    return (keys / scale[..., None]).astype(jnp.float8_e4m3fn), scale
