"""fetch_tiles: signature, validation, dispatch."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

from jaxtyping import Array, Int, Int32

from pallas_kernels.cache.copy_tiles.api import check_pool
from pallas_kernels.cache.place_tiles.api import checked_call
from pallas_kernels.core import dispatch
from pallas_kernels.core.pages import Pages


@dataclasses.dataclass(frozen=True)
class Call:
    """The static arguments of a call, as `fetch_tiles` explains them."""

    num_queries: int
    first: int
    border: int
    config: Any


class FetchedTiles(NamedTuple):
    """What `fetch_tiles` returns."""

    pages: Pages
    block_frames: Int32[Array, "B K W"]
    sources: Int32[Array, "n K"]
    tags: Int32[Array, "K S WAYS"]
    ages: Int32[Array, "K S WAYS"]


def fetch_tiles(
    pages: Pages,
    blocks: Int[Array, "B K W"],
    page_table: Int[Array, "B M"],
    frames: Int[Array, "B M"],
    lengths: Int[Array, "B"],
    tags: Int32[Array, "K S WAYS"],
    ages: Int32[Array, "K S WAYS"],
    now: Int32[Array, ""],
    *,
    num_queries: int,
    first: int,
    border: int,
    config: Any = None,
    implementation: str | None = None,
) -> FetchedTiles:
    """Look up the listed tiles in a buffer on the device of tiles in host memory, and copy those that are missing to a
    place there.

    What `place_tiles` and then `copy_tiles` do, which a kernel does in one launch: between a selection and its
    attention every launch delays the layer.

    Args:
        pages: the pool, in device memory and in host memory from frame `border` on; its page size is that of the lists.
        blocks, page_table, frames, lengths, tags, ages, now, num_queries, first, border: as of `place_tiles`.
        config: none takes any.
        implementation: see `pallas_kernels.core.dispatch`.

    Returns the pool with the copies made, in place under jit with the pool donated; the frame of each listed tile; the
    frame from which it was copied, -1 where it was not; and tags and ages afterwards. Traffic: that of both ops.

    Raises ValueError for arguments that do not fit together; NotImplementedError for an implementation that cannot run
    here.
    """
    check_pool(pages, "fetch_tiles")
    lists = (blocks, page_table, frames, lengths, tags, ages, now)
    sizes = {"num_queries": num_queries, "first": first, "border": border}
    _, arrays = checked_call(*lists, page_size=pages.page_size, **sizes, config=config)
    if blocks.shape[1] != pages.kv_heads:
        raise ValueError(f"lists are of {blocks.shape[1]} KV heads, pages have {pages.kv_heads}; got {arrays}")
    signature = f"{dispatch.signature(**pages.arrays)} {arrays}"
    return dispatch.run("fetch_tiles", implementation, signature, Call(**sizes, config=config), pages, *lists)
