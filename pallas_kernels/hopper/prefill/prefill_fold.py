"""Tiles of queries over tiles of paged keys, for Mosaic GPU (Hopper): the stage that all prefill kernels share.

A CTA has two folding warpgroups with 64 query rows each. A third warpgroup copies keys and values by TMA, straight from
their pages, into a ring in shared memory. Per tile of keys, each folding warpgroup multiplies q.k, folds it into an
online softmax in registers (base 2), and multiplies p.v. By a barrier the two take turns (ping-pong scheduling), so
that the softmax of one runs during the matrix work of the other (FlashAttention-3, arXiv 2407.08608). The op decides
which keys a tile of queries meets, and in which order: a `Walk`.

Tiles are folded in the order of the walk. A tile that a row may not see leaves that row's bits unchanged. So a row's
bits depend only on its own keys and their order, not on the other rows of its tile.

Few tiles of queries leave multiprocessors idle. Then the keys of each are split: of `splits` CTAs, number i folds tiles
i, i + splits, i + 2 * splits, ... of the walk, and `hopper.decode.split_merge` merges the parts in order. A part holds
the same keys however many follow them.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.hopper.decode import split_merge, wgmma_fold
from pallas_kernels.hopper.decode.wgmma_fold import LAYOUT, LOG2E, LOWEST, SWIZZLED, natural_lse

ROWS = 64
"""Query rows of a warpgroup: the rows of a `wgmma`."""

FOLDERS = 2
"""Warpgroups that fold tiles of keys; one more fetches them."""

TILE_ROWS = FOLDERS * ROWS
"""Query rows of a tile, which one CTA folds."""

PART_TILED = (plgpu.TilingTransform((8, 32)), plgpu.SwizzleTransform(128))


@dataclasses.dataclass(frozen=True)
class Shape:
    """Everything that the shared stage's code depends on.

    num_rows: query rows per sequence. row_stride: tokens between two of them. piece: consecutive tokens of a page in
    one copy, divides tile. tile: keys folded in at once. stages: tiles in flight. splits: CTAs that share the keys of a
    tile of queries.
    """

    batch: int
    num_rows: int
    row_stride: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    page_size: int
    piece: int
    tile: int
    stages: int
    sm_scale: float
    dtype: Any
    splits: int = 1

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.num_heads // self.num_kv_heads

    @property
    def pieces(self) -> int:
        """Copies per tile of keys."""
        return self.tile // self.piece

    @property
    def ping_pong(self) -> bool:
        """Whether the folding warpgroups take turns at the tensor cores. With head dim 64 softmax takes longer than the
        matrix work."""
        return self.head_dim > 64

    @property
    def query_tiles(self) -> int:
        """Tiles of queries per sequence and head."""
        return -(-self.num_rows // TILE_ROWS)

    @property
    def part_columns(self) -> int:
        """Columns of a part that go through shared memory together: what it has room for beside the ring."""
        return 64 if self.head_dim <= 128 else 32

    def scratch(self) -> dict[str, Any]:
        """Shared memory and barriers."""
        ring = (self.stages, self.tile, self.head_dim)
        parts = plgpu.SMEM((FOLDERS, ROWS, self.part_columns), jnp.float32, transforms=PART_TILED)
        return ({} if self.splits == 1 else {"part_s": parts}) | {
            "q_s": plgpu.SMEM((FOLDERS, ROWS, self.head_dim), self.dtype, transforms=SWIZZLED),
            "k_s": plgpu.SMEM(ring, self.dtype, transforms=SWIZZLED),
            "v_s": plgpu.SMEM(ring, self.dtype, transforms=SWIZZLED),
            "lse_s": plgpu.SMEM((FOLDERS, ROWS), jnp.float32),
            "q_bar": plgpu.Barrier(num_barriers=FOLDERS),
            "k_bar": plgpu.Barrier(num_arrivals=self.pieces, num_barriers=self.stages),
            "v_bar": plgpu.Barrier(num_arrivals=self.pieces, num_barriers=self.stages),
            "k_free": plgpu.Barrier(num_arrivals=FOLDERS, num_barriers=self.stages),
            "v_free": plgpu.Barrier(num_arrivals=FOLDERS, num_barriers=self.stages),
            "partial_bar": plgpu.Barrier(num_arrivals=self.pieces),
            "ping_pong": plgpu.Barrier(num_arrivals=FOLDERS),
        }


def unsupported(q, k, sm_scale: float) -> str | None:
    """Why the shared stage cannot take these queries and keys, or None if it can."""
    if q.dtype != k.dtype or q.dtype.name not in ("bfloat16", "float16"):
        return f"it multiplies bfloat16 or float16, q and k alike; got q {q.dtype}, k {k.dtype}"
    if q.shape[3] not in (64, 128, 256):
        return f"the head dim must be 64, 128 or 256, got {q.shape[3]}"
    if k.shape[2] % 64:
        return f"the page size must be a multiple of 64, got {k.shape[2]}"
    if sm_scale <= 0:
        return f"sm_scale must be positive, got {sm_scale}"
    return None


def shape_of(q, k, *, sm_scale: float, row_stride: int = 1, block_size: int | None = None) -> Shape:
    """The shape for query rows `[B, R, H, D]` and a pool `[N, K, P, D]`. block_size: tokens that a walk lists together;
    None: any."""
    batch, num_rows, num_heads, head_dim = q.shape
    num_kv_heads, page_size = k.shape[1:3]
    tile = 128 if head_dim <= 128 else 64
    piece = math.gcd(math.gcd(page_size, tile), block_size or tile)
    stages = 4 if head_dim == 64 else 2
    sizes = (num_heads, num_kv_heads, head_dim, page_size, piece, tile, stages)
    return Shape(batch, num_rows, row_stride, *sizes, sm_scale, q.dtype)


def plain_ends(table, lengths, page_size: int):
    """For each row of the batch `[B]`, the position before which every token is written and has a page."""
    missing = jnp.where(table < 0, jnp.arange(table.shape[1], dtype=jnp.int32), table.shape[1])
    return jnp.minimum(missing.min(axis=1) * page_size, lengths)


@dataclasses.dataclass(frozen=True)
class Walk:
    """Which keys a tile of queries meets.

    steps: tiles of keys, traced. starts: step -> position of the first key of each piece of a tile; negative: the piece
    has no keys. page_of: position -> its page, -1 where there is none. plain_end: positions before it are written and
    have pages. length: tokens written. unmasked: (step, starts, first position, last position) of 64 query rows ->
    whether each row sees all keys of the tile at or before it. seen: (step, key positions, query positions), arrays ->
    whether a query sees a key at or before it. Both None: all. packed: over packed pages, how many tiles are read as
    packed, before those of open pages, and the position before which they have keys. needed: first position of 64 query
    rows -> whether a row of them is needed; None: always. Rows that are not get zeros.
    """

    steps: Any
    starts: Callable
    page_of: Callable
    plain_end: Any
    length: Any
    unmasked: Callable | None = None
    seen: Callable | None = None
    packed: tuple[Any, Any] | None = None
    needed: Callable | None = None

    def part(self, number, parts: int) -> Walk:
        """Every `parts`-th tile of a walk over all keys, from tile `number` on. They are read from pages of numbers."""
        if self.unmasked is not None or self.seen is not None:
            raise ValueError("only a walk over all keys is split, got one that leaves keys out: its tiles may differ between queries")
        steps = lax.div(self.steps - number + (parts - 1), jnp.int32(parts))
        return dataclasses.replace(self, steps=steps, starts=lambda step: self.starts(number + step * parts), packed=None)


def window_masks(s: Shape, window: tuple[int, int]) -> dict[str, Callable]:
    """`unmasked` and `seen` of a walk whose rows see only sinks and window."""
    sink_tokens, window_tokens = window

    def unmasked(_, starts, first, last):
        return functools.reduce(jnp.logical_and, [(start + s.piece <= sink_tokens) | (start > last - window_tokens) for start in starts])

    def seen(_, pos, query_pos):
        return (pos < sink_tokens) | (pos > query_pos - window_tokens)

    return {"unmasked": unmasked, "seen": seen}


def places(s: Shape, walk: Walk, step):
    """Of each piece of a tile: its page (-1: none), its first token there, and how many of its keys are written, if it
    has a page."""
    found = []
    for start in walk.starts(step):
        there = (start >= 0) & (start < walk.length)
        page = jnp.where(there, walk.page_of(jnp.where(there, start, 0)), -1)
        token = lax.rem(jnp.maximum(start, 0), jnp.int32(s.page_size))
        found.append((page, token, jnp.where(there, walk.length - start, s.piece)))
    return tuple(found)


def copy(s: Shape, pool, head, target, bar, here) -> None:
    """Start copying a tile, keys or values, from its `places`. A piece without a page is read from past the end of the
    pool, where TMA returns zeros."""
    for p, (page, token, _) in enumerate(here):
        source = pool.at[jnp.where(page < 0, pool.shape[0], page), head, pl.ds(pl.multiple_of(token, s.piece), s.piece)]
        plgpu.copy_gmem_to_smem(source, target.at[pl.ds(p * s.piece, s.piece)], bar)


def when_free(s: Shape, n, free) -> None:
    """Wait until the folding warpgroups are done with the slot of tile n. free: the slot's barrier."""

    @pl.when(n >= s.stages)
    def _():
        plgpu.barrier_wait(free)


def partly_written(s: Shape, here):
    """Whether a tile has keys with a page that were not written."""
    return functools.reduce(jnp.logical_or, [count < s.piece for *_, count in here])


def announce(s: Shape, bar) -> None:
    """Say, in place of as many copies, that a tile is there."""
    for _ in range(s.pieces):
        plgpu.barrier_arrive(bar)


def copy_values(s: Shape, pool, head, slot, scratch, here) -> None:
    """Start copying a tile of values to a slot, as `copy`. Unwritten ones become zero."""
    v_bar, v_tile = scratch["v_bar"].at[slot], scratch["v_s"].at[slot]
    partial = partly_written(s, here)

    @pl.when(jnp.logical_not(partial))
    def _():
        copy(s, pool, head, v_tile, v_bar, here)

    @pl.when(partial)
    def _():
        copy(s, pool, head, v_tile, scratch["partial_bar"], here)
        plgpu.barrier_wait(scratch["partial_bar"])
        forget_unwritten(s, v_tile, here)
        announce(s, v_bar)


def fetch(s: Shape, walk: Walk, pools, head, scratch, begin=0) -> None:
    """By the third warpgroup: copy every tile of the walk from `begin` on, K and V, into the ring, as soon as a slot is
    free.

    Keys may be anything where they are masked.
    """

    def step(n, here):
        slot = lax.rem(n, jnp.int32(s.stages))
        after = places(s, walk, jnp.minimum(n + 1, walk.steps - 1))  # before the waits below, which hide the latency of its reads
        when_free(s, n, scratch["k_free"].at[slot])
        copy(s, pools[0], head, scratch["k_s"].at[slot], scratch["k_bar"].at[slot], here)
        when_free(s, n, scratch["v_free"].at[slot])
        copy_values(s, pools[1], head, slot, scratch, here)
        return after

    @pl.when(walk.steps > begin)
    def _():
        lax.fori_loop(begin, walk.steps, step, places(s, walk, jnp.int32(begin)))


def drain(s: Shape, walk: Walk, scratch) -> None:
    """After `fetch`: every phase of a barrier must have been waited for at the end."""
    for slot in range(s.stages):

        @pl.when(slot < walk.steps)
        def _(slot=slot):
            plgpu.barrier_wait(scratch["k_free"].at[slot])
            plgpu.barrier_wait(scratch["v_free"].at[slot])


def forget_unwritten(s: Shape, v_tile, here) -> None:
    """Zero the unwritten values of a tile that has arrived. They may be NaN, and 0 * NaN is NaN. 64 x 64 at a time,
    because registers are few."""
    for token, column in itertools.product(range(0, s.tile, 64), range(0, s.head_dim, 64)):
        corner = v_tile.at[pl.ds(token, 64), pl.ds(column, 64)]
        row = token + plgpu.broadcasted_iota(jnp.int32, (64, 64), 0, layout=LAYOUT)
        kept = row < _of_piece(s, row, [p * s.piece + count for p, (*_, count) in enumerate(here)])
        corner[...] = jnp.where(kept, corner[...], jnp.zeros_like(corner[...]))
    plgpu.commit_smem()


@dataclasses.dataclass(frozen=True)
class Aside:
    """What an op does with a tile of keys besides folding it in.

    weigh: used in place of `weigh_plainly`. beside: (step, report of `weigh`, state) -> state, called for every tile in
    order, while the q.k of the next tile is multiplied; first with step -1 and `report`. report, state: initial values.
    finish: takes the last state.
    """

    weigh: Callable
    beside: Callable
    report: Any
    state: Any
    finish: Callable


def fold(s: Shape, walk: Walk, warpgroup, first, scratch, aside: Aside | None = None, before=None):
    """By a folding warpgroup: its 64 rows over every tile of the walk. Returns (acc [64, D], m [64] in log2 units,
    total [64]), all float32.

    first: position of its first row. The rows of `q_s` must have arrived. before: what it returned over the tiles
    before; None: no keys.
    """
    weigh = aside.weigh if aside else functools.partial(weigh_plainly, s)
    q_s, k_s, v_s = scratch["q_s"].at[warpgroup], scratch["k_s"], scratch["v_s"]
    offer_turn, await_turn = ping_pong_barrier(s, scratch)

    def change_over():
        offer_turn()
        await_turn()

    def step(n, carry):
        acc, m, total, starts, report, state = carry
        slot = lax.rem(n, jnp.int32(s.stages))
        after = walk.starts(jnp.minimum(n + 1, walk.steps - 1))

        def scores(acc_ref):
            plgpu.wgmma(acc_ref, q_s, k_s.at[slot].transpose((1, 0)))
            change_over()
            after_last = aside.beside(n - 1, report, state) if aside else state
            return acc_ref[...], after_last

        x, state = pl.run_scoped(scores, plgpu.ACC((ROWS, s.tile), jnp.float32))
        plgpu.barrier_arrive(scratch["k_free"].at[slot])
        x = lax.cond(_plain(s, walk, n, starts, first), lambda x: x, functools.partial(_masked, s, walk, n, starts, first), x)

        new_m, of_tile, weights, report = weigh(x, m)
        alpha = jnp.exp2(m - new_m)
        acc *= lax.broadcast_in_dim(alpha, acc.shape, [0])
        total = total * alpha + of_tile
        acc, total, new_m, weights = lax.optimization_barrier((acc, total, new_m, weights))
        offer_turn()
        plgpu.barrier_wait(scratch["v_bar"].at[slot])
        await_turn()

        def values(acc_ref):
            for part, p16 in enumerate(weights):
                plgpu.wgmma(acc_ref, p16, v_s.at[slot, pl.ds(part * p16.shape[1], p16.shape[1])])

            @pl.when(n + 1 < walk.steps)
            def _():
                plgpu.barrier_wait(scratch["k_bar"].at[lax.rem(n + 1, jnp.int32(s.stages))])

        acc = pl.run_state(values)(plgpu.ACC.init(acc))
        plgpu.barrier_arrive(scratch["v_free"].at[slot])
        return acc, new_m, total, after, report, state

    @pl.when(walk.steps > 0)
    def _():
        plgpu.barrier_wait(scratch["k_bar"].at[0])

    pl.when(warpgroup == 1)(change_over)
    first_aside = (aside.report, aside.state) if aside else ((), ())
    begin = (*(no_keys(s) if before is None else before), walk.starts(jnp.int32(0)), *first_aside)
    acc, m, total, _, report, state = lax.fori_loop(0, walk.steps, step, begin)
    pl.when(warpgroup == 0)(change_over)
    if aside:
        aside.finish(aside.beside(walk.steps - 1, report, state))
    return acc, m, total


def no_keys(s: Shape):
    """What `fold` returns for rows that see no key."""
    return plgpu.layout_cast(jnp.zeros((ROWS, s.head_dim), jnp.float32), LAYOUT), all_rows(LOWEST), all_rows(0.0)


def all_rows(value: float):
    """The same number for each of a warpgroup's rows."""
    return plgpu.layout_cast(jnp.full((ROWS,), value, jnp.float32), LAYOUT.reduce(1))


def weigh_plainly(s: Shape, x, m):
    """A tile's weights from its logits (before scaling, -inf where masked) and the maximum so far, in log2 units.

    Returns the new maximum, the sum of weights relative to it, the weights themselves in parts of consecutive keys, and
    a report.
    """
    new_m = jnp.maximum(m, x.max(axis=1) * (s.sm_scale * LOG2E))
    p = jnp.exp2(x * (s.sm_scale * LOG2E) - lax.broadcast_in_dim(new_m, x.shape, [0]))
    return new_m, p.sum(axis=1), (p.astype(s.dtype),), ()


def _plain(s: Shape, walk: Walk, step, starts, first):
    """Whether 64 rows from position `first` on see every key of a tile."""
    plain = True if walk.unmasked is None else walk.unmasked(step, starts, first, first + (ROWS - 1) * s.row_stride)
    for start in starts:
        plain &= (start >= 0) & (start + s.piece <= walk.plain_end) & (start + (s.piece - 1) <= first)
    return plain


def _of_piece(s: Shape, column, values):
    """Per column of a tile, the value of its piece."""
    found = jnp.broadcast_to(values[-1], column.shape)
    for p in range(s.pieces - 2, -1, -1):
        found = jnp.where(column < (p + 1) * s.piece, values[p], found)
    return found


def _written(s: Shape, walk: Walk, starts):
    """How many keys of each piece are written and have a page."""
    counts = []
    for start in starts:
        there = (start >= 0) & (start < walk.length)
        page = walk.page_of(jnp.where(there, start, 0))
        counts.append(jnp.where(there & (page >= 0), jnp.minimum(walk.length - start, s.piece), 0))
    return counts


def _masked(s: Shape, walk: Walk, step, starts, first, x):
    """Logits of a tile with -inf where a row does not see a key."""
    column = plgpu.broadcasted_iota(jnp.int32, x.shape, 1, layout=LAYOUT)
    row = plgpu.broadcasted_iota(jnp.int32, x.shape, 0, layout=LAYOUT)
    query_pos = first + row * s.row_stride
    written = _written(s, walk, starts)
    pos = column + _of_piece(s, column, [start - p * s.piece for p, start in enumerate(starts)])
    seen = (column < _of_piece(s, column, [p * s.piece + count for p, count in enumerate(written)])) & (pos <= query_pos)
    if walk.seen is not None:
        seen &= walk.seen(step, pos, query_pos)
    return jnp.where(seen, x, -jnp.inf)


def store(s: Shape, folded, warpgroup, first_row, row, head, scratch, out_ref, lse_ref) -> None:
    """By a folding warpgroup: write its result to rows first_row, ... of `outputs`."""
    acc, m, total = folded
    q_s, lse_s = scratch["q_s"].at[warpgroup], scratch["lse_s"].at[warpgroup]
    share = 1.0 / jnp.where(total == 0, 1.0, total)
    q_s[...] = (acc * lax.broadcast_in_dim(share, acc.shape, [0])).astype(s.dtype)
    lse_s[...] = natural_lse(m, total)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(q_s, out_ref.at[row, pl.ds(first_row, ROWS), head])
    plgpu.copy_smem_to_gmem(lse_s, lse_ref.at[row, head, pl.ds(first_row, ROWS)])
    plgpu.wait_smem_to_gmem(0)


def store_part(s: Shape, folded, some, warpgroup, first_row, row, head, number, scratch, out_ref, lse_ref) -> None:
    """By a folding warpgroup: write part `number` of its rows to `outputs` with splits, -inf where a row sees none of
    its keys.

    some: whether the part has any keys. If not, only its LSE is written, but of part 0 the zeros, too, as
    `split_merge.merge` wants it.
    """
    acc, m, total = folded
    part_s, lse_s = scratch["part_s"].at[warpgroup], scratch["lse_s"].at[warpgroup]
    acc *= lax.broadcast_in_dim(1.0 / jnp.where(total == 0, 1.0, total), acc.shape, [0])
    lse_s[...] = natural_lse(m, total)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(lse_s, lse_ref.at[row, head, number, pl.ds(first_row, ROWS)])

    @pl.when(some | (number == 0))
    def _():
        for column in range(0, s.head_dim, s.part_columns):
            part_s[...] = lax.slice(acc, (0, column), (ROWS, column + s.part_columns))
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(part_s, out_ref.at[row, head, number, pl.ds(first_row, ROWS), pl.ds(column, s.part_columns)])
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    plgpu.wait_smem_to_gmem(0)


def merge_parts(s: Shape, out, lse):
    """The parts of all splits merged in order: out `[B, R padded to whole tiles, H, D]`, lse `[B, R padded to whole
    tiles, H]`."""
    rows = s.query_tiles * TILE_ROWS
    sizes = (s.batch, rows, s.num_heads, s.num_heads, s.head_dim, s.page_size, s.page_size)
    return split_merge.merge(wgmma_fold.Shape(*sizes, None, None, s.sm_scale, s.dtype, s.tile, s.stages, 1, s.splits), out, lse)


def outputs(s: Shape) -> list[jax.ShapeDtypeStruct]:
    """Out `[B, R padded to 8, H, D]` and lse `[B, H, R padded to whole tiles]`, because TMA needs the padding. With
    splits, their parts, float32: `[B, H, splits, R padded to whole tiles, D]` and `[B, H, splits, R padded to whole
    tiles]`."""
    if s.splits > 1:
        parts = (s.batch, s.num_heads, s.splits, s.query_tiles * TILE_ROWS)
        return [jax.ShapeDtypeStruct((*parts, s.head_dim), jnp.float32), jax.ShapeDtypeStruct(parts, jnp.float32)]
    return [
        jax.ShapeDtypeStruct((s.batch, -(-s.num_rows // 8) * 8, s.num_heads, s.head_dim), s.dtype),
        jax.ShapeDtypeStruct((s.batch, s.num_heads, s.query_tiles * TILE_ROWS), jnp.float32),
    ]


def padded(q):
    """Queries `[B, R, H, D]` with R padded to 8, as TMA needs it."""
    return jnp.pad(q, ((0, 0), (0, -q.shape[1] % 8), (0, 0), (0, 0)))


def cut(s: Shape, out, lse):
    """`outputs` as `[B, R, H, D]` and `[B, R, H]`."""
    return out[:, : s.num_rows], lse[:, :, : s.num_rows].swapaxes(1, 2)


@dataclasses.dataclass(frozen=True)
class Fetcher:
    """How tiles of keys and values come to the ring. registers: per thread of a folding and of the fetching warpgroup.
    bring: what the fetching warpgroup does, of (`Shape`, `Walk`, pools, KV head, scratch), like `fetch`."""

    registers: tuple[int, int]
    bring: Callable

    def __post_init__(self):
        """A CTA of 384 threads starts with 168 registers a thread, as 65536 / 384 is rounded down to a multiple of 8.
        Warpgroups that ask for more than all of these together wait for ever."""
        if FOLDERS * self.registers[0] + self.registers[1] > (FOLDERS + 1) * 168:
            raise ValueError(f"registers {self.registers}: {FOLDERS} x the first + the second must be at most {(FOLDERS + 1) * 168}")


PLAIN = Fetcher((232, 40), fetch)
"""Pools are keys and values."""


@dataclasses.dataclass(frozen=True)
class Relay:
    """A launch that folds on from what launches before left in memory. take: (references of the others, row of the
    batch, head, first of 64 query rows) -> what `fold` gave before. leave: (`Walk`, what `fold` gives, and the same) ->
    None, in place of `outputs`, for the next launch; None: this is the last one."""

    take: Callable
    leave: Callable | None


def launch(
    s: Shape,
    name: str,
    walk_of: Callable,
    aside_of: Callable | None = None,
    more_outputs: Sequence = (),
    fetcher: Fetcher = PLAIN,
    relay: Relay | None = None,
    interpret=None,
):
    """A kernel that folds every tile of queries, as a function of (`padded` queries, pools, *others) -> (*`outputs`,
    *more_outputs). With splits, a CTA folds a part of a walk, and `outputs` are for `merge_parts`.

    walk_of: (references of the others, row of the batch, head, tile) -> (`Walk`, position of the tile's first query).
    aside_of: (`Walk`, row of the batch, head, first of 64 query rows, its position, references of more_outputs) ->
    `Aside`. more_outputs: shapes and dtypes. name: of the kernel, in profiles. pools: arrays, a pytree that the fetcher
    knows. relay: for a walk that several launches fold.
    """

    def run(q, pools, *others):
        leaves, structure = jax.tree.flatten(pools)
        own = outputs(s) if relay is None or relay.leave is None else []

        def kernel(q_ref, *refs, **scratch):
            pools, refs = jax.tree.unflatten(structure, refs[: len(leaves)]), refs[len(leaves) :]
            others_refs, results, more_refs = refs[: len(others)], refs[len(others) :][: len(own)], refs[len(others) + len(own) :]
            head, row, warpgroup = (lax.axis_index(name) for name in ("head", "row", "warpgroup"))
            tile = s.query_tiles - 1 - lax.axis_index("tile")  # the longest walks first
            number = lax.axis_index("split") if s.splits > 1 else None

            def walk_here():
                walk, position = walk_of(others_refs, row, head, tile)
                return (walk if number is None else walk.part(number, s.splits)), position

            @pl.when(warpgroup < FOLDERS)
            def _():
                plgpu.set_max_registers(fetcher.registers[0], action="increase")
                walk, position = walk_here()
                first_row = (tile * FOLDERS + warpgroup) * ROWS
                q_bar = scratch["q_bar"].at[warpgroup]
                plgpu.copy_gmem_to_smem(q_ref.at[row, pl.ds(first_row, ROWS), head], scratch["q_s"].at[warpgroup], q_bar)
                plgpu.barrier_wait(q_bar)
                first = position + warpgroup * (ROWS * s.row_stride)
                aside = aside_of(walk, row, head, first_row, first, more_refs) if aside_of else None

                def passing():
                    idle_fold(s, walk.steps, warpgroup, scratch)
                    return no_keys(s)

                place = others_refs, row, head, first_row
                before = None if relay is None else relay.take(*place)
                folding = functools.partial(fold, s, walk, warpgroup, first, scratch, aside, before)
                folded = folding() if walk.needed is None else lax.cond(walk.needed(first), folding, passing)
                if not own:
                    relay.leave(walk, folded, *place)
                elif number is None:
                    store(s, folded, warpgroup, first_row, row, head, scratch, *results)
                else:
                    store_part(s, folded, walk.steps > 0, warpgroup, first_row, row, head, number, scratch, *results)

            @pl.when(warpgroup == FOLDERS)
            def _():
                plgpu.set_max_registers(fetcher.registers[1], action="decrease")
                walk, _ = walk_here()
                fetcher.bring(s, walk, pools, lax.div(head, jnp.int32(s.group)), scratch)
                drain(s, walk, scratch)

        kernel.__name__ = name
        return plgpu.kernel(
            kernel,
            out_type=[*own, *more_outputs],
            grid=(s.num_heads, s.query_tiles, *((s.splits,) if s.splits > 1 else ()), s.batch),
            grid_names=("head", "tile", *(("split",) if s.splits > 1 else ()), "row"),
            num_threads=FOLDERS + 1,
            thread_name="warpgroup",
            scratch_types=s.scratch(),
            compiler_params=plgpu.CompilerParams(approx_math=True),
            interpret=interpret,
        )(q, *leaves, *others)

    return run


def ping_pong_barrier(s: Shape, scratch) -> tuple[Callable, Callable]:
    """How a folding warpgroup offers the other one its turn, and awaits its own."""

    def offer():
        if s.ping_pong:
            plgpu.barrier_arrive(scratch["ping_pong"])

    def await_own():
        if s.ping_pong:
            plgpu.barrier_wait(scratch["ping_pong"])

    return offer, await_own


def idle_fold(s: Shape, steps, warpgroup, scratch) -> None:
    """By a folding warpgroup of whose rows none is needed: wait and arrive as `fold` does over so many tiles of keys,
    without which the other warpgroups would wait for ever."""
    offer_turn, await_turn = ping_pong_barrier(s, scratch)

    def change_over():
        offer_turn()
        await_turn()

    def step(n, nothing):
        slot = lax.rem(n, jnp.int32(s.stages))
        change_over()
        plgpu.barrier_arrive(scratch["k_free"].at[slot])
        offer_turn()
        plgpu.barrier_wait(scratch["v_bar"].at[slot])
        await_turn()

        @pl.when(n + 1 < steps)
        def _():
            plgpu.barrier_wait(scratch["k_bar"].at[lax.rem(n + 1, jnp.int32(s.stages))])

        plgpu.barrier_arrive(scratch["v_free"].at[slot])
        return nothing

    @pl.when(steps > 0)
    def _():
        plgpu.barrier_wait(scratch["k_bar"].at[0])

    pl.when(warpgroup == 1)(change_over)
    lax.fori_loop(0, steps, step, ())
    pl.when(warpgroup == 0)(change_over)
