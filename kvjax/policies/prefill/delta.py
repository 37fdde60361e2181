"""Delta correction: exact attention of every gamma-th query corrects the sparse attention of all."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float


def delta_correction(
    sparse: Float[Array, "B T H D"], exact: Float[Array, "B R H D"], gamma: int, *, damping_rows: int | None = None
) -> Float[Array, "B T H D"]:
    """Sparse attention plus the error of the nearest exact query at or before it: sparse[t] + exact[r] - sparse[r *
    gamma], r = t // gamma.

    sparse: the output of T consecutive queries over some of their keys. exact: the output of queries 0, gamma, 2 *
    gamma, ... of these over all of their keys, R = ceil(T / gamma). Returns `[B, T, H, D]` in the dtype of `sparse`,
    computed in float32; queries r * gamma get their exact output. Memory: that of the inputs in float32.

    damping_rows: None corrects in full, as published. A number makes tiles of so many consecutive rows, and damps the
    correction. The factor says how well, so far in the tile, the lack of one exact query predicted the lack of the
    next. With lack[r] = exact[r] - sparse[r
    * gamma] and told[r] = lack[r - 1] . lack[r], per head, over the rows i <= r of the tile that have one before them:
      the sum of told[i] less its standard error, the root of the sum of told[i]^2, by the sum of |lack[i - 1]|^2, cut
      to [0, 1]; always 0 in the first two rows of a tile. Without the standard error it is the best factor, in least
      squares, for a query gamma tokens on. Where neighbours lack the same, the factor grows towards 1 (equation 3).
      Where their lacks have nothing in common, as with lists that miss little, a full correction would only add error.

    Raises ValueError when gamma or damping_rows is not positive or shapes do not fit.

    Source: "Measure Once, Mask Once", equation 3; Delta Attention (arXiv 2505.11254). The damping is ours.
    """
    num_queries = sparse.shape[1]
    if gamma < 1:
        raise ValueError(f"gamma must be at least 1 query, got {gamma}")
    if damping_rows is not None and damping_rows < 1:
        raise ValueError(f"damping_rows must be at least 1 row, or None, got {damping_rows}")
    if exact.shape != (sparse.shape[0], -(-num_queries // gamma), *sparse.shape[2:]):
        raise ValueError(f"every {gamma}th of the queries {list(sparse.shape)} are ceil(T / gamma) rows; got exact {list(exact.shape)}")
    wide = sparse.astype(jnp.float32)
    lack = exact.astype(jnp.float32) - wide[:, ::gamma]
    delta = jnp.repeat(lack, gamma, axis=1)[:, :num_queries]
    if damping_rows is not None:
        share = jnp.repeat(_carried_over(lack, damping_rows), gamma, axis=1)[:, :num_queries]
        others = (jnp.arange(num_queries) % gamma != 0)[:, None]
        delta *= jnp.where(others, share, 1.0)[..., None]
    return (wide + delta).astype(sparse.dtype)


def _carried_over(lack: Float[Array, "B R H D"], rows: int) -> Float[Array, "B R H"]:
    """For every row, the damping factor: the share of a row's lack that the next row surely had too, over its tile so
    far."""
    batch, num_rows, num_heads, head_dim = lack.shape
    tiles = jnp.pad(lack, ((0, 0), (0, -num_rows % rows), (0, 0), (0, 0))).reshape(batch, -1, rows, num_heads, head_dim)
    before = jnp.pad(tiles[:, :, :-1], ((0, 0), (0, 0), (1, 0), (0, 0), (0, 0)))
    told, own = ((before * x).sum(axis=-1) for x in (tiles, before))
    told, squares, own = (jnp.cumsum(x, axis=2) for x in (told, told * told, own))
    share = jnp.clip((told - jnp.sqrt(squares)) / jnp.where(own > 0, own, 1.0), 0.0, 1.0)
    return share.reshape(batch, -1, num_heads)[:, :num_rows]
