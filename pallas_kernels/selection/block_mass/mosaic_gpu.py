"""block_mass in Pallas Mosaic GPU (Hopper): a CTA keeps a tile of keys in registers while the queries of one head
stream past.

Each folding warpgroup of a CTA has 64 keys, the left operand of its `wgmma`. One more warpgroup copies tiles of queries
and their LSE by TMA into a ring in shared memory, which all of them read. Per tile of queries a warpgroup multiplies
k.q, takes exp2(logit - LSE) and adds up each key's row. With head dim 128, products and exponentials take equally long.
So a barrier makes the warpgroups take turns at the tensor cores, as in FlashAttention-3 (arXiv 2407.08608), and the
exponentials of one run during the products of another. Nothing is rescaled, because the LSE is known from the start.
Only tiles at the causal border and at the first and last query that counts are masked. Sums run in the order of the
tiles of queries, in a fixed order within a tile, and are written once: the same call gives the same bits.

Memory traffic: keys once per query head; queries once per tile of keys and head, from L2, because tiles of one head run
side by side. Source: H2O (arXiv 2306.14048); SnapKV (arXiv 2404.14469).
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.hopper.decode.wgmma_fold import LAYOUT, LOG2E, SWIZZLED
from pallas_kernels.hopper.prefill import prefill_fold
from pallas_kernels.selection.block_mass.api import Call

KEYS = 64
"""Keys of a folding warpgroup: the rows of a `wgmma`."""

QUERIES = 128
"""Queries of a tile."""

BY_ROW, BY_COLUMN = LAYOUT.reduce(1), LAYOUT.reduce(0)
"""Register layouts of the sums of a warpgroup's keys, and of the LSE of a tile's queries."""


@dataclasses.dataclass(frozen=True)
class Shape:
    """Everything that the kernel's code depends on. num_pieces: of 64 keys, that a page table can name. unit: keys that
    are added up."""

    batch: int
    num_queries: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    num_pages: int
    page_size: int
    num_pieces: int
    unit: int
    sm_scale: float
    dtype: Any

    @property
    def folders(self) -> int:
        """Warpgroups that fold. With head dim 256, a third one's keys would not fit into registers."""
        return 3 if self.head_dim <= 128 else 2

    @property
    def registers(self) -> tuple[int, int]:
        """Registers per thread of those that fold, and of the one that fetches: what 65536 of them allow."""
        return (160, 32) if self.folders == 3 else (232, 40)

    @property
    def stages(self) -> int:
        """Tiles of queries in flight."""
        return {64: 6, 128: 4, 256: 2}[self.head_dim]

    @property
    def key_tiles(self) -> int:
        """CTAs per head of a sequence."""
        return -(-self.num_pieces // self.folders)

    @property
    def ping_pong(self) -> bool:
        """Whether warpgroups take turns at the tensor cores. With head dim 64, exponentials take twice as long as the
        products."""
        return self.head_dim > 64

    def scratch(self) -> dict[str, Any]:
        """Shared memory and barriers."""
        return {
            "k_s": plgpu.SMEM((self.folders, KEYS, self.head_dim), self.dtype, transforms=SWIZZLED),
            "q_s": plgpu.SMEM((self.stages, QUERIES, self.head_dim), self.dtype, transforms=SWIZZLED),
            "lse_s": plgpu.SMEM((self.stages, QUERIES), jnp.float32),
            "mass_s": plgpu.SMEM((self.folders, KEYS), jnp.float32),
            "k_bar": plgpu.Barrier(num_barriers=self.folders),
            "q_bar": plgpu.Barrier(num_arrivals=2, num_barriers=self.stages),
            "q_free": plgpu.Barrier(num_arrivals=self.folders, num_barriers=self.stages),
            "ping_pong": plgpu.Barrier(num_barriers=self.folders),
        }


def unsupported(call: Call, q, pages, table, starts, lengths, lse, first_query) -> str | None:
    """Why this kernel cannot take this valid input, or None if it can."""
    if call.block_size % 16:
        return f"block_size must be a multiple of 16, got {call.block_size}"
    if pages.packed:
        return f"it does not unpack pages; keys are {pages.k_format.codes}"
    return prefill_fold.unsupported(q, pages.k, call.sm_scale)


def block_mass(call: Call, q, pages, table, starts, lengths, lse, first_query):
    """See `pallas_kernels.block_mass`; takes no config."""
    reason = unsupported(call, q, pages, table, starts, lengths, lse, first_query)
    if reason:
        raise NotImplementedError(f"block_mass 'mosaic_gpu': {reason}")
    return _sum_up(call, q, pages.k, table, starts, lengths, lse, first_query)


@functools.partial(jax.jit, static_argnames="call")
def _sum_up(call: Call, q, k, table, starts, lengths, lse, first_query):
    num_pages, num_kv_heads, page_size, head_dim = k.shape
    sizes = (*q.shape[:3], num_kv_heads, head_dim, num_pages, page_size, table.shape[1] * page_size // KEYS)
    s = Shape(*sizes, math.gcd(call.block_size, KEYS), call.sm_scale, q.dtype)
    ends = jnp.minimum(lengths, starts + s.num_queries)
    arrays = prefill_fold.padded(q), k, _lse_that_counts(starts, ends, lse, first_query)
    mass = launch(s)(*arrays, table, starts, ends, lengths, first_query)
    mass = mass[:, :, : s.num_pieces * (KEYS // s.unit)]
    return mass.reshape(s.batch, s.num_heads, -1, call.block_size // s.unit).sum(3)


def _lse_that_counts(starts, ends, lse, first_query):
    """LSE in log2 units `[B, H, T padded to whole tiles]`, infinite where a query does not count: exp2(logit - inf) is
    0."""
    position = starts[:, None] + jnp.arange(lse.shape[1], dtype=jnp.int32)
    counts = ((position >= first_query[:, None]) & (position < ends[:, None]))[..., None] & (lse != -jnp.inf)
    lse = jnp.where(counts, lse * LOG2E, jnp.inf).swapaxes(1, 2)
    return jnp.pad(lse, ((0, 0), (0, 0), (0, -lse.shape[2] % QUERIES)), constant_values=jnp.inf)


@dataclasses.dataclass(frozen=True)
class Walk:
    """The work of a CTA, traced. begin: the first tile of queries. steps: how many tiles.

    pages: for each warpgroup, the page of its keys, -1 if there is none. key: position of the first key. start: of the
    first query. first, end: positions of the queries that count, first <= p < end.
    """

    begin: Any
    steps: Any
    pages: tuple
    key: Any
    start: Any
    first: Any
    end: Any


def _walk(s: Shape, refs, row, tile) -> Walk:
    """The tiles of queries from the first that counts and sees a key to the last. There are none if no key has a
    page."""
    table_ref, starts_ref, ends_ref, lengths_ref, first_ref = refs
    start, end, first, length = starts_ref[row], ends_ref[row], first_ref[row], lengths_ref[row]
    key, pages = tile * (s.folders * KEYS), []
    for w in range(s.folders):
        own = key + w * KEYS
        there = own < jnp.minimum(length, s.num_pieces * KEYS)
        page = table_ref[row, lax.div(jnp.where(there, own, 0), jnp.int32(s.page_size))]
        pages.append(jnp.where(there, page, -1))
    begin = lax.div(jnp.maximum(jnp.maximum(key, first) - start, 0), jnp.int32(QUERIES))
    steps = lax.div(jnp.maximum(end - start, 0) + (QUERIES - 1), jnp.int32(QUERIES)) - begin
    some = functools.reduce(jnp.logical_or, [page >= 0 for page in pages])
    return Walk(begin, jnp.where(some, jnp.maximum(steps, 0), 0), tuple(pages), key, start, first, end)


def _fetch(s: Shape, walk: Walk, row, head, q_ref, k_ref, lse_ref, scratch) -> None:
    """By the last warpgroup: copy the keys, then every tile of queries as soon as a slot is free. Keys without a page
    are read as zeros, from past the end of the pool."""
    kv_head = lax.div(head, jnp.int32(s.num_heads // s.num_kv_heads))
    for w, page in enumerate(walk.pages):
        token = lax.rem(walk.key + w * KEYS, jnp.int32(s.page_size))
        source = k_ref.at[jnp.where(page < 0, s.num_pages, page), kv_head, pl.ds(pl.multiple_of(token, KEYS), KEYS)]
        plgpu.copy_gmem_to_smem(source, scratch["k_s"].at[w], scratch["k_bar"].at[w])

    def step(n, _):
        slot, query = lax.rem(n, jnp.int32(s.stages)), pl.multiple_of((walk.begin + n) * QUERIES, QUERIES)

        @pl.when(n >= s.stages)
        def _():
            plgpu.barrier_wait(scratch["q_free"].at[slot])

        q_bar = scratch["q_bar"].at[slot]
        plgpu.copy_gmem_to_smem(q_ref.at[row, pl.ds(query, QUERIES), head], scratch["q_s"].at[slot], q_bar)
        plgpu.copy_gmem_to_smem(lse_ref.at[row, head, pl.ds(query, QUERIES)], scratch["lse_s"].at[slot], q_bar)
        return ()

    lax.fori_loop(0, walk.steps, step, ())
    for slot in range(s.stages):  # every phase of a barrier must have been waited for at the end

        @pl.when(slot < walk.steps)
        def _(slot=slot):
            plgpu.barrier_wait(scratch["q_free"].at[slot])


def _fold(s: Shape, walk: Walk, warpgroup, scratch):
    """By a folding warpgroup: the masses of its 64 keys, float32."""
    turn, next_one = scratch["ping_pong"], lax.rem(warpgroup + 1, jnp.int32(s.folders))
    key = walk.key + warpgroup * KEYS

    @pl.when(walk.steps > 0)
    def _():
        plgpu.barrier_wait(scratch["k_bar"].at[warpgroup])

    keys = scratch["k_s"][warpgroup]

    def step(n, sums):
        slot, first = lax.rem(n, jnp.int32(s.stages)), walk.start + (walk.begin + n) * QUERIES
        plgpu.barrier_wait(scratch["q_bar"].at[slot])
        if s.ping_pong:
            pl.when((n > 0) | (warpgroup > 0))(lambda: plgpu.barrier_wait(turn.at[warpgroup]))

        def products(acc_ref):
            plgpu.wgmma(acc_ref, keys, scratch["q_s"].at[slot].transpose((1, 0)))
            if s.ping_pong:
                plgpu.barrier_arrive(turn.at[next_one])
            return acc_ref[...]

        x = pl.run_scoped(products, plgpu.ACC((KEYS, QUERIES), jnp.float32))
        x = lax.cond(_plain(walk, key, first), lambda x: x, functools.partial(_masked, walk, key, first), x)
        lse = plgpu.layout_cast(scratch["lse_s"][slot], BY_COLUMN)
        sums += jnp.exp2(x * (s.sm_scale * LOG2E) - lax.broadcast_in_dim(lse, x.shape, [1])).sum(axis=1)
        plgpu.commit_smem()  # TMA writes next where this read
        plgpu.barrier_arrive(scratch["q_free"].at[slot])
        return sums

    sums = lax.fori_loop(0, walk.steps, step, plgpu.layout_cast(jnp.zeros((KEYS,), jnp.float32), BY_ROW))
    if s.ping_pong:  # the turn that the last warpgroup passed on
        pl.when((walk.steps > 0) & (warpgroup == 0))(lambda: plgpu.barrier_wait(turn.at[warpgroup]))
    return sums


def _plain(walk: Walk, key, first):
    """Whether each query of a tile counts and sees each of 64 keys."""
    return (key + (KEYS - 1) <= first) & (walk.first <= first) & (first + QUERIES <= walk.end)


def _masked(walk: Walk, key, first, x):
    """Logits of a tile, with -inf where a query does not count or does not see the key, whatever the key holds."""
    row, column = (plgpu.broadcasted_iota(jnp.int32, x.shape, axis, layout=LAYOUT) for axis in (0, 1))
    seen = (column >= jnp.maximum(row + key, walk.first) - first) & (column < walk.end - first)
    return jnp.where(seen, x, -jnp.inf)


def _store(s: Shape, walk: Walk, sums, warpgroup, place, scratch, out_ref) -> None:
    """By a folding warpgroup: write the masses of its keys, added up in order by `unit`; 0 where there is no page."""
    mass_s, (row, head, piece) = scratch["mass_s"].at[warpgroup], place
    page = functools.reduce(lambda found, w: jnp.where(warpgroup == w, walk.pages[w], found), range(1, s.folders), walk.pages[0])
    mass_s[...] = sums
    for u in range(KEYS // s.unit):
        total = mass_s[u * s.unit]
        for i in range(1, s.unit):
            total += mass_s[u * s.unit + i]
        out_ref[row, head, piece * (KEYS // s.unit) + u] = jnp.where(page >= 0, total, 0.0)


def launch(s: Shape, interpret=None):
    """The kernel, as a function of (padded queries, k, lse in log2 units, page table, starts, ends, lengths,
    first_query) -> mass `[B, H, pieces * 64 / unit]`, where pieces fill whole CTAs."""

    def block_mass_kernel(q_ref, k_ref, lse_ref, *refs, **scratch):
        row, head, tile, warpgroup = (lax.axis_index(name) for name in ("row", "head", "tile", "warpgroup"))
        *refs, out_ref = refs

        @pl.when(warpgroup < s.folders)
        def _():
            plgpu.set_max_registers(s.registers[0], action="increase")
            walk = _walk(s, refs, row, tile)
            sums = _fold(s, walk, warpgroup, scratch)
            _store(s, walk, sums, warpgroup, (row, head, tile * s.folders + warpgroup), scratch, out_ref)

        @pl.when(warpgroup == s.folders)
        def _():
            plgpu.set_max_registers(s.registers[1], action="decrease")
            walk = _walk(s, refs, row, tile)
            pl.when(walk.steps > 0)(lambda: _fetch(s, walk, row, head, q_ref, k_ref, lse_ref, scratch))

    return plgpu.kernel(
        block_mass_kernel,
        out_type=jax.ShapeDtypeStruct((s.batch, s.num_heads, s.key_tiles * s.folders * (KEYS // s.unit)), jnp.float32),
        grid=(s.batch, s.num_heads, s.key_tiles),
        grid_names=("row", "head", "tile"),
        num_threads=s.folders + 1,
        thread_name="warpgroup",
        scratch_types=s.scratch(),
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret,
    )
