"""Pages of one layer, and the indexes over them.

The types here are pytrees of arrays. Ownership of pages is tracked on the host (`kvjax.cache.allocator`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

import flax.struct
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int, Int32

from kvjax.cache import spanning
from kvjax.cache.hot import HotBuffers
from kvjax.cache.residency import Residency
from kvjax.cache.spanning import FrameCounts
from pallas_kernels.indexer_scores.api import FP8
from pallas_kernels.page_index import CODED, INDEX_KINDS, index_dtype, index_shape
from pallas_kernels.pages import CODES, PageFormat, Pages

if TYPE_CHECKING:
    from kvjax.cache.spec import CacheSpec
    from kvjax.sharding import Shards


@dataclasses.dataclass(frozen=True)
class IndexSpec:
    """An index that a policy needs for every sealed page.

    kind: "bounds" (elementwise max and min of a block's keys), "mean", or the keys in few bits: "keys1" to "keys8". block_size:
    tokens, divides the page size. unless_packed: not built in layers whose keys are packed, which the policy then reads themselves.
    every: built in every n-th layer alone, counting from the first, of those that read all tokens and attend to pages.
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
        """Shape of the array: `N K P/bs R W` with R rows of W elements per block (`pallas_kernels.page_index.index_shape`)."""
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


@flax.struct.dataclass
class OpenRows:
    """Pages that are not packed yet, in compute dtype: a row for each sequence, beside a layer of packed pages.

    A row holds n pages, as many as a step may write to: the logical page j lies in place j % n. Places whose page is not written yet may
    hold anything. `kvjax.cache.packed` reads and writes it.
    """

    k: Float[Array, "R n K P D"]
    v: Float[Array, "R n K P D"]


@flax.struct.dataclass
class PagedKV:
    """Keys and values of one full-attention layer, and the indexes that selectors scan instead of the keys.

    `index` maps `IndexSpec.name` to an array `[N, K, P/bs, R, W]`. Rows of pages that are not sealed are meaningless. open: where pages
    are packed, those that are still open; None: every page is written where it lies.
    """

    pages: Pages
    index: dict[str, Array]
    open: OpenRows | None = None


INDEXER, INDEXER_SCALES = "indexer", "indexer_scales"
"""Names of a lightning indexer's keys, and of their scales where they are 8-bit, in `LatentPages.index`."""


@flax.struct.dataclass
class LatentPages:
    """Latents of one layer of multi-head latent attention (MLA), and the keys that a lightning indexer scans instead of them.

    pages: one KV head. Each token has a row of `value_dim` latent columns, from which each head's key and value are linear maps, and the
    rotated key that all heads share. V is the first `value_dim` columns of K. index: unlike that of `PagedKV` it is written with each
    token, so tokens of the open page are found too. INDEXER: keys `[N, P, D_I]`; where those are float8_e4m3fn, INDEXER_SCALES: float32
    `[N, P]`.
    """

    pages: Pages
    index: dict[str, Float[Array, "N P DI"] | Float32[Array, "N P"]]


@flax.struct.dataclass
class SlotLayer:
    """States of one recurrent layer: a row for each sequence. `kvjax.recurrent` reads and writes it.

    Row j of a sequence's tokens is token first + j. Rows after its last token may hold anything. P: page_size. R: P plus the largest number
    of drafted tokens. W: taps of the convolution. E: its channels.
    """

    start: Float32[Array, "N H Dk Dv"]
    """The state after the first `first` tokens."""
    inputs: Float[Array, "N W-1+R E"]
    """Inputs of the convolution, from the W-1 tokens before `first` on; zeros before the sequence."""
    g: Float32[Array, "N R H"]
    beta: Float32[Array, "N R H"]
    corrections: Float32[Array, "N R H Dv"]
    first: Int32[Array, "N"]
    """Tokens that `start` holds, a multiple of P."""
    page_size: int = flax.struct.field(pytree_node=False)
    chunk: int = flax.struct.field(pytree_node=False)
    """Tokens of an inner chunk of prefill; divides page_size."""


LayerCache = PagedKV | LatentPages | SlotLayer


@flax.struct.dataclass
class Cache:
    """What a jitted step reads and writes. shards: inside a program over a mesh, what it knows of it: layers are then this device's part.

    layers: one entry per layer, no stacked axis, so that updates stay in place; None for a layer that reads another's pages. page_tables:
    per layer group, logical page -> page id, -1 where there is none. lengths: tokens written; includes the current ones when attention
    reads it. spec: describes `layers`. residency: where pages lie, by layer group; in groups that it does not name, a page's frame is its
    id. hot: the layers' hot buffers; None where no layer has one.
    """

    layers: tuple[LayerCache | None, ...]
    page_tables: dict[str, Int[Array, "B M"]]
    lengths: Int[Array, "B"]
    spec: CacheSpec = flax.struct.field(pytree_node=False)
    residency: dict[str, Residency] = flax.struct.field(default_factory=dict)
    hot: HotBuffers | None = None
    shards: Shards | None = flax.struct.field(pytree_node=False, default=None)

    def table_of(self, layer: int) -> Int[Array, "B M"]:
        """The page table of a layer's group. On a mesh it names rows of this device's part of the pool."""
        group = self.spec.layers[layer].group
        return self.page_tables[group] if self.shards is None else self.shards.own_table(group, self.page_tables[group])


def empty_layer(
    num_pages: int,
    num_kv_heads: int,
    page_size: int,
    head_dim: int,
    dtype: jnp.dtype,
    indexes: tuple[IndexSpec, ...],
    frames: FrameCounts | None = None,
) -> PagedKV:
    """A layer of zeroed pages: 2 * num_pages * num_kv_heads * page_size * head_dim elements of `dtype`, and the declared indexes.

    frames: where the pages lie, if some lie in host memory; their indexes do not. None: all on the device.
    """
    pages = (num_pages, num_kv_heads, page_size, head_dim)
    return PagedKV(
        pages=Pages(_frames(pages, dtype, frames), _frames(pages, dtype, frames)),
        index={spec.name: spec.empty(*pages, dtype) for spec in indexes},
    )


def empty_packed(
    num_pages: int,
    num_kv_heads: int,
    page_size: int,
    head_dim: int,
    dtype: jnp.dtype,
    indexes: tuple[IndexSpec, ...],
    formats: tuple[PageFormat | None, PageFormat | None],
    rows: tuple[int, int],
    frames: FrameCounts | None = None,
) -> PagedKV:
    """A layer of packed pages: codes and scales of 0, open rows in `dtype`, and the declared indexes in `dtype`.

    formats: of keys and of values; None: numbers of `dtype`. rows: how many, and how many pages each holds. frames: as in `empty_layer`;
    scales lie where their codes do, and open rows on the device.
    """
    tiles = num_pages, num_kv_heads
    arrays: dict[str, Array | PageFormat | None] = {}
    for name, packed in zip("kv", formats, strict=True):
        width, kind = (head_dim, dtype) if packed is None else (packed.width(head_dim), packed.code_dtype)
        arrays |= {name: _frames((*tiles, page_size, width), kind, frames), f"{name}_packed": packed}
        if packed is not None and (shape := packed.scale_shape(page_size, head_dim)) is not None:
            arrays[f"{name}_scales"] = _frames((*tiles, *shape), packed.scale_dtype, frames)
    opened = (*rows, num_kv_heads, page_size, head_dim)
    return PagedKV(
        pages=Pages(**arrays),
        index={spec.name: spec.empty(*tiles, page_size, head_dim, dtype) for spec in over_packed(indexes, formats[0])},
        open=OpenRows(jnp.zeros(opened, dtype), jnp.zeros(opened, dtype)),
    )


def _frames(shape: tuple[int, ...], dtype: jnp.dtype, frames: FrameCounts | None) -> Array:
    return jnp.zeros(shape, dtype) if frames is None else spanning.empty((frames.total, *shape[1:]), dtype, frames.border)


def empty_latents(
    num_pages: int,
    page_size: int,
    latent_dim: int,
    rope_dim: int,
    index_dim: int,
    dtype: jnp.dtype,
    index_dtype: jnp.dtype | None = None,
    frames: FrameCounts | None = None,
) -> LatentPages:
    """A layer of zeroed latent pages: num_pages * page_size * (latent_dim + rope_dim) elements of `dtype` and as many times index_dim of
    `index_dtype` (default `dtype`), with a float32 scale per token where that is float8_e4m3fn. frames: as in `empty_layer`.

    ValueError for a dtype other than float32, bfloat16 and float16, which for the indexer's keys may be float8_e4m3fn too.
    """
    dtype, index_dtype = jnp.dtype(dtype), jnp.dtype(dtype if index_dtype is None else index_dtype)
    if dtype.name not in CODES or index_dtype.name not in (*CODES, FP8):
        raise ValueError(
            f"latents must be one of {', '.join(CODES)}, index_dtype one of those or {FP8}; got dtype {dtype}, index_dtype {index_dtype}"
        )
    index = {INDEXER: jnp.zeros((num_pages, page_size, index_dim), index_dtype)}
    if index_dtype.name == FP8:
        index[INDEXER_SCALES] = jnp.ones((num_pages, page_size), jnp.float32)
    latents = _frames((num_pages, 1, page_size, latent_dim + rope_dim), dtype, frames)
    return LatentPages(Pages(latents, value_dim=latent_dim), index)
