"""page_index by definition: one token after the other."""

from __future__ import annotations

import jax.numpy as jnp

from pallas_kernels.page_index.api import Call


def page_index(call: Call, keys):
    """See `pallas_kernels.page_index.page_index`."""
    blocks, block_size = [], call.block_size
    for start in range(0, keys.shape[-2], block_size):
        tokens = [keys[..., start + i, :] for i in range(block_size)]
        if call.kind == "bounds":
            most = least = tokens[0]
            for token in tokens[1:]:
                most, least = jnp.maximum(most, token), jnp.minimum(least, token)
            blocks.append(jnp.stack([most, least], axis=-2))
        else:
            total = sum(token.astype(jnp.float32) for token in tokens)
            blocks.append((total / block_size).astype(keys.dtype)[..., None, :])
    return jnp.stack(blocks, axis=-3)
