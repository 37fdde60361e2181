"""select_tiles for TPU: each tile of queries and head walks twice over the bounds of all earlier blocks. Then the k
best of its scores are taken.

The bounds that a table names are gathered first, as in `xla.py`. The grid is (B, H, C, 2, steps). For each tile of
queries, the first walk folds `BLOCK_TILE` bounds per step into the queries' log-sum-exps. Each step of the second walk
writes what the tile pays `BLOCK_TILE` blocks. While a tile of bounds is scored, the next is being copied. Steps past
the tile's last query, or past the last sealed page, name the tile of bounds that is already there, so that nothing is
copied, multiplied or written.

Memory traffic: bounds once in, once out, then twice per tile of queries and head, up to the tile's last query; queries
once; a tile's scores out and in. Memory needed: the bounds that the tables name, and the tiles' scores `[B, H, C, S]`
float32. Source: bounds of Quest (Tang et al., ICML 2024); online log-sum-exps as in FlashAttention (arXiv 2205.14135).
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.lax import div  # `//` of traced values also handles signs, and lowering that needs the chip's generation

from pallas_kernels.core import dispatch
from pallas_kernels.selection.select_tiles.api import Call
from pallas_kernels.selection.select_tiles.xla import best_candidates, candidates, sealed_blocks, table_bounds
from pallas_kernels.tpu.memory import LANES, QUERY_TILE, SUBLANES, VMEM_BYTES
from pallas_kernels.xla import online_softmax

BLOCK_TILE = 256
"""Blocks whose bounds are copied and scored together. It does not depend on the table's width, so a row's bits do not
either."""


def unsupported(call: Call, q, bounds, table, starts, lengths) -> str | None:
    """Why this kernel cannot take this valid input, with the values, or None if it can. Uses only shapes and dtypes."""
    arrays, query_tile = dispatch.signature(q=q, bounds=bounds), call.query_tile
    if not {q.dtype.name, bounds.dtype.name} <= {"float32", "bfloat16"}:
        return f"TPUs compute in bfloat16 and float32 only; got {arrays}"
    if q.shape[3] % LANES:
        return f"head dim {q.shape[3]} is not a multiple of {LANES}; got {arrays}"
    if query_tile % QUERY_TILE:
        return f"query_tile {query_tile} is not a multiple of {QUERY_TILE}, the rows that a tile of the matrix unit has"
    vectors = _vmem_bytes(q, bounds, query_tile)
    if vectors > VMEM_BYTES:
        return f"buffers take {vectors} bytes of vector memory, at most {VMEM_BYTES} are available; query_tile {query_tile}, {arrays}"
    return None


def _vmem_bytes(q, bounds, query_tile: int) -> int:
    """Queries, bounds and scores, double-buffered; the log-sum-exps; queries and bounds in float32, and the arrays
    computed from them."""
    head_dim, wide = q.shape[3], 4
    moved = 2 * (query_tile * head_dim * q.dtype.itemsize + BLOCK_TILE * (2 * head_dim * bounds.dtype.itemsize + SUBLANES * wide))
    computed = wide * (3 * query_tile * head_dim + 2 * BLOCK_TILE * head_dim + 4 * query_tile * BLOCK_TILE)
    return moved + 2 * query_tile * LANES * wide + computed


def select_tiles(call: Call, q, bounds, table, starts, lengths, *, interpret=False):
    """See `pallas_kernels.select_tiles`. interpret: False, or `pltpu.InterpretParams(...)` to run on a CPU; for tests.

    Raises NotImplementedError, with the sentence of `unsupported`, for input that this kernel cannot take.
    """
    reason = unsupported(call, q, bounds, table, starts, lengths)
    if reason is not None:
        raise NotImplementedError(f"implementation 'mosaic_tpu' of select_tiles: {reason}")
    return _select(call, q, bounds, table, starts, lengths, interpret=interpret)


@functools.partial(jax.jit, static_argnames=("call", "interpret"))
def _select(call: Call, q, bounds, table, starts, lengths, *, interpret):
    batch, num_queries, num_heads, head_dim = q.shape
    block_size, query_tile = call.block_size, call.query_tile
    there = sealed_blocks(table, lengths, bounds, block_size)
    rows = table_bounds(bounds, table, there, -there.shape[1] % BLOCK_TILE)
    sealed = jnp.minimum(lengths // (block_size * bounds.shape[2]), table.shape[1]) * bounds.shape[2]
    tiles, group = -(-num_queries // query_tile), num_heads // bounds.shape[1]
    q = jnp.pad(q, ((0, 0), (0, tiles * query_tile - num_queries), (0, 0), (0, 0))).swapaxes(1, 2)
    reach = functools.partial(_reach, query_tile, block_size)

    def here(row, tile, step, scalars):  # the tile of bounds of a step
        return jnp.minimum(step, jnp.maximum(reach(row, tile, *scalars)[2] - 1, 0))

    def queries_of(row, head, tile, walk, step, *scalars):
        return row, head, tile, 0

    def bounds_of(row, head, tile, walk, step, *scalars):
        return row, div(head, group), here(row, tile, step, scalars), 0

    def scores_of(row, head, tile, walk, step, *scalars):  # during the first walk, the first scores of the second
        return row, head, tile, 0, walk * here(row, tile, step, scalars)

    scores = pl.pallas_call(
        functools.partial(_kernel, reach, block_size, call.pooling, call.sm_scale),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=(batch, num_heads, tiles, 2, rows.shape[2] // BLOCK_TILE),
            in_specs=[
                pl.BlockSpec((1, 1, query_tile, head_dim), queries_of),
                pl.BlockSpec((1, 1, BLOCK_TILE, 2 * head_dim), bounds_of),
            ],
            out_specs=pl.BlockSpec((1, 1, 1, 1, BLOCK_TILE), scores_of),
            scratch_shapes=[pltpu.VMEM((query_tile, 1), jnp.float32)] * 2,
        ),
        out_shape=jax.ShapeDtypeStruct((batch, num_heads, tiles, 1, rows.shape[2]), jnp.float32),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "parallel", "arbitrary", "arbitrary")),
        interpret=interpret,
        name="select_tiles",
    )(starts, lengths, sealed, q, rows)
    first, end = candidates(starts, lengths, num_queries, block_size, query_tile, call.window)
    return best_candidates(scores[:, :, :, 0, : there.shape[1]].swapaxes(1, 2), there, first, end, call.k, call.ranked)


def _reach(query_tile: int, block_size: int, row, tile, starts, lengths, sealed):
    """The position of a tile's first query, how many blocks its queries may see, and how many tiles of bounds these
    fill."""
    first = starts[row] + tile * query_tile
    last = jnp.minimum(first + query_tile, lengths[row]) - 1
    blocks = jnp.where(last < first, 0, jnp.minimum(div(last, block_size) + 1, sealed[row]))
    return first, blocks, div(blocks + BLOCK_TILE - 1, BLOCK_TILE)


def _kernel(reach, block_size: int, pooling: str, sm_scale: float, starts, lengths, sealed, q, rows, paid, top, total):
    """One step of a walk. Scratch: the queries' greatest bound (in the second walk their log-sum-exp) and their sum of
    exponentials.

    Scores of blocks that no query of the tile sees are not written, or 0.
    """
    row, tile, walk, step = (pl.program_id(axis) for axis in (0, 2, 3, 4))
    first, blocks, steps = reach(row, tile, starts, lengths, sealed)

    @pl.when((walk == 0) & (step == 0))
    def _():
        top[...] = jnp.full_like(top, -jnp.inf)
        total[...] = jnp.zeros_like(total)

    @pl.when((walk == 1) & (step == 0))
    def _():
        top[...] = jnp.where(top[...] == -jnp.inf, 0.0, top[...] + jnp.log(jnp.where(total[...] == 0, 1.0, total[...])))

    @pl.when(step < steps)
    def _():
        queries = q[0, 0].astype(jnp.float32)
        split = jnp.concatenate([jnp.maximum(queries, 0), jnp.minimum(queries, 0)], axis=1).astype(q.dtype)
        x = online_softmax.scaled_logits(split[None], rows[0], sm_scale)[0]
        position = first + jax.lax.broadcasted_iota(jnp.int32, (x.shape[0], 1), 0)
        block = step * BLOCK_TILE + jax.lax.broadcasted_iota(jnp.int32, (1, BLOCK_TILE), 1)
        seen = (block * block_size <= position) & (block < blocks) & (position < lengths[row])
        x = jnp.where(seen, x, -jnp.inf)

        @pl.when(walk == 0)
        def _():
            new = jnp.maximum(top[...], x.max(1, keepdims=True))
            shift = jnp.where(new == -jnp.inf, 0.0, new)  # -inf minus -inf would be NaN
            total[...] = total[...] * jnp.exp(top[...] - shift) + jnp.exp(x - shift).sum(1, keepdims=True)
            top[...] = new

        @pl.when(walk == 1)
        def _():
            of_queries = jnp.exp(x - top[...])
            paid[0, 0, 0] = of_queries.sum(0, keepdims=True) if pooling == "sum" else of_queries.max(0, keepdims=True)
