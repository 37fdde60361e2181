"""select_tiles in Pallas Mosaic GPU (Hopper): a CTA per tile of 128 queries and head walks twice over the bounds of all
earlier blocks.

A query's bound of a block is one product: its positive and its negative part, side by side, with the block's maxima and
minima, side by side. The first walk has queries as rows: each of two warpgroups folds the bounds of its 64 queries into
their log-sum-exps. The second walk has blocks as rows: a warpgroup takes 64 of each tile of 128 blocks, and the sum
along a row is what all 128 queries may pay that block. It is written once and in a fixed order, -inf where a block is
no candidate. A third warpgroup copies tiles of bounds into a ring by TMA. `top_k` finds the k best of a tile. It reads
only the blocks before the tile's window.

Before the kernel, the bounds that a table names are gathered: 1/64 of the keys' bytes. Then a tile of 128 blocks is one
copy. Blocks without a sealed page get bounds there to which no query pays anything (`xla.table_bounds`).

Memory traffic: bounds once in, once out; twice per tile of queries, mostly from L2; queries once; a tile's scores out
and in. Source: bounds of Quest (Tang et al., ICML 2024); log-sum-exps and overlap as in FlashAttention-3 (arXiv
2407.08608).
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.hopper.decode.wgmma_fold import LAYOUT, LOG2E, LOWEST, SWIZZLED
from pallas_kernels.hopper.prefill import prefill_fold
from pallas_kernels.selection.select_tiles.api import Call
from pallas_kernels.selection.select_tiles.xla import candidates, listed, sealed_blocks, table_bounds
from pallas_kernels.selection.top_k import top_k

ROWS = 64
"""Rows of a warpgroup: the rows of a `wgmma`."""

TILE = 128
"""Queries per tile, and blocks per tile of bounds."""

NEVER = 1e30
"""Log-sum-exp, in log2 units, of a query that pays nothing."""

BY_ROW, BY_COLUMN = LAYOUT.reduce(1), LAYOUT.reduce(0)


@dataclasses.dataclass(frozen=True)
class Shape:
    """Everything that the kernel's code depends on. block_tiles: tiles of 128 blocks that a table can name."""

    batch: int
    num_queries: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_tiles: int
    block_size: int
    pooling: str
    sm_scale: float
    dtype: Any

    @property
    def query_tiles(self) -> int:
        """Tiles of queries of a sequence."""
        return -(-self.num_queries // TILE)

    @property
    def stages(self) -> int:
        """Tiles of bounds in flight."""
        return 2 if self.head_dim == 128 else 4

    def scratch(self) -> dict[str, Any]:
        """Shared memory and barriers: queries' positive and negative parts, and the ring of maxima, minima and
        `admitted_blocks`."""
        queries = plgpu.SMEM((TILE, self.head_dim), self.dtype, transforms=SWIZZLED)
        bounds = plgpu.SMEM((self.stages, TILE, self.head_dim), self.dtype, transforms=SWIZZLED)
        return {
            "positive_s": queries,
            "negative_s": queries,
            "most_s": bounds,
            "least_s": bounds,
            "admitted_s": plgpu.SMEM((self.stages, TILE), jnp.float32),
            "lse_s": plgpu.SMEM((TILE,), jnp.float32),
            "paid_s": plgpu.SMEM((2, ROWS), jnp.float32),
            "q_bar": plgpu.Barrier(num_barriers=2),
            "both_bar": plgpu.Barrier(num_arrivals=2),
            "full_bar": plgpu.Barrier(num_arrivals=3, num_barriers=self.stages),
            "free_bar": plgpu.Barrier(num_arrivals=2, num_barriers=self.stages),
        }


def unsupported(call: Call, q, bounds, table, starts, lengths) -> str | None:
    """Why this kernel cannot take this valid input, or None if it can."""
    if q.dtype != bounds.dtype or q.dtype.name not in ("bfloat16", "float16"):
        return f"it multiplies bfloat16 or float16, q and bounds alike; got q {q.dtype}, bounds {bounds.dtype}"
    if q.shape[3] not in (64, 128):
        return f"the head dim must be 64 or 128, got {q.shape[3]}"
    if call.query_tile != TILE:
        return f"query_tile must be {TILE}, got {call.query_tile}"
    return None


def select_tiles(call: Call, q, bounds, table, starts, lengths):
    """See `pallas_kernels.select_tiles`."""
    reason = unsupported(call, q, bounds, table, starts, lengths)
    if reason:
        raise NotImplementedError(f"select_tiles 'mosaic_gpu': {reason}")
    return _select(call, q, bounds, table, starts, lengths)


@functools.partial(jax.jit, static_argnames="call")
def _select(call: Call, q, bounds, table, starts, lengths):
    block_size = call.block_size
    there = sealed_blocks(table, lengths, bounds, block_size)
    rows = table_bounds(bounds, table, there, -there.shape[1] % TILE)
    sizes = (*q.shape[:3], bounds.shape[1], q.shape[3], rows.shape[2] // TILE)
    s = Shape(*sizes, block_size, call.pooling, call.sm_scale, q.dtype)
    page_size = block_size * bounds.shape[2]
    sealed = jnp.minimum(lengths // page_size, table.shape[1]) * bounds.shape[2]
    first, end = candidates(starts, lengths, s.num_queries, block_size, call.query_tile, call.window)
    paid = launch(s)(prefill_fold.padded(q), rows, admitted_blocks(there, first, rows.shape[2]), starts, lengths, sealed)
    ends = jnp.broadcast_to(jnp.minimum(end, sealed[:, None])[:, None], paid.shape[:3]).reshape(-1)
    best, ids = top_k(paid.reshape(-1, paid.shape[-1]), min(call.k, there.shape[1]), lengths=ends, sort=call.ranked)
    return listed(best, ids, call.ranked).reshape(*paid.shape[:3], -1).swapaxes(1, 2)


def admitted_blocks(there, first: int, columns: int):
    """A term added to what tiles pay the blocks, `[B, columns]` float32: 0, or -inf for blocks that are missing or
    before `first`."""
    there = jnp.pad(there, ((0, 0), (0, columns - there.shape[1])))
    return jnp.where(there & (jnp.arange(columns, dtype=jnp.int32) >= first), 0.0, -jnp.inf)


def _steps(s: Shape, refs, row, tile):
    """Position of the tile's first query, and how many tiles of bounds its queries may see."""
    starts_ref, lengths_ref, sealed_ref = refs
    first = starts_ref[row] + tile * TILE
    last = jnp.minimum(first + TILE, lengths_ref[row]) - 1
    blocks = jnp.minimum(lax.div(last, jnp.int32(s.block_size)) + 1, sealed_ref[row])
    return first, jnp.where(last < first, 0, lax.div(blocks + (TILE - 1), jnp.int32(TILE)))


def _fetch(s: Shape, steps, row, head, rows_ref, admitted_ref, scratch) -> None:
    """By the third warpgroup: copy every tile of bounds, and its part of `admitted_blocks`, twice over."""
    kv_head = lax.div(head, jnp.int32(s.num_heads // s.num_kv_heads))

    def step(n, _):
        slot, block = lax.rem(n, jnp.int32(s.stages)), pl.multiple_of(lax.rem(n, steps) * TILE, TILE)

        @pl.when(n >= s.stages)
        def _():
            plgpu.barrier_wait(scratch["free_bar"].at[slot])

        for name, column in (("most_s", 0), ("least_s", s.head_dim)):
            source = rows_ref.at[row, kv_head, pl.ds(block, TILE), pl.ds(column, s.head_dim)]
            plgpu.copy_gmem_to_smem(source, scratch[name].at[slot], scratch["full_bar"].at[slot])
        plgpu.copy_gmem_to_smem(admitted_ref.at[row, pl.ds(block, TILE)], scratch["admitted_s"].at[slot], scratch["full_bar"].at[slot])
        return ()

    lax.fori_loop(0, 2 * steps, step, ())
    for slot in range(s.stages):  # every phase of a barrier must have been waited for at the end

        @pl.when(slot < 2 * steps)
        def _(slot=slot):
            plgpu.barrier_wait(scratch["free_bar"].at[slot])


def _split_queries(q_ref, warpgroup, first_row, row, head, scratch) -> None:
    """By a folding warpgroup: load its 64 queries, and split them into positive and negative parts."""
    own = pl.ds(pl.multiple_of(warpgroup * ROWS, ROWS), ROWS)
    positive, negative = scratch["positive_s"].at[own], scratch["negative_s"].at[own]
    plgpu.copy_gmem_to_smem(q_ref.at[row, pl.ds(first_row, ROWS), head], positive, scratch["q_bar"].at[warpgroup])
    plgpu.barrier_wait(scratch["q_bar"].at[warpgroup])
    q = plgpu.layout_cast(positive[...], LAYOUT)
    nothing = jnp.zeros_like(q)
    negative[...] = jnp.minimum(q, nothing)
    positive[...] = jnp.maximum(q, nothing)
    plgpu.commit_smem()


def _meet(scratch) -> None:
    """Wait until both folding warpgroups are here. Each then sees what the other wrote to shared memory."""
    plgpu.commit_smem()
    plgpu.barrier_arrive(scratch["both_bar"])
    plgpu.barrier_wait(scratch["both_bar"])


def _products(slot, scratch, a, b):
    """The bounds `[64, 128]` of rows a with rows b. Each is a pair of references; the products of corresponding
    references are added."""

    def multiply(acc_ref):
        for left, right in zip(a, b, strict=True):
            plgpu.wgmma(acc_ref, left, right.transpose((1, 0)))
        return acc_ref[...]

    x = pl.run_scoped(multiply, plgpu.ACC((ROWS, TILE), jnp.float32))
    plgpu.barrier_arrive(scratch["free_bar"].at[slot])
    return x


def _seen(s: Shape, x, block, query, blocks_axis: int, sealed):
    """Bounds with -inf where a block begins after a query or has no sealed page. block, query: numbers of the first of
    each."""
    blocks = block + plgpu.broadcasted_iota(jnp.int32, x.shape, blocks_axis, layout=LAYOUT)
    queries = query + plgpu.broadcasted_iota(jnp.int32, x.shape, 1 - blocks_axis, layout=LAYOUT)
    return jnp.where((blocks * s.block_size <= queries) & (blocks < sealed), x, -jnp.inf)


def _measure(s: Shape, steps, first, sealed, warpgroup, scratch):
    """The first walk, by a folding warpgroup: log-sum-exps of its 64 queries' bounds, in log2 units. first: its first
    query's position."""
    own = pl.ds(pl.multiple_of(warpgroup * ROWS, ROWS), ROWS)
    queries = scratch["positive_s"].at[own], scratch["negative_s"].at[own]
    factor = s.sm_scale * LOG2E

    def step(n, carry):
        m, total = carry
        slot = lax.rem(n, jnp.int32(s.stages))
        plgpu.barrier_wait(scratch["full_bar"].at[slot])
        x = _products(slot, scratch, queries, (scratch["most_s"].at[slot], scratch["least_s"].at[slot]))
        plain = ((n * TILE + (TILE - 1)) * s.block_size <= first) & ((n + 1) * TILE <= sealed)
        x = lax.cond(plain, lambda x: x, lambda x: _seen(s, x, n * TILE, first, 1, sealed), x)
        new_m = jnp.maximum(m, x.max(axis=1) * factor)
        p = jnp.exp2(x * factor - lax.broadcast_in_dim(new_m, x.shape, [0]))
        return new_m, total * jnp.exp2(m - new_m) + p.sum(axis=1)

    m, total = lax.fori_loop(0, steps, step, (prefill_fold.all_rows(LOWEST), prefill_fold.all_rows(0.0)))
    return jnp.where(total > 0, m + jnp.log2(jnp.where(total > 0, total, 1.0)), NEVER)


def _pay(s: Shape, steps, first, sealed, warpgroup, place, scratch, paid_ref) -> None:
    """The second walk, by a folding warpgroup: what the tile's queries may pay its 64 of every 128 blocks. first: the
    tile's position."""
    own = pl.ds(pl.multiple_of(warpgroup * ROWS, ROWS), ROWS)
    queries = scratch["positive_s"], scratch["negative_s"]
    paid_s, (row, head, tile), factor = scratch["paid_s"].at[warpgroup], place, s.sm_scale * LOG2E
    lse = plgpu.layout_cast(scratch["lse_s"][...], BY_COLUMN)

    def step(n, _):
        i = steps + n
        slot = lax.rem(i, jnp.int32(s.stages))
        plgpu.barrier_wait(scratch["full_bar"].at[slot])
        admitted = plgpu.layout_cast(scratch["admitted_s"].at[slot, own][...], BY_ROW)
        x = _products(slot, scratch, (scratch["most_s"].at[slot, own], scratch["least_s"].at[slot, own]), queries)
        block = n * TILE + warpgroup * ROWS
        plain = ((block + (ROWS - 1)) * s.block_size <= first) & (block + ROWS <= sealed)
        x = lax.cond(plain, lambda x: x, lambda x: _seen(s, x, block, first, 0, sealed), x)
        p = jnp.exp2(x * factor - lax.broadcast_in_dim(lse, x.shape, [1]))
        plgpu.wait_smem_to_gmem(0)  # TMA has read what is overwritten next
        paid_s[...] = (p.sum(axis=1) if s.pooling == "sum" else p.max(axis=1)) + admitted
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(paid_s, paid_ref.at[row, head, tile, pl.ds(pl.multiple_of(block, ROWS), ROWS)])
        return ()

    lax.fori_loop(0, steps, step, ())
    plgpu.wait_smem_to_gmem(0)


def launch(s: Shape, interpret=None):
    """The kernel, as a function of (padded queries, rows `[B, K, S, 2 * D]`, `admitted_blocks` `[B, S]`, starts,
    lengths, sealed blocks).

    It returns what tiles pay admitted blocks, -inf for others, `[B, H, C, S]` float32. Blocks that no query of a tile
    sees are not written.
    """

    def select_tiles_kernel(q_ref, rows_ref, admitted_ref, *refs, **scratch):
        *refs, paid_ref = refs
        row, head, warpgroup = (lax.axis_index(name) for name in ("row", "head", "warpgroup"))
        tile = s.query_tiles - 1 - lax.axis_index("tile")  # the longest walks first
        first, steps = _steps(s, refs, row, tile)

        @pl.when(warpgroup < 2)
        def _():
            plgpu.set_max_registers(232, action="increase")
            sealed = refs[2][row]
            own = first + warpgroup * ROWS
            _split_queries(q_ref, warpgroup, tile * TILE + warpgroup * ROWS, row, head, scratch)
            lse = _measure(s, steps, own, sealed, warpgroup, scratch)
            position = own + plgpu.broadcasted_iota(jnp.int32, (ROWS,), 0, layout=BY_ROW)
            lse = jnp.where(position < refs[1][row], lse, NEVER)
            scratch["lse_s"].at[pl.ds(pl.multiple_of(warpgroup * ROWS, ROWS), ROWS)][...] = lse
            _meet(scratch)
            _pay(s, steps, first, sealed, warpgroup, (row, head, tile), scratch, paid_ref)

        @pl.when(warpgroup == 2)
        def _():
            plgpu.set_max_registers(40, action="decrease")
            pl.when(steps > 0)(lambda: _fetch(s, steps, row, head, rows_ref, admitted_ref, scratch))

    return plgpu.kernel(
        select_tiles_kernel,
        out_type=jax.ShapeDtypeStruct((s.batch, s.num_heads, s.query_tiles, s.block_tiles * TILE), jnp.float32),
        grid=(s.num_heads, s.query_tiles, s.batch),
        grid_names=("head", "tile", "row"),
        num_threads=3,
        thread_name="warpgroup",
        scratch_types=s.scratch(),
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret,
    )
