"""How the `xla` attention ops cut a row of keys into tiles, and how they walk through the tiles."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

MEMORY = 256 * 2**20
"""Bytes that the temporary arrays of an op may take on an accelerator, unless a `Config` says otherwise."""

GROWTH = 4
"""While tiles grow, each makes what was read this many times as much."""


FIRST, LARGEST, STRIDE = 8192, 98304, 131072
"""Tokens of the first tile, of the largest, and of a stride on an accelerator. Tiles end at 8K, 32K and 128K tokens, if memory allows."""


def on_cpu() -> bool:
    """Whether tiles should fit a CPU's caches. Other devices need large ones."""
    return jax.default_backend() == "cpu"


def fitting(bytes_each: int, most: int) -> int:
    """The largest 2^n or 3 * 2^n, from 1 to `most`, of things whose temporary arrays fit into `MEMORY` together."""
    count = max(1, min(most, MEMORY // bytes_each))
    power = 1 << (count.bit_length() - 1)
    return power + power // 2 if power + power // 2 <= count else power


class Run(NamedTuple):
    """Tiles of one size that follow each other: `count` tiles of `size` entries from `start` on."""

    start: int | Int[Array, ""]
    size: int
    count: int

    def scan(self, step: Callable[[int | Array, Any, Any], tuple[Any, Any]], state: Any, xs: Any = None) -> tuple[Any, Any]:
        """Like `jax.lax.scan`: `step(start, state, x) -> (state, result)` for each tile in order. xs and results: `[count, ...]`."""
        if self.count == 1:
            state, found = step(self.start, state, jax.tree.map(lambda x: x[0], xs))
            return state, jax.tree.map(lambda x: x[None], found)
        # A loop, so that XLA does not read several tiles at once, and hold all of them.
        starts = self.start + self.size * jnp.arange(self.count, dtype=jnp.int32)
        return jax.lax.scan(lambda state, each: step(each[0], state, each[1]), state, (starts, xs))


@dataclasses.dataclass(frozen=True)
class Cut:
    """The tiles of a row of `count` entries: small ones at its beginning that grow from `first` to `largest`, then equal ones.

    Where a tile begins and ends does not depend on `count`. Tiles are folded in groups (`walk`): the small ones with the first `stride`
    equal ones, then `stride` equal ones at a time. If `stride` is 1, each tile is a group.
    """

    count: int
    first: int
    largest: int
    stride: int = 1

    @property
    def growing(self) -> tuple[tuple[int, int], ...]:
        """Start and size of the tiles before the equal ones."""
        return tuple(tile for tile in self._all_growing if tile[0] < self.count)

    @property
    def _all_growing(self) -> tuple[tuple[int, int], ...]:
        found, start, size = [], 0, self.first
        while size < self.largest:
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

    @property
    def group(self) -> int:
        """Entries of the largest group, whatever `count` is."""
        small = sum(size for _, size in self._all_growing) if self.stride > 1 else 0
        return small + self.stride * self.largest


def cut(count: int, size: int, bytes_each: int, bytes_kept: int) -> Cut:
    """How an accelerator cuts a row of `count` entries of `size` tokens. Half of the memory is for a tile, whose temporary arrays take
    `bytes_each` for an entry. The other half is for what is kept of all tiles of a group, `bytes_kept` for an entry."""
    largest = fitting(2 * bytes_each, max(1, LARGEST // size))
    stride = min(-(-STRIDE // (largest * size)), MEMORY // (2 * bytes_kept * largest))
    return Cut(count, max(1, min(FIRST // size, largest)), largest, max(1, stride))


def walk(cut: Cut, used: Int[Array, ""], fold: Callable[[tuple[Run, ...], Any], Any], state: Any) -> Any:
    """Fold the groups of a row in order.

    fold: `(runs, state) -> state` for the tiles of a group. Tiles without readable entries must leave the state as it is. used: entries up
    to the last readable one. Tiles behind it may be folded or not. A row that has more equal tiles than its first group looks, before each
    further group, whether anything is left. On a GPU the host takes each look, and the device waits for it.
    """
    small = tuple(Run(start, size, 1) for start, size in cut.growing)
    start, left, together = cut.start, cut.equal, min(cut.stride, cut.equal)
    if cut.stride == 1:
        for run in small:
            state = fold((run,), state)
        small = ()
    if small or 0 < left <= together:
        state = fold((*small, Run(start, cut.largest, together)) if together else small, state)
        start, left = start + together * cut.largest, left - together
    if not left:
        return state
    entries = together * cut.largest
    groups = -(-jnp.maximum(used - start, 0) // entries)
    return jax.lax.fori_loop(0, groups, lambda i, state: fold((Run(start + i * entries, cut.largest, together),), state), state)
