"""Designs that were measured for `project_tokens` of one bfloat16 token on a CPU, whose steps are slower than PyTorch's.

    python benchmarks/designs/few_rows.py --json designs-few-rows.json

One row times the output matrix of Qwen2.5-0.5B. Each design reads the whole matrix, which is larger than the caches.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import jax
import jax.numpy as jnp
import numpy as np
import typer
from jax import lax

from pallas_kernels.bench.results import write_result
from pallas_kernels.bench.timing import device_time

FEATURES, WIDTH = 151_936, 896
CHUNK = 4748
"""Rows that are converted at a time: a 32nd part."""

TILE = 32
"""Results that lie beside each other in the layout by tiles."""


def sum_of_products(x, w):
    """What `project_tokens` does: products in float32 and a sum, which convert the weights while they read them."""
    return (x.astype(jnp.float32) * w.astype(jnp.float32)).sum(-1)


def matrix_product(x, w):
    """XLA's own product, with the matrix first."""
    return jnp.einsum("fe,re->f", w, x, preferred_element_type=jnp.float32)


def converted_in_chunks(x, w):
    """Rows are converted to float32, some at a time, and multiplied while they are in the cache."""
    x = x[0].astype(jnp.float32)

    def multiply(i, out):
        rows = lax.optimization_barrier(lax.dynamic_slice_in_dim(w, i * CHUNK, CHUNK).astype(jnp.float32))
        return lax.dynamic_update_slice_in_dim(out, rows @ x, i * CHUNK, 0)

    return lax.fori_loop(0, FEATURES // CHUNK, multiply, jnp.zeros(FEATURES, jnp.float32))


def by_tiles(x, w):
    """The weights lie `[F / 32, E, 32]`: sums run over an axis that is not the innermost."""
    return (x[0].astype(jnp.float32)[:, None] * w.astype(jnp.float32)).sum(1).reshape(-1)


def in_float32(x, w):
    """The weights are held in float32, twice the memory, and multiplied by XLA's own product."""
    return w @ x[0].astype(jnp.float32)


def _same(w):
    return w


def _tiled(w):
    return w.reshape(-1, TILE, WIDTH).swapaxes(1, 2).copy()


def _wide(w):
    return w.astype(jnp.float32)


DESIGNS: dict[Callable, Callable] = {sum_of_products: _same, matrix_product: _same, converted_in_chunks: _same}
DESIGNS |= {by_tiles: _tiled, in_float32: _wide}
"""By design, how it wants the weights."""


def main(json_out: Annotated[Path, typer.Option("--json", help="Write the figures here.")]) -> None:
    """Time every design."""
    w = jax.random.normal(jax.random.key(0), (FEATURES, WIDTH), jnp.bfloat16)
    x = jax.random.normal(jax.random.key(1), (1, WIDTH), jnp.bfloat16)
    expected, rows = np.asarray(x, np.float64)[0] @ np.asarray(w, np.float64).T, []
    for design, prepare in DESIGNS.items():
        weights, run = jax.block_until_ready(prepare(w)), jax.jit(design)
        error = np.linalg.norm(np.asarray(run(x, weights), np.float64) - expected) / np.linalg.norm(expected)
        seconds = device_time(run, [(x, weights)], calls=20).median_s
        rows.append({"design": design.__name__, "median_s": seconds, "bytes": weights.nbytes, "error": float(error)})
        typer.echo(f"{design.__name__}: {seconds * 1e3:.1f} ms, {weights.nbytes / seconds / 1e9:.1f} GB/s, error {error:.1e}")
        write_result(json_out, {"features": FEATURES, "width": WIDTH, "rows": rows})


if __name__ == "__main__":
    typer.run(main)
