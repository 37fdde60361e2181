"""Log-sum-exp of listed blocks by an index that holds their keys in few bits, for any backend.

Memory traffic: the codes of the listed blocks. Memory: the unpacked keys of a tile of blocks per list; on a CPU, of one
row's lists.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int, UInt8

from pallas_kernels.core.soft_cap import Scale, scaled
from pallas_kernels.selection.page_index import coded_keys, index_shape
from pallas_kernels.xla import key_tiles

TILE = 16
"""Blocks of a list that are unpacked together. Lists are padded to whole tiles, so that their length changes no
bits."""

CPU_TOKENS = 1024
"""Tokens of each list that a CPU unpacks together: in float32 they fit its caches."""


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
    num_kv_heads, count = index.shape[1], places.shape[3]
    q = q.reshape(batch, num_queries, num_kv_heads, -1, head_dim).astype(jnp.float32)
    found = (_row_by_row if key_tiles.on_cpu() else _together)(q, index, places, kind, sm_scale)
    there = jnp.repeat(places >= 0, num_heads // num_kv_heads, axis=2)
    return jnp.where(there, found.reshape(batch, num_queries, num_heads, -1)[..., :count], -jnp.inf)


def _together(q: Float32[Array, "B T K G D"], index, places, kind: str, sm_scale: Scale) -> Float32[Array, "B T K G m"]:
    """Tile by tile, of all lists at once. m: whole tiles."""
    per_page, heads = index.shape[2], jnp.arange(index.shape[1])[:, None]
    at = jnp.pad(jnp.maximum(places, 0), ((0, 0), (0, 0), (0, 0), (0, -places.shape[3] % TILE)))

    def of_tile(at: Int[Array, "B T K tile"]) -> Float32[Array, "B T K G tile"]:
        keys = coded_keys(kind, index[at // per_page, heads, at % per_page])
        logits = scaled(jnp.einsum("btkgd,btknsd->btkgns", q, keys, precision=jax.lax.Precision.HIGHEST), sm_scale)
        return jax.nn.logsumexp(logits, axis=-1)

    found = jax.lax.map(of_tile, jnp.moveaxis(at.reshape(*at.shape[:3], -1, TILE), 3, 0))
    found = jnp.moveaxis(found, 0, 4)
    return found.reshape(*found.shape[:4], -1)


def _row_by_row(q: Float32[Array, "B T K G D"], index, places, kind: str, sm_scale: Scale) -> Float32[Array, "B T K G m"]:
    """One query's lists after the other, tile by tile up to its last entry, so that a tile stays in the caches. m:
    whole tiles; what lies behind the last entry means nothing."""
    num_kv_heads, per_page, *block = index.shape[1:]

    def read(head, place):
        return jax.lax.dynamic_slice(index, (place // per_page, head, place % per_page, 0, 0), (1, 1, 1, *block))[0, 0, 0]

    read_lists = jax.vmap(jax.vmap(read, in_axes=(None, 0)), in_axes=(0, 0))
    heads, group = jnp.arange(num_kv_heads, dtype=jnp.int32), q.shape[3]
    tile = max(1, CPU_TOKENS // (block[0] - index_shape(kind, 0, q.shape[4])[0]))
    places = jnp.pad(places, ((0, 0), (0, 0), (0, 0), (0, -places.shape[3] % tile)), constant_values=-1)

    def row(args):
        q, places = args  # [K, G, D], [K, m]

        def fold(i, found):
            at = jax.lax.dynamic_slice_in_dim(places, i * tile, tile, axis=1)
            keys = coded_keys(kind, read_lists(heads, jnp.maximum(at, 0)))
            keys = keys.reshape(num_kv_heads, -1, keys.shape[-1])
            # Keys come first: XLA's product for CPUs packs the second operand. The barrier keeps them there.
            products = jax.lax.dot_general(keys, q, (((2,), (2,)), ((0,), (0,))), precision=jax.lax.Precision.HIGHEST)
            logits = scaled(jax.lax.optimization_barrier(products).swapaxes(1, 2).reshape(num_kv_heads, group, tile, -1), sm_scale)
            return jax.lax.dynamic_update_slice_in_dim(found, jax.nn.logsumexp(logits, axis=-1), i * tile, axis=2)

        last = jnp.max(jnp.where(places >= 0, jnp.arange(places.shape[1], dtype=jnp.int32) + 1, 0))
        empty = jnp.full((num_kv_heads, group, places.shape[1]), -jnp.inf, jnp.float32)
        return jax.lax.fori_loop(0, -(-last // tile), fold, empty)

    flat = (x.reshape(-1, *x.shape[2:]) for x in (q, places))
    return jax.lax.map(row, tuple(flat)).reshape(*q.shape[:4], -1)
