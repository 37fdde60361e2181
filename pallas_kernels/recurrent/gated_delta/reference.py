"""gated_delta by definition: row by row, token by token."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from pallas_kernels.recurrent.gated_delta.api import Call


@functools.partial(jax.jit, static_argnames="call")
def gated_delta(call: Call, *operands):
    """See `pallas_kernels.gated_delta`: its functions, by form."""
    return jax.vmap(functools.partial({"page": _page, "step": _step, "fold": _fold}[call.form], call))(*operands)


def _page(call, q, k, v, g, beta, corrections, start, count, length):
    def token(state, at):
        decayed = state * jnp.exp(g[at])[:, None, None]
        known = at < count // call.chunk * call.chunk
        correction = jnp.where(known, corrections[at], _correction(call, decayed, k[at], v[at], beta[at]))
        state = jnp.where(at < count + length, decayed + _outer(call, k[at], correction), state)
        return state, (_read(call, state, q[at]), correction)

    _, (out, found) = jax.lax.scan(token, start, jnp.arange(len(k)))
    at = jnp.arange(len(k))[:, None, None]
    new = (at >= count) & (at < count + length)
    return jnp.where(new, out, 0).astype(v.dtype), jnp.where(new, found, corrections)


def _step(call, q, k, v, g, beta, page_k, page_g, corrections, start, count, length):
    def token(state, at):
        decayed = state * jnp.exp(g[at])[:, None, None]
        correction = _correction(call, decayed, k[at], v[at], beta[at])
        state = decayed + _outer(call, k[at], correction)
        return state, (_read(call, state, q[at]), correction)

    _, (out, found) = jax.lax.scan(token, _fold(call, page_k, page_g, corrections, start, count), jnp.arange(len(k)))
    new = (jnp.arange(len(k)) < length)[:, None, None]
    return jnp.where(new, out, 0).astype(v.dtype), jnp.where(new, found, 0)


def _fold(call, k, g, corrections, start, count):
    def token(state, at):
        after = state * jnp.exp(g[at])[:, None, None] + _outer(call, k[at], corrections[at])
        return jnp.where(at < count, after, state), None

    return jax.lax.scan(token, start, jnp.arange(len(k)))[0]


def _wide(call, x, heads):
    """Keys or queries [K, Dk] repeated for every value head, in float32, of length 1 if normalised."""
    x = x.astype(jnp.float32)
    x = x / jnp.sqrt(jnp.sum(x * x, axis=-1, keepdims=True) + 1e-6) if call.normalize else x
    return jnp.repeat(x, heads // len(x), axis=0)


def _correction(call, decayed, k, v, beta):
    found = jnp.einsum("hde,hd->he", decayed, _wide(call, k, len(v)), precision="highest")
    return beta[:, None] * (v.astype(jnp.float32) - found)


def _outer(call, k, correction):
    return _wide(call, k, len(correction))[:, :, None] * correction[:, None, :]


def _read(call, state, q):
    return call.scale * jnp.einsum("hde,hd->he", state, _wide(call, q, len(state)), precision="highest")
