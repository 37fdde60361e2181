"""The hot buffer: copies in device memory of the host's tiles that steps read lately, for each layer and KV head.

It works like the cache of a processor. A tile, one KV head of a sealed page, may lie in a few places (`WAYS`), which follow from its page's
id. A step looks up the tiles that it lists, copies those that are missing from host memory in place of the tiles that were unused longest,
and then attends. Tiles that find no place are read in host memory. So what the buffer holds never changes a result.
"""

from __future__ import annotations

import functools

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, Int32

from pallas_kernels.copy_tiles import copy_tiles
from pallas_kernels.pages import Pages

WAYS = 8
"""Places in which a tile may lie."""
NOWHERE = jnp.iinfo(jnp.int32).max


@flax.struct.dataclass
class HotTiles:
    """What one layer's hot buffer holds. tags: page ids, -1 where there is none. ages: the step that used a tile last. now: steps so far.

    Tile (h, s, w) is head h of frame `first + s * WAYS + w`, in device memory. Shared by all sequences, because a sealed page does not
    change. A page whose id gets a new content must be forgotten first (`forget`).
    """

    tags: Int32[Array, "K sets WAYS"]
    ages: Int32[Array, "K sets WAYS"]
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
    page_ids: Int[Array, "B K W"],
    frames: Int[Array, "B K W"],
    wanted: Bool[Array, "B K W"],
) -> tuple[HotTiles, Pages, Int[Array, "B K W"], Bool[Array, "B K W"]]:
    """Look up listed tiles, and copy missing ones here. Returns buffer, pool, the frames in which the tiles now lie, and which were copied.

    wanted: tiles of sealed pages in host memory. frames: where the pages lie; the result differs only where a tile is in the buffer.
    """
    batch, kv_heads, width = page_ids.shape

    def by_head(x):
        return x.swapaxes(0, 1).reshape(kv_heads, batch * width)

    ids, asked = by_head(page_ids), by_head(wanted)
    heads, sets, now = jnp.arange(kv_heads)[:, None], jnp.maximum(ids, 0) % hot.tags.shape[1], hot.now + 1
    same = (hot.tags[heads, sets] == ids[..., None]) & asked[..., None]
    found = same.any(axis=-1)
    # First the tiles that are found become young, so that none of them has to go.
    ages = hot.ages.at[heads, jnp.where(found, sets, NOWHERE), same.argmax(axis=-1)].set(now, mode="drop")
    way = jnp.where(found, same.argmax(axis=-1), ages[heads, sets].argmin(axis=-1))
    missing = asked & ~found
    tags = hot.tags.at[heads, jnp.where(missing, sets, NOWHERE), way].set(ids, mode="drop")
    # Of two missing tiles that chose one place, one got it. A found tile may have lost its place, too, where all of them are young.
    held = asked & (tags[heads, sets, way] == ids)
    ages = ages.at[heads, jnp.where(held & missing, sets, NOWHERE), way].set(now, mode="drop")
    copied = held & missing
    places = hot.first + sets * WAYS + way
    sources, targets = jnp.where(copied, by_head(frames), -1), jnp.where(copied, places, -1)
    pages = copy_tiles(pages, sources.T.astype(jnp.int32), targets.T.astype(jnp.int32))

    def by_row(x):
        return x.reshape(kv_heads, batch, width).swapaxes(0, 1)

    return HotTiles(tags, ages, now, hot.first), pages, jnp.where(by_row(held), by_row(places), frames), by_row(copied)


@functools.partial(jax.jit, donate_argnames="hot")
def forget(hot: tuple[HotTiles, ...], dead: Bool[Array, " ids"]) -> tuple[HotTiles, ...]:
    """Every layer's buffer without the `dead` pages, whose ids get a new content. DONATES hot."""
    return tuple(each.replace(tags=jnp.where((each.tags >= 0) & dead[jnp.maximum(each.tags, 0)], -1, each.tags)) for each in hot)
