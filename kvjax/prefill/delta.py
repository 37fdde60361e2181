"""Delta correction: exact attention of every gamma-th query corrects the sparse attention of all."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float


def delta_correction(sparse: Float[Array, "B T H D"], exact: Float[Array, "B R H D"], gamma: int) -> Float[Array, "B T H D"]:
    """Sparse attention plus what its nearest exact query at or before it lacks: sparse[t] + exact[r] - sparse[r * gamma], r = t // gamma.

    sparse: the output of T consecutive queries over some of their keys. exact: the output of queries 0, gamma, 2 * gamma, ... of these
    over all of their keys, R = ceil(T / gamma). Returns `[B, T, H, D]` in the dtype of `sparse`, worked out in float32; queries
    r * gamma get their exact output. Memory: that of the inputs in float32.

    Raises ValueError when gamma is not positive or shapes do not fit it.

    Source: "Measure Once, Mask Once", equation 3; Delta Attention (arXiv 2505.11254).
    """
    num_queries = sparse.shape[1]
    if gamma < 1:
        raise ValueError(f"gamma must be at least 1 query, got {gamma}")
    if exact.shape != (sparse.shape[0], -(-num_queries // gamma), *sparse.shape[2:]):
        raise ValueError(f"every {gamma}th of the queries {list(sparse.shape)} are ceil(T / gamma) rows; got exact {list(exact.shape)}")
    wide = sparse.astype(jnp.float32)
    delta = jnp.repeat(exact.astype(jnp.float32) - wide[:, ::gamma], gamma, axis=1)[:, :num_queries]
    return (wide + delta).astype(sparse.dtype)
