"""Indexes that hold every key in few bits: "keys1", "keys2", "keys4" and "keys8", by kind the bits of a number.

Each channel of a block has 2^bits evenly spaced levels, from the smallest to the largest number that the block's keys
have there. With 1 bit these two are the levels. Levels are per channel because keys have channels far from 0 (KIVI,
arXiv 2402.02750). A block is `[R, W]` bytes. Rows of W = D * bits / 8 bytes: a row of codes per token, then the lowest
levels and the distances of two levels in bfloat16, 2 * D bytes each. Code number d of a token is in byte d % W, from
bit `bits * (d // W)` on.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, UInt8

CODED = {"keys1": 1, "keys2": 2, "keys4": 4, "keys8": 8}
"""Bits of a number in each kind of index that holds codes of keys."""

ROUNDED = 2**-8 * (1 + 2**-6)
"""The most by which rounding to bfloat16 changes a number, as a share of the rounded one."""

INDEX_ROWS = {"bounds": 2, "mean": 1}
"""Rows of the other kinds per block, each as wide as a key and in its dtype: bounds are (max, min), mean is one row."""

INDEX_KINDS = (*INDEX_ROWS, *CODED)


def index_shape(kind: str, block_size: int, head_dim: int) -> tuple[int, int]:
    """Shape `(R, W)` of a block in an index. ValueError where codes of `head_dim` numbers are not whole bytes."""
    if kind in INDEX_ROWS:
        return INDEX_ROWS[kind], head_dim
    per_byte = 8 // CODED[kind]
    if head_dim % per_byte:
        raise ValueError(f"an index of kind {kind!r} needs a head dim that is a multiple of {per_byte}, got {head_dim}: use more bits")
    return block_size + 2 * _level_rows(kind), head_dim // per_byte


def index_dtype(kind: str, dtype: jnp.dtype) -> jnp.dtype:
    """Dtype of an index of keys of `dtype`: bytes for codes, else that of the keys."""
    return jnp.dtype(jnp.uint8 if kind in CODED else dtype)


def code_keys(kind: str, blocks: Float[Array, "... bs D"]) -> UInt8[Array, "... R W"]:
    """The codes of whole blocks of keys. A channel with a NaN or an infinity reads as NaN."""
    # XLA for GPUs may leave out that keys and levels are rounded where they are used in the same program, unless a
    # barrier hides it.
    bits, keys = CODED[kind], jax.lax.optimization_barrier(blocks).astype(jnp.float32)
    most = 2**bits - 1
    low = jax.lax.optimization_barrier(keys.min(-2, keepdims=True).astype(jnp.bfloat16))
    step = ((keys.max(-2, keepdims=True) - low.astype(jnp.float32)) * (1 / most)).astype(jnp.bfloat16)
    step = jax.lax.optimization_barrier(step)
    distance = jnp.broadcast_to(jnp.where(step == 0, 1, step).astype(jnp.float32), keys.shape)
    codes = (keys - low.astype(jnp.float32)) / jax.lax.optimization_barrier(distance)  # a compiler may multiply by a reciprocal otherwise
    codes = jnp.clip(jnp.nan_to_num(jnp.round(codes)), 0, most).astype(jnp.uint8)
    _, width = index_shape(kind, *blocks.shape[-2:])
    places = codes.reshape(*codes.shape[:-1], 8 // bits, width)
    packed = sum(places[..., i, :] << (bits * i) for i in range(8 // bits))
    levels = (jax.lax.bitcast_convert_type(x, jnp.uint8).reshape(*x.shape[:-2], -1, width) for x in (low, step))
    return jnp.concatenate([packed, *levels], axis=-2)


def coded_keys(kind: str, rows: UInt8[Array, "... R W"]) -> Float32[Array, "... bs D"]:
    """The numbers that codes stand for. Products and sums are exact before one rounding, so any program gives the same
    bits."""
    bits, tokens = CODED[kind], rows.shape[-2] - 2 * _level_rows(kind)
    codes = jnp.concatenate([(rows[..., :tokens, :] >> (bits * i)) & (2**bits - 1) for i in range(8 // bits)], axis=-1)
    low, step = _levels(kind, rows)
    return low + step * codes.astype(jnp.float32)


def code_errors(kind: str, rows: UInt8[Array, "... R W"], *, sixteen_bits: bool) -> Float32[Array, "... D"]:
    """The most by which a finite key of a block can differ from `coded_keys` in each channel.

    Half a step; and where the levels were rounded so far that the largest or smallest key lies outside of them, what
    that rounding can be. sixteen_bits: whether keys are bfloat16; then the lowest level is a key, which was not
    rounded.
    """
    low, step = (jnp.abs(x[..., 0, :]) for x in _levels(kind, rows))
    most = 2 ** CODED[kind] - 1
    steps = max(0.5, most * ROUNDED) * (1 + 2**-10)  # a quotient is rounded before the code is
    rounding = 2**-23 * (low + most * step)  # of the number that is read
    return steps * step + (0 if sixteen_bits else ROUNDED * low) + rounding + jnp.finfo(jnp.float32).tiny * 2 ** CODED[kind]


def _levels(kind: str, rows: UInt8[Array, "... R W"]) -> tuple[Float32[Array, "... 1 D"], Float32[Array, "... 1 D"]]:
    """The lowest level of each channel, and the distance of two levels."""
    count, channels = _level_rows(kind), rows.shape[-1] * 8 // CODED[kind]
    tokens = rows.shape[-2] - 2 * count
    levels = (rows[..., start : start + count, :] for start in (tokens, tokens + count))
    low, step = (jax.lax.bitcast_convert_type(x.reshape(*x.shape[:-2], 1, channels, 2), jnp.bfloat16).astype(jnp.float32) for x in levels)
    return low, step


def _level_rows(kind: str) -> int:
    """Rows of D numbers in bfloat16."""
    return 16 // CODED[kind]
