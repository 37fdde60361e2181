"""union_blocks by definition, in plain Python: for each tile, a dictionary from block to the scores of the rows that
chose it."""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.selection.union_blocks.api import Call

LOWEST = np.finfo(np.float32).min


def union(rows: list[list[tuple[int, np.float32]]], k_trim: int, rank: str) -> list[int]:
    """rows: the (block, score) pairs of each row of a tile, in the order of the rows. Returns the blocks kept,
    ascending."""
    chosen: dict[int, list[np.float32]] = {}
    for row in rows:
        for block, score in row:
            if block >= 0:
                chosen.setdefault(block, []).append(np.float32(score))

    def worth(scores: list[np.float32]) -> np.float32:
        with np.errstate(over="ignore", invalid="ignore"):
            total = functools.reduce(lambda a, b: np.float32(a + b), scores)
            total = total / np.float32(len(scores)) if rank == "mean" else total
        return LOWEST if math.isnan(total) else max(total, LOWEST)

    best = sorted(chosen, key=lambda block: (-worth(chosen[block]), block))
    return sorted(best[:k_trim])


@functools.partial(jax.jit, static_argnames="call")
def union_blocks(call: Call, ids, scores):
    """See `pallas_kernels.union_blocks`."""
    (batch, num_rows, num_heads, _), rows, k_trim = ids.shape, call.rows, call.k_trim
    tiles = -(-num_rows // rows)

    def of_all(ids, scores):
        ids, scores = np.asarray(ids), np.asarray(scores)
        blocks = np.full((batch, tiles, num_heads, k_trim), -1, np.int32)
        for b, u, h in np.ndindex(batch, tiles, num_heads):
            lists = [list(zip(ids[b, r, h], scores[b, r, h], strict=True)) for r in range(u * rows, min((u + 1) * rows, num_rows))]
            kept = union(lists, k_trim, call.rank)
            blocks[b, u, h, : len(kept)] = kept
        return blocks

    return jax.pure_callback(of_all, jax.ShapeDtypeStruct((batch, tiles, num_heads, k_trim), jnp.int32), ids, scores)
