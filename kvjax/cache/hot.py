"""The hot buffer: copies in device memory of the host's tiles that steps read lately, for each layer and KV head.

It works like the cache of a processor. A tile, one KV head of a sealed page, may lie in a few places, which follow from its page's id. A
step looks up the tiles that it lists, copies those that are missing from host memory in place of the tiles that were unused longest, and
then attends. Tiles that find no place are read in host memory. So what the buffer holds never changes a result.
"""

from __future__ import annotations

import functools

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int, Int32

from pallas_kernels.copy_tiles import copy_tiles
from pallas_kernels.pages import Pages
from pallas_kernels.place_tiles import WAYS, place_tiles

WORD = 30
"""Bits of the lower word of a counter. A step counts fewer than 2 ** WORD tiles, so their sum fits into 31 bits."""


@flax.struct.dataclass
class HotTiles:
    """What one layer's hot buffer holds. tags: page ids, -1 where there is none. ages: the step that used a tile last. now: steps so far.
    asked: tiles of pages in host memory that steps have listed so far. from_host: those of them that came, or were read, from there.
    Both are counted in two words (`counted`): one of 32 bits is full after some hours of large batches.

    Tile (h, s, w) is head h of frame `first + s * WAYS + w`, in device memory. Shared by all sequences, because a sealed page does not
    change. A page whose id gets a new content must be forgotten first (`forget`).
    """

    tags: Int32[Array, "K S WAYS"]
    ages: Int32[Array, "K S WAYS"]
    now: Int32[Array, ""]
    asked: Int32[Array, "2"]
    from_host: Int32[Array, "2"]
    first: int = flax.struct.field(pytree_node=False)


def empty_hot(kv_heads: int, first: int, frames: int) -> HotTiles | None:
    """An empty buffer over `frames` frames from `first` on; None for fewer than WAYS."""
    if frames < WAYS:
        return None
    places = (kv_heads, frames // WAYS, WAYS)
    asked, from_host = (jnp.zeros(2, jnp.int32) for _ in range(2))
    return HotTiles(jnp.full(places, -1, jnp.int32), jnp.zeros(places, jnp.int32), jnp.zeros((), jnp.int32), asked, from_host, first)


def fetch(
    hot: HotTiles,
    pages: Pages,
    blocks: Int[Array, "B K W"],
    page_table: Int[Array, "B M"],
    frames: Int[Array, "B M"],
    lengths: Int[Array, "B"],
    *,
    num_queries: int,
    border: int,
) -> tuple[HotTiles, Pages, Int[Array, "B K W"], Int[Array, "B"]]:
    """Look up the listed tiles, and copy missing ones here. Arguments as of `place_tiles`, blocks being whole pages.

    Returns buffer, pool, the frame in which each listed tile lies now, and how many of each row came, or are read, from host memory.
    """
    now = hot.now + 1
    lists = (blocks, page_table, frames, lengths)
    placed = place_tiles(
        *lists, hot.tags, hot.ages, now, page_size=pages.page_size, num_queries=num_queries, first=hot.first, border=border
    )
    pages = copy_tiles(pages, placed.sources, placed.targets)
    copied = (placed.sources >= 0).reshape(len(blocks), -1).sum(axis=1, dtype=jnp.int32)
    in_place = (placed.block_frames >= border).sum((1, 2), dtype=jnp.int32)
    asked = _add(hot.asked, (placed.block_frames >= hot.first).sum(dtype=jnp.int32))
    count = copied + in_place
    after = HotTiles(placed.tags, placed.ages, now, asked, _add(hot.from_host, count.sum(dtype=jnp.int32)), hot.first)
    return after, pages, placed.block_frames, count


def counted(words: Int32[Array, "2"]) -> int:
    """What `asked` or `from_host` of a buffer has counted. Waits for the device."""
    high, low = np.asarray(words).tolist()
    return (high << WORD) + low


def _add(words: Int32[Array, "2"], count: Int32[Array, ""]) -> Int32[Array, "2"]:
    low = words[1] + count
    return jnp.stack([words[0] + (low >> WORD), low & ((1 << WORD) - 1)])


@functools.partial(jax.jit, donate_argnames="hot")
def forget(hot: tuple[HotTiles, ...], dead: Bool[Array, " ids"]) -> tuple[HotTiles, ...]:
    """Every layer's buffer without the `dead` pages, whose ids get a new content. DONATES hot."""
    return tuple(each.replace(tags=jnp.where((each.tags >= 0) & dead[jnp.maximum(each.tags, 0)], -1, each.tags)) for each in hot)
