"""pack_pages for any backend. Reads x once for the scales and once for the codes.

Bits do not depend on what else a program computes: sums of several terms are additions in a fixed order, and a product
that is rounded before it is added to something, and a divisor that is one number, are kept apart by barriers. Otherwise
compilers fuse the two, and multiply by the divisor's reciprocal.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float32

from pallas_kernels.cache.pack_pages.api import Call
from pallas_kernels.core import lattices
from pallas_kernels.core.page_format import GGML, GGML_GROUP, LARGEST, LATTICES, PageFormat

SMALLEST = float(jnp.finfo(jnp.float32).tiny)
"""Scales below this are 0: devices differ in what they do with smaller numbers."""


@functools.partial(jax.jit, static_argnames="call")
def pack_pages(call: Call, x):
    """See `pallas_kernels.pack_pages`."""
    # XLA for GPUs takes a number that is rounded to a narrower type and read back at once for the number itself.
    # Indexes are of keys as they are read, so the rounding must not be left out.
    return jax.lax.optimization_barrier(_packed(call.format, x.astype(jnp.float32)))


def _packed(format: PageFormat, x: Float32[Array, "*lead P D"]) -> tuple[Array, Array | None]:
    """Codes and scales."""
    if format.codes in GGML:
        return _ggml(format.codes, x)
    if format.scale_dtype is None:
        return _codes(format, x), None
    head_dim, factor = x.shape[-1], 1
    if format.rotate:
        x, factor = _rotated(x), head_dim
    largest = _largest(format, x)
    scale = _rounded_up(_quotient(largest, format.levels or LARGEST[format.codes]))
    scale = jnp.where(scale < SMALLEST * factor, 0.0, scale)
    wide = jnp.repeat(scale, head_dim // scale.shape[-1], axis=-1) if 1 < scale.shape[-1] < head_dim else scale
    codes = _codes(format, jnp.where(wide > 0, _quotient(x, jnp.where(wide > 0, wide, 1.0)), 0.0))
    return codes, jnp.where(jnp.isfinite(largest), scale / factor, jnp.nan).astype(format.scale_dtype)


def _quotient(x: Float32[Array, "..."], y: Array | float) -> Float32[Array, "..."]:
    """x / y, rounded once."""
    return x / jax.lax.optimization_barrier(jnp.broadcast_to(jnp.asarray(y, jnp.float32), x.shape))


def _largest(format: PageFormat, x: Float32[Array, "*lead P D"]) -> Float32[Array, "*lead S n"]:
    """The largest magnitude of what shares a scale; NaN where one is NaN."""
    # As integers, whose order is that of magnitudes, with NaN last: XLA's largest float on a CPU may leave out a NaN.
    bits = jax.lax.bitcast_convert_type(jnp.abs(x), jnp.int32)
    if format.scale == "channel":
        largest = bits.max(-2, keepdims=True)
    elif format.scale == "page":
        largest = bits.max((-2, -1), keepdims=True)
    else:
        largest = bits.reshape(*x.shape[:-1], -1, format.group or x.shape[-1]).max(-1)
    return jax.lax.bitcast_convert_type(largest, jnp.float32)


def _rounded_up(x: Float32[Array, "..."]) -> Float32[Array, "..."]:
    """The next bfloat16 at or above x >= 0, as float32; anything for NaN and infinity."""
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    return jax.lax.bitcast_convert_type((bits + 0xFFFF) & jnp.uint32(0xFFFF0000), jnp.float32)


def _codes(format: PageFormat, x: Float32[Array, "*lead P D"]) -> Array:
    """Codes of numbers in units of the scale."""
    most = format.levels or LARGEST[format.codes]
    if format.codes == "fp8_e4m3":
        return jnp.where(jnp.isfinite(x), jnp.clip(x, -most, most), jnp.nan).astype(format.code_dtype)
    x = jnp.clip(jnp.where(jnp.isfinite(x), x, 0.0), -most, most)
    if format.codes in LATTICES:
        return lattices.pack_points(format.codes, format.levels, lattices.nearest(format.codes, x))
    codes = jnp.round(x).astype(jnp.int32)
    if format.codes == "int8":
        return codes.astype(jnp.int8)
    low, high = jnp.split(codes + 8, 2, axis=-1)
    return (low | (high << 4)).astype(jnp.uint8)


def _rotated(x: Float32[Array, "*lead D"]) -> Float32[Array, "*lead D"]:
    """x times Sylvester's Hadamard matrix, by sums and differences of pairs."""
    shape, half = x.shape, 1
    while half < shape[-1]:
        pairs = x.reshape(*shape[:-1], -1, 2, half)
        first, second = pairs[..., 0, :], pairs[..., 1, :]
        x = jnp.stack([first + second, first - second], axis=-2)
        half *= 2
    return x.reshape(shape)


def _ggml(codes: str, x: Float32[Array, "*lead P D"]) -> tuple[Array, Array]:
    groups = x.reshape(*x.shape[:-1], -1, GGML_GROUP)
    finite = jnp.isfinite(groups).all(-1)
    largest = jnp.abs(groups).max(-1)
    if codes == "q8_0":
        d = _quotient(largest, 127.0)
    else:  # the number of largest magnitude, the first of them, becomes code -8
        signed = jnp.take_along_axis(groups, jnp.argmax(jnp.abs(groups), axis=-1)[..., None], axis=-1)[..., 0]
        d = signed / -8.0  # exact
    d = jnp.where(finite & (jnp.abs(d) >= SMALLEST), d, 0.0)
    inverse = jnp.where(d != 0, 1.0 / jnp.where(d != 0, d, 1.0), 0.0)
    scaled = jax.lax.optimization_barrier(jnp.where(finite[..., None], groups, 0.0) * inverse[..., None])
    scales = jnp.where(finite, d, jnp.nan).astype(jnp.float16)
    if codes == "q8_0":  # C's roundf: halves away from zero
        whole = jnp.trunc(scaled)
        found = (whole + jnp.where(jnp.abs(scaled - whole) >= 0.5, jnp.sign(scaled), 0.0)).astype(jnp.int8)
    else:
        number = jnp.minimum(jnp.trunc(scaled + 8.5), 15.0).astype(jnp.uint8)
        found = number[..., : GGML_GROUP // 2] | (number[..., GGML_GROUP // 2 :] << 4)
    return found.reshape(*x.shape[:-1], -1), scales
