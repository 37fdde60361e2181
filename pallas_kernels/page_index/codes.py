"""Indexes that hold every key in few bits: "keys1", "keys2" and "keys4", by kind the bits of a number.

Each channel of a block has 2^bits evenly spaced levels, from the smallest to the largest number that the block's keys have there. With 1
bit these two are the levels. Levels are per channel because keys have channels far from 0 (KIVI, arXiv 2402.02750).
A block is `[R, W]` bytes. Rows of W = D * bits / 8 bytes: a row of codes per token, then the lowest levels and the distances of two levels
in bfloat16, 2 * D bytes each. Code number d of a token is in byte d % W, from bit `bits * (d // W)` on.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, UInt8

CODED = {"keys1": 1, "keys2": 2, "keys4": 4}
"""Bits of a number in each kind of index that holds codes of keys."""

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
    bits, keys = CODED[kind], blocks.astype(jnp.float32)
    most = 2**bits - 1
    low = keys.min(-2, keepdims=True).astype(jnp.bfloat16)
    step = ((keys.max(-2, keepdims=True) - low.astype(jnp.float32)) * (1 / most)).astype(jnp.bfloat16)
    distance = jnp.broadcast_to(jnp.where(step == 0, 1, step).astype(jnp.float32), keys.shape)
    codes = (keys - low.astype(jnp.float32)) / jax.lax.optimization_barrier(distance)  # a compiler may multiply by a reciprocal otherwise
    codes = jnp.clip(jnp.nan_to_num(jnp.round(codes)), 0, most).astype(jnp.uint8)
    _, width = index_shape(kind, *blocks.shape[-2:])
    places = codes.reshape(*codes.shape[:-1], 8 // bits, width)
    packed = sum(places[..., i, :] << (bits * i) for i in range(8 // bits))
    levels = (jax.lax.bitcast_convert_type(x, jnp.uint8).reshape(*x.shape[:-2], -1, width) for x in (low, step))
    return jnp.concatenate([packed, *levels], axis=-2)


def coded_keys(kind: str, rows: UInt8[Array, "... R W"]) -> Float32[Array, "... bs D"]:
    """The numbers that codes stand for. Products and sums are exact before one rounding, so any program gives the same bits."""
    bits, count = CODED[kind], _level_rows(kind)
    tokens = rows.shape[-2] - 2 * count
    codes = jnp.concatenate([(rows[..., :tokens, :] >> (bits * i)) & (2**bits - 1) for i in range(8 // bits)], axis=-1)
    levels = (rows[..., start : start + count, :] for start in (tokens, tokens + count))
    low, step = (
        jax.lax.bitcast_convert_type(x.reshape(*x.shape[:-2], 1, codes.shape[-1], 2), jnp.bfloat16).astype(jnp.float32) for x in levels
    )
    return low + step * codes.astype(jnp.float32)


def _level_rows(kind: str) -> int:
    """Rows of D numbers in bfloat16."""
    return 16 // CODED[kind]
