"""Copies of keys and values of one KV head from pages in HBM to vector memory, a tile at a time, into one of two
slots."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

_NOWHERE = -(2**30)  # a position before every sequence; with any offset in a tile added, it stays negative


@dataclasses.dataclass
class TileCopies:
    """The copies that fill one slot with one tile, piece by piece. A piece that cannot be read is not copied.

    piece: number of a piece in the tile -> whether it can be read, its first position, its frame, and its first token
    in the page. length: tokens written. k, v: the pool, and its slots `[2, pieces, tokens of a piece, D]`. arrived: a
    semaphore per slot.
    """

    piece: Callable
    length: jax.Array
    head: jax.Array
    slot: jax.Array
    k: tuple[jax.Ref, jax.Ref]
    v: tuple[jax.Ref, jax.Ref]
    arrived: jax.Ref

    def each(self, do):
        """Call `do` on both copies of every piece that can be read."""
        _, pieces, size, _ = self.v[1].shape

        def one(i, _):
            there, _, frame, token = self.piece(i)

            @pl.when(there)
            def _():
                for pool, slots in (self.k, self.v):
                    source = pool.at[frame, self.head, pl.ds(token, size)]
                    do(pltpu.make_async_copy(source, slots.at[self.slot, i], self.arrived.at[self.slot]))

        jax.lax.fori_loop(0, pieces, one, None)

    def start(self):
        self.each(lambda copy: copy.start())

    def wait(self):
        """Wait for all copies that `start` started. A slot has one semaphore for all its copies, so single copies
        cannot be waited for."""
        self.each(lambda copy: copy.wait())

    def clean(self):
        """Set unwritten values to 0: whatever is there, its product with weight 0 must be 0.

        Returns the position of each key of the tile, `[1, keys]`, negative where its piece cannot be read.
        """
        values = self.v[1]
        _, pieces, size, _ = values.shape
        lane = jax.lax.broadcasted_iota(jnp.int32, (1, pieces * size), 1)

        def one(i, pos):
            there, first, _, _ = self.piece(i)

            @pl.when(~there | (first + size > self.length))
            def _():
                written = jnp.where(there, self.length - first, 0)
                token = jax.lax.broadcasted_iota(jnp.int32, values.shape[2:], 0)
                values[self.slot, i] = jnp.where(token < written, values[self.slot, i], 0)

            return jnp.where(lane >= i * size, jnp.where(there, first - i * size, _NOWHERE) + lane, pos)

        return jax.lax.fori_loop(0, pieces, one, jnp.full(lane.shape, _NOWHERE, jnp.int32))
