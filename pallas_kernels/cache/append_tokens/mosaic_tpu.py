"""append_tokens for TPU: one kernel, pool and indexes in place; a page that fills is sealed in the same launch.

Algorithm. A copy moves whole groups of 8 rows of a page. So XLA first brings new tokens into the groups in which they
will lie (for one token, by a broadcast). The grid is (B, tiles of `Config.tile_tokens` rows, at most a page). A grid
cell copies the groups that it changes from the pool, all KV heads at once, puts the valid tokens into them, and copies
them back. If one of its tokens is the last of a page, it copies the page's keys, builds every index from them in
float32, head by head, and copies the index rows out. A page gets its tokens from one sequence, whose tiles are walked
in order, so a cell reads what earlier cells wrote.

Memory traffic: for each group of 8 tokens that holds a new one, `2 * 8 * K * D * itemsize` bytes of K and V in, and as
many out; the new tokens, padded to groups, once; for a page that fills, its keys, `K * P * D * itemsize` bytes, once,
and its index rows out.

Source: bounds of Quest (Tang et al., ICML 2024).
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.lax import rem  # `%` of traced values also handles signs, and lowering that needs the chip's generation

from pallas_kernels.cache.append_tokens.api import Call, Kinds
from pallas_kernels.cache.append_tokens.xla import NOWHERE
from pallas_kernels.core import dispatch
from pallas_kernels.core.pages import physical, unlike
from pallas_kernels.selection.page_index import CODED, INDEX_ROWS
from pallas_kernels.tpu.memory import LANES, SMEM_BYTES, SUBLANES, VMEM_BYTES, padded

GROUP = SUBLANES
"""Tokens that are written together: the rows at which a copy can start and end."""


@dataclasses.dataclass(frozen=True)
class Config:
    """tile_tokens: rows of new tokens that a grid cell writes, a multiple of 8. A tile has at most the tokens of a
    page."""

    tile_tokens: int = 128

    def __post_init__(self):
        if not isinstance(self.tile_tokens, int) or self.tile_tokens < 1 or self.tile_tokens % GROUP:
            raise ValueError(f"tile_tokens must be a positive multiple of {GROUP}, got {self.tile_tokens!r}")


@dataclasses.dataclass(frozen=True)
class _Sizes:
    """Values known at compile time. groups: of a tile. tiles: of a row of the batch."""

    kv_heads: int
    page_size: int
    groups: int
    tiles: int
    kinds: Kinds


def _sizes(call: Call, pages, k) -> _Sizes:
    touched = padded(k.shape[1] + GROUP - 1, GROUP)  # wherever in a group the first token lies
    tile = min((call.config or Config()).tile_tokens, pages.page_size, touched)
    return _Sizes(pages.kv_heads, pages.page_size, tile // GROUP, -(-touched // tile), call.kinds)


def unsupported(call: Call, pages, indexes, k, v, positions, valid, table, frames) -> str | None:
    """Why this kernel cannot take this valid input, with the values, or None if it can. Uses only shapes and dtypes."""
    arrays = dispatch.signature(k_pages=pages.k, v_pages=pages.v, k=k)
    if reason := unlike(pages):
        return reason
    if pages.k.dtype == jnp.float16:
        return f"TPUs do not compute in float16, only in bfloat16 and float32; got {arrays}"
    if pages.head_dim % LANES:
        return f"head dim {pages.head_dim} is not a multiple of {LANES}, and XLA would copy the whole pool to pad it; got {arrays}"
    if pages.page_size % GROUP:
        return f"page size {pages.page_size} is not a multiple of {GROUP}, the rows that a copy moves together; got {arrays}"
    for name, kind, block_size in call.kinds:
        if kind in CODED:
            return f"it builds bounds and means, not the codes of index {name!r}"
        if block_size % GROUP:
            return f"block_size {block_size} of index {name!r} is not a multiple of {GROUP}, the rows of a tile of vector memory"
    sizes = _sizes(call, pages, k)
    scalars = 4 * k.shape[0] * (1 + sizes.tiles * (2 * sizes.groups + 2))
    if scalars > SMEM_BYTES:
        return f"the places of tokens take {scalars} bytes of scalar memory, at most {SMEM_BYTES} are available; {arrays}"
    vectors = _vmem_bytes(sizes, pages)
    if vectors > VMEM_BYTES:
        return f"buffers take {vectors} bytes of vector memory, at most {VMEM_BYTES} are available; {arrays}"
    return None


def _vmem_bytes(sizes: _Sizes, pages) -> int:
    """Tokens, double-buffered, and the groups that they go to; a page of keys and its index rows; a head in float32,
    and its results."""
    row = sizes.kv_heads * pages.head_dim * pages.k.dtype.itemsize
    moved = (2 * 2 + 2) * sizes.groups * GROUP * row
    if not sizes.kinds:
        return moved
    built = sum(padded(INDEX_ROWS[kind] * sizes.page_size // block_size, GROUP) * row for _, kind, block_size in sizes.kinds)
    return moved + sizes.page_size * row + built + 4 * 4 * sizes.page_size * pages.head_dim


def append_tokens(call: Call, pages, indexes, k, v, positions, valid, table, frames, *, interpret=False):
    """See `pallas_kernels.append_tokens`. config: a `Config`, or None for `Config()`.

    interpret: False, or `pltpu.InterpretParams(...)` to run on a CPU; for tests.

    Raises NotImplementedError, with the sentence of `unsupported`, for input that this kernel cannot take.
    """
    reason = unsupported(call, pages, indexes, k, v, positions, valid, table, frames)
    if reason is not None:
        raise NotImplementedError(f"implementation 'mosaic_tpu' of append_tokens: {reason}")
    named = {name: indexes[name] for name, _, _ in call.kinds}
    sizes = _sizes(call, pages, k)
    written, built = _append(pages, named, k, v, positions, valid, table, frames, sizes=sizes, interpret=interpret)
    return written, dict(indexes) | built


@functools.partial(jax.jit, static_argnames=("sizes", "interpret"))
def _append(pages, indexes, k, v, positions, valid, table, frames, *, sizes: _Sizes, interpret):
    batch, head_dim, names = k.shape[0], pages.head_dim, [name for name, _, _ in sizes.kinds]
    scalars, tokens = _places(sizes, positions, valid, table, frames)
    new = [_in_groups(sizes, x.astype(pages.k.dtype), tokens) for x in (k, v)]
    rows = [_without_ones(indexes[name]) for name in names]
    # pools do not fit into vector memory, and stay in HBM; XLA would copy a small index to vector memory and back
    pools = [pages.k, pages.v, *(pltpu.with_memory_space_constraint(x, pltpu.HBM) for x in rows)]
    of_cell = pl.BlockSpec((1, 1, sizes.groups, sizes.kv_heads, GROUP, head_dim), lambda row, tile, *_: (row, tile, 0, 0, 0, 0))
    in_hbm, slot = pl.BlockSpec(memory_space=pltpu.HBM), pltpu.VMEM((sizes.groups, sizes.kv_heads, GROUP, head_dim), pages.k.dtype)
    sealing = [pltpu.VMEM(x.shape[1:], x.dtype) for x in (pages.k, *rows)] if rows else []
    k_pool, v_pool, *rows = pl.pallas_call(
        functools.partial(_kernel, sizes),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=(batch, sizes.tiles),
            in_specs=[of_cell, of_cell, *[in_hbm] * len(pools)],
            out_specs=[in_hbm] * len(pools),
            scratch_shapes=[slot, slot, *sealing, pltpu.SemaphoreType.DMA],
        ),
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in pools],
        input_output_aliases={len(scalars) + 2 + i: i for i in range(len(pools))},
        # the tiles of a sequence may write to one page, one after the other; sequences may go to different cores
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary")),
        interpret=interpret,
        name="append_tokens",
    )(*scalars, *new, *pools)
    built = {name: x.reshape(indexes[name].shape) for name, x in zip(names, rows, strict=True)}
    return pages.replace(k=k_pool, v=v_pool), built


def _without_ones(index):
    """An index as XLA keeps it, else it would be copied: rows of 16 bits lie in pairs, and axes of size 1 among the
    last three move."""
    if index.dtype.itemsize == 4:
        return index
    return index.reshape(*index.shape[:2], *(n for n in index.shape[2:4] if n > 1), index.shape[4])


def _places(sizes: _Sizes, positions, valid, table, frames):
    """Where tokens go, as scalars in 1D (first row of each sequence's groups; per group its frame, -1 for none, and a
    bit for each new row; per tile the page id and the frame of the page that it fills, or -1), and the token of each
    row `[B, rows]`."""
    (batch, num_tokens), page_size, per_tile = positions.shape, sizes.page_size, sizes.groups * GROUP
    first = positions[:, :1]
    base = first // GROUP * GROUP
    position = base + jnp.arange(sizes.tiles * per_tile, dtype=jnp.int32)
    token = jnp.clip(position - first, 0, num_tokens - 1)
    new = (position >= first) & (position < first + num_tokens) & jnp.take_along_axis(valid, token, axis=1)
    frame = page = physical(table, position // page_size, new, NOWHERE)
    if frames is not None:
        frame = physical(frames, position // page_size, page < NOWHERE, NOWHERE)
    new = frame < NOWHERE
    fills = new & (position % page_size == page_size - 1)
    groups, tiles = (batch, -1, GROUP), (batch, -1, per_tile)
    bits = jnp.where(new.reshape(groups), 1 << jnp.arange(GROUP, dtype=jnp.int32), 0).sum(-1, dtype=jnp.int32)
    group_frames = jnp.where(new, frame, -1).reshape(groups).max(-1)
    sealed = (jnp.where(fills, x, -1).reshape(tiles).max(-1) for x in (page, frame))
    return [x.reshape(-1) for x in (base, group_frames, bits, *sealed)], token


def _in_groups(sizes: _Sizes, x, token):
    """New keys or values `[B, T, K, D]` at the rows where they will lie: `[B, tiles, groups, K, 8, D]`."""
    batch, _, kv_heads, head_dim = x.shape
    rows = jnp.take_along_axis(x, token[:, :, None, None], axis=1)
    return rows.reshape(batch, sizes.tiles, sizes.groups, GROUP, kv_heads, head_dim).swapaxes(3, 4)


def _kernel(sizes: _Sizes, base, group_frames, bits, sealed_pages, sealed_frames, k_new, v_new, *rest):
    """One tile of one sequence. Pools are operands and results in the same memory. Scratch follows: groups of K and of
    V, a page of keys and its index rows, a semaphore."""
    count = 2 + len(sizes.kinds)
    (k_pool, v_pool, *indexes), (k_slots, v_slots, *sealing, arrived) = rest[count : 2 * count], rest[2 * count :]
    row, tile = pl.program_id(0), pl.program_id(0) * sizes.tiles + pl.program_id(1)
    first = base[row] + pl.program_id(1) * (sizes.groups * GROUP)

    def each_group(do):
        """Call `do` on every group that gets a token, with its number in the tile and its places in the pools of K and
        V."""

        def one(i, _):
            frame = group_frames[tile * sizes.groups + i]

            @pl.when(frame >= 0)
            def _():
                offset = pl.multiple_of(rem(first + i * GROUP, sizes.page_size), GROUP)
                do(i, *(pool.at[frame, :, pl.ds(offset, GROUP)] for pool in (k_pool, v_pool)))

        jax.lax.fori_loop(0, sizes.groups, one, None)

    def copies(i, k_place, v_place, out: bool):
        for place, slots in ((k_place, k_slots), (v_place, v_slots)):
            source, target = (slots.at[i], place) if out else (place, slots.at[i])
            yield pltpu.make_async_copy(source, target, arrived)

    def start_in(*group):
        for copy in copies(*group, out=False):
            copy.start()

    def wait_in(*group):
        for copy in copies(*group, out=False):
            copy.wait()

    def put(i, *places):
        is_new = jax.lax.shift_right_logical(bits[tile * sizes.groups + i], jax.lax.broadcasted_iota(jnp.int32, k_slots.shape[1:], 1)) & 1
        for new, slots in ((k_new, k_slots), (v_new, v_slots)):
            slots[i] = jnp.where(is_new == 1, new[0, 0, i], slots[i])
        for copy in copies(i, *places, out=True):
            copy.start()

    def wait_out(*group):
        for copy in copies(*group, out=True):
            copy.wait()

    # one semaphore counts all copies, so all must arrive before the first is used
    for stage in (start_in, wait_in, put, wait_out):
        each_group(stage)
    if sizes.kinds:

        @pl.when(sealed_frames[tile] >= 0)
        def _():
            _seal(sizes, k_pool.at[sealed_frames[tile]], [x.at[sealed_pages[tile]] for x in indexes], *sealing, arrived)


def _seal(sizes: _Sizes, page, indexes, keys, *rest):
    """Copy a page's keys in, build its index rows, copy them out."""
    *rows, arrived = rest
    copy = pltpu.make_async_copy(page, keys, arrived)
    copy.start()
    copy.wait()

    for head in range(sizes.kv_heads):
        of_head = keys[head].astype(jnp.float32)
        for (_, kind, block_size), built in zip(sizes.kinds, rows, strict=True):
            _build(kind, of_head.reshape(-1, block_size, of_head.shape[1]), built, head)

    copies = [pltpu.make_async_copy(*pair, arrived) for pair in zip(rows, indexes, strict=True)]
    for copy in copies:
        copy.start()
    for copy in copies:
        copy.wait()


def _build(kind: str, blocks, built, head: int):
    """Index rows of one head from its keys `[nb, bs, D]`, float32. built: `[K, nb, R, D]`, axes nb and R only where
    they are not 1."""
    if kind == "mean":
        mean = (blocks.sum(1) * (1 / blocks.shape[1])).astype(built.dtype)
        built[pl.ds(head, 1)] = mean.reshape(1, *built.shape[1:])
        return
    some_nan = jnp.where(blocks != blocks, 1, 0).max(1) > 0
    most, least = (jnp.where(some_nan, jnp.nan, x) for x in (blocks.max(1), blocks.min(1)))
    is_most = jax.lax.broadcasted_iota(jnp.int32, (2, blocks.shape[2]), 0) == 0
    for i in range(blocks.shape[0]):
        place = built.at[head, i] if len(built.shape) == 4 else built.at[head]
        place[...] = jnp.where(is_most, most[i : i + 1], least[i : i + 1]).astype(built.dtype)
