"""gated_delta for any backend: inner chunks one after the other, each by matrix products; or token by token.

Chunked form. Inside a chunk the corrections u_i = beta_i (v_i - S_i^T k_i), with S_i the decayed state that token i meets, solve a
unit lower triangular system (the UT transform), since S_i is the chunk's first state and the corrections before i:

    u_i + sum_{j<i} beta_i exp(g_{j+1} + ... + g_i) (k_i . k_j) u_j = beta_i (v_i - exp(g_1 + ... + g_i) S_0^T k_i)

What decides bits. All arithmetic of a chunk runs on arrays of the chunk's shape, in the body of a loop whose number of rounds is not known
to the compiler: no call can merge it with what stands around it, and it does not know T. Row i of a chunk gets only zeros from later rows,
because every product with them is masked, and is rounded alike whether they are there or not. Sums of g are taken per pair of
tokens and not as differences of one running sum, which would lose a weak decay after a strong one.

Memory: the outputs once more, a second state, and a chunk's arrays, about `16 B H C (C + Dk + Dv)` bytes. Traffic per chunk: these arrays
several times, its tokens and the state once. Source: arXiv 2412.06464, section 3.3 and appendix A.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Int32

from pallas_kernels.gated_delta.state import GatedDeltaState

EPSILON = 1e-6
"""Added to the squared length of a query or key before the root."""

_einsum = functools.partial(jnp.einsum, precision=jax.lax.Precision.HIGHEST)


@functools.partial(jax.jit, static_argnames="call")
def gated_delta(q, k, v, g, beta, state, lengths, fold, *, call):
    """See `pallas_kernels.gated_delta.gated_delta`."""
    if call.form == "recurrent":
        return _recurrent(q, k, v, g, beta, state, lengths, call)
    return _chunked(q, k, v, g, beta, state, lengths, fold, call)


def _unit(x: Float[Array, "... D"], call) -> Float32[Array, "... D"]:
    x = x.astype(jnp.float32)
    return x * jax.lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + EPSILON) if call.normalize else x


# Token by token.


def _recurrent(q, k, v, g, beta, state, lengths, call):
    group = v.shape[2] // q.shape[2]

    def step(border, token):
        q, k, v, g, beta, at = token
        q, k = (jnp.repeat(_unit(x, call), group, axis=1) for x in (q, k))
        after = border * jnp.exp(g)[..., None, None]
        correction = beta[..., None] * (v.astype(jnp.float32) - _einsum("bhd,bhde->bhe", k, after))
        after = after + k[..., None] * correction[..., None, :]
        there = (at < lengths)[:, None, None]
        out = jnp.where(there, _einsum("bhd,bhde->bhe", q * call.scale, after), 0)
        return jnp.where(there[..., None], after, border), out.astype(v.dtype)

    # A tail that was not folded is a mistake of the caller; it must not go unseen.
    bad = ((state.count > 0) & (lengths > 0))[:, None, None, None]
    steps = [jnp.swapaxes(x, 0, 1) for x in (q, k, v, g, beta)]
    border, outs = jax.lax.scan(step, jnp.where(bad, jnp.nan, state.border), (*steps, jnp.arange(q.shape[1], dtype=jnp.int32)))
    return jnp.swapaxes(outs, 0, 1), dataclasses.replace(state, border=border)


# Chunk by chunk.


def _chunked(q, k, v, g, beta, state, lengths, fold, call):
    (batch, num_tokens, num_heads, value_dim), size = v.shape, state.chunk
    total = state.count + lengths
    most = -(-(size - 1 + num_tokens) // size)
    rounds = jnp.max(jnp.where((lengths > 0) | fold, -(-total // size), 0))
    tails = state.k, state.v, state.g, state.beta

    def round_(number, carry):
        outs, border = carry
        at = jnp.broadcast_to(number * size + jnp.arange(size, dtype=jnp.int32), (batch, size))
        keys, values, log_decay, rate = (
            _tokens(tail, new, state.count, total, at) for tail, new in zip(tails, (k, v, g, beta), strict=True)
        )
        queries = _tokens(jnp.zeros_like(state.k), q, state.count, total, at)
        by_head = [jnp.swapaxes(x, 1, 2) for x in (_unit(queries, call) * call.scale, _unit(keys, call), values.astype(jnp.float32))]
        out, end = _chunk(*by_head, jnp.swapaxes(log_decay, 1, 2), jnp.swapaxes(rate, 1, 2), border)
        outs = jax.lax.dynamic_update_slice_in_dim(outs, jnp.swapaxes(out, 1, 2).astype(v.dtype), number * size, axis=1)
        passed = ((number + 1) * size <= total) | (fold & (number * size < total))
        return outs, jnp.where(passed[:, None, None, None], end, border)

    outs = jnp.zeros((batch, most * size, num_heads, value_dim), v.dtype)
    outs, border = jax.lax.fori_loop(0, rounds, round_, (outs, state.border))
    at = jnp.arange(num_tokens, dtype=jnp.int32) + state.count[:, None]
    out = jnp.where((at < total[:, None])[..., None, None], jax.vmap(lambda rows, at: rows[at])(outs, at), 0)
    return out, _state_after(state, border, (k, v, g, beta), total, fold)


def _tokens(tail: Array, new: Array, count: Int32[Array, "B"], total: Int32[Array, "B"], at: Int32[Array, "B n"]) -> Array:
    """The tokens at places `at` since the border: those of the tail, then those of the call, then zeros.

    A row of `at` is consecutive. It starts at 0, or at the tail's end or later.
    """

    def mask(rows):
        return rows.reshape(*at.shape, *[1] * (new.ndim - 2))

    old = jnp.pad(tail, ((0, 0), (0, at.shape[1] - tail.shape[1]), *[(0, 0)] * (new.ndim - 2)))
    fresh = jax.vmap(lambda rows, index: rows.at[index].get(mode="clip"))(new, at - count[:, None])
    return jnp.where(mask(at < total[:, None]), jnp.where(mask(at < count[:, None]), old, fresh), 0)


def _state_after(state: GatedDeltaState, border, new, total: Int32[Array, "B"], fold: Bool[Array, "B"]) -> GatedDeltaState:
    first = total // state.chunk * state.chunk
    left = jnp.where(fold, 0, total - first)
    at = first[:, None] + jnp.arange(state.chunk - 1, dtype=jnp.int32)
    tails = state.k, state.v, state.g, state.beta
    rows = [_tokens(tail, x, state.count, first + left, at) for tail, x in zip(tails, new, strict=True)]
    return GatedDeltaState(border, *rows, left)


def _chunk(
    q: Float32[Array, "B K C Dk"],
    k: Float32[Array, "B K C Dk"],
    v: Float32[Array, "B H C Dv"],
    g: Float32[Array, "B H C"],
    beta: Float32[Array, "B H C"],
    start: Float32[Array, "B H Dk Dv"],
) -> tuple[Float32[Array, "B H C Dv"], Float32[Array, "B H Dk Dv"]]:
    """Outputs of a chunk, and the state after it. Tokens that are not there are zeros: they decay nothing and correct nothing."""
    group = v.shape[1] // k.shape[1]
    since_start, between = _decays(g)
    wide_q, wide_k = (jnp.repeat(x, group, axis=1) for x in (q, k))
    of_keys, of_queries = (jnp.repeat(_einsum("bkid,bkjd->bkij", x, k), group, axis=1) * between for x in (k, q))
    found = since_start * _einsum("bhid,bhde->bhie", wide_k, start)
    corrections = _einsum("bhij,bhje->bhie", _inverse(beta[..., None] * of_keys), beta[..., None] * (v - found))
    out = since_start * _einsum("bhid,bhde->bhie", wide_q, start) + _einsum("bhij,bhje->bhie", of_queries, corrections)
    until_end = jnp.swapaxes(between[..., -1:, :], -1, -2)
    end = start * since_start[..., -1:, :] + _einsum("bhjd,bhje->bhde", wide_k * until_end, corrections)
    # A sum of zeros alone may be -0 or 0, depending on the signs of masked rows.
    return jnp.where(out == 0, 0.0, out), end


def _decays(g: Float32[Array, "B H C"]) -> tuple[Float32[Array, "B H C 1"], Float32[Array, "B H C C"]]:
    """Of each token i: the decay from the chunk's start to it, and from each token j <= i (0 for later ones)."""
    token = jnp.arange(g.shape[-1])
    summed = (token[:, None] >= token).astype(jnp.float32)  # [i, l]: l <= i
    after = token[:, None] > jnp.arange(-1, g.shape[-1])  # [l, j]: l > j, j = -1 being the start
    sums = _einsum("il,bhlj->bhij", summed, jnp.where(after, g[..., None], 0.0))
    return jnp.exp(sums[..., :1]), jnp.where(token[:, None] >= token, jnp.exp(sums[..., 1:]), 0.0)


def _inverse(system: Float32[Array, "B H C C"]) -> Float32[Array, "B H C C"]:
    """The inverse of 1 + the part of `system` below its diagonal; the rest of it is not looked at.

    Diagonal blocks of 2, 4, 8, ... tokens are inverted, each from the two inverses in it: `[[1 + A, 0], [B, 1 + D]]` has the inverse
    `[[a, 0], [-d B a, d]]`, where a and d are those of `1 + A` and `1 + D`. No power of `system` is formed: powers grow beyond float32's
    digits where keys repeat.
    """
    token, size = jnp.arange(system.shape[-1]), 1
    inverse = jnp.broadcast_to(jnp.eye(system.shape[-1], dtype=jnp.float32), system.shape)
    while size < system.shape[-1]:
        block = token // size
        below = jnp.where((block[:, None] % 2 == 1) & (block == block[:, None] - 1), system, 0.0)
        # Blocks of one token are 1, and so are their inverses.
        inverse = inverse - (below if size == 1 else _einsum("bhij,bhjk,bhkl->bhil", inverse, below, inverse))
        size *= 2
    return inverse
