"""union_blocks for any backend: sort a tile's choices by block, add up runs of equal blocks, keep the best runs.

A block comes at most once a row, so a run is at most `rows` long. That many shifted sums add it up, in the order of the
rows. There is no scatter, so the device cannot change the order. (On GPUs, XLA's float32 division is sometimes off by a
last bit, so means that differ by no more than that may change places.) Memory traffic: the lists are read, sorted and
read again.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from pallas_kernels.selection.union_blocks.api import Call

_NONE = jnp.iinfo(jnp.int32).max  # sorts behind every block


@functools.partial(jax.jit, static_argnames="call")
def union_blocks(call: Call, ids, scores):
    """See `pallas_kernels.union_blocks`."""
    (batch, num_rows, num_heads, _), rows, k_trim = ids.shape, call.rows, call.k_trim
    pad = ((0, 0), (0, -num_rows % rows), (0, 0), (0, 0))
    ids, scores = jnp.pad(ids, pad, constant_values=-1), jnp.pad(scores, pad)
    ids, scores = (x.reshape(batch, -1, rows, num_heads, x.shape[3]).swapaxes(2, 3) for x in (ids, scores))
    ids, scores = (x.reshape(*x.shape[:3], -1) for x in (ids, scores))
    # Stable, so the rows of a block stay in order.
    ids, scores = jax.lax.sort((jnp.where(ids < 0, _NONE, ids), scores), num_keys=1, is_stable=True)

    begins = jnp.pad(ids[..., 1:] != ids[..., :-1], ((0, 0), (0, 0), (0, 0), (1, 0)), constant_values=True)
    total, count = scores, jnp.ones_like(ids)
    for step in range(1, min(rows, ids.shape[-1])):
        ahead = ((0, 0), (0, 0), (0, 0), (0, step))
        same = jnp.pad(ids[..., step:], ahead, constant_values=-1) == ids
        total = jnp.where(same, total + jnp.pad(scores[..., step:], ahead), total)
        count += same
    lowest = jnp.finfo(jnp.float32).min
    worth = total / count if call.rank == "mean" else total
    worth = jnp.where(worth >= lowest, worth, lowest)  # NaN and -inf
    worth = jnp.where(worth == 0, 0.0, worth)  # -0.0 and 0.0 are a tie

    kept = min(k_trim, ids.shape[-1])
    best, place = jax.lax.top_k(jnp.where(begins & (ids < _NONE), worth, -jnp.inf), kept)  # of equal scores the first: the lower block
    blocks = jnp.where(best == -jnp.inf, _NONE, jnp.take_along_axis(ids, place, axis=-1))
    blocks = jnp.sort(blocks, axis=-1)
    blocks = jnp.where(blocks == _NONE, -1, blocks)
    return jnp.pad(blocks, ((0, 0), (0, 0), (0, 0), (0, k_trim - kept)), constant_values=-1)
