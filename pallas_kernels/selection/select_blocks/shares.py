"""How much attention each block of a shortlist gets, by an estimate of its log-sum-exp. For any backend.

Memory: a few times the estimates, `B T H n` float32.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float32


def block_shares(
    near: Float32[Array, "B T H"], found: Float32[Array, "B T H n"], kv_heads: int, *, total: Float32[Array, "B T H"] | None = None
) -> tuple[Float32[Array, "B T K n"], Float32[Array, "B T K"]]:
    """Log of the share of attention that each block gets, and that of the keys that are always read, each summed over
    the query heads of a KV head. So a query head that attends to the always-read keys alone has no vote about blocks.

    Args:
        near: log-sum-exp of the scaled logits of sink and local keys, per query head; heads of one KV head adjacent.
        found: that of each block; -inf where there is none.
        kv_heads: K.
        total: that of all logits, where other devices have some of the blocks. None: of `near` and `found`.

    A head without any key gives NaN.
    """
    total = jnp.logaddexp(near, jax.nn.logsumexp(found, axis=3)) if total is None else total
    shares = jnp.concatenate([near[..., None], found], axis=3) - total[..., None]
    summed = jax.nn.logsumexp(shares.reshape(*near.shape[:2], kv_heads, -1, shares.shape[3]), axis=3)
    return summed[..., 1:], summed[..., 0]
