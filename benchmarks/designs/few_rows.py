"""Designs that were measured for `project_tokens` of bfloat16 tokens on a CPU.

    python -m benchmarks.designs.few_rows --json designs-few-rows.json

One row times the output matrix of Qwen2.5-0.5B: each design reads the whole matrix, which is larger than the caches.
Then 2,048 rows, a prompt's, times a matrix of its MLP.
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

from pallas_kernels.bench.timing import device_time
from pallas_kernels.core.results import write_result

FEATURES, WIDTH = 151_936, 896
PROMPT, MLP = 2048, 4864
"""Tokens of a prompt, and the width of the MLP."""

CHUNK = 4748
"""Rows that are converted at a time: a 32nd part."""

TILE = 32
"""Results that lie beside each other in the layout by tiles."""


def two_rows(x, w):
    """What `project_tokens` does: XLA's own product of two rows, one of zeros, which reads bfloat16 weights as they
    are."""
    return jnp.einsum("re,fe->rf", jnp.concatenate([x, jnp.zeros_like(x)]), w, preferred_element_type=jnp.float32)[0]


def sum_of_products(x, w):
    """Products in float32 and a sum, which convert the weights while they read them."""
    return (x.astype(jnp.float32) * w.astype(jnp.float32)).sum(-1)


def matrix_product(x, w):
    """XLA's own product of one row, with the matrix first."""
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


def rows_first(x, w):
    """What `project_tokens` does with a prompt."""
    return jnp.einsum("re,fe->rf", x, w)


def matrix_first(x, w):
    """The matrix first, and tokens in columns."""
    return jnp.einsum("fe,er->fr", w, lax.optimization_barrier(x.T)).T


def _same(w):
    return w


def _tiled(w):
    return w.reshape(-1, TILE, WIDTH).swapaxes(1, 2).copy()


def _wide(w):
    return w.astype(jnp.float32)


ONE_ROW: dict[Callable, Callable] = {two_rows: _same, sum_of_products: _same, matrix_product: _same, converted_in_chunks: _same}
ONE_ROW |= {by_tiles: _tiled, in_float32: _wide}
MANY_ROWS: dict[Callable, Callable] = {rows_first: _same, matrix_first: _same}
"""By design, how it wants the weights."""


def main(json_out: Annotated[Path, typer.Option("--json", help="Write the figures here.")]) -> None:
    """Time every design."""
    rows: list[dict] = []
    for tokens, features, designs in ((1, FEATURES, ONE_ROW), (PROMPT, MLP, MANY_ROWS)):
        w = jax.random.normal(jax.random.key(0), (features, WIDTH), jnp.bfloat16)
        x = jax.random.normal(jax.random.key(1), (tokens, WIDTH), jnp.bfloat16)
        expected = np.asarray(x, np.float64) @ np.asarray(w, np.float64).T
        for design, prepare in designs.items():
            weights, run = jax.block_until_ready(prepare(w)), jax.jit(design)
            found = np.asarray(run(x, weights), np.float64).reshape(expected.shape)
            error = float(np.linalg.norm(found - expected) / np.linalg.norm(expected))
            seconds = device_time(run, [(x, weights)], calls=20).median_s
            size = {"tokens": tokens, "features": features, "width": WIDTH}
            rows.append({"design": design.__name__, **size, "median_s": seconds, "bytes": weights.nbytes, "error": error})
            rate = f"{weights.nbytes / seconds / 1e9:.1f} GB/s, {2 * tokens * features * WIDTH / seconds / 1e9:.0f} GFLOP/s"
            typer.echo(f"{design.__name__}: {seconds * 1e3:.1f} ms, {rate}, error {error:.1e}")
            write_result(json_out, {"rows": rows})


if __name__ == "__main__":
    typer.run(main)
