"""Products of a few tokens and integer codes on a CPU, which read the codes as they are.

XLA for CPUs writes a matrix of codes as float32 before it multiplies tokens by it, 4 bytes for each number. Two forms
write none:

Whole rows. XLA's product of int8 by int8 uses the processor's instructions for bytes (AVX-512's VNNI and the like). So,
as `digits` does on a GPU, a token becomes multiples of 2^-20 of the power of two at or below its largest input, or of
2^-126 if that is below 2^-106: integers of 22 bits with their sign, which are d0 * 2^16 + d1 * 2^8 + d2 with digits of
8 bits with their sign. Products of codes and digits add up in int32, exactly, in any order. A token's result depends on
no other token, and not on how many there are.

Blocks of a row, one token. XLA fuses the widening, the product with inputs and scales, and the sum.

Memory traffic of a step: the codes once. Codes of 4 bits are written as 8 bits, a tile at a time, which stays in a
processor's cache.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int8, Int32

from pallas_kernels.core.matrices import PackedMatrix, row_scales, unpack

MAX_INPUTS = 1 << 16
"""Inputs of a row: 2^16 products of a code and a digit are below 2^31."""

COLUMNS = 4
"""Bytes of an integer: three digits, and one that is 0."""


def takes(weight: PackedMatrix, tokens: int) -> bool:
    """Whether `codes_product` multiplies so few tokens by this matrix: integer codes in whole rows; by one token, in
    blocks of a row."""
    own, inputs = weight.format, weight.shape[1]
    if own.columns is None:
        return own.codes in ("int8", "int4") and inputs <= MAX_INPUTS
    return own.codes in ("int8", "int4") and own.rows == 1 and tokens == 1


@jax.custom_jvp
def codes_product(x: Float[Array, "R E"], weight: PackedMatrix) -> Float32[Array, "R F"]:
    """Tokens by a matrix that `takes` accepts. A token with an input that is not finite gives NaN, or with blocks what
    float32 gives. The gradient is that of numbers."""
    x = x.astype(jnp.float32)
    if weight.format.columns is not None:
        return _blocks_product(x, weight)
    digits, one = _digits(x)
    parts, step = _parts(weight), 2 if weight.format.codes == "int4" else 1
    sums = sum(_sums(codes, digits[:, first::step]) for first, codes in enumerate(parts))
    return _together(sums, one) * row_scales(weight)


@codes_product.defjvp
def _derivative(primals, tangents):
    x, weight = primals

    def numbers(x: Array, scales: Array) -> Array:
        return x.astype(jnp.float32) @ unpack(weight.replace(scales=scales)).T

    return codes_product(x, weight), jax.jvp(numbers, (x, weight.scales), (tangents[0], tangents[1].scales))[1]


def _parts(weight: PackedMatrix) -> list[Int8[Array, "F C"]]:
    """What scales multiply, as int8: all columns of int8; the even and the odd columns of int4, whole rows."""
    if weight.format.codes == "int8":
        return [weight.codes]
    zeros = 8 if weight.zeros is None else jnp.repeat(weight.zeros, weight.format.rows, axis=0)[: weight.shape[0]].astype(jnp.int8)
    return [(weight.codes & 15).astype(jnp.int8) - zeros, (weight.codes >> 4).astype(jnp.int8) - zeros]


def _blocks_product(x: Float32[Array, "1 E"], weight: PackedMatrix) -> Float32[Array, "1 F"]:
    """One token by blocks of single rows. A smaller last block is a product of its own."""
    columns, inputs = weight.format.columns, weight.shape[1]
    whole, found = inputs // columns, jnp.zeros(weight.shape[0], jnp.float32)
    per_byte = 2 if weight.format.codes == "int4" else 1
    for first, count, width in ((0, whole, columns), (whole, 1, inputs - whole * columns)):
        if count == 0 or width == 0:
            continue
        start, stop = first * columns, first * columns + count * width
        codes = weight.codes[:, start // per_byte : stop // per_byte].reshape(-1, count, width // per_byte)
        scales, inputs_of = weight.scales[:, first : first + count].astype(jnp.float32), x[:, start:stop].reshape(1, count, -1, per_byte)
        if per_byte == 1:
            found = found + (codes.astype(jnp.float32) * inputs_of[..., 0] * scales[..., None]).sum((1, 2))
            continue
        zeros = 8.0 if weight.zeros is None else weight.zeros[:, first : first + count, None].astype(jnp.float32)
        for half, of_half in enumerate((codes & 15, codes >> 4)):
            found = found + (((of_half.astype(jnp.float32) - zeros) * inputs_of[..., half]).sum(2) * scales).sum(1)
    return found[None]


def _digits(x: Float32[Array, "R E"]) -> tuple[Int8[Array, "4R E"], Float32[Array, "R 1"]]:
    """The digits of each token, d2, d1, d0 and zeros, and what its integer 1 stands for: NaN if an input is not
    finite."""
    largest = jax.lax.bitcast_convert_type(jnp.max(jnp.abs(x), axis=1, keepdims=True), jnp.int32)
    exponent = jnp.maximum(largest >> 23, 21)  # below, an integer of 1 would be no normal float32
    finite = exponent < 255
    scale = jax.lax.bitcast_convert_type((274 - jnp.minimum(exponent, 254)) << 23, jnp.float32)
    one = jnp.where(finite, jax.lax.bitcast_convert_type((exponent - 20) << 23, jnp.float32), jnp.nan)
    integers = jnp.round(jnp.where(finite, x, 0) * scale).astype(jnp.int32)
    # 128 more in each digit makes them the integer's bytes; its highest bit then says which sign the digit had.
    found = jax.lax.bitcast_convert_type((integers + 0x808080) ^ 0x808080, jnp.int8)
    return jnp.moveaxis(found, 2, 1).reshape(-1, x.shape[1]), one


def _sums(codes: Int8[Array, "F C"], digits: Int8[Array, "4R C"]) -> Int32[Array, "F 4R"]:
    """With the codes first: XLA's product packs the second operand."""
    return jnp.einsum("fc,rc->fr", codes, digits, preferred_element_type=jnp.int32)


def _together(sums: Int32[Array, "F 4R"], one: Float32[Array, "R 1"]) -> Float32[Array, "R F"]:
    """The products of tokens from those of their digits."""
    numbers = sums.reshape(len(sums), -1, COLUMNS).astype(jnp.float32)
    found = numbers[..., 2] * 2.0**16 + (numbers[..., 1] * 2.0**8 + numbers[..., 0])
    return found.T * one
