"""Folding tiles of listed keys into an online softmax, by one warpgroup: the stage that all decode kernels for Mosaic
GPU share.

TMA copies a tile's K and V into a ring in shared memory. Two `wgmma` and an online softmax fold it in. The T*G query
rows of a KV head are the left operand, padded to 64 rows. The padding costs only matrix work, and memory bandwidth is
the limit. Rows do not mix, so the content of padding rows does not matter. More than 64 rows are several query tiles:
each has a warpgroup, and all of them fold the tiles of one ring. So a row's bits do not depend on how many there are.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.hopper.threads import lanes

ROWS = 64
"""Rows of a `wgmma`."""

LOG2E = math.log2(math.e)
LOWEST = -1e30
"""Start of the running maximum: below every logit, and finite, so that a tile without visible keys folds in as
zeros."""

LAYOUT = plgpu.Layout.WGMMA
SWIZZLED = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))


@dataclasses.dataclass(frozen=True)
class Shape:
    """Everything that a kernel's code depends on: sizes, and which keys a query sees.

    width: entries of a list, None for dense. tile: keys folded in at once, 64 or 128. stages: tiles in flight per
    warpgroup. warpgroups: of a CTA. splits: CTAs that share the work of a (row, KV head).
    """

    batch: int
    num_queries: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    page_size: int
    block_size: int
    width: int | None
    window: tuple[int, int] | None
    sm_scale: float
    dtype: Any
    tile: int
    stages: int
    warpgroups: int
    splits: int

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.num_heads // self.num_kv_heads

    @property
    def rows(self) -> int:
        """Query rows per KV head, padded to whole 8-row tiles."""
        return -(-self.num_queries * self.group // 8) * 8

    @property
    def query_tiles(self) -> int:
        """Tiles of `ROWS` query rows of a KV head. Those of one CTA fold the same keys."""
        return -(-self.num_queries * self.group // ROWS)

    @property
    def parts(self) -> int:
        """Partial results of a (row, KV head): one of each warpgroup."""
        return self.splits * self.warpgroups

    @property
    def piece(self) -> int:
        """Tokens of one copy, which stays within a block and a tile."""
        return min(self.block_size, self.tile)

    @property
    def pieces(self) -> int:
        """Copies per tile."""
        return self.tile // self.piece

    def scratch(self) -> dict[str, Any]:
        """Shared memory: the queries, rings of K and V tiles, their barriers; with several query tiles also barriers at
        which all of them are done with a tile."""
        ring = (2, self.warpgroups, self.stages, self.tile, self.head_dim)
        barrier = plgpu.Barrier(num_arrivals=self.pieces, num_barriers=self.warpgroups * self.stages)
        done = {} if self.query_tiles == 1 else {"done_bar": plgpu.Barrier(num_arrivals=self.query_tiles, num_barriers=self.stages)}
        return done | {
            "q_s": plgpu.SMEM((self.query_tiles, ROWS, self.head_dim), self.dtype, transforms=SWIZZLED),
            "kv_s": plgpu.SMEM(ring, self.dtype, transforms=SWIZZLED),
            "k_bar": barrier,
            "v_bar": barrier,
        }


def load_queries(s: Shape, row, head, q_ref, q_s) -> None:
    """By all threads of a CTA: copy the T*G query rows of a (row, KV head) of `[B, T, H, D]` to shared memory, swizzled
    for `wgmma`."""
    scalar, ref = plgpu.Layout.WG_SPLAT(()), plgpu.RefType()

    @plgpu.inline_mgpu(arg_types=(scalar, scalar, ref, plgpu.RefType(SWIZZLED)))
    def load(_, row, head, q_ref, q_s):
        row, head = lanes.of_splat(row), lanes.of_splat(head)
        threads, chunks, rows = s.warpgroups * s.query_tiles * 128, s.head_dim // 8, s.num_queries * s.group
        for start in range(0, rows * chunks, threads):
            i = lanes.thread() + start
            with lanes.when(i < rows * chunks):
                r, chunk = i // chunks, i % chunks
                at = (row * s.num_queries + r // s.group) * s.num_heads + head * s.group + r % s.group
                words = lanes.load_global_16_bytes(q_ref, (at * chunks + chunk) * 16)
                lanes.store_shared(q_s, _swizzled(s, r, chunk) * 4, *words)
        lanes.publish_to_tensor_cores()
        lanes.cta_barrier(threads)

    load(row, head, q_ref, q_s)


def _swizzled(s: Shape, row, chunk):
    """Offset of 16 bytes of a row in a tile of `SWIZZLED`, in units of 16 bytes: 8 rows of 128 bytes each, chunks
    permuted by row."""
    return ((row // 8) * (s.head_dim // 64) + chunk // 8) * 64 + (row % 8) * 8 + ((chunk % 8) ^ (row % 8))


def padded_queries(s: Shape, q):
    """Queries `[B, T, H, D]` as `[B, K, rows, D]`."""
    q = q.reshape(s.batch, s.num_queries, s.num_kv_heads, s.group, s.head_dim).swapaxes(1, 2)
    q = q.reshape(s.batch, s.num_kv_heads, -1, s.head_dim)
    return jnp.pad(q, ((0, 0), (0, 0), (0, s.rows - q.shape[2]), (0, 0)))


def span(s: Shape, worker, length):
    """First tile of a warpgroup and the number of its tiles: all tiles in equal parts, the last ones shorter or empty.
    Of a dense call, the parts are those of its first query alone; the last part takes what later queries add."""
    tiles, workers = number_of_tiles(s, length), s.splits * s.warpgroups
    per = tiles_of_span(s, length - (s.num_queries - 1))
    first = jnp.minimum(worker * per, tiles)
    return first, jnp.where(worker == workers - 1, tiles - first, jnp.minimum(tiles - first, per))


def tiles_of_span(s: Shape, length):
    """Tiles of each part, but for the last ones, of a row of so many tokens."""
    workers = s.splits * s.warpgroups
    return lax.div(number_of_tiles(s, jnp.maximum(length, 0)) + (workers - 1), jnp.int32(workers))


def number_of_tiles(s: Shape, length):
    """Tiles of a row: those with written keys (dense), or those of the whole list."""
    if s.width is None:
        return lax.div(length + (s.tile - 1), jnp.int32(s.tile))
    return jnp.int32(-(-s.width * s.block_size // s.tile))


def places(s: Shape, block_of, page_of, length, tile):
    """Where the pieces of a tile lie: of each its page, its first token there, the position of its first key, and how
    many keys are written.

    block_of: entry of the list -> block; None for dense. page_of: entry (None for dense), first token -> page, -1 where
    there is none.
    """
    found = []
    for p in range(s.pieces):
        if s.width is None:
            start, entry = tile * s.tile + p * s.piece, None
            listed = start < length
        else:
            wanted = lax.div(tile * s.tile, jnp.int32(s.block_size)) + p
            entry = jnp.minimum(wanted, s.width - 1)
            block = block_of(entry)
            start = jnp.maximum(block, 0) * s.block_size + lax.rem(tile * s.tile, jnp.int32(s.block_size))
            listed = (block >= 0) & (wanted < s.width) & (start < length)
        page = page_of(entry, jnp.where(listed, start, 0))
        written = jnp.where(listed & (page >= 0), jnp.minimum(length - start, s.piece), 0)
        found.append((jnp.maximum(page, 0), lax.rem(start, jnp.int32(s.page_size)), start, written))
    return found


def fold(s: Shape, warpgroup, pools, scratch, head, length, first, count, place, queries, report=None, query_tile=0):
    """Fold `count` tiles from `first` on, in order, into (acc [64, D], m [64] in log2 units, total [64]), all float32.

    pools: K and V. scratch: `Shape.scratch`. place: tile -> `places`. queries: makes the queries available; called once
    the copies of the first tiles have started. report: called with a tile and, per piece, the LSE of its keys.
    query_tile: the caller's; the first one copies the keys for all.
    """
    q_s = scratch["q_s"].at[query_tile]
    copies = True if s.query_tiles == 1 else query_tile == 0
    kv_s, bars = scratch["kv_s"], (scratch["k_bar"], scratch["v_bar"])

    def fetch(i):
        slot = lax.rem(i, jnp.int32(s.stages))
        for p, (page, token, _, _) in enumerate(place(first + i)):
            for n, ref in enumerate(pools):
                target = kv_s.at[n, warpgroup, slot, pl.ds(p * s.piece, s.piece)]
                plgpu.copy_gmem_to_smem(ref.at[page, head, pl.ds(token, s.piece)], target, bars[n].at[warpgroup * s.stages + slot])

    for i in range(s.stages):

        @pl.when((i < count) & copies)
        def _start(i=i):
            fetch(jnp.int32(i))

    queries()

    def step(i, carry):
        acc, m, total = carry
        slot = lax.rem(i, jnp.int32(s.stages))
        pieces = place(first + i)
        plgpu.barrier_wait(bars[0].at[warpgroup * s.stages + slot])

        def scores(acc_ref):
            plgpu.wgmma(acc_ref, q_s, kv_s.at[0, warpgroup, slot].transpose((1, 0)))
            return acc_ref[...]

        x = pl.run_scoped(scores, plgpu.ACC((ROWS, s.tile), jnp.float32)) * (s.sm_scale * LOG2E)
        x = lax.cond(_sees_all(s, pieces, length), lambda x: x, lambda x: jnp.where(_seen(s, pieces, length, query_tile), x, -jnp.inf), x)
        if report is not None:
            report(first + i, _lse_of_pieces(s, x))
        new_m = jnp.maximum(m, x.max(axis=1))
        alpha = jnp.exp2(m - new_m)
        p = jnp.exp2(x - lax.broadcast_in_dim(new_m, x.shape, [0]))
        total = total * alpha + p.sum(axis=1)
        acc = acc * lax.broadcast_in_dim(alpha, acc.shape, [0])
        p = p.astype(s.dtype)
        plgpu.barrier_wait(bars[1].at[warpgroup * s.stages + slot])
        _forget_unwritten(s, kv_s.at[1, warpgroup, slot], pieces)

        def values(acc_ref):
            plgpu.wgmma(acc_ref, p, kv_s.at[1, warpgroup, slot])

        acc = pl.run_state(values)(plgpu.ACC.init(acc))
        if s.query_tiles > 1:
            plgpu.barrier_arrive(scratch["done_bar"].at[slot])

        @pl.when((i + s.stages < count) & copies)
        def _next():
            if s.query_tiles > 1:
                plgpu.barrier_wait(scratch["done_bar"].at[slot])
            fetch(i + s.stages)

        return acc, new_m, total

    rows = functools.partial(jnp.full, (ROWS,), dtype=jnp.float32)
    start = (
        plgpu.layout_cast(jnp.zeros((ROWS, s.head_dim), jnp.float32), LAYOUT),
        plgpu.layout_cast(rows(LOWEST), LAYOUT.reduce(1)),
        plgpu.layout_cast(rows(0.0), LAYOUT.reduce(1)),
    )
    return lax.fori_loop(0, count, step, start)


def _of_piece(s: Shape, column, values):
    """Per column of a tile, the value of its piece."""
    found = jnp.broadcast_to(values[-1], column.shape)
    for p in range(s.pieces - 2, -1, -1):
        found = jnp.where(column < (p + 1) * s.piece, values[p], found)
    return found


def _sees_all(s: Shape, pieces, length):
    """Whether all queries attend to all keys of a tile, so that it needs no mask."""
    if s.window is not None:
        return False
    first_query = length - s.num_queries
    return functools.reduce(
        jnp.logical_and, [(written == s.piece) & (start + s.piece <= first_query + 1) for _, _, start, written in pieces]
    )


def _seen(s: Shape, pieces, length, query_tile):
    """Which keys of a tile each query row may attend to, [64, tile]."""
    column = plgpu.broadcasted_iota(jnp.int32, (ROWS, s.tile), 1, layout=LAYOUT)
    seen = column < _of_piece(s, column, [p * s.piece + written for p, (*_, written) in enumerate(pieces)])
    if s.num_queries == 1 and s.window is None:
        return seen
    pos = column + _of_piece(s, column, [start - p * s.piece for p, (_, _, start, _) in enumerate(pieces)])
    row = plgpu.broadcasted_iota(jnp.int32, (ROWS, s.tile), 0, layout=LAYOUT)
    row = row + query_tile * ROWS if s.query_tiles > 1 else row
    query = lax.div(row, jnp.int32(s.group)) if s.num_queries > 1 else jnp.zeros_like(row)
    query_pos = length - s.num_queries + query
    seen = seen & (pos <= query_pos)
    if s.window is not None:
        sink_tokens, window_tokens = s.window
        seen = seen & ((pos < sink_tokens) | (pos > query_pos - window_tokens))
    return seen


def _lse_of_pieces(s: Shape, x):
    """LSE (natural log) of the keys of each piece, from logits in log2 units."""
    found = []
    for p in range(s.pieces):
        of_piece = x
        if s.pieces > 1:
            column = plgpu.broadcasted_iota(jnp.int32, x.shape, 1, layout=LAYOUT)
            of_piece = jnp.where((column >= p * s.piece) & (column < (p + 1) * s.piece), x, -jnp.inf)
        m = jnp.maximum(of_piece.max(axis=1), LOWEST)
        total = jnp.exp2(of_piece - lax.broadcast_in_dim(m, x.shape, [0])).sum(axis=1)
        found.append(natural_lse(m, total))
    return found


def natural_lse(m, total):
    """LSE in natural log from a maximum in log2 units and a sum relative to it; -inf where the sum is 0."""
    nothing = total == 0
    return jnp.where(nothing, -jnp.inf, (m + jnp.log2(jnp.where(nothing, 1.0, total))) / LOG2E)


def _forget_unwritten(s: Shape, v_tile, pieces):
    """Zero the values of a tile that were never written: they may be NaN, and 0 * NaN is NaN."""
    whole = functools.reduce(jnp.logical_and, [written == s.piece for *_, written in pieces])

    @pl.when(jnp.logical_not(whole))
    def _():
        token = plgpu.broadcasted_iota(jnp.int32, (s.tile, s.head_dim), 0, layout=LAYOUT)
        end = _of_piece(s, token, [p * s.piece + written for p, (*_, written) in enumerate(pieces)])
        v_tile[...] = jnp.where(token < end, v_tile[...], jnp.zeros_like(v_tile[...]))
        plgpu.commit_smem()
