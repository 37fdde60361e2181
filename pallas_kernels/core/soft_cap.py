"""The scale of logits: a factor, or a factor and a soft-cap (Gemma 2, arXiv 2408.00118, section 2)."""

from __future__ import annotations

import dataclasses
import math

import jax.numpy as jnp
from jaxtyping import Array, Float


@dataclasses.dataclass(frozen=True)
class SoftCap:
    """Logits are cap * tanh(factor * product / cap): never beyond the cap, and in the order of the products.

    It takes the place of the plain factor `sm_scale` of an attention op. Only forms in plain JAX apply it;
    `pallas_kernels.core.dispatch` passes kernels by. It is no number on purpose: code that would multiply by it fails.
    """

    factor: float
    cap: float

    def __post_init__(self):
        for name in ("factor", "cap"):
            if not math.isfinite(getattr(self, name)) or getattr(self, name) <= 0:
                raise ValueError(f"{name} of a soft-cap must be above 0 and finite, got {getattr(self, name)!r}")


Scale = float | SoftCap
"""What makes logits of dot products."""


def scaled(products: Float[Array, "..."], scale: Scale) -> Float[Array, "..."]:
    """Logits of dot products."""
    if isinstance(scale, SoftCap):
        return scale.cap * jnp.tanh(products * (scale.factor / scale.cap))
    return products * scale


def divided(scale: Scale, count: int) -> Scale:
    """The scale of means of `count` products, for their sums."""
    return dataclasses.replace(scale, factor=scale.factor / count) if isinstance(scale, SoftCap) else scale / count


def factor_of(scale: Scale) -> float:
    """The factor alone. Logits differ by at most this factor times the difference of their products, with a cap too."""
    return scale.factor if isinstance(scale, SoftCap) else scale
