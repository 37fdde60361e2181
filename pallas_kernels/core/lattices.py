"""Points of the lattices D4 and E8: the nearest one, and its number in few bits.

D4 is every integer vector of 4 coordinates with an even sum. E8 is D8 (8 integer coordinates with an even sum) together
with D8 moved by (1/2, ..., 1/2). A point's coordinates lie in a box, so its number is one of mixed radix: the last
coordinate's parity follows from the others, and is not stored. Numbers are split into words of four coordinates that
fit into 32 bits.

Source: Conway and Sloane, "Fast quantizing and decoding algorithms for lattice quantizers and codes" (1982), for the
nearest points.
"""

from __future__ import annotations

import functools
import math
import operator

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, UInt8, UInt32


def word_bits(lattice: str, levels: int) -> int:
    """Bits of four coordinates. D4: 25 at 38 levels, 29 at 76. E8: 26 at 38 levels."""
    if lattice == "d4":
        return math.ceil(math.log2((2 * levels + 1) ** 3 * (levels + 1)))
    return math.ceil(4 * math.log2(2 * levels + 2))


def nearest(lattice: str, x: Float[Array, "*lead D"]) -> Float[Array, "*lead D"]:
    """The lattice point nearest to each 4 (d4) or 8 (e8) consecutive numbers, float32. |x| of at most Q (an integer)
    gives coordinates of at most Q, in E8's second coset Q + 1/2. Ties go to D8, and inside it toward 0."""
    size = 4 if lattice == "d4" else 8
    blocks = x.reshape(*x.shape[:-1], -1, size)
    points = _even_sum(blocks)
    if lattice == "e8":
        moved = _even_sum(blocks - 0.5) + 0.5
        closer = _distance(blocks, moved) < _distance(blocks, points)
        points = jnp.where(closer[..., None], moved, points)
    return points.reshape(x.shape)


def _distance(x: Float[Array, "*lead n"], y: Float[Array, "*lead n"]) -> Float[Array, "*lead"]:
    """Squared distance, added up in a fixed order: the choice between two points must not depend on the program."""
    squares = jax.lax.optimization_barrier((x - y) ** 2)
    return functools.reduce(operator.add, [squares[..., i] for i in range(x.shape[-1])])


def _even_sum(x: Float[Array, "*lead n"]) -> Float[Array, "*lead n"]:
    """The nearest integer vector with an even sum: round, and if the sum is odd, round the worst coordinate the other
    way."""
    rounded = jnp.round(x)
    error = x - rounded
    worst = jnp.arange(x.shape[-1]) == jnp.argmax(jnp.abs(error), axis=-1)[..., None]
    other = jnp.where(error == 0, -jnp.sign(rounded), jnp.sign(error))
    other = jnp.where(other == 0, 1.0, other)
    odd = jnp.mod(rounded.sum(-1, keepdims=True), 2) == 1
    return jnp.where(odd & worst, rounded + other, rounded)


def pack_points(lattice: str, levels: int, points: Float[Array, "*lead D"]) -> UInt8[Array, "*lead width"]:
    """The numbers of lattice points, as bytes: see `points`, the inverse."""
    blocks = points.reshape(*points.shape[:-1], -1, 4 if lattice == "d4" else 8)
    if lattice == "d4":
        c = (blocks + levels).astype(jnp.uint32)
        words = _number([c[..., 0], c[..., 1], c[..., 2]], 2 * levels + 1) * (levels + 1) + (c[..., 3] >> 1)
    else:
        whole = jnp.floor(blocks)
        half = (blocks[..., 0] != whole[..., 0]).astype(jnp.uint32)
        c = (whole + (levels + 1)).astype(jnp.uint32)
        radix = 2 * levels + 2
        first = _number([c[..., i] for i in range(4)], radix)
        second = _number([c[..., i] for i in range(4, 7)], radix) * (levels + 1) + (c[..., 7] >> 1)
        words = jnp.stack([first, second * 2 + half], axis=-1).reshape(*points.shape[:-1], -1)
    return _to_planes(words, word_bits(lattice, levels))


def points(lattice: str, levels: int, codes: UInt8[Array, "*lead width"]) -> Float[Array, "*lead D"]:
    """The lattice points of their numbers, float32. Bytes that no point has give some point: nothing is read out of
    range.

    Bytes of a token: first byte 0 of every word, then byte 1, ...; then, for each bit that is left, that bit of eight
    words per byte.
    """
    words = _from_planes(codes, word_bits(lattice, levels))
    if lattice == "d4":
        rest, h = words // (levels + 1), words % (levels + 1)
        a, b, c = _digits(rest, 2 * levels + 1, 3)
        found = jnp.stack([a, b, c, 2 * h + ((a + b + c) & 1)], axis=-1).astype(jnp.float32) - levels
        return found.reshape(*codes.shape[:-1], -1)
    words = words.reshape(*words.shape[:-1], -1, 2)
    first, half, second = words[..., 0], words[..., 1] & 1, words[..., 1] >> 1
    radix = 2 * levels + 2
    digits = [*_digits(first, radix, 4), *_digits(second // (levels + 1), radix, 3)]
    digits.append(2 * (second % (levels + 1)) + (sum(digits) & 1))
    found = jnp.stack(digits, axis=-1).astype(jnp.float32) - (levels + 1) + 0.5 * half[..., None].astype(jnp.float32)
    return found.reshape(*codes.shape[:-1], -1)


def _number(digits: list[UInt32[Array, "..."]], radix: int) -> UInt32[Array, "..."]:
    number = digits[0]
    for digit in digits[1:]:
        number = number * radix + digit
    return number


def _digits(number: UInt32[Array, "..."], radix: int, count: int) -> list[UInt32[Array, "..."]]:
    found = []
    for _ in range(count - 1):
        number, digit = number // radix, number % radix
        found.append(digit)
    return [number, *reversed(found)]


def _to_planes(words: UInt32[Array, "*lead n"], bits: int) -> UInt8[Array, "*lead n*bits/8"]:
    planes = [((words >> (8 * i)) & 255).astype(jnp.uint8) for i in range(bits // 8)]
    places = jnp.arange(8, dtype=jnp.uint32)
    for bit in range(bits // 8 * 8, bits):
        eights = ((words >> bit) & 1).reshape(*words.shape[:-1], -1, 8)
        planes.append((eights << places).sum(-1, dtype=jnp.uint32).astype(jnp.uint8))
    return jnp.concatenate(planes, axis=-1)


def _from_planes(codes: UInt8[Array, "*lead w"], bits: int) -> UInt32[Array, "*lead n"]:
    count = codes.shape[-1] * 8 // bits
    whole, wide = bits // 8, codes.astype(jnp.uint32)
    words = jnp.zeros((*codes.shape[:-1], count), jnp.uint32)
    for i in range(whole):
        words |= wide[..., i * count : (i + 1) * count] << (8 * i)
    places = jnp.arange(8, dtype=jnp.uint32)
    for bit in range(8 * whole, bits):
        start = whole * count + (bit - 8 * whole) * (count // 8)
        eights = (wide[..., start : start + count // 8, None] >> places) & 1
        words |= eights.reshape(*codes.shape[:-1], count) << bit
    return words
