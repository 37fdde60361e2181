"""gated_delta by definition: one row, one token after the other."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from pallas_kernels.gated_delta.state import GatedDeltaState


@functools.partial(jax.jit, static_argnames="call")
def gated_delta(q, k, v, g, beta, state, lengths, fold, *, call):
    """See `pallas_kernels.gated_delta.gated_delta`."""
    size, group = state.chunk, v.shape[2] // q.shape[2]
    # Where the last state becomes the border.
    moves = (lengths > 0) if call.form == "recurrent" else fold

    def unit(x):
        return x / jnp.sqrt(jnp.sum(x * x, axis=-1, keepdims=True) + 1e-6) if call.normalize else x

    def of_row(q, k, v, g, beta, state, length, moves):
        rows = (state.k, k), (state.v, v), (state.g, g), (state.beta, beta)
        count, total = state.count, state.count + length

        def token(carry, at):
            memory, border = carry  # [H, Dk, Dv]
            of = [jnp.where(at < count, old[at], new[at - count]) for old, new in rows]
            key, value, decay, rate = (x.astype(jnp.float32) for x in of)
            query = jnp.repeat(unit(q[at - count].astype(jnp.float32)), group, axis=0) * call.scale
            key = jnp.repeat(unit(key), group, axis=0)
            after = memory * jnp.exp(decay)[:, None, None]
            delta = rate[:, None] * (value - jnp.einsum("hde,hd->he", after, key, precision="highest"))
            after = after + key[:, :, None] * delta[:, None, :]
            memory = jnp.where(at < total, after, memory)
            border = jnp.where((at < total) & ((at + 1) % size == 0), after, border)
            return (memory, border), jnp.einsum("hde,hd->he", memory, query, precision="highest")

        (memory, border), outs = jax.lax.scan(token, (state.border, state.border), jnp.arange(size - 1 + k.shape[0]))
        out = jnp.where((jnp.arange(k.shape[0]) < length)[:, None, None], outs[count + jnp.arange(k.shape[0])], 0)
        first = total // size * size
        left = jnp.where(moves, 0, total - first)
        at = first + jnp.arange(size - 1)
        tail = []
        for old, new in rows:
            kept = jnp.where(_wide(at < count, new), old[at], new[at - count])
            tail.append(jnp.where(_wide(jnp.arange(size - 1) < left, new), kept, 0))
        bad = (call.form == "recurrent") & moves & (count > 0)
        border = jnp.where(bad, jnp.nan, jnp.where(moves, memory, border))
        return jnp.where(bad, jnp.nan, out).astype(v.dtype), GatedDeltaState(border, *tail, left)

    return jax.vmap(of_row)(q, k, v, g, beta, state, lengths, moves)


def _wide(mask, rows):
    """[n] -> [n, 1, ...], to select rows."""
    return mask.reshape(-1, *[1] * (rows.ndim - 1))
