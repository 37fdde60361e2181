"""Multi-head latent attention with a lightning indexer, as DeepSeek-V3.2 has it.

Attention runs on the cached rows. A head's query is mapped into the latents' space by the transpose of its key map
("absorbed"), so that all heads read one row of C + R elements. The result, a weighted sum of latents, is then mapped to
values. The caller of the decoder decides which tokens they read.

Sources: DeepSeek-V2 (arXiv 2405.04434, section 2.1 and appendix B) for latents and absorption; DeepSeek-V3.2-Exp
technical report (DeepSeek-AI, 2025), section 1, for the indexer; details as in transformers' `DeepseekV32Attention`,
which the tests compare with.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from kvjax.model.layers import LatentLayer
from kvjax.model.protocols import Indexer, Latents, Params
from kvjax.models.mixers.tokens import MixHere, Rotation, Tokens
from kvjax.models.products import project, widened
from pallas_kernels.core.rope_norm import layer_norm, rms_norm, rotate

NORM_EPS = 1e-6
"""Epsilon of the three norms inside the layer. config.json's rms_norm_eps is for the norms between layers."""


def attend_latents(
    config: LatentLayer, params: Params, x: Float[Array, "B T E"], tokens: Tokens, mix: MixHere, state: Any
) -> tuple[Float[Array, "B T H*Dv"], Any]:
    """See `kvjax.models.decoder.MIXERS`.

    The indexer is neither rounded to 8 bits nor multiplied by a Hadamard matrix first, as DeepSeek's own inference does
    with queries and keys (dot products are the same).
    """
    x = rms_norm(x, params["attn_norm"], tokens.norm_eps, tokens.norm_offset)
    rotation = tokens.rotation(config.rope)
    query_latent, compressed, index_k = project(x, params["q_a"], params["kv_a"], params["index_k"])
    q, index_q = project(query_latent, params["q_b"], params["index_q"], norm=params["q_norm"], norm_eps=NORM_EPS)
    indexer = _indexer(config, params, x, index_q, index_k, rotation)
    key_maps, value_maps = _maps(config, widened(params["kv_b"], x.dtype))
    q = _absorbed(config, key_maps, q, rotation)
    out, state = mix(Latents(q, _rows(config, params, compressed, rotation), indexer, config.latent_dim, config.sm_scale), state)
    values = _product("bthc,hvc->bthv", out.astype(x.dtype), value_maps)
    return values.reshape(*x.shape[:2], -1), state


def causal_latents(given: Latents) -> Float[Array, "B T H C"]:
    """Attention within each row of the batch, which is a sequence: each token reads the `topk` tokens up to itself that
    score best; of equal scores the earlier. Memory: T x T per head."""
    count, asked = given.row.shape[1], given.indexer
    precision = jax.lax.Precision.HIGHEST
    dots = jnp.einsum("bthd,bsd->bths", asked.q, asked.k, precision=precision, preferred_element_type=jnp.float32)
    scores = jnp.einsum("bths,bth->bts", jnp.maximum(dots, 0), asked.weights, precision=precision)
    causal = jnp.tril(jnp.ones((count, count), bool))
    _, best = jax.lax.top_k(jnp.where(causal, scores, -jnp.inf), min(asked.topk, count))
    chosen = jnp.any(best[..., None] == jnp.arange(count), axis=2) & causal
    logits = jnp.einsum("bthd,bsd->bhts", given.q, given.row, precision=precision, preferred_element_type=jnp.float32)
    paid = jax.nn.softmax(jnp.where(chosen[:, None], logits * given.sm_scale, -jnp.inf), axis=-1)
    latents = given.row[..., : given.value_dim].astype(jnp.float32)
    return jnp.einsum("bhts,bsc->bthc", paid, latents, precision=precision).astype(given.q.dtype)


def _indexer(config: LatentLayer, params: Params, x: Array, index_q: Array, index_k: Array, rotation: Rotation) -> Indexer:
    """The first elements are rotated in "rotate half" layout, as the indexer of DeepSeek's checkpoints is."""
    index_q = rotate(index_q.reshape(*x.shape[:2], config.index_heads, config.index_dim), *rotation)
    index_k = layer_norm(index_k, params["index_norm"], NORM_EPS, params["index_norm_bias"])
    (weights,) = project(x, params["index_weights"], out_dtype=jnp.float32)
    weights = weights * (config.index_dim * config.index_heads) ** -0.5
    return Indexer(index_q, weights, rotate(index_k[:, :, None], *rotation)[:, :, 0], config.index_topk)


def _rows(config: LatentLayer, params: Params, compressed: Float[Array, "B T C+R"], rotation: Rotation) -> Float[Array, "B T C+R"]:
    """The rows that the cache keeps: the normalised latent and the rotated shared key."""
    latent = rms_norm(compressed[..., : config.latent_dim], params["kv_norm"], NORM_EPS)
    shared = _rotate_pairs(compressed[..., None, config.latent_dim :], rotation)[:, :, 0]
    return jnp.concatenate([latent, shared], axis=-1)


def _maps(config: LatentLayer, both: Float[Array, "H*(N+V) C"]) -> tuple[Float[Array, "H N C"], Float[Array, "H V C"]]:
    """The key maps and the value maps of the heads."""
    both = both.reshape(config.num_heads, -1, config.latent_dim)
    return both[:, : config.nope_dim], both[:, config.nope_dim :]


def _absorbed(
    config: LatentLayer, key_maps: Float[Array, "H N C"], q: Float[Array, "B T Q"], rotation: Rotation
) -> Float[Array, "B T H C+R"]:
    """Queries in the space of the cached rows."""
    q = q.reshape(*q.shape[:2], config.num_heads, -1)
    plain = _product("bthn,hnc->bthc", q[..., : config.nope_dim], key_maps)
    return jnp.concatenate([plain, _rotate_pairs(q[..., config.nope_dim :], rotation)], axis=-1)


def _rotate_pairs(x: Float[Array, "B T N R"], rotation: Rotation) -> Float[Array, "B T N R"]:
    """RoPE on neighbouring pairs (2i, 2i + 1), as the attention of DeepSeek's checkpoints is laid out; the result has
    evens, then odds."""
    return rotate(jnp.concatenate([x[..., 0::2], x[..., 1::2]], axis=-1), *rotation)


def _product(subscripts: str, x: Array, weights: Array) -> Array:
    # By default accelerators multiply float32 with fewer bits. For shorter types the default loses nothing.
    precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else jax.lax.Precision.DEFAULT
    return jnp.einsum(subscripts, x, weights, precision=precision, preferred_element_type=x.dtype)
