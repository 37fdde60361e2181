"""Indexes that policies scan instead of keys. Static."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping

import jax.numpy as jnp
from jaxtyping import Array

from pallas_kernels.core.pages import PageFormat
from pallas_kernels.selection.page_index import CODED, INDEX_KINDS, index_dtype, index_shape


@dataclasses.dataclass(frozen=True)
class IndexSpec:
    """An index that a policy needs for every sealed page.

    kind: "bounds" (elementwise max and min of a block's keys), "mean", or the keys in few bits: "keys1" to "keys8".
    block_size: tokens, divides the page size. unless_packed: not built in layers whose keys are packed, which the
    policy then reads themselves. every: built in every n-th layer alone, counting from the first, of those that read
    all tokens and attend to pages.
    """

    kind: str
    block_size: int
    unless_packed: bool = False
    every: int = 1

    def __post_init__(self):
        if self.kind not in INDEX_KINDS:
            raise ValueError(f"index kind {self.kind!r} is unknown; there are {', '.join(sorted(INDEX_KINDS))}")
        if self.block_size <= 0:
            raise ValueError(f"block_size must be positive, got {self.block_size}")
        if self.every < 1:
            raise ValueError(f"every must be at least 1, got {self.every}")

    @property
    def name(self) -> str:
        """Key of this index in `PagedKV.index`."""
        return f"{self.kind}{self.block_size}"

    def __str__(self) -> str:
        """The name, and what the index holds."""
        bits = CODED.get(self.kind, 0)
        what = {"bounds": "largest and smallest keys", "mean": "mean keys"}.get(self.kind, f"keys in {bits} bit{'s' * (bits != 1)}")
        return f"{self.name} ({what}, in blocks of {self.block_size} tokens)"

    def covers(self, other: IndexSpec) -> bool:
        """Whether this index is there, and the same, in every layer in which the other one is."""
        same = (self.kind, self.block_size) == (other.kind, other.block_size)
        return same and self.unless_packed <= other.unless_packed and other.every % self.every == 0

    def shape(self, num_pages: int, num_kv_heads: int, page_size: int, head_dim: int) -> tuple[int, ...]:
        """Shape of the array: `N K P/bs R W` with R rows of W elements per block
        (`pallas_kernels.selection.page_index.index_shape`)."""
        if page_size % self.block_size:
            raise ValueError(
                f"block_size {self.block_size} does not divide page_size {page_size}: use a page_size that is a "
                f"multiple of {self.block_size}, or a policy of smaller blocks"
            )
        return (num_pages, num_kv_heads, page_size // self.block_size, *index_shape(self.kind, self.block_size, head_dim))

    def empty(self, num_pages: int, num_kv_heads: int, page_size: int, head_dim: int, dtype: jnp.dtype) -> Array:
        """The array for keys of `dtype`, zeroed."""
        return jnp.zeros(self.shape(num_pages, num_kv_heads, page_size, head_dim), index_dtype(self.kind, dtype))


def kept_in(index: Mapping[str, Array], indexes: tuple[IndexSpec, ...]) -> tuple[IndexSpec, ...]:
    """Those of `indexes` that a layer with this `PagedKV.index` has, one of each name."""
    return tuple({spec.name: spec for spec in indexes if spec.name in index}.values())


def without_covered(indexes: Iterable[IndexSpec]) -> tuple[IndexSpec, ...]:
    """Each of `indexes` once, without those that another one covers."""
    once = tuple(dict.fromkeys(indexes))
    return tuple(spec for spec in once if not any(other != spec and other.covers(spec) for other in once))


def over_packed(indexes: tuple[IndexSpec, ...], k_packed: PageFormat | None) -> tuple[IndexSpec, ...]:
    """Those of `indexes` that are built over keys of this format; None: numbers as they are."""
    return tuple(spec for spec in indexes if k_packed is None or not spec.unless_packed)
