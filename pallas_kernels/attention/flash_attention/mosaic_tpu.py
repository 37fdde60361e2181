"""flash_attention for TPU: `pallas_kernels.tpu.prefill_fold` over every tile of keys, or those that sinks and window
touch.

A tile of queries has all heads of a KV head, `Config.rows` rows. Key tiles are fixed spans of absolute positions,
walked in ascending order. So a row's bits depend neither on where its chunk starts, nor on the width of the page table,
nor on the other rows.

Memory traffic: q and out once; keys and values of a sequence once per tile of queries and KV head, `2 * P * D *
itemsize` bytes a page, up to the tile's last query, without pages that lie between sinks and window.

Source: FlashAttention-2 (arXiv 2307.08691); StreamingLLM (arXiv 2309.17453) for sinks and window.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.lax import div

from pallas_kernels.attention.flash_attention.api import Call
from pallas_kernels.core.pages import visible
from pallas_kernels.tpu import prefill_fold
from pallas_kernels.tpu.prefill_fold import Config

__all__ = ["Config", "flash_attention", "unsupported"]


def _shape(call: Call, q, pages, table) -> prefill_fold.Shape:
    sizes = {"group": q.shape[2] // pages.kv_heads, "piece": pages.page_size, "sm_scale": call.sm_scale}
    return prefill_fold.shape_of(q, pages, table, **sizes, config=call.config or Config())


def unsupported(call: Call, q, pages, table, starts, lengths, fresh) -> str | None:
    """Why this kernel cannot take this valid input, with the values, or None if it can. Uses only shapes and dtypes."""
    return prefill_fold.unsupported(_shape(call, q, pages, table), q, pages, table)


def flash_attention(call: Call, q, pages, table, starts, lengths, fresh, *, interpret=False):
    """See `pallas_kernels.flash_attention`; it computes every row. config: a `Config`, or None for `Config()`.

    interpret: False, or `pltpu.InterpretParams(...)` to run on a CPU; for tests.

    Raises NotImplementedError, with the sentence of `unsupported`, for input that this kernel cannot take.
    """
    reason = unsupported(call, q, pages, table, starts, lengths, fresh)
    if reason is not None:
        raise NotImplementedError(f"implementation 'mosaic_tpu' of flash_attention: {reason}")
    return _attend(call, q, pages, table, starts, lengths, interpret=interpret)


@functools.partial(jax.jit, static_argnames=("call", "interpret"))
def _attend(call: Call, q, pages, table, starts, lengths, *, interpret):
    s = _shape(call, q, pages, table)
    walk = functools.partial(_walk, s, call.window)
    return prefill_fold.launch(s, "flash_attention", walk, q, pages, table, starts, lengths, interpret=interpret)


def _walk(s: prefill_fold.Shape, window, tile: prefill_fold.Tile, _) -> prefill_fold.Walk:
    """Every tile of keys up to the last query, or those that sinks and window touch."""
    end = div(tile.end + (s.key_tile - 1), s.key_tile)
    sinks, resume = 0, 0
    if window is not None:
        sinks = jnp.minimum(-(-window[0] // s.key_tile), end)
        resume = jnp.clip(div(jnp.maximum(tile.position - window[1] + 1, 0), s.key_tile), sinks, end)

    def first(step, piece):
        if window is not None:
            step = jnp.where(step < sinks, step, step - sinks + resume)
        return step * s.key_tile + piece * s.piece

    def seen(_, pos, query_pos):
        return visible(pos, query_pos, window)

    return prefill_fold.Walk(sinks + end - resume, first, seen)
