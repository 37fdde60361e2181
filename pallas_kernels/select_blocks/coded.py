"""Log-sum-exp of listed blocks by an index that holds their keys in few bits, for any backend.

Memory traffic: the codes of the listed blocks. Memory: the unpacked keys of `TILE` blocks per list.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int, UInt8

from pallas_kernels.page_index import coded_keys
from pallas_kernels.soft_cap import Scale, scaled

TILE = 16
"""Blocks of a list that are unpacked together. Lists are padded to whole tiles, so that their length changes no bits."""


@functools.partial(jax.jit, static_argnames=("kind", "sm_scale"))
def block_lse(
    q: Float[Array, "B T H D"], index: UInt8[Array, "N K nb R W"], places: Int[Array, "B T K n"], *, kind: str, sm_scale: Scale
) -> Float32[Array, "B T H n"]:
    """The log-sum-exp of scaled logits of every key of listed blocks, per query head; -inf where there is none.

    Args:
        q: queries, heads of one KV head adjacent.
        index: `page_index` of a kind in `CODED`.
        places: page * nb + block within the page; -1 where there is none.
        kind: of the index.
        sm_scale: multiplies the logits, or a `SoftCap`.
    """
    batch, num_queries, num_heads, head_dim = q.shape
    num_kv_heads, per_page, count = *index.shape[1:3], places.shape[3]
    q = q.reshape(batch, num_queries, num_kv_heads, -1, head_dim).astype(jnp.float32)
    at = jnp.pad(jnp.maximum(places, 0), ((0, 0), (0, 0), (0, 0), (0, -count % TILE)))
    heads = jnp.arange(num_kv_heads)[:, None]

    def of_tile(at: Int[Array, "B T K tile"]) -> Float32[Array, "B T K G tile"]:
        keys = coded_keys(kind, index[at // per_page, heads, at % per_page])
        logits = scaled(jnp.einsum("btkgd,btknsd->btkgns", q, keys, precision=jax.lax.Precision.HIGHEST), sm_scale)
        return jax.nn.logsumexp(logits, axis=-1)

    tiles = at.reshape(*at.shape[:3], -1, TILE)
    found = jax.lax.map(of_tile, jnp.moveaxis(tiles, 3, 0))
    found = jnp.moveaxis(found, 0, 4).reshape(batch, num_queries, num_heads, -1)
    there = jnp.repeat(places >= 0, num_heads // num_kv_heads, axis=2)
    return jnp.where(there, found[..., :count], -jnp.inf)
