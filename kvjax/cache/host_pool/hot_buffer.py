"""The hot buffer: copies in device memory of the host's tiles that steps read lately, for each layer and KV head.

It works like the cache of a processor. A tile, one KV head of a sealed page, may lie in a few places, which follow from
its page's id. A step looks up the tiles that it lists, copies those that are missing from host memory in place of the
tiles that were unused longest, and then attends. Tiles that find no place are read in host memory. So what the buffer
holds never changes a result.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int, Int32

from pallas_kernels.cache.fetch_tiles import fetch_tiles
from pallas_kernels.cache.place_tiles import WAYS
from pallas_kernels.core.pages import Pages

WORD = 30
"""Bits of the lower word of a counter. A step counts fewer than 2 ** WORD tiles of a layer, so their sum fits into 31
bits."""


@flax.struct.dataclass
class HotTiles:
    """What one layer's hot buffer holds. tags: page ids, -1 where there is none. ages: the step that used a tile last.

    Tile (h, s, w) is head h of frame `first + s * WAYS + w`, in device memory. Shared by all sequences, because a
    sealed page does not change. A page whose id gets a new content must be forgotten first (`forget`).
    """

    tags: Int32[Array, "K S WAYS"]
    ages: Int32[Array, "K S WAYS"]
    first: int = flax.struct.field(pytree_node=False)


@flax.struct.dataclass
class HotBuffers:
    """The buffers of all layers, None where a layer has none. now: steps so far. asked: for each layer, tiles of pages
    in host memory that steps have listed so far. from_host: those of them that came, or were read, from there. Both are
    counted in two words (`counted`): one of 32 bits is full after some hours of large batches."""

    tiles: tuple[HotTiles | None, ...]
    now: Int32[Array, ""]
    asked: Int32[Array, "L 2"]
    from_host: Int32[Array, "L 2"]

    def __bool__(self) -> bool:
        """Whether any layer has a buffer."""
        return any(each is not None for each in self.tiles)


def no_buffers(tiles: tuple[HotTiles | None, ...]) -> HotBuffers:
    """Buffers that nothing has used yet."""
    asked, from_host = (jnp.zeros((len(tiles), 2), jnp.int32) for _ in range(2))
    return HotBuffers(tiles, jnp.zeros((), jnp.int32), asked, from_host)


def empty_hot(kv_heads: int, first: int, frames: int) -> HotTiles | None:
    """An empty buffer over `frames` frames from `first` on; None for fewer than WAYS."""
    if frames < WAYS:
        return None
    places = (kv_heads, frames // WAYS, WAYS)
    return HotTiles(jnp.full(places, -1, jnp.int32), jnp.zeros(places, jnp.int32), first)


@flax.struct.dataclass
class Fetched:
    """What a layer's step listed: the frame in which each tile lies now, the sources of the tiles that were copied, -1
    where none was, and the layer whose buffer this was. border: frames from this one on lie in host memory; first:
    those from this one on lie there or in the buffer."""

    frames: Int32[Array, "B K W"]
    sources: Int32[Array, "n K"]
    owner: int = flax.struct.field(pytree_node=False)
    first: int = flax.struct.field(pytree_node=False)
    border: int = flax.struct.field(pytree_node=False)


def fetch(
    hot: HotTiles,
    pages: Pages,
    blocks: Int[Array, "B K W"],
    page_table: Int[Array, "B M"],
    frames: Int[Array, "B M"],
    lengths: Int[Array, "B"],
    now: Int32[Array, ""],
    *,
    num_queries: int,
    border: int,
    owner: int = 0,
) -> tuple[HotTiles, Pages, Fetched]:
    """Look up the listed tiles, and copy missing ones here. Arguments as of `fetch_tiles`, blocks being whole pages.
    owner: the number of the buffer's layer.

    Returns buffer, pool, and what was listed: `count` counts it for all layers of a step together, because every small
    kernel in a layer delays the next one.
    """
    lists = (blocks, page_table, frames, lengths, hot.tags, hot.ages, now)
    found = fetch_tiles(pages, *lists, num_queries=num_queries, first=hot.first, border=border)
    after = hot.replace(tags=found.tags, ages=found.ages)
    return after, found.pages, Fetched(found.block_frames, found.sources, owner, hot.first, border)


def count(hot: HotBuffers, fetched: Sequence[Fetched | None]) -> tuple[HotBuffers, list[Int32[Array, "B"] | None]]:
    """After a step: the counters with what its layers listed, and how many tiles of each row of each of these layers
    came, or were read, from host memory; None for a layer that listed nothing through a buffer."""
    rows: list[Int32[Array, "B"] | None] = [None] * len(fetched)
    asked, from_host = (jnp.zeros(len(hot.tiles), jnp.int32) for _ in range(2))
    alike: dict[tuple, list[int]] = {}
    for place, each in enumerate(fetched):
        if each is not None:
            alike.setdefault((each.frames.shape, each.first, each.border), []).append(place)
    for (shape, first, border), places in alike.items():
        frames, sources = (jnp.stack([getattr(fetched[place], name) for place in places]) for name in ("frames", "sources"))
        copied = (sources >= 0).reshape(len(places), shape[0], -1).sum(axis=2, dtype=jnp.int32)
        of_rows = copied + (frames >= border).sum((2, 3), dtype=jnp.int32)
        # Not as a scatter: XLA puts the sums into it, and on a GPU one thread then makes each.
        owned = np.arange(len(hot.tiles))[:, None] == [fetched[place].owner for place in places]
        asked += jnp.where(owned, (frames >= first).sum((1, 2, 3), dtype=jnp.int32), 0).sum(axis=1, dtype=jnp.int32)
        from_host += jnp.where(owned, of_rows.sum(axis=1, dtype=jnp.int32), 0).sum(axis=1, dtype=jnp.int32)
        for number, place in enumerate(places):
            rows[place] = of_rows[number]
    return hot.replace(asked=_add(hot.asked, asked), from_host=_add(hot.from_host, from_host)), rows


def counted(words: Int32[Array, "2"]) -> int:
    """What `asked` or `from_host` has counted for a layer. Waits for the device."""
    high, low = np.asarray(words).tolist()
    return (high << WORD) + low


def _add(words: Int32[Array, "L 2"], counts: Int32[Array, "L"]) -> Int32[Array, "L 2"]:
    low = words[:, 1] + counts
    return jnp.stack([words[:, 0] + (low >> WORD), low & ((1 << WORD) - 1)], axis=1)


@functools.partial(jax.jit, donate_argnames="hot")
def forget(hot: tuple[HotTiles, ...], dead: Bool[Array, " ids"]) -> tuple[HotTiles, ...]:
    """Every layer's buffer without the `dead` pages, whose ids get a new content. DONATES hot."""
    return tuple(each.replace(tags=jnp.where((each.tags >= 0) & dead[jnp.maximum(each.tags, 0)], -1, each.tags)) for each in hot)
