"""copy_tiles: signature, validation, dispatch."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Int

from pallas_kernels.core import dispatch
from pallas_kernels.core.pages import Pages, check_none_open, check_pages


@dataclasses.dataclass(frozen=True)
class Call:
    """The static arguments of a call, as `copy_tiles` explains them."""

    config: Any


def copy_tiles(
    pages: Pages, sources: Int[Array, "n K"], targets: Int[Array, "n K"], *, config: Any = None, implementation: str | None = None
) -> Pages:
    """Copy tiles, the keys and values of one KV head of a page, to other frames of the same pool.

    Entry (i, h) copies head h of frame `sources[i, h]` to head h of frame `targets[i, h]`. Frames may lie in device
    memory or in host memory: this op moves pages between both.

    Args:
        pages: the pool.
        sources, targets: int32, frames below N; an entry is skipped where either is below 0. Entries with the same
            target must have the same source: two rows of a batch may list one page. No tile may be the source of one
            entry and the target of another.
        config: settings of the implementation; none takes any.
        implementation: see `pallas_kernels.core.dispatch`.

    Returns the updated pool. Under jit with the pool donated the update is in place. Traffic: each copied tile is read
    once and written once. Memory: "xla" holds a copy of all n * K tiles, the kernel none.

    Raises ValueError for arguments that do not fit together; NotImplementedError for an implementation that cannot run
    here.
    """
    check_pool(pages, "copy_tiles")
    arrays = dispatch.signature(**pages.arrays, sources=sources, targets=targets)
    if sources.ndim != 2 or sources.shape != targets.shape or 0 in sources.shape or sources.shape[1] != pages.kv_heads:
        raise ValueError(f"sources and targets must be [n, K], one column for each KV head; got {arrays}")
    if sources.dtype != jnp.int32 or targets.dtype != jnp.int32:
        raise ValueError(f"sources and targets must be int32; got {arrays}")
    return dispatch.run("copy_tiles", implementation, str(arrays), Call(config), pages, sources, targets)


def check_pool(pages: Pages, op: str) -> None:
    """Raise ValueError unless an op may copy tiles of this pool: no open pages, and arrays that fit together."""
    check_pages(pages)
    check_none_open(pages, op)
