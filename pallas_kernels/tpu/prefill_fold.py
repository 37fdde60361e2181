"""Tiles of queries against tiles of keys from pages, on a TPU: code that the prefill kernels share. Each op says which
keys a tile walks over.

The page table, starts and lengths are scalar-prefetched; K and V stay in HBM. The grid is (B, units, tiles of queries).
A unit shares a list of keys: it is a KV head with its query heads, or one query head. A tile's matrix has a row for
each token and head of the unit. A grid cell walks over its tiles of keys. A tile of keys consists of pieces, which are
consecutive tokens of one page. For each piece, `[piece, D]` of K and of V are copied into one of two slots in VMEM.
While one tile is used, the next is being copied. Tiles are folded in order by online softmax in float32. A tile that a
row may not read leaves the row's bits unchanged. Where values are bfloat16, weights are rounded to bfloat16 for
bfloat16 queries, and to the sum of two bfloat16 terms for float32 queries.

A piece without a page, or after the tile's last query, is not copied. Its logits are -inf, and its values in the slot
are set to 0 before the product.

Source: FlashAttention-2 (arXiv 2307.08691).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.lax import div, rem  # `//` and `%` of traced values also handle signs, and lowering that needs the chip's generation

from pallas_kernels.core import dispatch
from pallas_kernels.core.pages import unlike
from pallas_kernels.tpu.memory import LANES, QUERY_TILE, SMEM_BYTES, SUBLANES, VMEM_BYTES, padded
from pallas_kernels.tpu.tile_copies import TileCopies


@dataclasses.dataclass(frozen=True)
class Config:
    """rows: of a tile of queries, tokens times heads that share keys, a multiple of 16; rounded down to whole tokens,
    at least 16 of them. key_tile: tokens that are copied and multiplied together, rounded down to whole pieces, at
    least one."""

    rows: int = 512
    key_tile: int = 512

    def __post_init__(self):
        for name, multiple in (("rows", QUERY_TILE), ("key_tile", SUBLANES)):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1 or value % multiple:
                raise ValueError(f"{name} must be a positive multiple of {multiple}, got {value!r}")


@dataclasses.dataclass(frozen=True)
class Shape:
    """Everything that a kernel is compiled for. group: heads of a unit. tokens: of a tile of queries, `stride`
    positions apart. piece: tokens of one copy. pieces: of a tile of keys. width: of the page table. terms: bfloat16
    terms per weight of bfloat16 values."""

    kv_heads: int
    units: int
    group: int
    tokens: int
    stride: int
    tiles: int
    page_size: int
    width: int
    piece: int
    pieces: int
    sm_scale: float
    terms: int

    @property
    def rows(self) -> int:
        """Rows of the matrix of queries."""
        return self.tokens * self.group

    @property
    def key_tile(self) -> int:
        """Keys of a tile."""
        return self.piece * self.pieces


class Tile(NamedTuple):
    """A grid cell's tile of queries: scalars. position: of its first query. end: the first position that none of its
    queries sees."""

    row: jax.Array
    unit: jax.Array
    tile: jax.Array
    position: jax.Array
    end: jax.Array
    length: jax.Array


class Walk(NamedTuple):
    """Which keys a tile of queries reads. steps: tiles of keys. first: (step, piece) -> position of a piece's first
    token, negative for none. seen: (step, positions of keys `[1, S]`, negative where there is none, of queries `[rows,
    1]`) -> which keys may be read."""

    steps: jax.Array
    first: Callable
    seen: Callable


class Aside(NamedTuple):
    """What a kernel computes from the logits besides attention. widths: of its results, one row of each per row of
    queries. empty: () -> state. fold: (step, logits `[rows, S]`, positions of queries `[rows, 1]`, state) -> state.
    results: state -> arrays `[rows, width]`."""

    widths: tuple[tuple[int, str], ...]
    empty: Callable
    fold: Callable
    results: Callable


NOTHING = Aside((), tuple, lambda step, logits, query_pos, state: state, lambda state: ())


def shape_of(
    q, pages, table, *, group: int, piece: int, config: Config, sm_scale: float, stride: int = 1, tokens: int | None = None
) -> Shape:
    """group: query heads of a unit. piece: tokens; it divides the page. stride: of q's rows, in positions. tokens: of a
    tile of queries; None: as `config` says."""
    tokens = tokens or max(QUERY_TILE, config.rows // group // QUERY_TILE * QUERY_TILE)
    return Shape(
        kv_heads=pages.kv_heads,
        units=q.shape[2] // group,
        group=group,
        tokens=tokens,
        stride=stride,
        tiles=-(-q.shape[1] // tokens),
        page_size=pages.page_size,
        width=table.shape[1],
        piece=piece,
        pieces=max(1, config.key_tile // piece),
        sm_scale=float(sm_scale),
        terms=2 if q.dtype == jnp.float32 else 1,
    )


def unsupported(s: Shape, q, pages, table, *, more_smem: int = 0, more_vmem: int = 0) -> str | None:
    """Why a kernel of this shape cannot take this valid input, with the values, or None. more_smem, more_vmem: bytes it
    takes beside."""
    arrays = dispatch.signature(q=q, **pages.arrays, table=table)
    if reason := unlike(pages):
        return reason
    if "float16" in (q.dtype.name, pages.k_format.codes):
        return f"TPUs do not compute in float16, only in bfloat16 and float32; got {arrays}"
    if q.shape[3] % LANES:
        return f"head dim {q.shape[3]} is not a multiple of {LANES}, and XLA would copy the whole pool to pad it; got {arrays}"
    if s.piece % SUBLANES:
        return f"blocks of {s.piece} tokens are not a multiple of {SUBLANES}, the rows that one copy can start at; got {arrays}"
    scalars = 4 * q.shape[0] * (s.width + 2) + more_smem
    if scalars > SMEM_BYTES:
        return f"page table and lists take {scalars} bytes of scalar memory, at most {SMEM_BYTES} are available; {arrays}"
    vectors = _vmem_bytes(s, q, pages.k) + more_vmem
    if vectors > VMEM_BYTES:
        return (
            f"buffers take {vectors} bytes of vector memory, at most {VMEM_BYTES} are available; {s.rows} rows, {s.key_tile} keys, {arrays}"
        )
    return None


def _vmem_bytes(s: Shape, q, k) -> int:
    """Both slots of K and V; q and results, double-buffered; the folded part and a tile's part of it; logits and
    weights."""
    head_dim, wide = q.shape[3], 4
    slots = 4 * s.key_tile * head_dim * k.dtype.itemsize
    moved = 2 * s.rows * 2 * head_dim * q.dtype.itemsize + 2 * SUBLANES * padded(s.rows, LANES) * wide
    computed = wide * s.rows * (2 * head_dim + 4 * LANES + 3 * padded(s.key_tile, LANES))
    return slots + moved + computed


def launch(
    s: Shape,
    name: str,
    walk_of: Callable[..., Walk],
    q: jax.Array,
    pages,
    table: jax.Array,
    starts: jax.Array,
    lengths: jax.Array,
    lists: jax.Array | None = None,
    aside: Aside = NOTHING,
    *,
    interpret,
) -> tuple[jax.Array, ...]:
    """Attention of q `[B, T, H, D]`, T rows `s.stride` positions apart from `starts` on: out and lse as
    `flash_attention` returns them, then the results of `aside`, `[B, T, H, width]`.

    walk_of: (tile, reference to its list) -> Walk. lists: int32 `[B, units, tiles, W]`; a grid cell has its list in
    scalar memory.
    """
    batch, _, num_heads, head_dim = q.shape
    num_rows = q.shape[1]
    q = jnp.pad(q, ((0, 0), (0, s.tiles * s.tokens - num_rows), (0, 0), (0, 0)))
    q = q.reshape(batch, -1, s.units, s.group, head_dim).swapaxes(1, 2).reshape(batch, s.units, -1, head_dim)

    def of_rows(width):
        return pl.BlockSpec((1, 1, s.rows, width), lambda row, unit, tile, *_: (row, unit, tile, 0))

    in_hbm, listed = pl.BlockSpec(memory_space=pl.ANY), []
    if lists is not None:
        number = lambda row, unit, tile, *_: ((row * s.units + unit) * s.tiles + tile, 0, 0)  # noqa: E731
        listed = [pl.BlockSpec((1, 1, lists.shape[3]), number, memory_space=pltpu.SMEM)]
    slots = pltpu.VMEM((2, s.pieces, s.piece, head_dim), pages.k.dtype)
    out, lse, *more = pl.pallas_call(
        functools.partial(_kernel, s, walk_of, aside, lists is not None),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=(batch, s.units, s.tiles),
            in_specs=[of_rows(head_dim), *listed, in_hbm, in_hbm],
            out_specs=[
                of_rows(head_dim),
                pl.BlockSpec((1, 1, 1, 1, s.rows), lambda row, unit, tile, *_: (row, unit, tile, 0, 0)),
                *(of_rows(width) for width, _ in aside.widths),
            ],
            scratch_shapes=[slots, slots, pltpu.SemaphoreType.DMA((2,))],
        ),
        out_shape=[
            jax.ShapeDtypeStruct(q.shape, q.dtype),
            # rows along the lanes: one number per row of 128 lanes would take 128 times the memory
            jax.ShapeDtypeStruct((batch, s.units, s.tiles, 1, s.rows), jnp.float32),
            *(jax.ShapeDtypeStruct((*q.shape[:3], width), dtype) for width, dtype in aside.widths),
        ],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "parallel")),
        interpret=interpret,
        name=name,
    )(table.reshape(-1), starts, lengths, q, *([] if lists is None else [lists.reshape(-1, 1, lists.shape[3])]), pages.k, pages.v)

    def heads_last(x, width):
        x = x.reshape(batch, s.units, -1, s.group, width).swapaxes(1, 2)
        return x.reshape(batch, -1, num_heads, width)[:, :num_rows]

    return heads_last(out, head_dim), heads_last(lse, 1)[..., 0], *(heads_last(x, x.shape[3]) for x in more)


def _kernel(s: Shape, walk_of, aside: Aside, has_list: bool, table, starts, lengths, q, *rest):
    """One tile of queries. Scratch: slots of K and V, and a semaphore per slot."""
    listed, (k, v, out, lse, *more, k_slots, v_slots, arrived) = (rest[0] if has_list else None), rest[has_list:]
    row, unit, tile = (pl.program_id(axis) for axis in range(3))
    length, position = lengths[row], starts[row] + tile * (s.tokens * s.stride)
    end = jnp.minimum(jnp.minimum(position + ((s.tokens - 1) * s.stride + 1), length), s.width * s.page_size)
    here = Tile(row, unit, tile, position, jnp.where(position < length, end, 0), length)
    walk = walk_of(here, listed)
    head = div(unit, s.units // s.kv_heads) if s.units > s.kv_heads else unit

    def copies(step, slot):
        return TileCopies(functools.partial(_piece, s, here, walk, table, step), length, head, slot, (k, k_slots), (v, v_slots), arrived)

    @pl.when(walk.steps > 0)
    def _():
        copies(0, 0).start()

    query = jax.lax.broadcasted_iota(jnp.int32, (s.rows, 1), 0)
    query_pos = position + s.stride * (query if s.group == 1 else div(query, s.group))

    def step(i, carry):
        partial, state = carry
        slot = rem(i, 2)

        @pl.when(i + 1 < walk.steps)
        def _():
            copies(i + 1, 1 - slot).start()

        current = copies(i, slot)
        current.wait()
        pos = current.clean()
        pos = jnp.where(pos < length, pos, -1)  # positions of padding queries lie past the length
        keys, values = (x[slot].reshape(s.key_tile, -1) for x in (k_slots, v_slots))
        dtype = jnp.promote_types(q.dtype, keys.dtype)
        logits = product(q[0, 0].astype(dtype), keys.astype(dtype), contract=1) * s.sm_scale
        logits = jnp.where(walk.seen(i, pos, query_pos), logits, -jnp.inf)
        return fold(partial, logits, values, s.terms), aside.fold(i, logits, query_pos, state)

    (top, total, weighted), state = jax.lax.fori_loop(0, walk.steps, step, (empty(s.rows, q.shape[-1]), aside.empty()))
    total = jnp.where(top == -jnp.inf, 1.0, total)
    out[0, 0] = (weighted / total).astype(out.dtype)
    lse[0, 0, 0] = _along_lanes(top + jnp.log(total))
    for ref, result in zip(more, aside.results(state), strict=True):
        ref[0, 0] = result


def _piece(s: Shape, tile: Tile, walk: Walk, table, step, i):
    """For the i-th piece of a tile of keys: whether it can be read, its first position, its frame, and its first token
    in the page."""
    first = walk.first(step, i)
    inside = (first >= 0) & (first < tile.end)
    first = jnp.where(inside, first, 0)
    frame = table[tile.row * s.width + div(first, s.page_size)]
    return inside & (frame >= 0), first, jnp.maximum(frame, 0), pl.multiple_of(rem(first, s.page_size), s.piece)


def empty(rows: int, head_dim: int):
    """Attention over no key: greatest logit, sum of exponentials, weighted values, float32."""
    nothing = jnp.full((rows, 1), -jnp.inf, jnp.float32)
    return nothing, jnp.zeros_like(nothing), jnp.zeros((rows, head_dim), jnp.float32)


def fold(partial, logits, values, terms: int):
    """Add a tile. A tile that a row may not read leaves the row's bits unchanged. terms: bfloat16 terms per weight,
    where values are bfloat16."""
    top, total, weighted = partial
    new_top = jnp.maximum(top, logits.max(1, keepdims=True))
    shift = jnp.where(new_top == -jnp.inf, 0.0, new_top)  # -inf minus -inf would be NaN
    weights, kept = jnp.exp(logits - shift), jnp.exp(top - shift)
    return new_top, total * kept + weights.sum(1, keepdims=True), weighted * kept + weighted_sum(weights, values, terms)


def weighted_sum(weights, values, terms: int):
    """Weights float32 times values; see `fold`."""
    if values.dtype == jnp.float32:
        return product(weights, values, contract=0)
    high = weights.astype(values.dtype)
    found = product(high, values, contract=0)
    if terms == 1:
        return found
    low = (weights - high.astype(jnp.float32)).astype(values.dtype)
    return found + product(low, values, contract=0)


def product(a, b, contract: int):
    """a's columns against axis `contract` of b, in float32. By default the matrix unit would round float32 to
    bfloat16."""
    precision = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else jax.lax.Precision.DEFAULT
    return jax.lax.dot_general(a, b, (((1,), (contract,)), ((), ())), precision=precision, preferred_element_type=jnp.float32)


def _along_lanes(column):
    """`[rows, 1]` as `[1, rows]`, 128 at a time: the diagonal of a square that repeats the column."""
    parts = []
    for start in range(0, column.shape[0], LANES):
        part = column[start : start + LANES]
        place = [jax.lax.broadcasted_iota(jnp.int32, (len(part), len(part)), axis) for axis in (0, 1)]
        parts.append(jnp.where(place[0] == place[1], part, 0.0).sum(0, keepdims=True))
    return jnp.concatenate(parts, axis=1)
