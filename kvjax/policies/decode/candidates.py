"""Lists of ids, and the best candidates of several devices, each of which ranked those of its own pages."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Int32

_NONE = jnp.iinfo(jnp.int32).max  # sorts behind every id


def ascending(ids: Int[Array, "... n"]) -> Int32[Array, "... n"]:
    """Ids in order, and -1 at the end."""
    ids = jnp.sort(jnp.where(ids < 0, _NONE, ids).astype(jnp.int32), axis=-1)
    return jnp.where(ids == _NONE, -1, ids)


def best_candidates(scores: Float[Array, "... n"], ids: Int[Array, "... n"], k: int) -> Int32[Array, "... k"]:
    """The ids of the k best scores, in no order that matters, -1 where there are fewer; of equal scores the lower id.

    ids: each at most once, -1 for none. NaN and -inf count as the lowest finite score, 0.0 and -0.0 are equal, as in
    `pallas_kernels.select_blocks`.
    """
    order = jnp.argsort(jnp.where(ids < 0, _NONE, ids), axis=-1)
    scores, ids = (jnp.take_along_axis(x, order, axis=-1) for x in (scores, ids))
    lowest = jnp.finfo(scores.dtype).min
    scores = jnp.where(scores >= lowest, scores, lowest)
    scores = jnp.where(ids >= 0, jnp.where(scores == 0, 0.0, scores), -jnp.inf)
    best, places = jax.lax.top_k(scores, min(k, scores.shape[-1]))  # of equal scores the first, which has the lower id
    return jnp.where(best > -jnp.inf, jnp.take_along_axis(ids, places, axis=-1), -1)
