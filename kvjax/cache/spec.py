"""What a model's cache is: which layers keep the same tokens, and what a page of each layer holds. Static; a model declares it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import jax
import jax.numpy as jnp

from kvjax.cache.types import IndexSpec, LayerCache, empty_latents, empty_layer


@dataclasses.dataclass(frozen=True)
class GroupSpec:
    """Layers that keep the same tokens, and so share page tables.

    page_size: tokens. window: the latest tokens that its layers read, the current one included; None: all.
    """

    name: str
    page_size: int
    window: int | None = None

    def __post_init__(self):
        for name, value in (("page_size", self.page_size), ("window", self.window)):
            if value is not None and value < 1:
                raise ValueError(f"{name} of layer group {self.name!r} must be at least 1 token, got {value}")


@dataclasses.dataclass(frozen=True)
class PagedSpec:
    """A layer that keeps keys and values of every KV head. dtype: of both, by name."""

    group: str
    kv_heads: int
    head_dim: int
    dtype: str

    def empty(self, num_pages: int, page_size: int, indexes: tuple[IndexSpec, ...] = ()) -> LayerCache:
        """`num_pages` zeroed pages, with the indexes."""
        return empty_layer(num_pages, self.kv_heads, page_size, self.head_dim, jnp.dtype(self.dtype), indexes)


@dataclasses.dataclass(frozen=True)
class LatentSpec:
    """A layer of multi-head latent attention: a latent and a rotated key per token, and its indexer's key.

    latent_dim, rope_dim, index_dim: elements. dtype, index_dtype: by name.
    """

    group: str
    latent_dim: int
    rope_dim: int
    index_dim: int
    dtype: str
    index_dtype: str

    @property
    def kv_heads(self) -> int:
        """1: all heads read one row."""
        return 1

    def empty(self, num_pages: int, page_size: int, indexes: tuple[IndexSpec, ...] = ()) -> LayerCache:
        """`num_pages` zeroed pages. NotImplementedError for indexes other than the indexer's keys, which are always there."""
        if indexes:
            raise NotImplementedError(f"latent pages have the indexer's keys and no other index, asked for {indexes[0].name}")
        sizes = (num_pages, page_size, self.latent_dim, self.rope_dim, self.index_dim)
        return empty_latents(*sizes, jnp.dtype(self.dtype), jnp.dtype(self.index_dtype))


@dataclasses.dataclass(frozen=True)
class CacheSpec:
    """The cache of a model: its layer groups, and per layer what a page holds. Sizes are taken from here alone."""

    groups: tuple[GroupSpec, ...]
    layers: tuple[PagedSpec | LatentSpec, ...]

    def __post_init__(self):
        names = [group.name for group in self.groups]
        if not names or len(set(names)) < len(names):
            raise ValueError(f"a cache needs layer groups of different names, got {names}")
        used = [layer.group for layer in self.layers]
        if set(used) != set(names):
            raise ValueError(f"every layer group needs layers and every layer a group; groups {names}, layers in {sorted(set(used))}")

    def group_of(self, layer: int) -> GroupSpec:
        """The group of a layer."""
        return next(group for group in self.groups if group.name == self.layers[layer].group)

    def layers_of(self, group: str) -> tuple[int, ...]:
        """Numbers of the group's layers."""
        return tuple(number for number, layer in enumerate(self.layers) if layer.group == group)

    @property
    def kv_heads(self) -> int:
        """KV heads of all layers together."""
        return sum(layer.kv_heads for layer in self.layers)

    def empty(self, pages: Mapping[str, int], indexes: tuple[IndexSpec, ...] = ()) -> tuple[LayerCache, ...]:
        """Zeroed pages of every layer. pages: how many, by group. indexes: of the layers that read all tokens."""
        return tuple(self._empty(number, pages[layer.group], indexes) for number, layer in enumerate(self.layers))

    def bytes_per_page(self, group: str, indexes: tuple[IndexSpec, ...] = ()) -> int:
        """Bytes of one page of a group, in all of its layers, indexes included."""
        layers = jax.eval_shape(lambda: [self._empty(number, 1, indexes) for number in self.layers_of(group)])
        return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(layers))

    def _empty(self, number: int, pages: int, indexes: tuple[IndexSpec, ...]) -> LayerCache:
        group = self.group_of(number)
        return self.layers[number].empty(pages, group.page_size, indexes if group.window is None else ())
