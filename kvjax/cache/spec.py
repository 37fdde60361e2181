"""A model's cache: which layers keep the same tokens, and what a page of each layer holds. Static; the model declares
it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int

from kvjax.cache.arrays import LayerCache, PagedKV, SlotLayer, empty_latents, empty_layer, empty_packed
from kvjax.cache.host_pool import FrameCounts
from kvjax.cache.index_spec import IndexSpec
from pallas_kernels.core.page_format import PageFormat

WHOLE = 1 << 30
"""Page size, in tokens, of a group in which one page holds a whole sequence: the state of recurrent layers."""
MAX_STEP_TOKENS = 16
"""The most tokens that a decode step may write to a sequence, including drafted ones."""
OPEN = "open"
"""Name of the layer group of open pages beside packed ones: one row of them holds those of a sequence, in all layers
that pack."""


def pages_of_step(page_size: int) -> int:
    """The most pages of this size that a step writes to in one row: it may begin at the end of a page."""
    return 1 + -(-(MAX_STEP_TOKENS - 1) // page_size)


@dataclasses.dataclass(frozen=True)
class GroupSpec:
    """Layers that keep the same tokens, and so share page tables.

    page_size: tokens; WHOLE where one page, a row of state, holds a whole sequence. window: how many latest tokens its
    layers read, the current one included; None: all.
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
    """A layer that keeps keys and values of every KV head. dtype: of both, by name.

    share_with: the number of the layer whose pages it reads, and then it keeps none; None: its own. Below 0:
    `CacheSpec.owners` has it. copies: how many devices of a mesh keep each head (`CacheSpec.on_mesh`). k_packed,
    v_packed: how sealed pages are packed; None: they are not. The pages of a layer that packs either are open until
    they are full, and then lie in its open rows.
    """

    group: str
    kv_heads: int
    head_dim: int
    dtype: str
    share_with: int | None = None
    copies: int = 1
    k_packed: PageFormat | None = None
    v_packed: PageFormat | None = None

    def on_mesh(self, tensor: int) -> PagedSpec:
        """The layer over all of `tensor` devices: a head for each device at least, some then being the same."""
        copies = max(1, tensor // self.kv_heads)
        return dataclasses.replace(self, kv_heads=self.kv_heads * copies, copies=copies)

    def on_device(self, tensor: int) -> PagedSpec:
        """What each of `tensor` devices has of the layer that `on_mesh` returned."""
        return dataclasses.replace(self, kv_heads=self.kv_heads // tensor)

    @property
    def width(self) -> int:
        """Elements of a token that attention reads."""
        return 2 * self.kv_heads * self.head_dim

    @property
    def formats(self) -> tuple[PageFormat | None, PageFormat | None]:
        """How keys and values are packed."""
        return self.k_packed, self.v_packed

    def token_bytes(self, page_size: int, keys: float, opened: float = 0) -> float:
        """Bytes of keys and values of `keys` tokens, in all KV heads.

        opened: how many of them, at most, lie in open pages, which are not packed. Scales of channels and pages count
        in proportion.
        """
        own = min(keys, opened)
        each = sum(self._of_head(packed, page_size) for packed in self.formats)
        return own * self.width * jnp.dtype(self.dtype).itemsize + (keys - own) * self.kv_heads * each

    def key_bytes(self, page_size: int) -> float:
        """Bytes of the key of a token and KV head in a full page, its share of scales included."""
        return self._of_head(self.k_packed, page_size)

    def _of_head(self, packed: PageFormat | None, page_size: int) -> float:
        """Bytes of the key or value of a token and KV head in a full page."""
        if packed is None:
            return self.head_dim * jnp.dtype(self.dtype).itemsize
        return packed.bytes_per_page(page_size, self.head_dim) / page_size

    def empty(
        self,
        num_pages: int,
        page_size: int,
        indexes: tuple[IndexSpec, ...] = (),
        frames: FrameCounts | None = None,
        rows: int = 0,
    ) -> LayerCache | None:
        """`num_pages` zeroed pages, with the indexes; None for a layer that reads another's. frames: as in
        `empty_layer`. rows: of open pages, where pages are packed."""
        if self.share_with is not None:
            return None
        if self.formats != (None, None):
            sizes = num_pages, self.kv_heads, page_size, self.head_dim, jnp.dtype(self.dtype)
            return empty_packed(*sizes, indexes, self.formats, (rows, pages_of_step(page_size)), frames)
        return empty_layer(num_pages, self.kv_heads, page_size, self.head_dim, jnp.dtype(self.dtype), indexes, frames)


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
    copies: int = 1

    share_with: ClassVar[None] = None

    def on_mesh(self, tensor: int) -> LatentSpec:
        """The layer over all of `tensor` devices, each of which keeps all rows."""
        return dataclasses.replace(self, copies=tensor)

    def on_device(self, tensor: int) -> LatentSpec:
        """What each of `tensor` devices has of the layer: everything."""
        return self

    @property
    def kv_heads(self) -> int:
        """1: all heads read one row."""
        return 1

    @property
    def width(self) -> int:
        """Elements of a token that attention reads; values are a part of keys."""
        return self.latent_dim + self.rope_dim

    def token_bytes(self, page_size: int, keys: float, opened: float = 0) -> float:
        """Bytes of the latents of `keys` tokens. They are never packed."""
        return keys * self.width * jnp.dtype(self.dtype).itemsize

    def empty(self, num_pages: int, page_size: int, indexes: tuple[IndexSpec, ...] = (), frames: FrameCounts | None = None) -> LayerCache:
        """`num_pages` zeroed pages. frames: as in `empty_layer`. NotImplementedError for indexes other than the
        indexer's keys, which are always there."""
        if indexes:
            raise NotImplementedError(f"latent pages have the indexer's keys and no other index, asked for {indexes[0].name}")
        sizes = (num_pages, page_size, self.latent_dim, self.rope_dim, self.index_dim)
        return empty_latents(*sizes, jnp.dtype(self.dtype), jnp.dtype(self.index_dtype), frames)


@dataclasses.dataclass(frozen=True)
class RecurrentSpec:
    """A recurrent layer (Gated DeltaNet): a row of state per sequence, and no pages of keys.

    A row holds the state before the sequence's open page and, for each token of that page, the recurrence's inputs and
    what it wrote. The state after any of these tokens is a fold over them. So `truncate` and dropped drafts cost
    nothing, and nothing is computed again. A page is folded when the token after it is written.

    Args:
        group: its layer group, whose page size is WHOLE.
        key_heads, value_heads, key_dim, value_dim: K, H, Dk and Dv of `pallas_kernels.gated_delta`.
        conv_width: W, taps of the convolution before it.
        page_size: P, tokens of a page. A row holds the recurrence's inputs for them and for the drafted tokens after
            them.
        chunk: the most tokens of an inner chunk of prefill, on which its bits depend.
        dtype: that of the convolution's inputs, by name.

    Bytes of a sequence and layer: 4 H Dk Dv of state, and for each of P + 15 tokens 2 K Dk + H Dv elements of dtype, 4
    H Dv of corrections and 8 H of gates. Qwen3.5-9B (K = 16, H = 32, D = 128, bfloat16, pages of 128): 2.1 + 4.8 MB; 24
    such layers: 165 MB.
    """

    group: str
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    conv_width: int
    page_size: int
    dtype: str
    chunk: int = 64

    share_with: ClassVar[None] = None

    def __post_init__(self):
        for field in dataclasses.fields(self):
            if field.type == "int" and getattr(self, field.name) < 1:
                raise ValueError(f"{field.name} of a recurrent layer must be at least 1, got {getattr(self, field.name)}")
        if self.value_heads % self.key_heads:
            raise ValueError(f"value_heads must be a multiple of key_heads, got {self.value_heads} and {self.key_heads}")

    def on_mesh(self, tensor: int) -> RecurrentSpec:
        """The layer over all of `tensor` devices: itself."""
        return self

    def on_device(self, tensor: int) -> RecurrentSpec:
        """What each of `tensor` devices has of the layer: a part of the heads."""
        return dataclasses.replace(self, key_heads=self.key_heads // tensor, value_heads=self.value_heads // tensor)

    def channel_order(self, tensor: int) -> Int[np.ndarray, " channels"]:
        """The channels in the order in which `tensor` devices have them: each has queries, keys and values of its own
        heads."""
        sections, start = [], 0
        for heads, dim in ((self.key_heads, self.key_dim), (self.key_heads, self.key_dim), (self.value_heads, self.value_dim)):
            sections.append(np.arange(start, start + heads * dim).reshape(tensor, -1))
            start += heads * dim
        return np.concatenate(sections, axis=1).reshape(-1)

    @property
    def kv_heads(self) -> int:
        """0: it keeps no keys."""
        return 0

    @property
    def channels(self) -> int:
        """Elements of a token that go through the convolution: its queries, keys and values."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim

    def empty(self, num_pages: int, page_size: int, indexes: tuple[IndexSpec, ...] = (), frames: FrameCounts | None = None) -> SlotLayer:
        """`num_pages` rows of zeros, each for `self.page_size` tokens, whatever the group's page size is. There is
        nothing to index, and nothing in host memory."""
        rows = self.page_size + min(self.page_size, MAX_STEP_TOKENS) - 1
        gates = num_pages, rows, self.value_heads
        return SlotLayer(
            start=jnp.zeros((num_pages, self.value_heads, self.key_dim, self.value_dim), jnp.float32),
            inputs=jnp.zeros((num_pages, self.conv_width - 1 + rows, self.channels), jnp.dtype(self.dtype)),
            g=jnp.zeros(gates, jnp.float32),
            beta=jnp.zeros(gates, jnp.float32),
            corrections=jnp.zeros((*gates, self.value_dim), jnp.float32),
            first=jnp.zeros(num_pages, jnp.int32),
            page_size=self.page_size,
            chunk=math.gcd(self.chunk, self.page_size),
        )


LayerSpec = PagedSpec | LatentSpec | RecurrentSpec


@dataclasses.dataclass(frozen=True)
class CacheSpec:
    """The cache of a model: its layer groups, and what a page of each layer holds. It is the only source of sizes.

    owners: for a slice of a model's layers, the earlier layers whose pages it reads; they are its layers -len(owners)
    to -1.
    """

    groups: tuple[GroupSpec, ...]
    layers: tuple[LayerSpec, ...]
    owners: tuple[LayerSpec, ...] = ()

    def __post_init__(self):
        names = [group.name for group in self.groups]
        if not names or len(set(names)) < len(names):
            raise ValueError(f"a cache needs layer groups of different names, got {names}")
        used = [layer.group for layer in self.layers] + [OPEN] * bool(self.packing)
        if set(used) != set(names):
            raise ValueError(f"every layer group needs layers and every layer a group; groups {names}, layers in {sorted(set(used))}")

        for layer in self.layers:
            if (self._named(layer.group).page_size == WHOLE) != isinstance(layer, RecurrentSpec):
                raise ValueError(
                    f"a page holds a whole sequence in groups of recurrent layers and in no other; layer group {layer.group!r}"
                )
        for number, layer in enumerate(self.layers):
            if layer.share_with is not None:
                self._check_owner(number, layer)

    def _check_owner(self, number: int, layer: PagedSpec) -> None:
        said = f"layer {number} reads the pages of layer {layer.share_with} (share_with)"
        if not -len(self.owners) <= layer.share_with < number:
            raise ValueError(f"{said}, which is not an earlier layer: name one before it")
        owner = (self.owners if layer.share_with < 0 else self.layers)[layer.share_with]
        if owner != dataclasses.replace(layer, share_with=None):
            raise ValueError(
                f"{said}: name a layer with pages of its own, in the same layer group and of the same KV heads, head dim and dtype; it is "
                f"{owner}, and the reader {layer}"
            )

    def on_mesh(self, tensor: int) -> CacheSpec:
        """The cache over all devices, if heads are split over `tensor` of them."""
        return dataclasses.replace(
            self,
            layers=tuple(layer.on_mesh(tensor) for layer in self.layers),
            owners=tuple(layer.on_mesh(tensor) for layer in self.owners),
        )

    def on_device(self, tensor: int) -> CacheSpec:
        """What each of `tensor` devices has of the cache that `on_mesh` returned."""
        return dataclasses.replace(
            self,
            layers=tuple(layer.on_device(tensor) for layer in self.layers),
            owners=tuple(layer.on_device(tensor) for layer in self.owners),
        )

    def group_of(self, layer: int) -> GroupSpec:
        """The group of a layer."""
        return self._named(self.layers[layer].group)

    def with_formats(self, formats: Sequence[tuple[PageFormat | None, PageFormat | None]]) -> CacheSpec:
        """The same cache with sealed pages packed: formats of keys and values of each layer, (None, None) where it does
        not pack."""
        layers = tuple(
            dataclasses.replace(layer, k_packed=k, v_packed=v) if (k, v) != (None, None) else layer
            for layer, (k, v) in zip(self.layers, formats, strict=True)
        )
        opened = (GroupSpec(OPEN, WHOLE),) if layers != self.layers else ()
        return dataclasses.replace(self, groups=self.groups + opened, layers=layers)

    @property
    def formats(self) -> tuple[tuple[PageFormat | None, PageFormat | None], ...]:
        """Of each layer, how it packs keys and values."""
        return tuple(layer.formats if isinstance(layer, PagedSpec) else (None, None) for layer in self.layers)

    @property
    def packing(self) -> tuple[int, ...]:
        """Numbers of the layers that pack their sealed pages."""
        return tuple(number for number, each in enumerate(self.formats) if each != (None, None))

    def layers_of(self, group: str) -> tuple[int, ...]:
        """Numbers of the group's layers. Those of `OPEN` belong to another group, too."""
        if group == OPEN:
            return self.packing
        return tuple(number for number, layer in enumerate(self.layers) if layer.group == group)

    @property
    def paged(self) -> tuple[int, ...]:
        """Numbers of the layers that attend to pages, for which policies choose blocks."""
        return tuple(number for number, layer in enumerate(self.layers) if not isinstance(layer, RecurrentSpec))

    @property
    def holding(self) -> tuple[int, ...]:
        """Numbers of the layers that have pages of their own."""
        return tuple(number for number in self.paged if self.layers[number].share_with is None)

    @property
    def row_groups(self) -> tuple[str, ...]:
        """Groups in which a sequence of any length holds one page: a row of state, or of open pages."""
        return tuple(group.name for group in self.groups if group.page_size == WHOLE)

    @property
    def state_groups(self) -> tuple[str, ...]:
        """Groups of recurrent layers: without their row, a sequence cannot go on even from the end of a page."""
        return tuple(name for name in self.row_groups if name != OPEN)

    @property
    def kv_heads(self) -> int:
        """KV heads that all layers together read."""
        return sum(layer.kv_heads for layer in self.layers)

    def empty(
        self, pages: Mapping[str, int], indexes: tuple[IndexSpec, ...] = (), frames: Mapping[str, FrameCounts] | None = None
    ) -> tuple[LayerCache | None, ...]:
        """Zeroed pages of every layer, None for one that reads another's. pages: how many, by group. indexes: those of
        layers that read all tokens. frames: where pages lie, for groups with pages in host memory."""
        known, rows = frames or {}, pages.get(OPEN, 0)
        return tuple(
            self._empty(number, pages[layer.group], indexes, known.get(layer.group), rows) for number, layer in enumerate(self.layers)
        )

    def indexes_of(self, number: int, indexes: tuple[IndexSpec, ...]) -> tuple[IndexSpec, ...]:
        """Those of `indexes` that a layer keeps: those that it scans itself, or a layer that shares its pages does.

        Layers with a window of their own, and recurrent ones, keep none, and do not count (`IndexSpec.every`). Not for
        a slice of a model's layers, which does not know how many are before it.
        """
        choosing = [each for each in self.paged if self.group_of(each).window is None]
        places = [place for place, each in enumerate(choosing) if number in (each, self.layers[each].share_with)]
        return tuple(spec for spec in indexes if any(place % spec.every == 0 for place in places))

    def bytes_per_page(self, group: str, indexes: tuple[IndexSpec, ...] = ()) -> int:
        """Bytes of one page of a group, in all layers that hold it, indexes included."""
        layers = jax.eval_shape(lambda: [self._empty(number, 1, indexes, rows=1) for number in self.layers_of(group)])
        parts = [part_of(layer, group) for layer in layers]
        return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(parts))

    def bytes_per_frame(self, group: str) -> int:
        """Bytes of keys and values of one page of a group, in all layers that hold it: what moves between device and
        host memory."""
        if group == OPEN:
            return 0
        layers = jax.eval_shape(lambda: [self._empty(number, 1, ()) for number in self.layers_of(group)])
        pages = [layer.pages for layer in layers if layer is not None and not isinstance(layer, SlotLayer)]
        return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(pages))

    def _named(self, name: str) -> GroupSpec:
        return next(group for group in self.groups if group.name == name)

    def _empty(
        self, number: int, pages: int, indexes: tuple[IndexSpec, ...], frames: FrameCounts | None = None, rows: int = 0
    ) -> LayerCache | None:
        group, layer = self.group_of(number), self.layers[number]
        more = {"rows": rows} if isinstance(layer, PagedSpec) else {}
        return layer.empty(pages, group.page_size, self.indexes_of(number, indexes), frames, **more)


def part_of(layer: LayerCache | None, group: str) -> Any:
    """What a layer keeps in a layer group: its open rows in `OPEN`, everything else in its own group."""
    if not isinstance(layer, PagedKV):
        return layer
    return layer.open if group == OPEN else layer.replace(open=None)
