"""top_k by definition: order every row completely and stably, take the first k.

A float is a sign and a magnitude, and the bits of the magnitude order as it does. (As floats, denormals become 0 on
some backends.)
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from pallas_kernels.selection.top_k.api import Call


def unsupported(call: Call, scores, hint, lengths) -> str | None:
    """Why this implementation cannot take this valid input, or None if it can."""
    if call.config is not None:
        return f"it takes no config, got {call.config!r}"
    return "it has no counts to return" if call.return_counts else None


def top_k(call: Call, scores, hint, lengths):
    """See `pallas_kernels.top_k`; takes no config."""
    reason = unsupported(call, scores, hint, lengths)
    if reason:
        raise NotImplementedError(f"top_k 'reference': {reason}")
    lengths = jnp.full(scores.shape[0], scores.shape[1], jnp.int32) if lengths is None else jnp.asarray(lengths)
    return _order(call.k, call.sort, scores, lengths)


@functools.partial(jax.jit, static_argnums=(0, 1))
@functools.partial(jax.vmap, in_axes=(None, None, 0, 0))
def _order(k, sort, row, length):
    width = 8 * row.dtype.itemsize
    bits, infinity = (jax.lax.bitcast_convert_type(x, f"uint{width}") for x in (row, jnp.array(jnp.inf, row.dtype)))
    sign = jnp.array(1 << (width - 1), bits.dtype)
    magnitude, infinite = (bits & ~sign).astype(jnp.int32), infinity.astype(jnp.int32)
    number = jnp.where(bits >= sign, -magnitude, magnitude)
    number = jnp.where(magnitude > infinite, -infinite - 1, number)  # NaN
    index = jnp.arange(row.size, dtype=jnp.int32)
    order = jnp.argsort(jnp.where(index < length, number, -infinite - 2), descending=True, stable=True).astype(jnp.int32)
    chosen = jnp.pad(order, (0, max(k - row.size, 0)), constant_values=row.size)[:k]
    chosen = jnp.where(chosen < length, chosen, row.size)
    chosen = chosen if sort else jnp.sort(chosen)
    missing = chosen == row.size
    values = jnp.where(missing, infinity | sign, bits[chosen])
    return jax.lax.bitcast_convert_type(values, row.dtype), jnp.where(missing, -1, chosen)
