"""place_tiles: signature, validation, dispatch."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Int, Int32

from pallas_kernels.core import dispatch

WAYS = 8
"""Places in the buffer in which a tile may lie."""


@dataclasses.dataclass(frozen=True)
class Call:
    """The static arguments of a call, as `place_tiles` explains them."""

    page_size: int
    num_queries: int
    first: int
    border: int
    config: Any


class Placed(NamedTuple):
    """What `place_tiles` returns."""

    block_frames: Int32[Array, "B K W"]
    sources: Int32[Array, "n K"]
    targets: Int32[Array, "n K"]
    tags: Int32[Array, "K S WAYS"]
    ages: Int32[Array, "K S WAYS"]


def place_tiles(
    blocks: Int[Array, "B K W"],
    page_table: Int[Array, "B M"],
    frames: Int[Array, "B M"],
    lengths: Int[Array, "B"],
    tags: Int32[Array, "K S WAYS"],
    ages: Int32[Array, "K S WAYS"],
    now: Int32[Array, ""],
    *,
    page_size: int,
    num_queries: int,
    first: int,
    border: int,
    config: Any = None,
    implementation: str | None = None,
) -> Placed:
    """Look up the listed tiles in a buffer on the device of tiles in host memory, and give those that are missing a
    place in it.

    A tile is one KV head of a page. Place (s, w) of KV head h is head h of frame `first + s * WAYS + w`; a page's tiles
    may lie in the places of s = id % S. A missing tile takes the place of the one that was not used for longest. A tile
    that this call lists goes only where all WAYS places hold such tiles; it is then read in host memory. If several
    missing tiles choose one place, one of them gets it, and the others stay in host memory. Which one is not
    determined, and no result depends on it.

    Args:
        blocks: int32, the logical pages that each KV head reads, -1 for none: whole pages.
        page_table, frames: int32, logical page -> page id, and -> frame; -1 where there is none.
        lengths: int32, tokens written, those of the step's queries included.
        tags: int32, the page id in each place, -1 for none. ages: int32, the step that used it last.
        now: int32, number of this step, larger than all ages.
        page_size: tokens.
        num_queries: T of the step. Only pages that were full before the step may be in the buffer, since others still
            change.
        first: frame of the first place.
        border: frames from this one on lie in host memory; tiles of other frames are not looked up.
        config: none takes any.
        implementation: see `pallas_kernels.core.dispatch`.

    Returns the frame of each listed tile (in the buffer, or as `frames` says, -1 for none); the copies that make it
    true, for `copy_tiles`, n = B * W, -1 where there is none; and tags and ages afterwards, in place under jit with
    both donated, tags before ages: JAX gives donated arrays of one shape to results in this order.

    Source: none; a set-associative cache, as processors have, that gives up what was used least recently.

    Raises ValueError for arguments that do not fit together; NotImplementedError for an implementation that cannot run
    here.
    """
    operands = (blocks, page_table, frames, lengths, tags, ages, now)
    sizes = {"page_size": page_size, "num_queries": num_queries, "first": first, "border": border}
    call, arrays = checked_call(*operands, **sizes, config=config)
    return dispatch.run("place_tiles", implementation, arrays, call, *operands)


def checked_call(
    blocks, page_table, frames, lengths, tags, ages, now, *, page_size, num_queries, first, border, config
) -> tuple[Call, str]:
    """The static arguments of a call and the text of its arrays. Arguments as of `place_tiles`; raises ValueError as it
    does."""
    arrays = dispatch.signature(blocks=blocks, page_table=page_table, frames=frames, lengths=lengths, tags=tags, ages=ages)
    if blocks.ndim != 3 or page_table.ndim != 2 or frames.shape != page_table.shape or lengths.shape != blocks.shape[:1]:
        raise ValueError(f"needs blocks [B, K, W], page_table and frames [B, M], lengths [B]; got {arrays}")
    if page_table.shape[0] != blocks.shape[0] or 0 in (*blocks.shape, *page_table.shape):
        raise ValueError(f"tables and lists must have the same batch, and no axis may be empty; got {arrays}")
    if tags.shape != ages.shape or tags.ndim != 3 or tags.shape[0] != blocks.shape[1] or tags.shape[2] != WAYS or not tags.shape[1]:
        raise ValueError(f"tags and ages must be [K, S, {WAYS}]; got {arrays}")
    if any(x.dtype != jnp.int32 for x in (blocks, page_table, frames, lengths, tags, ages, now)) or now.ndim:
        raise ValueError(f"all arrays must be int32, and now a scalar; got {arrays}, now {now.dtype}{list(now.shape)}")
    if min(page_size, num_queries) < 1 or not 0 <= first <= border - tags.shape[1] * WAYS:
        raise ValueError(
            f"the {tags.shape[1] * WAYS} places from frame {first} on must lie before the border {border}; page_size {page_size} and "
            f"num_queries {num_queries} must be at least 1"
        )
    return Call(page_size, num_queries, first, border, config), str(arrays)
