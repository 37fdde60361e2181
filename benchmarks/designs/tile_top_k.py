"""A design that was measured for the last step of `select_tiles` at 1M tokens: fewer candidates in `top_k`, so that
more CTAs run at once.

    python -m benchmarks.designs.tile_top_k --json designs-tile-top-k.json

229,376 rows (8,192 tiles of 28 heads) of up to 8,192 scores each, as long as a causal mask makes them; the 32 best of
each.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Annotated

import jax
import jax.numpy as jnp
import typer

from pallas_kernels.bench.timing import device_time
from pallas_kernels.core.results import write_result
from pallas_kernels.selection.top_k import top_k
from pallas_kernels.selection.top_k.plan import Config

ROWS, SCORES, K = 229_376, 8192, 32


def main(json_out: Annotated[Path, typer.Option("--json", help="Write the figures here.")]) -> None:
    """Time `top_k` by the capacity of its config; None is its own choice, a whole row."""
    scores = jax.jit(functools.partial(jax.random.normal, shape=(ROWS, SCORES)))(jax.random.key(0))
    lengths, rows, expected = jnp.arange(ROWS, dtype=jnp.int32) % SCORES, [], None
    for capacity in (None, 512, 1024, 2048, 4096):
        config = None if capacity is None else Config(capacity=capacity)
        call = jax.jit(functools.partial(top_k, k=K, config=config))
        found = call(scores, lengths=lengths)[1]
        expected = found if expected is None else expected
        seconds = device_time(lambda s, n, call=call: call(s, lengths=n), [(scores, lengths)], calls=5).median_s
        rows.append({"capacity": capacity, "same": bool((found == expected).all()), "median_s": seconds})
        write_result(json_out, {"rows_of_scores": ROWS, "scores": SCORES, "k": K, "rows": rows})


if __name__ == "__main__":
    typer.run(main)
