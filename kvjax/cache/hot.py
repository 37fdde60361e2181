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
from jaxtyping import Array, Bool, Int, Int32

from pallas_kernels.copy_tiles import copy_tiles
from pallas_kernels.pages import Pages
from pallas_kernels.place_tiles import WAYS, place_tiles


@flax.struct.dataclass
class HotTiles:
    """What one layer's hot buffer holds. tags: page ids, -1 where there is none. ages: the step that used a tile last. now: steps so far.

    Tile (h, s, w) is head h of frame `first + s * WAYS + w`, in device memory. Shared by all sequences, because a sealed page does not
    change. A page whose id gets a new content must be forgotten first (`forget`).
    """

    tags: Int32[Array, "K S WAYS"]
    ages: Int32[Array, "K S WAYS"]
    now: Int32[Array, ""]
    first: int = flax.struct.field(pytree_node=False)


def empty_hot(kv_heads: int, first: int, frames: int) -> HotTiles | None:
    """An empty buffer over `frames` frames from `first` on; None for fewer than WAYS."""
    if frames < WAYS:
        return None
    places = (kv_heads, frames // WAYS, WAYS)
    return HotTiles(jnp.full(places, -1, jnp.int32), jnp.zeros(places, jnp.int32), jnp.int32(0), first)


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
    return HotTiles(placed.tags, placed.ages, now, hot.first), pages, placed.block_frames, copied + in_place


@functools.partial(jax.jit, donate_argnames="hot")
def forget(hot: tuple[HotTiles, ...], dead: Bool[Array, " ids"]) -> tuple[HotTiles, ...]:
    """Every layer's buffer without the `dead` pages, whose ids get a new content. DONATES hot."""
    return tuple(each.replace(tags=jnp.where((each.tags >= 0) & dead[jnp.maximum(each.tags, 0)], -1, each.tags)) for each in hot)
