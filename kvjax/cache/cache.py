"""The cache as a jitted step reads and writes it, and where its pages lie.

A page keeps its id for life, but its frame may change between steps.
"""

from __future__ import annotations

import flax.struct
import numpy as np
from jaxtyping import Array, Int

from kvjax.axes import ONE_DEVICE, Shards
from kvjax.cache.arrays import LayerCache
from kvjax.cache.host_pool.hot_buffer import HotBuffers
from kvjax.cache.spec import CacheSpec


@flax.struct.dataclass
class Cache:
    """What a jitted step reads and writes. shards: inside a program over a mesh, what it knows of it: layers are then
    this device's part.

    layers: one entry per layer, no stacked axis, so that updates stay in place; None for a layer that reads another's
    pages. page_tables: per layer group, logical page -> page id, -1 where there is none. lengths: tokens written;
    includes the current ones when attention reads it. spec: describes `layers`. residency: where pages lie, by layer
    group; in groups that it does not name, a page's frame is its id. hot: the layers' hot buffers; None where no layer
    has one.
    """

    layers: tuple[LayerCache | None, ...]
    page_tables: dict[str, Int[Array, "B M"]]
    lengths: Int[Array, "B"]
    spec: CacheSpec = flax.struct.field(pytree_node=False)
    residency: dict[str, Residency] = flax.struct.field(default_factory=dict)
    hot: HotBuffers | None = None
    shards: Shards = flax.struct.field(pytree_node=False, default=ONE_DEVICE)

    def table_of(self, layer: int) -> Int[Array, "B M"]:
        """The page table of a layer's group. On a mesh it names rows of this device's part of the pool."""
        group = self.spec.layers[layer].group
        return self.shards.own_table(group, self.page_tables[group])


@flax.struct.dataclass
class Residency:
    """Frames of a layer group's pages, in all of its layers. frame_of: by page id; -1 where no frame holds the page.
    border: frames from this one on lie in host memory; None: all lie on the device.

    To move a page is to copy its bytes and to write its entry here: page tables name ids, and rows of indexes are found
    by id.
    """

    frame_of: Int[Array, " ids"]
    border: int | None = flax.struct.field(pytree_node=False, default=None)

    def frames(self, table: Int[Array, "B M"]) -> Int[Array, "B M"]:
        """The frames of a table of page ids, -1 where there is no page or no frame."""
        return self.frame_of.at[table].get(mode="fill", fill_value=-1, wrap_negative_indices=False)


class MissingPages(RuntimeError):
    """A step listed pages that no store holds. Its results are meaningless."""


def frame_tables(cache: Cache) -> dict[str, Int[Array, "B M"]]:
    """Tables of frames, for the groups that have a `Residency`. In the other groups the frame of a page is its id,
    without a look-up.

    ValueError for a residency of rows of state, which do not move, or of an unknown group.
    """
    for name in cache.residency:
        if name not in cache.page_tables or name in cache.spec.row_groups:
            known = [group.name for group in cache.spec.groups if group.name not in cache.spec.row_groups]
            raise ValueError(f"layer group {name!r} has no pages that move between frames; a residency can be given for {known}")
    return {name: residency.frames(cache.page_tables[name]) for name, residency in cache.residency.items()}


def check_missing(missing: Int[Array, "B"] | None) -> None:
    """MissingPages if a step counted pages without a frame. None: every page is in the frame of its id. Waits for the
    device."""
    if missing is not None and (counts := np.asarray(missing)).any():
        rows = ", ".join(f"{count} in row {row}" for row, count in enumerate(counts.tolist()) if count)
        raise MissingPages(
            f"a step read or wrote pages that no store holds (over all layers and lists: {rows}), so its results mean nothing: bring every "
            "page that a step may list into a frame first, and say so in Residency.frame_of"
        )
