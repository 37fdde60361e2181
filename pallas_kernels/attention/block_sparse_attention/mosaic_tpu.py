"""block_sparse_attention for TPU: `pallas_kernels.tpu.prefill_fold` over sinks, window and a list of blocks, a query
head at a time.

A tile's walk takes the blocks that sinks and window touch, in ascending order, then the listed ones in list order, as
many to a tile of keys as fit. In the first group a query reads exactly its sinks and window, in the second exactly the
rest. So a block in both groups is read twice and counted once, and no list has to be sorted or cleaned. A row's bits
depend only on its own list, keys and window.

Memory traffic: q and out once; each listed block once per tile of `query_tile` queries and query head, `2 * block_size
* D * itemsize` bytes, and likewise each block that sinks and window touch; lists once.

Source: "Measure Once, Mask Once", Algorithm 1, step 3; FlashAttention-2 (arXiv 2307.08691).
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.lax import div

from pallas_kernels.attention.block_sparse_attention.api import Call
from pallas_kernels.core.pages import visible
from pallas_kernels.tpu import prefill_fold
from pallas_kernels.tpu.memory import QUERY_TILE
from pallas_kernels.tpu.prefill_fold import Config

__all__ = ["Config", "block_sparse_attention", "unsupported"]


def _shape(call: Call, q, pages, table) -> prefill_fold.Shape:
    """The tile has `query_tile` queries of one head, because a list is for these, whatever `rows` of the config is."""
    sizes = {"group": 1, "piece": call.block_size, "sm_scale": call.sm_scale, "tokens": call.query_tile}
    return prefill_fold.shape_of(q, pages, table, **sizes, config=call.config or Config())


def unsupported(call: Call, q, pages, table, starts, lengths, blocks) -> str | None:
    """Why this kernel cannot take this valid input, with the values, or None if it can. Uses only shapes and dtypes."""
    if call.query_tile % QUERY_TILE:
        return f"query_tile {call.query_tile} is not a multiple of {QUERY_TILE}, the rows of a tile of the matrix unit"
    lists = 2 * 4 * (blocks.shape[3] + 1)
    return prefill_fold.unsupported(_shape(call, q, pages, table), q, pages, table, more_smem=lists)


def block_sparse_attention(call: Call, q, pages, table, starts, lengths, blocks, *, interpret=False):
    """See `pallas_kernels.block_sparse_attention`. config: a `Config`, of which `rows` is not used, or None for
    `Config()`.

    interpret: False, or `pltpu.InterpretParams(...)` to run on a CPU; for tests.

    Raises NotImplementedError, with the sentence of `unsupported`, for input that this kernel cannot take.
    """
    reason = unsupported(call, q, pages, table, starts, lengths, blocks)
    if reason is not None:
        raise NotImplementedError(f"implementation 'mosaic_tpu' of block_sparse_attention: {reason}")
    return _attend(call, q, pages, table, starts, lengths, blocks, interpret=interpret)


@functools.partial(jax.jit, static_argnames=("call", "interpret"))
def _attend(call: Call, q, pages, table, starts, lengths, blocks, *, interpret):
    s = _shape(call, q, pages, table)
    count = jnp.max(jnp.where(blocks >= 0, jnp.arange(1, blocks.shape[3] + 1, dtype=jnp.int32), 0), axis=3, keepdims=True)
    lists = jnp.concatenate([count, blocks], axis=3).swapaxes(1, 2)  # how many entries count, then the entries
    walk = functools.partial(_walk, s, call.window, blocks.shape[3])
    return prefill_fold.launch(s, "block_sparse_attention", walk, q, pages, table, starts, lengths, lists, interpret=interpret)


def _walk(s: prefill_fold.Shape, window, width: int, tile: prefill_fold.Tile, listed) -> prefill_fold.Walk:
    """The blocks that sinks and window touch, padded to whole tiles of keys, then the listed ones."""
    num_blocks = s.width * s.page_size // s.piece
    sinks, resume, near = 0, 0, 0
    if window is not None:
        end = div(tile.end + (s.piece - 1), s.piece)
        sinks = jnp.minimum(-(-window[0] // s.piece), end)
        resume = jnp.clip(div(jnp.maximum(tile.position - window[1] + 1, 0), s.piece), sinks, end)
        near = div(sinks + end - resume + (s.pieces - 1), s.pieces)

    def first(step, piece):
        place = (step - near) * s.pieces + piece
        block = listed[0, 0, 1 + jnp.clip(place, 0, width - 1)]
        there = (place < listed[0, 0, 0]) & (block >= 0) & (block < num_blocks)
        from_list = jnp.where(there, jnp.where(there, block, 0) * s.piece, -1)
        if window is None:
            return from_list
        of_near = step * s.pieces + piece
        of_near = jnp.where(of_near < sinks, of_near, of_near - sinks + resume)
        return jnp.where(step < near, of_near * s.piece, from_list)

    def seen(step, pos, query_pos):
        causal = visible(pos, query_pos, None)
        if window is None:
            return causal
        is_near = visible(pos, query_pos, window)
        return causal & ((is_near & (step < near)) | (~is_near & (step >= near)))

    steps = near + div(listed[0, 0, 0] + (s.pieces - 1), s.pieces)
    return prefill_fold.Walk(jnp.where(tile.end > 0, steps, 0), first, seen)
