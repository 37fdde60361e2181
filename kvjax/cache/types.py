"""The cache: a pool of pages per layer, page tables that name them, and the lengths written so far.

Everything here is a pytree of arrays; who owns pages is the allocator's business (`kvjax.cache.allocator`), on the host.
"""

from __future__ import annotations

import dataclasses

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.page_index import INDEX_ROWS

FULL = "full"
"""Name of the one layer group there is so far: layers that keep every token."""


@dataclasses.dataclass(frozen=True)
class IndexSpec:
    """One index a policy wants built for every sealed page.

    kind: "bounds" (elementwise max and min of a block's keys) or "mean". block_size: tokens, divides the page size.
    """

    kind: str
    block_size: int

    def __post_init__(self):
        if self.kind not in INDEX_ROWS:
            raise ValueError(f"index kind {self.kind!r} is unknown; there are {', '.join(sorted(INDEX_ROWS))}")
        if self.block_size <= 0:
            raise ValueError(f"block_size must be positive, got {self.block_size}")

    @property
    def name(self) -> str:
        """Key of this index in `PagedKV.index`."""
        return f"{self.kind}{self.block_size}"

    def shape(self, num_pages: int, num_kv_heads: int, page_size: int, head_dim: int) -> tuple[int, ...]:
        """Shape of the array: `N K P/bs R D` with R the index's rows per block (2 for bounds, 1 for mean)."""
        if page_size % self.block_size:
            raise ValueError(f"block_size {self.block_size} does not divide page_size {page_size}")
        return (num_pages, num_kv_heads, page_size // self.block_size, INDEX_ROWS[self.kind], head_dim)


@flax.struct.dataclass
class PagedKV:
    """Keys and values of one full-attention layer, and what selectors scan instead of the keys.

    A (page, head) tile is `[P, D]` and contiguous. `index` maps `IndexSpec.name` to `Float[Array, "N K P/bs R D"]`; rows of pages
    that are not sealed hold nothing meaningful.
    """

    k: Float[Array, "N K P D"]
    v: Float[Array, "N K P D"]
    index: dict[str, Float[Array, "N K nb R D"]]


@flax.struct.dataclass
class Cache:
    """What a jitted step reads and writes.

    layers: one entry per layer, no stacked axis, so that updates stay in place. page_tables: per layer group, logical page ->
    physical page, -1 where there is none. lengths: tokens written, the current ones included when attention reads it.
    """

    layers: tuple[PagedKV, ...]
    page_tables: dict[str, Int[Array, "B M"]]
    lengths: Int[Array, "B"]


def empty_layer(
    num_pages: int, num_kv_heads: int, page_size: int, head_dim: int, dtype: jnp.dtype, indexes: tuple[IndexSpec, ...]
) -> PagedKV:
    """A layer of zeroed pages: 2 * num_pages * num_kv_heads * page_size * head_dim elements of `dtype`, and the declared indexes."""
    pages = (num_pages, num_kv_heads, page_size, head_dim)
    return PagedKV(
        k=jnp.zeros(pages, dtype),
        v=jnp.zeros(pages, dtype),
        index={spec.name: jnp.zeros(spec.shape(*pages), dtype) for spec in indexes},
    )


def bytes_per_page(num_kv_heads: int, page_size: int, head_dim: int, dtype: jnp.dtype, indexes: tuple[IndexSpec, ...]) -> int:
    """Bytes one page of one layer takes, its indexes included."""
    layer = jax.eval_shape(lambda: empty_layer(1, num_kv_heads, page_size, head_dim, dtype, indexes))
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(layer))
