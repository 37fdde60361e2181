"""page_index for any backend. Reads the keys once; writes R / block_size of that."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


@functools.partial(jax.jit, static_argnames=("kind", "block_size"))
def page_index(keys: Float[Array, "... P D"], *, kind: str, block_size: int) -> Float[Array, "... P/block_size R D"]:
    """See `pallas_kernels.page_index.page_index`."""
    *lead, page_size, head_dim = keys.shape
    blocks = keys.reshape(*lead, page_size // block_size, block_size, head_dim)
    if kind == "bounds":
        return jnp.stack([blocks.max(-2), blocks.min(-2)], axis=-2)
    return jnp.mean(blocks, axis=-2, keepdims=True, dtype=jnp.float32).astype(keys.dtype)
