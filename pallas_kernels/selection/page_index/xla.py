"""page_index for any backend. Reads the keys once; writes the index."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.selection.page_index.api import Call
from pallas_kernels.selection.page_index.codes import CODED, code_keys


@functools.partial(jax.jit, static_argnames="call")
def page_index(call: Call, keys: Float[Array, "... P D"]) -> Array:
    """See `pallas_kernels.page_index`."""
    *lead, page_size, head_dim = keys.shape
    blocks = keys.reshape(*lead, page_size // call.block_size, call.block_size, head_dim)
    if call.kind in CODED:
        return code_keys(call.kind, blocks)
    if call.kind == "bounds":
        return jnp.stack([blocks.max(-2), blocks.min(-2)], axis=-2)
    return jnp.mean(blocks, axis=-2, keepdims=True, dtype=jnp.float32).astype(keys.dtype)
