"""gather_attention for TPU: one pass over the list of each (sequence, KV head); the next tile of keys is copied while
one is multiplied.

Algorithm. The page table, the lengths and the list are scalar-prefetched; K and V stay in HBM. The grid is (B, K). A
grid cell walks its list in tiles of `Config.tile_tokens`. Each block is one copy of `[block_size, D]` from K and one
from V into one of two slots in VMEM. While a tile is used, the next one is being copied, or the first one of the next
KV head. Tiles are folded in list order, by online softmax in float32. A row stops after the last tile that its length
reaches (dense) or that its list has. The rows of one matrix are the heads of one KV head times the T queries, padded to
whole tiles. Weights multiply bfloat16 values as a sum of two bfloat16 terms: they keep 16 bits.

Slots or parts of slots that no copy filled are never used: logits there are -inf, and values are set to 0 in the slot
before the product.

Memory traffic: each listed block once, `2 * block_size * D * itemsize` bytes, plus q and the results. Dense attention
reads every page up to the length once per KV head. A tile is a fixed number of list entries, so for dense attention a
fixed span of positions. So the bits of a row depend neither on the other rows nor on the width of the page table.

Source: "Attention Pays Its Bill" (BRL-2026-07) for gather-decode; online softmax from FlashAttention (arXiv
2205.14135).
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.lax import div, rem  # `//` and `%` of traced values also handle signs, and lowering that needs the chip's generation

from pallas_kernels.attention.gather_attention.api import Call
from pallas_kernels.core import dispatch
from pallas_kernels.core.pages import unlike, visible
from pallas_kernels.tpu import prefill_fold
from pallas_kernels.tpu.memory import LANES, QUERY_TILE, SMEM_BYTES, SUBLANES, VMEM_BYTES, padded
from pallas_kernels.tpu.tile_copies import TileCopies


@dataclasses.dataclass(frozen=True)
class Config:
    """tile_tokens: keys that are copied and multiplied together, rounded down to whole blocks, at least one block."""

    tile_tokens: int = 512

    def __post_init__(self):
        if not isinstance(self.tile_tokens, int) or self.tile_tokens < 1:
            raise ValueError(f"tile_tokens must be a positive int, got {self.tile_tokens!r}")


@dataclasses.dataclass(frozen=True)
class _Sizes:
    """Values known at compile time. entries: of a list, or blocks of the table when dense. rows: T * G padded to whole
    tiles."""

    kv_heads: int
    group: int
    num_queries: int
    rows: int
    width: int
    page_size: int
    block_size: int
    dense: bool
    entries: int
    per_tile: int
    window: tuple[int, int] | None
    sm_scale: float

    @property
    def list_tiles(self) -> int:
        return -(-self.entries // self.per_tile)

    @property
    def tile_tokens(self) -> int:
        return self.per_tile * self.block_size

    @property
    def lse_groups(self) -> int:
        """Groups of 128 lanes for the block LSE, one lane per block."""
        return -(-self.entries // LANES)


def sizes_of(call: Call, q, pages, table, blocks) -> _Sizes:
    config, block_size = call.config, call.block_size
    if config is not None and not isinstance(config, Config):
        takes = f"a {Config.__module__}.{Config.__name__}"
        raise ValueError(f"implementation 'mosaic_tpu' of gather_attention takes {takes}, got {config!r}")
    (_, num_queries, num_heads, _), kv_heads, page_size = q.shape, pages.kv_heads, pages.page_size
    group, width = num_heads // kv_heads, table.shape[1]
    per_tile = max(1, (config or Config()).tile_tokens // block_size)
    if blocks is not None:
        per_tile = min(per_tile, blocks.shape[2])
    return _Sizes(
        kv_heads=kv_heads,
        group=group,
        num_queries=num_queries,
        rows=padded(num_queries * group, QUERY_TILE),
        width=width,
        page_size=page_size,
        block_size=block_size,
        dense=blocks is None,
        entries=width * (page_size // block_size) if blocks is None else blocks.shape[2],
        per_tile=per_tile,
        window=call.window,
        sm_scale=float(call.sm_scale),
    )


def unsupported(call: Call, q, pages, table, lengths, blocks, block_frames=None) -> str | None:
    """Why this kernel cannot take this valid input, with the values, or None if it can. Uses only shapes and dtypes.

    Raises ValueError for a config that is not a `Config`.
    """
    sizes = sizes_of(call, q, pages, table, blocks)
    arrays = dispatch.signature(q=q, **pages.arrays, table=table, blocks=blocks)
    if reason := unlike(pages):
        return reason
    if block_frames is not None:
        return f"it finds frames in the page table alone, not in block_frames; got {arrays}"
    if "float16" in (q.dtype.name, pages.k_format.codes):
        return f"TPUs do not compute in float16, only in bfloat16 and float32; got {arrays}"
    if q.shape[3] % LANES:
        return f"head dim {q.shape[3]} is not a multiple of {LANES}, and XLA would copy the whole pool to pad it; got {arrays}"
    if call.block_size % SUBLANES:
        return f"block_size {call.block_size} is not a multiple of {SUBLANES}, the rows that one copy can start at; got {arrays}"
    scalars = _smem_bytes(sizes, q.shape[0])
    if scalars > SMEM_BYTES:
        return f"page table and list take {scalars} bytes of scalar memory, at most {SMEM_BYTES} are available; {arrays}"
    vectors = vmem_bytes_of_tiles(sizes, q, pages.k) + vmem_bytes_of_rows(sizes, q, call.return_block_lse)
    if vectors > VMEM_BYTES:
        return (
            f"buffers take {vectors} bytes of vector memory, at most {VMEM_BYTES} are available; tile_tokens {sizes.tile_tokens}, {arrays}"
        )
    return None


def _smem_bytes(sizes: _Sizes, batch: int) -> int:
    listed = 0 if sizes.dense else sizes.kv_heads * sizes.list_tiles * sizes.per_tile
    return 4 * batch * (sizes.width + 1 + listed)


def vmem_bytes_of_tiles(sizes: _Sizes, q, k) -> int:
    """Both slots of K and V, a float32 copy of a tile, the logits and the arrays computed from them."""
    head_dim, tile, wide = q.shape[3], sizes.tile_tokens, 4
    computed = wide * (2 * tile * head_dim + sizes.rows * (4 * padded(tile, LANES) + 4 * head_dim))
    return 4 * tile * head_dim * k.dtype.itemsize + computed


def vmem_bytes_of_rows(sizes: _Sizes, q, return_block_lse: bool) -> int:
    """q and results of one KV head, double-buffered."""
    moved = 2 * sizes.rows * (q.shape[3] * 2 * q.dtype.itemsize + LANES * 4)
    return moved + 2 * sizes.rows * sizes.lse_groups * LANES * 4 * return_block_lse


def gather_attention(call: Call, q, pages, table, lengths, blocks, block_frames=None, *, interpret=False) -> tuple[jax.Array, ...]:
    """See `pallas_kernels.gather_attention`. config: a `Config`, or None for `Config()`.

    interpret: False, or `pltpu.InterpretParams(...)` to run on a CPU; for tests.

    Raises NotImplementedError, with the sentence of `unsupported`, for input that this kernel cannot take; ValueError
    for another config.
    """
    reason = unsupported(call, q, pages, table, lengths, blocks, block_frames)
    if reason is not None:
        raise NotImplementedError(f"implementation 'mosaic_tpu' of gather_attention: {reason}")
    sizes = sizes_of(call, q, pages, table, blocks)
    return _attend(q, pages, table, lengths, blocks, sizes=sizes, return_block_lse=call.return_block_lse, interpret=interpret)


@functools.partial(jax.jit, static_argnames=("sizes", "return_block_lse", "interpret"))
def _attend(q, pages, table, lengths, blocks, *, sizes: _Sizes, return_block_lse, interpret):
    batch, num_queries, num_heads, head_dim = q.shape
    kv_heads, used = sizes.kv_heads, num_queries * sizes.group
    rows = q.reshape(batch, num_queries, kv_heads, sizes.group, head_dim).swapaxes(1, 2).reshape(batch, kv_heads, used, head_dim)
    rows = jnp.pad(rows, ((0, 0), (0, 0), (0, sizes.rows - used), (0, 0)))
    if blocks is None:
        ids = jnp.full((1,), -1, jnp.int32)  # not read
    else:
        ids = jnp.pad(blocks, ((0, 0), (0, 0), (0, -sizes.entries % sizes.per_tile)), constant_values=-1).reshape(-1)

    def of_cell(*shape):  # the cell's part of an array [B, K, ...]
        return pl.BlockSpec((1, 1, *shape), lambda row, head, *_: (row, head, *(0,) * len(shape)))

    results = [((sizes.rows, head_dim), q.dtype), ((sizes.rows, 1), jnp.float32)]
    if return_block_lse:
        results.append(((sizes.lse_groups, sizes.rows, LANES), jnp.float32))
    slots = pltpu.VMEM((2, sizes.per_tile, sizes.block_size, head_dim), pages.k.dtype)
    out, lse, *block_lse = pl.pallas_call(
        functools.partial(_kernel, sizes),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=(batch, kv_heads),
            in_specs=[of_cell(sizes.rows, head_dim), pl.BlockSpec(memory_space=pl.ANY), pl.BlockSpec(memory_space=pl.ANY)],
            out_specs=[of_cell(*shape) for shape, _ in results],
            scratch_shapes=[slots, slots, pltpu.SemaphoreType.DMA((2,)), pltpu.SMEM((1,), jnp.int32)],
        ),
        out_shape=[jax.ShapeDtypeStruct((batch, kv_heads, *shape), dtype) for shape, dtype in results],
        # each head of a sequence starts the first copy of the next head; sequences may go to different cores
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary")),
        interpret=interpret,
        name="gather_attention",
    )(table.reshape(-1), lengths, ids, rows, pages.k, pages.v)

    def heads_last(x):
        x = x[:, :, :used].reshape(batch, kv_heads, num_queries, sizes.group, -1).swapaxes(1, 2)
        return x.reshape(batch, num_queries, num_heads, -1)

    found = heads_last(out), heads_last(lse)[..., 0]
    if not return_block_lse:
        return found
    of_entries = block_lse[0].swapaxes(2, 3).reshape(batch, kv_heads, sizes.rows, -1)[..., : sizes.entries]
    return *found, heads_last(of_entries)


def _kernel(sizes: _Sizes, table, lengths, ids, q, k, v, out, lse, *rest):
    """One (sequence, KV head). Scratch: slots of K and V, a semaphore per slot, and which slot the first tile of this
    cell is in."""
    *block_lse, k_slots, v_slots, arrived, first_slot = rest
    row, head = pl.program_id(0), pl.program_id(1)

    def listed(head, place):
        return ids[(row * sizes.kv_heads + head) * sizes.list_tiles * sizes.per_tile + place]

    copies = functools.partial(copies_of, sizes, table, lengths[row], listed, row, k=(k, k_slots), v=(v, v_slots), arrived=arrived)
    out[0, 0], lse[0, 0] = attend_head(sizes, copies, head, q[0, 0], lengths[row], first_slot, *block_lse)


def attend_head(sizes: _Sizes, copies, head, q, length, first_slot, block_lse=None):
    """Attention of one KV head's rows over its list: out in q's dtype and LSE `[rows, 1]`. Heads of a sequence must
    come in order from 0, because each starts the first copies of the next.

    copies: (head, tile, slot) -> `TileCopies`. first_slot: in scalar memory, the slot of this head's first tile.
    """
    tiles = sizes.list_tiles
    if sizes.dense:
        tiles = jnp.clip(div(length + sizes.tile_tokens - 1, sizes.tile_tokens), 1, tiles)

    @pl.when(head == 0)
    def _():
        first_slot[0] = 0
        copies(head=head, tile=0, slot=0).start()

    if block_lse is not None:
        block_lse[...] = jnp.full(block_lse.shape, -jnp.inf, jnp.float32)

    def step(tile, partial):
        slot = rem(first_slot[0] + tile, 2)
        last = tile + 1 == tiles

        @pl.when(~last | (head + 1 < sizes.kv_heads))
        def _():
            copies(head=jnp.where(last, head + 1, head), tile=jnp.where(last, 0, tile + 1), slot=1 - slot).start()

        current = copies(head=head, tile=tile, slot=slot)
        current.wait()
        pos = current.clean()
        keys, values = (x[slot].reshape(sizes.tile_tokens, -1) for x in (current.k[1], current.v[1]))
        logits = _logits(sizes, q, keys, pos, length)
        if block_lse is not None:
            _store_block_lse(sizes, block_lse, logits, tile)
        return prefill_fold.fold(partial, logits, values, terms=2)

    top, total, weighted = jax.lax.fori_loop(0, tiles, step, prefill_fold.empty(sizes.rows, q.shape[-1]))
    first_slot[0] = rem(first_slot[0] + tiles, 2)
    total = jnp.where(top == -jnp.inf, 1.0, total)
    return (weighted / total).astype(q.dtype), top + jnp.log(total)


def copies_of(sizes: _Sizes, table, length, listed, row, *, head, tile, slot, k, v, arrived) -> TileCopies:
    """The copies of one tile of one KV head's list. listed: (head, place) -> block. k, v: pool and slots."""

    def piece(i):
        """The tile's i-th entry."""
        place, per_page = tile * sizes.per_tile + i, sizes.page_size // sizes.block_size
        block = place if sizes.dense else listed(head, place)
        inside = (block >= 0) & (block < sizes.width * per_page)
        block = jnp.where(inside, block, 0)
        page, first = table[row * sizes.width + div(block, per_page)], block * sizes.block_size
        there = inside & (page >= 0) & (first < length)
        return there, first, jnp.maximum(page, 0), pl.multiple_of(rem(block, per_page) * sizes.block_size, sizes.block_size)

    return TileCopies(piece, length, head, slot, k, v, arrived)


def _logits(sizes: _Sizes, q, keys, pos, length):
    """`[rows, tile_tokens]` float32, -inf where a row may not read."""
    dtype = jnp.promote_types(q.dtype, keys.dtype)
    logits = prefill_fold.product(q.astype(dtype), keys.astype(dtype), contract=1) * sizes.sm_scale
    query = jax.lax.broadcasted_iota(jnp.int32, (sizes.rows, 1), 0)
    seen = visible(pos, length - sizes.num_queries + div(query, sizes.group), sizes.window)
    return jnp.where(seen, logits, -jnp.inf)


def _store_block_lse(sizes: _Sizes, block_lse, logits, tile):
    """Log-sum-exp of each block of the tile, into the lane of its entry."""
    lane = jax.lax.broadcasted_iota(jnp.int32, (1, LANES), 1)
    for i in range(sizes.per_tile):
        start, end = i * sizes.block_size, (i + 1) * sizes.block_size
        aligned = start // LANES * LANES
        near = logits[:, aligned : padded(end, LANES)]  # whole tiles of lanes, because slicing inside one would move data
        at = aligned + jax.lax.broadcasted_iota(jnp.int32, (1, near.shape[1]), 1)
        near = jnp.where((at >= start) & (at < end), near, -jnp.inf)
        top = near.max(1, keepdims=True)
        total = jnp.exp(near - jnp.where(top == -jnp.inf, 0.0, top)).sum(1, keepdims=True)
        found = top + jnp.log(jnp.where(top == -jnp.inf, 1.0, total))
        entry = tile * sizes.per_tile + i

        @pl.when(entry < sizes.entries)
        def _(entry=entry, found=found):
            group = div(entry, LANES)
            block_lse[0, 0, group] = jnp.where(lane == rem(entry, LANES), found, block_lse[0, 0, group])
