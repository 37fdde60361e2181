"""Rotary position embedding: frequencies as transformers computes them, angles in float32 from absolute positions.

Sources: RoPE (arXiv 2104.09864), in the "rotate half" layout of Llama checkpoints; YaRN (arXiv 2309.00071); LongRoPE
(arXiv 2402.13753); the Llama 3.1 release for its piecewise scaling. Values that depend only on the configuration are
computed on the host with numpy, so every backend rotates by the same numbers.
"""

from __future__ import annotations

import functools
import math

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, Int

from kvjax.model.layers import LongRope, Rope, RopeScaling
from pallas_kernels.core.rope_norm import rotate


@functools.lru_cache(maxsize=64)
def frequencies(rope: Rope) -> tuple[float, ...]:
    """Radians per token of each of the dim / 2 rotated pairs, float32 values, scaled as `rope.scaling` says.

    It uses float32 operations in transformers' order, except for the power. PyTorch's power depends on the CPU in its
    last bit; here it is correctly rounded, the same on every machine. Of the 13,008 frequencies of 260 configurations
    (tests/models/make_rope_golden.py) 3 differ from PyTorch's scalar code, 95 from its AVX2 and 87 from its AVX-512
    code, by one unit in the last place, in the band that llama3 scaling blends by up to 3; PyTorch's own codes differ
    from each other as much.
    """
    pairs = np.arange(0, rope.dim, 2, dtype=np.float32) / np.float32(rope.dim)
    periods = np.float64(np.float32(rope.theta)) ** pairs.astype(np.float64)  # over 2 pi
    return tuple(float(x) for x in scaled(periods.astype(np.float32), rope))


def scaled(periods: Float32[np.ndarray, "D2"], rope: Rope) -> Float32[np.ndarray, "D2"]:
    """Frequencies from unscaled periods over 2 pi, bit for bit as transformers scales them."""
    scaling = rope.scaling
    if scaling is None or scaling.kind == "dynamic":  # up to `RopeScaling.most_positions`
        return 1 / periods
    if isinstance(scaling, LongRope):
        return 1 / (np.asarray(scaling.long_factors if scaling.long else scaling.short_factors, np.float32) * periods)
    if scaling.kind == "linear":
        return 1 / periods / np.float32(scaling.factor)
    if scaling.kind == "llama3":
        return _llama3(1 / periods, scaling)
    if scaling.kind == "yarn":
        return _yarn(periods, scaling, rope)
    raise ValueError(f"rope_scaling.kind is {scaling.kind!r}; supported: 'linear', 'dynamic', 'llama3', 'yarn', 'longrope'")


def _llama3(base: Float32[np.ndarray, "D2"], scaling: RopeScaling) -> Float32[np.ndarray, "D2"]:
    """Low frequencies are divided by `factor`, high ones kept, and the band between is blended linearly in turns per
    original length."""
    original, low, high = scaling.original_max_positions, scaling.low_freq_factor, scaling.high_freq_factor
    wavelengths = 1 / base * np.float32(2 * math.pi)  # PyTorch divides a number by a tensor as reciprocal times number
    slowed = base / np.float32(scaling.factor)
    smooth = (1 / wavelengths * np.float32(original) - np.float32(low)) / np.float32(high - low)
    blended = (1 - smooth) * base / np.float32(scaling.factor) + smooth * base
    longest, shortest = np.float32(original / low), np.float32(original / high)
    return np.where(wavelengths > longest, slowed, np.where(wavelengths < shortest, base, blended))


def _yarn(periods: Float32[np.ndarray, "D2"], scaling: RopeScaling, rope: Rope) -> Float32[np.ndarray, "D2"]:
    """Pairs that turn more than `beta_fast` times within the original length are kept; those below `beta_slow` are
    divided by `factor`."""
    dim = rope.dim

    def pair_turning(turns: float) -> float:
        return dim * math.log(scaling.original_max_positions / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    first, last = pair_turning(scaling.beta_fast), pair_turning(scaling.beta_slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, dim - 1)
    if first == last:
        last += 0.001  # as transformers does: the ramp becomes a step, not a division by zero
    ramp = (np.arange(dim // 2, dtype=np.float32) - np.float32(first)) / np.float32(last - first)
    keep = 1 - np.clip(ramp, 0, 1)
    return 1 / (np.float32(scaling.factor) * periods) * (1 - keep) + 1 / periods * keep


def mscale(factor: float, weight: float) -> float:
    """YaRN's attention factor for positions stretched by `factor` (YaRN, section 3.3), its logarithm weighted."""
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


def rotation(rope: Rope, positions: Int[Array, "B T"]) -> tuple[Float32[Array, "B T 1 D2"], Float32[Array, "B T 1 D2"]]:
    """Cosine and sine of every pair's angle at absolute `positions` (tokens), float32, times the attention factor of
    YaRN and longrope."""
    angles = positions.astype(jnp.float32)[..., None, None] * jnp.asarray(frequencies(rope), jnp.float32)
    factor = rope.scaling.attention_factor if rope.scaling else 1.0
    return jnp.cos(angles) * factor, jnp.sin(angles) * factor


def turned(x: Float[Array, "B T N D"], rope: Rope, by: Int[Array, "B T"]) -> Float[Array, "B T N D"]:
    """Rotated heads, turned on by so many positions (tokens, below 0 for back): as if they had been rotated at position
    + by.

    Attention depends only on differences of positions. So turning a query moves it with respect to all keys that it
    then reads, and no key is touched. Computed in float32, returned in x's dtype.
    """
    angles = by.astype(jnp.float32)[..., None, None] * jnp.asarray(frequencies(rope), jnp.float32)
    return rotate(x, jnp.cos(angles), jnp.sin(angles))
