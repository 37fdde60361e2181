"""How the `xla` attention ops cut a row of keys into tiles, and how they walk through the tiles."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

MEMORY = 256 * 2**20
"""Bytes that the temporary arrays of an op may take on an accelerator, unless a `Config` says otherwise."""

GROWTH = 4
"""While tiles grow, each makes what was read this many times as much."""


FIRST, LARGEST, STRIDE = 8192, 98304, 131072
"""Tokens of the first tile, of the largest, and of a stride on an accelerator. Tiles end at 8K, 32K and 128K tokens, if
memory allows."""


def on_cpu() -> bool:
    """Whether tiles should fit a CPU's caches. Other devices need large ones."""
    return jax.default_backend() == "cpu"


def fitting(bytes_each: int, most: int) -> int:
    """The largest 2^n or 3 * 2^n, from 1 to `most`, of things whose temporary arrays fit into `MEMORY` together."""
    count = max(1, min(most, MEMORY // bytes_each))
    power = 1 << (count.bit_length() - 1)
    return power + power // 2 if power + power // 2 <= count else power


@dataclasses.dataclass(frozen=True)
class Cut:
    """The tiles of a row of `count` entries: small ones at its beginning that grow from `first` to `largest`, then
    equal ones.

    Where a tile begins and ends does not depend on `count`. Equal tiles are folded in strides of `stride` tiles
    (`walk`).
    """

    count: int
    first: int
    largest: int
    stride: int = 1

    @property
    def growing(self) -> tuple[tuple[int, int], ...]:
        """Start and size of the tiles before the equal ones."""
        found, start, size = [], 0, self.first
        while size < self.largest and start < self.count:
            found.append((start, size))
            start += size
            size = min(start * (GROWTH - 1), self.largest)
        return tuple(found)

    @property
    def start(self) -> int:
        """Where the equal tiles begin."""
        return sum(size for _, size in self.growing)

    @property
    def equal(self) -> int:
        """How many equal tiles there are. A multiple of `stride` where there are more than one stride."""
        tiles = -(-max(0, self.count - self.start) // self.largest)
        return tiles if tiles <= self.stride else -(-tiles // self.stride) * self.stride

    @property
    def width(self) -> int:
        """The end of the last tile. Entries from `count` on are padding."""
        return self.start + self.equal * self.largest


def cut(count: int, size: int, bytes_each: int) -> Cut:
    """How an accelerator cuts a row of `count` entries of `size` tokens, with temporary arrays of `bytes_each` for an
    entry."""
    largest = fitting(bytes_each, max(1, LARGEST // size))
    return Cut(count, max(1, min(FIRST // size, largest)), largest, -(-STRIDE // (largest * size)))


def walk(cut: Cut, used: Int[Array, ""], fold: Callable[[Any, int, Any], Any], state: Any) -> Any:
    """Fold the tiles of a row in order.

    fold: `(start, size, state) -> state`; a tile without readable entries must leave the state as it is. used: entries
    up to the last readable one. Tiles behind it may be folded or not. A row of more than one stride looks, before each
    stride, whether anything is left. On a GPU the host takes each look, and the device waits for it.
    """
    for start, size in cut.growing:
        state = fold(start, size, state)

    def stride(first, state):
        count = min(cut.stride, cut.equal)
        if count <= 1:
            return fold(cut.start + first * cut.largest, cut.largest, state) if count else state
        # A loop, so that XLA does not read several tiles at once, and hold all of them.
        return jax.lax.fori_loop(0, count, lambda i, state: fold(cut.start + (first + i) * cut.largest, cut.largest, state), state)

    if cut.equal <= cut.stride:
        return stride(0, state)
    strides = -(-jnp.maximum(used - cut.start, 0) // (cut.largest * cut.stride))
    return jax.lax.fori_loop(0, strides, lambda i, state: stride(i * cut.stride, state), state)
