"""Arrays of the cache: pages of one layer and the indexes over them, and how a mesh cuts them.

The types here are pytrees of arrays. Ownership of pages is tracked on the host (`kvjax.cache.allocator`).
"""

from __future__ import annotations

from collections.abc import Callable

import flax.struct
import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jaxtyping import Array, Float, Float32, Int32

from kvjax.axes import WHOLE_COPY, Shards, spec_of
from kvjax.cache.host_pool import FrameCounts
from kvjax.cache.index_spec import IndexSpec, over_packed
from pallas_kernels.core.pages import CODES, PageFormat, Pages
from pallas_kernels.selection.indexer_scores.api import FP8


@flax.struct.dataclass
class OpenRows:
    """Pages that are not packed yet, in compute dtype: a row for each sequence, beside a layer of packed pages.

    A row holds n pages, as many as a step may write to: the logical page j lies in place j % n. Places whose page is
    not written yet may hold anything. `kvjax.cache.packed` reads and writes it.
    """

    k: Float[Array, "R n K P D"]
    v: Float[Array, "R n K P D"]


@flax.struct.dataclass
class PagedKV:
    """Keys and values of one full-attention layer, and the indexes that selectors scan instead of the keys.

    `index` maps `IndexSpec.name` to an array `[N, K, P/bs, R, W]`. Rows of pages that are not sealed are meaningless.
    open: where pages are packed, those that are still open; None: every page is written where it lies.
    """

    pages: Pages
    index: dict[str, Array]
    open: OpenRows | None = None


INDEXER = "indexer"
"""The name of a lightning indexer's keys in `LatentPages.index`."""
INDEXER_SCALES = "indexer_scales"
"""The name of their scales there, where they are 8-bit."""


@flax.struct.dataclass
class LatentPages:
    """Latents of one layer of multi-head latent attention (MLA), and the keys that a lightning indexer scans instead of
    them.

    pages: one KV head. Each token has a row of `value_dim` latent columns, from which each head's key and value are
    linear maps, and the rotated key that all heads share. V is the first `value_dim` columns of K. index: unlike that
    of `PagedKV` it is written with each token, so tokens of the open page are found too. INDEXER: keys `[N, P, D_I]`;
    where those are float8_e4m3fn, INDEXER_SCALES: float32 `[N, P]`.
    """

    pages: Pages
    index: dict[str, Float[Array, "N P DI"] | Float32[Array, "N P"]]


@flax.struct.dataclass
class SlotLayer:
    """States of one recurrent layer: a row for each sequence. `kvjax.engine.recurrent` reads and writes it.

    Row j of a sequence's tokens is token first + j. Rows after its last token may hold anything. P: page_size. R: P
    plus the largest number of drafted tokens. W: taps of the convolution. E: its channels.
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


def empty_layer(
    num_pages: int,
    num_kv_heads: int,
    page_size: int,
    head_dim: int,
    dtype: jnp.dtype,
    indexes: tuple[IndexSpec, ...],
    frames: FrameCounts | None = None,
) -> PagedKV:
    """A layer of zeroed pages: 2 * num_pages * num_kv_heads * page_size * head_dim elements of `dtype`, and the
    declared indexes.

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

    formats: of keys and of values; None: numbers of `dtype`. rows: how many, and how many pages each holds. frames: as
    in `empty_layer`; scales lie where their codes do, and open rows on the device.
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
    if frames is None:
        return jnp.zeros(shape, dtype)
    from kvjax.cache.host_pool.mapped_memory import empty

    return empty((frames.total, *shape[1:]), dtype, frames.border)


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
    """A layer of zeroed latent pages: num_pages * page_size * (latent_dim + rope_dim) elements of `dtype` and as many
    times index_dim of `index_dtype` (default `dtype`), with a float32 scale per token where that is float8_e4m3fn.
    frames: as in `empty_layer`.

    ValueError for a dtype other than float32, bfloat16 and float16, which for the indexer's keys may be float8_e4m3fn
    too.
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


Layers = tuple[LayerCache | None, ...]


def layer_specs(layers: Layers) -> Layers:
    """The `PartitionSpec` of each array of a pool's layers, in the place of the array."""
    return tuple(None if layer is None else _layer_specs(layer) for layer in layers)


def _layer_specs(layer: LayerCache) -> LayerCache:
    if isinstance(layer, SlotLayer):  # rows of state are not sharded: every device along the context axis has all of them
        per_head, rows = spec_of((None, "kv_heads")), spec_of((None, None, "kv_heads"))
        return layer.replace(
            start=per_head, inputs=spec_of((None, None, "channels")), g=rows, beta=rows, corrections=rows, first=WHOLE_COPY
        )
    axes = ("pages",) if isinstance(layer, LatentPages) else ("pages", "kv_heads")
    specs = jax.tree.map(lambda _: spec_of(axes), layer)
    if isinstance(layer, PagedKV) and layer.open is not None:  # its rows are not sharded
        specs = specs.replace(open=jax.tree.map(lambda _: spec_of((None, None, "kv_heads")), layer.open))
    return specs


def made_on(shards: Shards, make: Callable[[], Layers]) -> Layers:
    """The layers of a pool that `make` makes, each part on its device from the start."""
    if shards.mesh is None:
        return make()
    return jax.jit(make, out_shardings=_shardings(shards, jax.eval_shape(make)))()


def kept_cut(shards: Shards, layers: Layers) -> Layers:
    """Layers of a pool, cut as they were, out of a program that is not split by `Shards.run`."""
    return layers if shards.mesh is None else jax.lax.with_sharding_constraint(layers, _shardings(shards, layers))


def _shardings(shards: Shards, layers: Layers) -> Layers:
    return jax.tree.map(lambda spec: NamedSharding(shards.mesh, spec), layer_specs(layers))
