"""The two folding warpgroups of `hopper.query_tiles` take turns at the tensor cores, and one of them may have nothing to do."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

if TYPE_CHECKING:
    from pallas_kernels.hopper.query_tiles import Shape


def turns(s: Shape, scratch) -> tuple[Callable, Callable]:
    """How a folding warpgroup offers the other one its turn, and awaits its own."""

    def offer():
        if s.turns:
            plgpu.barrier_arrive(scratch["turn"])

    def await_own():
        if s.turns:
            plgpu.barrier_wait(scratch["turn"])

    return offer, await_own


def pass_by(s: Shape, steps, warpgroup, scratch) -> None:
    """By a folding warpgroup of whose rows none is needed: wait and arrive as `query_tiles.fold` does over so many tiles of keys, without
    which the other warpgroups would wait for ever."""
    offer_turn, await_turn = turns(s, scratch)

    def take_turns():
        offer_turn()
        await_turn()

    def step(n, nothing):
        slot = lax.rem(n, jnp.int32(s.stages))
        take_turns()
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

    pl.when(warpgroup == 1)(take_turns)
    lax.fori_loop(0, steps, step, ())
    pl.when(warpgroup == 0)(take_turns)
