"""Designs that were measured for `flash_attention` in plain JAX on a GPU, which stays far below cuDNN.

    python -m benchmarks.designs.plain_attention --json designs-plain-attention.json

One layer's causal attention of a prompt with the heads of Qwen2.5-7B to itself, keys and values as arrays without
pages. TFLOP/s count the products that the mask leaves.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import jax
import jax.numpy as jnp
import numpy as np
import typer
from jax import lax

from pallas_kernels.bench.timing import device_time
from pallas_kernels.core.results import write_result
from pallas_kernels.xla import online_softmax

TOKENS, HEADS, KV_HEADS, HEAD_DIM = 8192, 28, 4, 128
SCALE = HEAD_DIM**-0.5


def over_tiles(attend: Callable, q, k, v, *, query_tile: int = 1024, key_tile: int = 2048) -> jax.Array:
    """`attend(rows, walk)` for each tile of queries `[K, R, D]`. `walk(step, state)` folds `step(state, k, v, seen)`
    over the tiles of keys that they may see."""

    def queries(first):
        rows = lax.dynamic_slice_in_dim(q, first, query_tile).reshape(query_tile, KV_HEADS, -1, HEAD_DIM)
        rows = rows.transpose(1, 2, 0, 3).reshape(KV_HEADS, -1, HEAD_DIM)
        pos = jnp.tile(first + jnp.arange(query_tile), HEADS // KV_HEADS)[:, None]

        def walk(step, state):
            def tile(i, state):
                keys, values = (lax.dynamic_slice_in_dim(x, i * key_tile, key_tile, axis=1) for x in (k, v))
                return step(state, keys, values, i * key_tile + jnp.arange(key_tile) <= pos)

            return lax.fori_loop(0, -(-(first + query_tile) // key_tile), tile, state)

        return attend(rows, walk).astype(q.dtype).reshape(HEADS, query_tile, HEAD_DIM).swapaxes(0, 1)

    return lax.map(queries, jnp.arange(0, TOKENS, query_tile)).reshape(TOKENS, HEADS, HEAD_DIM)


def tiled(fold: Callable, q, k, v, **tiles: int) -> jax.Array:
    """`fold(partial, q, k, v, seen)` for each tile of keys."""

    def attend(rows, walk):
        partial = online_softmax.empty(rows.shape[:2], HEAD_DIM)
        return online_softmax.finish(walk(lambda partial, *tile: fold(partial, rows, *tile), partial))[0]

    return over_tiles(attend, q, k, v, **tiles)


def weighted(weights, v):
    """Sums of values times rounded weights."""
    return jnp.einsum("krs,ksd->krd", weights.astype(v.dtype), v, preferred_element_type=jnp.float32)


def online(partial, q, k, v, seen):
    """What `flash_attention` does."""
    logits = jnp.where(seen, online_softmax.scaled_logits(q, k, SCALE), -jnp.inf)
    return online_softmax.fold(partial, logits, v, rounded=True)


def one_reduction(partial, q, k, v, seen):
    """Largest logit and sum of exponentials in one pass over the logits."""
    logits = jnp.where(seen, online_softmax.scaled_logits(q, k, SCALE), -1e30)

    def combine(one, two):
        top = jnp.maximum(one[0], two[0])
        return top, one[1] * jnp.exp(one[0] - top) + two[1] * jnp.exp(two[0] - top)

    top, total = lax.reduce((logits, jnp.ones_like(logits)), (jnp.float32(-1e30), jnp.float32(0)), combine, (2,))
    new_top = jnp.maximum(partial.top, top)
    kept, tile = jnp.exp(partial.top - new_top), weighted(jnp.exp(logits - new_top[..., None]), v)
    total = partial.total * kept + total * jnp.exp(top - new_top)
    return online_softmax.Partial(new_top, total, partial.weighted * kept[..., None] + tile)


def short_logits(partial, q, k, v, seen):
    """Logits are written in bfloat16, half the bytes and fewer digits."""
    logits = jnp.einsum("krd,ksd->krs", q, k, preferred_element_type=jnp.bfloat16).astype(jnp.float32) * SCALE
    return online_softmax.fold(partial, jnp.where(seen, logits, -jnp.inf), v, rounded=True)


def in_two_passes(q, k, v):
    """Log-sum-exps first. Then all logits again, and their exponentials inside the product with the values."""

    def attend(rows, walk):
        def first(partial, k, v, seen):
            logits = jnp.where(seen, online_softmax.scaled_logits(rows, k, SCALE), -jnp.inf)
            top = jnp.maximum(partial.top, logits.max(-1))  # the first tile has a key for every query
            total = partial.total * jnp.exp(partial.top - top) + jnp.exp(logits - top[..., None]).sum(-1)
            return partial._replace(top=top, total=total)

        partial = walk(first, online_softmax.empty(rows.shape[:2], HEAD_DIM))
        lse = (partial.top + jnp.log(partial.total))[..., None]

        def add(out, k, v, seen):
            logits = jnp.where(seen, online_softmax.scaled_logits(rows, k, SCALE), -jnp.inf)
            return out + weighted(jnp.exp(logits - lse), v)

        return walk(add, jnp.zeros(rows.shape, jnp.float32))

    return over_tiles(attend, q, k, v)


def by_jax(implementation: str, q, k, v):
    """`jax.nn.dot_product_attention`, which holds all logits at once."""
    return jax.nn.dot_product_attention(q, k.swapaxes(0, 1), v.swapaxes(0, 1), scale=SCALE, is_causal=True, implementation=implementation)


DESIGNS: dict[str, Callable] = {
    "online softmax over tiles of 1,024 queries and 2,048 keys (kept)": functools.partial(tiled, online),
    "tiles of 256 queries and 512 keys, which stay in the cache": functools.partial(tiled, online, query_tile=256, key_tile=512),
    "tiles of 512 queries and 512 keys": functools.partial(tiled, online, query_tile=512, key_tile=512),
    "largest logit and sum in one reduction": functools.partial(tiled, one_reduction),
    "log-sum-exps first, then exponentials inside the product": in_two_passes,
    "logits written in bfloat16": functools.partial(tiled, short_logits),
    "jax.nn.dot_product_attention by XLA": functools.partial(by_jax, "xla"),
    "jax.nn.dot_product_attention by cuDNN, for scale": functools.partial(by_jax, "cudnn"),
}


def main(json_out: Annotated[Path, typer.Option("--json", help="Write the figures here.")]) -> None:
    """Time every design."""
    keys = jax.random.split(jax.random.key(0), 3)
    sizes = (TOKENS, HEADS, HEAD_DIM), (KV_HEADS, TOKENS, HEAD_DIM), (KV_HEADS, TOKENS, HEAD_DIM)
    arrays = tuple(jax.random.normal(key, size, jnp.bfloat16) for key, size in zip(keys, sizes, strict=True))
    wide = tuple(x.astype(jnp.float32) for x in arrays)
    with jax.default_matmul_precision("highest"):
        expected = np.asarray(jax.jit(functools.partial(by_jax, "xla"))(*wide))
    operations, rows = 2 * TOKENS * TOKENS * HEADS * HEAD_DIM, []
    for name, design in DESIGNS.items():
        run = jax.jit(design)
        found = np.asarray(run(*arrays), np.float32)
        error = np.linalg.norm(found - expected) / np.linalg.norm(expected)
        seconds = device_time(run, [arrays], calls=10).median_s
        rows.append({"design": name, "median_s": seconds, "flops_per_s": operations / seconds, "error": float(error)})
        typer.echo(f"{name}: {seconds * 1e3:.2f} ms, {operations / seconds * 1e-12:.0f} TFLOP/s, error {error:.1e}")
        write_result(json_out, {"tokens": TOKENS, "heads": HEADS, "kv_heads": KV_HEADS, "head_dim": HEAD_DIM, "rows": rows})


if __name__ == "__main__":
    typer.run(main)
