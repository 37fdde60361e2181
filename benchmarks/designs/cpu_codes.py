"""Designs that were measured for `project_tokens` of one token by int8 codes with a scale for each row on a CPU.

    python -m benchmarks.designs.cpu_codes --json designs-cpu-codes.json

The matrices are those of SmolLM2-135M: of its MLP, and its head. A real step reads others in between, so small ones are
slower there: here they stay in the caches.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import jax
import jax.numpy as jnp
import numpy as np
import typer

from pallas_kernels.core.matrices import MatrixFormat, PackedMatrix, pack, unpack
from pallas_kernels.core.results import write_result
from pallas_kernels.matmul.project_tokens.cpu_codes import codes_product

SHAPES = ((1536, 576), (576, 1536), (49_152, 576))
CALLS = 200


def three_digits(x, w: PackedMatrix):
    """What `project_tokens` does: the token becomes three digits of 8 bits and one of zeros, and XLA multiplies int8 by
    int8."""
    return codes_product(x, w)


def fused_sum(x, w: PackedMatrix):
    """Codes become float32, are multiplied by inputs and summed, in one fused loop."""
    return (w.codes.astype(jnp.float32) * x).sum(1)[None] * w.scales[:, 0]


def integer_sum(x, w: PackedMatrix):
    """The token becomes one integer of 16 bits; codes times integers are summed in int32, in one fused loop. Less exact
    than digits."""
    one = jnp.max(jnp.abs(x)) / 2**14
    return (w.codes.astype(jnp.int32) * jnp.round(x / one).astype(jnp.int32)).sum(1)[None] * (w.scales[:, 0] * one)


def widened(x, w: PackedMatrix):
    """The whole matrix becomes float32, and then XLA's product."""
    return x @ unpack(w, jnp.float32).T


def in_float32(x, w):
    """The weights are held in float32, four times the memory."""
    return x @ w.T


def main(json_out: Annotated[Path, typer.Option("--json", help="Write the figures here.")]) -> None:
    """Time every design."""
    rows: list[dict] = []
    designs: tuple[Callable, ...] = (three_digits, fused_sum, integer_sum, widened, in_float32)
    for features, width in SHAPES:
        w = pack(jax.random.normal(jax.random.key(0), (features, width), jnp.float32), MatrixFormat("int8"), "w")
        x = jax.random.normal(jax.random.key(1), (1, width), jnp.float32)
        wide = unpack(w, jnp.float32)
        expected = np.asarray(x, np.float64) @ np.asarray(wide, np.float64).T
        for design in designs:
            run, weights = jax.jit(design), wide if design is in_float32 else w
            found = np.asarray(run(x, weights), np.float64)
            times = []
            for _ in range(CALLS):
                began = time.perf_counter()
                run(x, weights).block_until_ready()
                times.append(time.perf_counter() - began)
            row = {"design": design.__name__, "features": features, "width": width, "median_s": float(np.median(times))}
            row |= {"least_s": min(times), "error": float(np.linalg.norm(found - expected) / np.linalg.norm(expected))}
            rows.append(row)
            typer.echo(f"{features} x {width} {design.__name__}: {row['median_s'] * 1e6:.0f} us, least {row['least_s'] * 1e6:.0f}")
            write_result(json_out, {"rows": rows})


if __name__ == "__main__":
    typer.run(main)
