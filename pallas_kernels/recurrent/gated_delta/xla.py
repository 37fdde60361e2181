"""gated_delta for any backend: a page by inner chunks in order, each by matrix products; a step by products with the
page's rows.

Inside an inner chunk the corrections u_i = beta_i (v_i - S_i^T k_i), with S_i the decayed state before token i, solve a
unit lower triangular system (the UT transform), since S_i consists of the chunk's first state and the corrections
before i:

    u_i + sum_{j<i} beta_i exp(g_{j+1} + ... + g_i) (k_i . k_j) u_j = beta_i (v_i - exp(g_1 + ... + g_i) S_0^T k_i)

A step solves the same for its own tokens, one after the other, with the page's corrections known. The page's first
state is the only state it needs.

What decides bits. All arithmetic of an inner chunk runs on arrays of the chunk's and the page's shapes, in the body of
a loop. The compiler does not know the number of rounds, so it cannot fuse the body with the code around it. Row i of a
chunk gets only zeros from later rows, because every product with them is masked. So it is rounded alike whether they
are there or not. Sums of g are taken per pair of tokens. Differences of one running sum would lose a weak decay after a
strong one.

Memory: the outputs, a copy of the corrections, a second state, and a chunk's arrays, about `16 B H C (C + Dk + Dv)`
bytes. Traffic per chunk: these arrays several times, the page's rows and the state once. Source: arXiv 2412.06464,
section 3.3 and appendix A.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int32

from pallas_kernels.recurrent.gated_delta.api import Call

EPSILON = 1e-6
"""Added to the squared length of a query or key before the square root."""

_einsum = functools.partial(jnp.einsum, precision=jax.lax.Precision.HIGHEST)


@functools.partial(jax.jit, static_argnames="call")
def gated_delta(call: Call, *operands):
    """See `pallas_kernels.gated_delta`: its functions, by form."""
    return {"page": _page, "step": _step, "fold": _fold}[call.form](*operands, call)


def _unit(x: Float[Array, "... D"], call: Call) -> Float32[Array, "... D"]:
    x = x.astype(jnp.float32)
    return x * jax.lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + EPSILON) if call.normalize else x


def _up_to(counts: Int32[Array, "B"], x: Float[Array, "B n ..."]) -> Float[Array, "B n ..."]:
    """The first `counts` rows, zeros beyond."""
    there = jnp.arange(x.shape[1], dtype=jnp.int32) < counts[:, None]
    return jnp.where(there.reshape(*there.shape, *[1] * (x.ndim - 2)), x, 0)


def _since(g: Float32[Array, "B R H"]) -> tuple[Float32[Array, "B H"], Float32[Array, "B H R"]]:
    """The decay over all rows, and over the rows after each row. Rows that are not there have g = 0."""
    rows = jnp.arange(g.shape[1])
    after = (rows > jnp.arange(-1, g.shape[1])[:, None]).astype(jnp.float32)  # [j, l]: l after j, j = -1 being the start
    decays = jnp.exp(_einsum("jl,blh->bhj", after, g))
    return decays[..., 0], decays[..., 1:]


def _fold(k, g, corrections, start, counts, call):
    k, g, corrections = (_up_to(counts, x) for x in (k, g, corrections))
    whole, since = _since(g)
    keys = jnp.repeat(_unit(k, call), g.shape[2] // k.shape[2], axis=2) * jnp.swapaxes(since, 1, 2)[..., None]
    return start * whole[..., None, None] + _einsum("brhd,brhe->bhde", keys, corrections)


def _step(q, k, v, g, beta, page_k, page_g, corrections, start, counts, lengths, call):
    (batch, num_tokens, heads, value_dim), group = v.shape, v.shape[2] // k.shape[2]
    page_k, page_g, corrections = (_up_to(counts, x) for x in (page_k, page_g, corrections))
    q, k = _unit(q, call) * call.scale, _unit(k, call)
    # Decays from the start, and from each row of the page, to before the first of these tokens.
    whole, since = _since(page_g)
    known = _unit(page_k, call)

    def held(x):
        """For each token x [B, T, K, Dk]: what the state before these tokens holds for it, without their decay. [B, T,
        H, Dv]"""
        of_start = _einsum("bthd,bhde->bthe", jnp.repeat(x, group, axis=2), start) * whole[:, None, :, None]
        weights = jnp.repeat(_einsum("btkd,brkd->btkr", x, known), group, axis=2) * since[:, None]
        return of_start + _einsum("bthr,brhe->bthe", weights, corrections)

    found_k, found_q = held(k), held(q)
    by_k, by_q = (jnp.repeat(_einsum("btkd,bskd->btks", x, k), group, axis=2) for x in (k, q))

    def token(at, carry):
        out, new, decay = carry
        decay = decay * jnp.exp(g[:, at])[:, :, None]  # [B, H, 1 + T]: to this token, from the start and each earlier token
        reach, place = decay[..., :1], jnp.arange(num_tokens)
        found = reach * found_k[:, at] + _einsum("bhs,bshe->bhe", jnp.where(place < at, by_k[:, at] * decay[..., 1:], 0), new)
        new = new.at[:, at].set(beta[:, at, :, None] * (v[:, at].astype(jnp.float32) - found))
        decay = decay.at[..., 1 + at].set(1.0)
        read = reach * found_q[:, at] + _einsum("bhs,bshe->bhe", jnp.where(place <= at, by_q[:, at] * decay[..., 1:], 0), new)
        return out.at[:, at].set(read), new, decay

    zeros = jnp.zeros((batch, num_tokens, heads, value_dim), jnp.float32)
    out, new, _ = jax.lax.fori_loop(0, num_tokens, token, (zeros, zeros, jnp.ones((batch, heads, 1 + num_tokens), jnp.float32)))
    return _up_to(lengths, out).astype(v.dtype), _up_to(lengths, new)


def _page(q, k, v, g, beta, corrections, start, counts, lengths, call):
    size, total = call.chunk, counts + lengths
    q, k, v, g, beta = (_up_to(total, x) for x in (q, k, v, g, beta))
    first = jnp.min(jnp.where(lengths > 0, counts // size, k.shape[1] // size))
    last = jnp.max(jnp.where(lengths > 0, -(-total // size), 0))

    def chunk(number, carry):
        outs, corrections = carry
        begin = number * size
        state = _fold(k, g, corrections, start, jnp.minimum(begin, total), call)
        queries, keys, values, log_decay, rate = (jnp.swapaxes(_rows(x, begin, size), 1, 2) for x in (q, k, v, g, beta))
        out, found = _chunk(_unit(queries, call) * call.scale, _unit(keys, call), values.astype(jnp.float32), log_decay, rate, state)
        at = begin + jnp.arange(size, dtype=jnp.int32)
        new = ((at >= counts[:, None]) & (at < total[:, None]))[..., None, None]
        out = jnp.where(new, jnp.swapaxes(out, 1, 2), 0).astype(v.dtype)
        found = jnp.where(new, jnp.swapaxes(found, 1, 2), _rows(corrections, begin, size))
        put = functools.partial(jax.lax.dynamic_update_slice_in_dim, start_index=begin, axis=1)
        return put(outs, out), put(corrections, found)

    return jax.lax.fori_loop(first, last, chunk, (jnp.zeros(v.shape, v.dtype), corrections))


def _rows(x: Float[Array, "B R ..."], begin: Int32[Array, ""], size: int) -> Float[Array, "B C ..."]:
    return jax.lax.dynamic_slice_in_dim(x, begin, size, axis=1)


def _chunk(
    q: Float32[Array, "B K C Dk"],
    k: Float32[Array, "B K C Dk"],
    v: Float32[Array, "B H C Dv"],
    g: Float32[Array, "B H C"],
    beta: Float32[Array, "B H C"],
    start: Float32[Array, "B H Dk Dv"],
) -> tuple[Float32[Array, "B H C Dv"], Float32[Array, "B H C Dv"]]:
    """Outputs and corrections of an inner chunk. Tokens that are not there are zeros: they decay nothing and correct
    nothing."""
    group = v.shape[1] // k.shape[1]
    since_start, between = _decays(g)
    wide_q, wide_k = (jnp.repeat(x, group, axis=1) for x in (q, k))
    of_keys, of_queries = (jnp.repeat(_einsum("bkid,bkjd->bkij", x, k), group, axis=1) * between for x in (k, q))
    found = since_start * _einsum("bhid,bhde->bhie", wide_k, start)
    corrections = _einsum("bhij,bhje->bhie", _inverse(beta[..., None] * of_keys), beta[..., None] * (v - found))
    out = since_start * _einsum("bhid,bhde->bhie", wide_q, start) + _einsum("bhij,bhje->bhie", of_queries, corrections)
    # A sum of zeros alone may be -0 or 0, depending on the signs of masked rows.
    return jnp.where(out == 0, 0.0, out), jnp.where(corrections == 0, 0.0, corrections)


def _decays(g: Float32[Array, "B H C"]) -> tuple[Float32[Array, "B H C 1"], Float32[Array, "B H C C"]]:
    """For each token i: the decay from the chunk's start to i, and from each token j <= i to i (0 for later j)."""
    token = jnp.arange(g.shape[-1])
    summed = (token[:, None] >= token).astype(jnp.float32)  # [i, l]: l <= i
    after = token[:, None] > jnp.arange(-1, g.shape[-1])  # [l, j]: l > j, j = -1 being the start
    sums = _einsum("il,bhlj->bhij", summed, jnp.where(after, g[..., None], 0.0))
    return jnp.exp(sums[..., :1]), jnp.where(token[:, None] >= token, jnp.exp(sums[..., 1:]), 0.0)


def _inverse(system: Float32[Array, "B H C C"]) -> Float32[Array, "B H C C"]:
    """The inverse of 1 + the part of `system` below its diagonal. The rest of `system` is not read.

    Diagonal blocks of 2, 4, 8, ... tokens are inverted, each from the two inverses in it: `[[1 + A, 0], [B, 1 + D]]`
    has the inverse `[[a, 0], [-d B a, d]]`, where a and d are the inverses of `1 + A` and `1 + D`. No power of `system`
    is formed: where keys repeat, powers grow beyond float32's digits.
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
