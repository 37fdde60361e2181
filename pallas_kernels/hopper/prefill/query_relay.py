"""Several launches of `hopper.prefill.prefill_fold`, one after the other, that fold one walk: what is folded so far
waits in memory, in float32.

A thread reads what it wrote itself, so no barrier is needed. Nothing is rounded on the way. So a row has the bits that
one launch gives.

Memory traffic: H * T * (D + 2) float32, written by each launch but the last, and read by each but the first.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.hopper.decode.wgmma_fold import LAYOUT
from pallas_kernels.hopper.prefill.prefill_fold import ROWS, TILE_ROWS, Relay, Shape, no_keys


def nothing(s: Shape) -> list:
    """References to the state of all rows before the first launch: sums `[B, H, R padded to whole tiles, D]`, and
    maxima and totals without D. Rows that no launch folds keep these zeros, and give zeros."""
    rows = s.batch, s.num_heads, s.query_tiles * TILE_ROWS
    return [jax.new_ref(jnp.zeros(shape, jnp.float32)) for shape in ((*rows, s.head_dim), rows, rows)]


def relay(s: Shape, begun: int, *, last: bool) -> Relay:
    """The relay of a launch whose last operands are the references of `nothing`. begun: which operand holds a number,
    int32 `[1]`, that is above 0 if a launch came before. last: whether none follows."""
    return Relay(functools.partial(_take, s, begun), None if last else _leave)


def _of_rows(refs, row, head, first_row):
    return [ref.at[row, head, pl.ds(first_row, ROWS)] for ref in refs[-3:]]


def _take(s: Shape, begun: int, refs, *place):
    def load():
        layouts = LAYOUT, LAYOUT.reduce(1), LAYOUT.reduce(1)
        return tuple(plgpu.load(ref, layout=x, optimized=False) for ref, x in zip(_of_rows(refs, *place), layouts, strict=True))

    return lax.cond(refs[begun][0] > 0, load, lambda: no_keys(s))


def _leave(walk, folded, refs, *place) -> None:
    @pl.when(walk.steps > 0)
    def _():
        for ref, value in zip(_of_rows(refs, *place), folded, strict=True):
            ref[...] = value
