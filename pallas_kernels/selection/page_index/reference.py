"""page_index by definition: one token after the other."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.selection.page_index.api import Call
from pallas_kernels.selection.page_index.codes import CODED


def page_index(call: Call, keys):
    """See `pallas_kernels.page_index`."""
    blocks, block_size = [], call.block_size
    for start in range(0, keys.shape[-2], block_size):
        tokens = [keys[..., start + i, :] for i in range(block_size)]
        if call.kind in CODED:
            blocks.append(_coded(CODED[call.kind], jnp.stack(tokens).astype(jnp.float32)))
        elif call.kind == "bounds":
            most = least = tokens[0]
            for token in tokens[1:]:
                most, least = jnp.maximum(most, token), jnp.minimum(least, token)
            blocks.append(jnp.stack([most, least], axis=-2))
        else:
            total = sum(token.astype(jnp.float32) for token in tokens)
            blocks.append((total / block_size).astype(keys.dtype)[..., None, :])
    return jnp.stack(blocks, axis=-3)


def _coded(bits: int, keys):
    """A block of keys `[bs, ..., D]` as bytes `[..., R, W]`: one byte of a token after the other."""
    width, levels = keys.shape[-1] * bits // 8, 2**bits
    low = keys.min(0).astype(jnp.bfloat16)
    step = ((keys.max(0) - low.astype(jnp.float32)) * (1 / (levels - 1))).astype(jnp.bfloat16)
    distance = jnp.where(step == 0, 1.0, step.astype(jnp.float32))
    rows = []
    for key in keys:
        codes = jnp.round((key - low.astype(jnp.float32)) / distance)
        codes = jnp.where(jnp.isnan(codes), 0, jnp.clip(codes, 0, levels - 1)).astype(jnp.int32)
        row = [sum(codes[..., byte + i * width] * levels**i for i in range(8 // bits)) for byte in range(width)]
        rows.append(jnp.stack(row, axis=-1).astype(jnp.uint8))
    for numbers in (low, step):
        words = jax.lax.bitcast_convert_type(numbers, jnp.uint16).astype(jnp.int32)
        flat = [byte for d in range(keys.shape[-1]) for byte in (words[..., d] % 256, words[..., d] // 256)]
        rows += [jnp.stack(flat[at : at + width], axis=-1).astype(jnp.uint8) for at in range(0, len(flat), width)]
    return jnp.stack(rows, axis=-2)
