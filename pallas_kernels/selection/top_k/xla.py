"""top_k for any backend: `jax.lax.top_k` of integers that order as the scores do; it takes the lower index of equal
ones.

Memory traffic: the scores are read, and their keys written and sorted (XLA sorts the whole row, except for a few k and
dtypes).
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from pallas_kernels.selection.top_k import keys
from pallas_kernels.selection.top_k.api import Call

_NONE = jnp.iinfo(jnp.int32).max  # sorts behind every index


def unsupported(call: Call, scores, hint, lengths) -> str | None:
    """Why this implementation cannot take this valid input, or None if it can."""
    if call.config is not None:
        return f"it takes no config, got {call.config!r}"
    return "it has no counts to return" if call.return_counts else None


def top_k(call: Call, scores, hint, lengths):
    """See `pallas_kernels.top_k`; takes no config."""
    reason = unsupported(call, scores, hint, lengths)
    if reason:
        raise NotImplementedError(f"top_k 'xla': {reason}")
    return _best(scores, lengths, k=call.k, sort=call.sort)


@functools.partial(jax.jit, static_argnames=("k", "sort"))
def _best(scores, lengths, *, k, sort):
    key, kept = keys.key_of(scores), min(k, scores.shape[1])
    if lengths is not None:
        key = jnp.where(jnp.arange(scores.shape[1]) < lengths[:, None], key, keys.NO_KEY)
    best, indices = jax.lax.top_k(key, kept)
    indices = jnp.where(best == keys.NO_KEY, _NONE, indices)
    indices = indices if sort else jnp.sort(indices, axis=1)
    indices = jnp.pad(indices, ((0, 0), (0, k - kept)), constant_values=_NONE)
    indices = jnp.where(indices == _NONE, -1, indices)
    return keys.values_at(scores, indices), indices
