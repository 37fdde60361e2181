"""select_blocks for TPU: one kernel scores the index and lists the best blocks, a query at a time.

Scores. The page table is scalar-prefetched and the index stays in HBM. A grid cell walks the pages before the first
local block in tiles of `Config.tile_rows` index rows, with one copy of `[K, P/bs, R, D]` per page into one of two slots
in VMEM. While a tile is scored, the next is being copied. As in `xla.py`, bounds are scored by one matrix product:
sum_d max(q_d max_d, q_d min_d) = relu(q) . max + min(q, 0) . min. The rows of an index page, as they lie, are the
columns of the product; a block's score stands in the column of its first row.

Exact top-k. A score becomes an int32 in the same order, or the least int32 where the block is no candidate. The k-th
best is found bit by bit by counting, in 32 passes over the scores in VMEM. The kernel writes the list in ascending
order. Each of k times it takes the lowest block that is after the last one found and scores above the k-th best, or
equal to it while ties may still be kept. There is no sort.

Memory traffic, per query: the index of the pages before the first local block that the table names, once, `K * P/bs * R
* D * itemsize` bytes each. Vector memory: 4 bytes per index row of the table and KV head, plus two tiles. All heads and
  queries are independent.

Source: Quest (ICML 2024) for bounds; "Attention Pays Its Bill" (BRL-2026-07) for the list.
"""

from __future__ import annotations

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.lax import div, rem  # `//` and `%` of traced values also handle signs, and lowering that needs the chip's generation

from pallas_kernels.core import dispatch
from pallas_kernels.selection.select_blocks.api import Call
from pallas_kernels.tpu.memory import LANES, QUERY_TILE, SMEM_BYTES, SUBLANES, VMEM_BYTES, padded

_NO = jnp.iinfo(jnp.int32).min  # below every score
_NONE = jnp.iinfo(jnp.int32).max  # sorts behind every block


@dataclasses.dataclass(frozen=True)
class Config:
    """tile_rows: index rows per KV head that are copied and scored together, rounded down to whole pages and a multiple
    of 128, but at least the smallest such number."""

    tile_rows: int = 512

    def __post_init__(self):
        if not isinstance(self.tile_rows, int) or self.tile_rows < 1:
            raise ValueError(f"tile_rows must be a positive int, got {self.tile_rows!r}")


@dataclasses.dataclass(frozen=True)
class _Sizes:
    """Values known at compile time. query_rows: rows of q per query (G, or 1 for the mean). rows: these, padded to
    whole tiles. index_rows: of a block. page_rows: of a page. per_page: blocks of a page. width: of the page table."""

    kind: str
    kv_heads: int
    num_queries: int
    query_rows: int
    rows: int
    index_rows: int
    width: int
    page_size: int
    block_size: int
    per_page: int
    page_rows: int
    tile_pages: int
    k: int
    sink: int
    local: int
    listed: int

    @property
    def tiles(self) -> int:
        return -(-self.width // self.tile_pages)

    @property
    def tile_rows(self) -> int:
        return self.tile_pages * self.page_rows


def sizes_of(call: Call, q, index, table, config) -> _Sizes:
    kind, page_size, block_size = call.kind, call.page_size, call.block_size
    (_, num_queries, num_heads, _), kv_heads, page_rows = q.shape, index.shape[1], index.shape[2] * index.shape[3]
    query_rows = num_heads // kv_heads if kind == "bounds" else 1
    unit = LANES // math.gcd(LANES, page_rows)
    return _Sizes(
        kind=kind,
        kv_heads=kv_heads,
        num_queries=num_queries,
        query_rows=query_rows,
        rows=padded(query_rows, QUERY_TILE),
        index_rows=index.shape[3],
        width=table.shape[1],
        page_size=page_size,
        block_size=block_size,
        per_page=page_size // block_size,
        page_rows=page_rows,
        tile_pages=unit * max(1, (config or Config()).tile_rows // (unit * page_rows)),
        k=call.k,
        sink=call.sink,
        local=call.local,
        listed=call.width,
    )


def unsupported(call: Call, q, index, table, lengths, *, config=None) -> str | None:
    """Why this kernel cannot take this valid input, with the values, or None if it can. Uses only shapes and dtypes."""
    sizes = sizes_of(call, q, index, table, config)
    arrays = dispatch.signature(q=q, index=index, table=table)
    if not {q.dtype.name, index.dtype.name} <= {"float32", "bfloat16"}:
        return f"TPUs compute in bfloat16 and float32 only; got {arrays}"
    if q.shape[3] % LANES:
        return f"head dim {q.shape[3]} is not a multiple of {LANES}, and XLA would copy the whole index to pad it; got {arrays}"
    scalars = 4 * q.shape[0] * (sizes.width + 1)
    if scalars > SMEM_BYTES:
        return f"the page table takes {scalars} bytes of scalar memory, at most {SMEM_BYTES} are available; {arrays}"
    vectors = vmem_bytes(sizes, q, index)
    if vectors > VMEM_BYTES:
        return f"scores and buffers take {vectors} bytes of vector memory, at most {VMEM_BYTES} are available; {arrays}"
    return None


def vmem_bytes(sizes: _Sizes, q, index) -> int:
    """The scores; both slots, row pairs padded to tiles; q and the list, double-buffered; a head's rows in float32 and
    their products."""
    head_dim, heads, wide = q.shape[3], padded(sizes.kv_heads, SUBLANES), 4
    scores = wide * sizes.tiles * heads * padded(sizes.tile_rows, LANES)
    slots = 2 * sizes.kv_heads * sizes.tile_rows * head_dim * index.dtype.itemsize
    moved = 2 * wide * (2 * sizes.kv_heads * sizes.rows * head_dim + heads * padded(sizes.listed, LANES))
    computed = wide * (2 * sizes.tile_rows * head_dim + 6 * sizes.rows * padded(sizes.tile_rows, LANES))
    return scores + slots + moved + computed


def select_blocks(call: Call, q, index, table, lengths, *, config: Config | None = None, interpret=False) -> jax.Array:
    """See `pallas_kernels.select_blocks`. config: a `Config`, or None for `Config()`.

    interpret: False, or `pltpu.InterpretParams(...)` to run on a CPU; for tests.

    Raises NotImplementedError, with the sentence of `unsupported`, for input that this kernel cannot take.
    """
    reason = unsupported(call, q, index, table, lengths, config=config)
    if reason is not None:
        raise NotImplementedError(f"implementation 'mosaic_tpu' of select_blocks: {reason}")
    return _select(q, index, table, lengths, sizes=sizes_of(call, q, index, table, config), interpret=interpret)


@functools.partial(jax.jit, static_argnames=("sizes", "interpret"))
def _select(q, index, table, lengths, *, sizes: _Sizes, interpret):
    (batch, num_queries), kv_heads = q.shape[:2], sizes.kv_heads
    rows, index = prepared(sizes, q, index)
    listed = padded(sizes.listed, LANES)
    ids = pl.pallas_call(
        functools.partial(list_blocks, sizes),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(batch * num_queries,),
            in_specs=[pl.BlockSpec((1, *rows.shape[1:]), lambda row, *_: (row, 0, 0, 0)), pl.BlockSpec(memory_space=pl.ANY)],
            out_specs=pl.BlockSpec((1, kv_heads, listed), lambda row, *_: (row, 0, 0)),
            scratch_shapes=scratch(sizes, index),
        ),
        out_shape=jax.ShapeDtypeStruct((batch * num_queries, kv_heads, listed), jnp.int32),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel",)),
        interpret=interpret,
        name="select_blocks",
    )(table.reshape(-1), lengths, rows, index)
    return ids[..., : sizes.listed].reshape(batch, num_queries, kv_heads, -1)


def prepared(sizes: _Sizes, q, index):
    """Queries as the rows that score, `[B*T, K, rows, D]`, and the index as it is copied."""
    head_dim = q.shape[3]
    rows = q.reshape(-1, sizes.kv_heads, q.shape[2] // sizes.kv_heads, head_dim)
    if sizes.kind == "mean":
        rows = rows.mean(axis=2, keepdims=True, dtype=jnp.float32)
    rows = jnp.pad(rows, ((0, 0), (0, 0), (0, sizes.rows - rows.shape[2]), (0, 0)))
    if sizes.kind == "bounds":
        rows = jnp.concatenate([jnp.maximum(rows, 0), jnp.minimum(rows, 0)], axis=2)
    # without axes of size 1: Mosaic's layout would pad them, and XLA would copy the whole index
    return rows, index.reshape(*index.shape[:2], *(n for n in index.shape[2:4] if n > 1), head_dim)


def scratch(sizes: _Sizes, index) -> list:
    """What `list_blocks` needs beside its operands."""
    return [
        pltpu.VMEM((2, sizes.tile_pages, *index.shape[1:]), index.dtype),
        pltpu.VMEM((sizes.tiles, sizes.kv_heads, sizes.tile_rows), jnp.int32),
        pltpu.SemaphoreType.DMA((2,)),
    ]


def list_blocks(sizes: _Sizes, table, lengths, q, index, out, slots, keys, arrived):
    """One query. Scratch: slots of index pages, the scores as ordered integers `[tiles, K, tile_rows]`, a semaphore per
    slot."""
    sequence, query = div(pl.program_id(0), sizes.num_queries), rem(pl.program_id(0), sizes.num_queries)
    length = jnp.maximum(lengths[sequence] - (sizes.num_queries - 1) + query, 0)  # tokens up to the query's own
    last = jnp.where(length > 0, div(length - 1, sizes.block_size), -1)
    open_page = div(jnp.maximum(length - 1, 0), sizes.page_size)
    first_local = jnp.maximum(jnp.minimum(last - sizes.local + 1, open_page * sizes.per_page), 0)
    searched = jnp.minimum(first_local, sizes.width * sizes.per_page)
    tiles = div(searched * sizes.index_rows + sizes.tile_rows - 1, sizes.tile_rows)
    pages = _Pages(sizes, table, sequence, searched, index, slots, arrived)

    @pl.when(tiles > 0)
    def _():
        pages.start(0, 0)

    def step(tile, _):
        slot = rem(tile, 2)

        @pl.when(tile + 1 < tiles)
        def _():
            pages.start(tile + 1, 1 - slot)

        pages.wait(tile, slot)

        def of_head(head, _):
            score = _scores(sizes, q[0, head], slots[slot, :, head].reshape(sizes.tile_rows, -1))
            row = tile * sizes.tile_rows + _lanes(sizes.tile_rows)
            candidate = (row >= sizes.sink * sizes.index_rows) & (row < searched * sizes.index_rows)
            if sizes.index_rows == 2:
                candidate &= row & 1 == 0
            keys[tile, pl.ds(head, 1)] = jnp.where(candidate, _ordered(score), _NO)

        # where a page has one row, heads are the sublanes of a slot, and Mosaic needs a constant sublane
        jax.lax.fori_loop(0, sizes.kv_heads, of_head, None, unroll=sizes.page_rows == 1)
        pages.strike(tile, keys)

    jax.lax.fori_loop(0, tiles, step, None)
    kth, ties, kept = _threshold(sizes, keys, tiles)
    out[0] = _list(sizes, keys, tiles, kth, ties, kept, first_local, last)


def _lanes(n: int):
    return jax.lax.broadcasted_iota(jnp.int32, (1, n), 1)


@dataclasses.dataclass
class _Pages:
    """The copies of index pages into slots: pages that the table names, up to the last one searched."""

    sizes: _Sizes
    table: jax.Ref
    sequence: jax.Array
    searched: jax.Array
    index: jax.Ref
    slots: jax.Ref
    arrived: jax.Ref

    def page(self, tile, i):
        """For the i-th page of a tile: whether it is searched, and its page id or -1."""
        page = tile * self.sizes.tile_pages + i
        inside = page * self.sizes.per_page < self.searched
        return inside, self.table[self.sequence * self.sizes.width + jnp.where(inside, page, 0)]

    def _each(self, tile, do, when_there: bool):
        def one(i, _):
            inside, page = self.page(tile, i)

            @pl.when(inside & ((page >= 0) == when_there))
            def _():
                do(i, page)

        jax.lax.fori_loop(0, self.sizes.tile_pages, one, None)

    def copy(self, slot, i, page):
        return pltpu.make_async_copy(self.index.at[page], self.slots.at[slot, i], self.arrived.at[slot])

    def start(self, tile, slot):
        self._each(tile, lambda i, page: self.copy(slot, i, page).start(), when_there=True)

    def wait(self, tile, slot):
        """Wait for all copies that `start` started. A slot has one semaphore for all its copies, so single copies
        cannot be waited for."""
        self._each(tile, lambda i, page: self.copy(slot, i, page).wait(), when_there=True)

    def strike(self, tile, keys):
        """Make blocks without a page non-candidates."""
        lane, rows = _lanes(self.sizes.tile_rows), self.sizes.page_rows

        def missing(i, _):
            keys[tile] = jnp.where((lane >= i * rows) & (lane < (i + 1) * rows), _NO, keys[tile])

        self._each(tile, missing, when_there=False)


def _scores(sizes: _Sizes, q, rows):
    """`[1, tile_rows]` float32: the score of each block in the column of its first index row, NaN and -inf as the
    lowest finite number.

    Other columns, and those of pages that were not copied, hold anything.
    """
    dtype = jnp.promote_types(q.dtype, rows.dtype)
    precision = jax.lax.Precision.HIGHEST if dtype == jnp.float32 else jax.lax.Precision.DEFAULT
    products = jax.lax.dot_general(
        q.astype(dtype), rows.astype(dtype), (((1,), (1,)), ((), ())), precision=precision, preferred_element_type=jnp.float32
    )
    if sizes.kind == "bounds":  # the product with the minimum is in the column after that with the maximum
        products = products[: sizes.rows] + pltpu.roll(products[sizes.rows :], sizes.tile_rows - 1, 1)
    looked_at = jax.lax.broadcasted_iota(jnp.int32, (sizes.rows, 1), 0) < sizes.query_rows
    nan = products != products
    score = jnp.where(looked_at & ~nan, products, -jnp.inf).max(0, keepdims=True)
    some_nan = jnp.where(looked_at & nan, 1, 0).max(0, keepdims=True)
    lowest = jnp.finfo(jnp.float32).min
    return jnp.where(some_nan > 0, lowest, jnp.maximum(score, lowest))


def _ordered(score):
    """int32 in the order of the scores; -0.0 and 0.0 are a tie."""
    bits = jax.lax.bitcast_convert_type(jnp.where(score == 0, 0.0, score), jnp.int32)
    return jnp.where(bits >= 0, bits, bits ^ 0x7FFFFFFF)


def _threshold(sizes: _Sizes, keys, tiles):
    """Per head, `[K, 1]`: the k-th best score, how many blocks of exactly that score are kept, how many blocks in
    all."""

    def count(test):
        def step(tile, counts):
            return counts + jnp.where(test(keys[tile]), 1, 0)

        return jax.lax.fori_loop(0, tiles, step, jnp.zeros(keys.shape[1:], jnp.int32)).sum(1, keepdims=True)

    kept = jnp.minimum(count(lambda key: key > _NO), sizes.k)

    def bit(i, kth):  # the greatest number that at least `kept` scores reach, from the top bit down; the first addition wraps
        trial = kth + jnp.left_shift(jnp.int32(1), 31 - i)
        return jnp.where(count(lambda key: key >= trial) >= kept, trial, kth)

    kth = jax.lax.fori_loop(0, 32, bit, jnp.full((sizes.kv_heads, 1), _NO, jnp.int32))
    return kth, kept - count(lambda key: key > kth), kept


def _list(sizes: _Sizes, keys, tiles, kth, ties, kept, first_local, last):
    """`[K, W]`, W padded to lanes: sink, then k times the next kept block, then local."""
    lane = _lanes(padded(sizes.listed, LANES))
    sinks = jnp.minimum(sizes.sink, first_local)
    none = jnp.full((sizes.kv_heads, 1), _NONE, jnp.int32)

    def find(i, carry):
        row, ties, ids = carry

        def step(tile, lowest):
            at, key = tile * sizes.tile_rows + _lanes(sizes.tile_rows), keys[tile]
            next_at = jnp.where(at > row, at, _NONE)
            found = (jnp.where(mask, next_at, _NONE).min(1, keepdims=True) for mask in (key > kth, key == kth))
            return tuple(jnp.minimum(*pair) for pair in zip(lowest, found, strict=True))

        above, equal = jax.lax.fori_loop(0, tiles, step, (none, none))
        equal = jnp.where(ties > 0, equal, _NONE)
        row = jnp.minimum(above, equal)
        ids = jnp.where(lane == sinks + i, div(row, sizes.index_rows), ids)
        return row, ties - jnp.where(equal < above, 1, 0), ids

    ids = jnp.broadcast_to(lane, (sizes.kv_heads, lane.shape[1]))
    _, _, ids = jax.lax.fori_loop(0, sizes.k, find, (jnp.full_like(none, -1), ties, ids))
    at_end = first_local + lane - sinks - kept
    return jnp.where(lane < sinks + kept, ids, jnp.where(at_end <= last, at_end, -1))
