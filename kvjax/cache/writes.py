"""Writing to pages: append keys and values, seal the pages that fill.

All functions are pure; under jit with a donated cache the updates are in place.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kvjax.axes import ONE_DEVICE, Shards
from kvjax.cache.arrays import INDEXER, INDEXER_SCALES, LatentPages, LayerCache, PagedKV, kept_cut
from kvjax.cache.index_spec import IndexSpec
from kvjax.compilation import program
from pallas_kernels.cache.append_tokens import append_tokens
from pallas_kernels.cache.copy_tiles import copy_tiles
from pallas_kernels.core import dispatch
from pallas_kernels.core.pages import CODES, physical
from pallas_kernels.selection.indexer_scores import quantize_keys
from pallas_kernels.selection.page_index import page_index


def append(
    layer: PagedKV,
    k: Float[Array, "B T K D"],
    v: Float[Array, "B T K D"],
    positions: Int[Array, "B T"],
    valid: Bool[Array, "B T"],
    page_table: Int[Array, "B M"],
    indexes: tuple[IndexSpec, ...],
    frames: Int[Array, "B M"] | None = None,
) -> PagedKV:
    """Write the valid tokens at their positions, then seal each page whose last token is among them.

    positions: tokens from the start of the sequence; those of one row are consecutive. A valid token whose page is not
    in the table is dropped, not written elsewhere; the engine reserves pages beforehand, so it does not happen there.
    frames: of the table's pages, where they are not their ids. See `pallas_kernels.append_tokens`.
    """
    kinds = tuple((spec.name, spec.kind, spec.block_size) for spec in indexes)
    return PagedKV(*append_tokens(layer.pages, layer.index, k, v, positions, valid, page_table, kinds=kinds, frames=frames))


def append_latents(
    layer: LatentPages,
    latents: Float[Array, "B T D"],
    keys: Float[Array, "B T DI"],
    positions: Int[Array, "B T"],
    valid: Bool[Array, "B T"],
    page_table: Int[Array, "B M"],
    frames: Int[Array, "B M"] | None = None,
) -> LatentPages:
    """Write the valid tokens' latents and indexer keys at their positions, rounded to the pages' dtypes
    (`quantize_keys` for 8-bit keys).

    positions, valid, page_table, frames: as in `append`; a valid token whose page is not in the table is dropped. Under
    jit with the layer donated the update is in place.

    Keys must be finite where pages hold them in 8 bits: one element that is inf or NaN makes that token's key NaN, and
    so its scores, but no other token's. Raises ValueError for shapes and dtypes that do not fit together.
    """
    arrays = dispatch.signature(latents=latents, keys=keys, positions=positions, valid=valid, page_table=page_table)
    dim, index_dim = layer.pages.head_dim, layer.index[INDEXER].shape[2]
    rows = positions.shape
    if (positions.ndim, page_table.ndim) != (2, 2) or (valid.shape, page_table.shape[0]) != (rows, rows[0]):
        raise ValueError(f"needs positions [B,T], valid [B,T], page_table [B,M] of one batch; got {arrays}")
    if latents.shape != (*rows, dim) or keys.shape != (*rows, index_dim):
        raise ValueError(f"latents must be [B,T,{dim}] and keys [B,T,{index_dim}], as these pages are; got {arrays}")
    if latents.dtype.name not in CODES or keys.dtype.name not in CODES:
        raise ValueError(f"latents and keys must be one of {', '.join(CODES)} (8-bit keys are rounded here); got {arrays}")
    if valid.dtype != bool or positions.dtype != jnp.int32 or page_table.dtype != jnp.int32:
        raise ValueError(f"positions and page_table must be int32, valid bool; got {arrays}")
    page_size = layer.pages.page_size
    page, offset = physical(page_table, positions // page_size, valid, len(layer.index[INDEXER])), positions % page_size
    index = dict(layer.index)
    written = {INDEXER: keys}
    if INDEXER_SCALES in index:
        written[INDEXER], written[INDEXER_SCALES] = quantize_keys(keys)
    for name, rows in written.items():
        index[name] = index[name].at[page, offset].set(rows.astype(index[name].dtype), mode="drop")
    # XLA may fuse the write into its readers. They would then read the pool as it was before, and need a copy of all of
    # it.
    index = jax.lax.optimization_barrier(index)
    pages, _ = append_tokens(layer.pages, {}, latents[:, :, None], None, positions, valid, page_table, kinds=(), frames=frames)
    return LatentPages(pages, index)


def seal(
    index: dict[str, Array], keys: Float[Array, "n K P D"], pages: Int[Array, " n"], indexes: tuple[IndexSpec, ...]
) -> dict[str, Array]:
    """Build the indexes of `pages` (ids; numbers outside the pool are skipped) from their keys."""
    built = dict(index)
    for spec in indexes:
        rows = page_index(keys, kind=spec.kind, block_size=spec.block_size)
        built[spec.name] = index[spec.name].at[pages].set(rows, mode="drop")
    return built


Places = tuple[Int[Array, ""], ...]
"""A page of each layer: its id, or its frame."""


@functools.partial(program, static_argnames="shards", donate_argnames="layers")
def copy_page(
    layers: tuple[LayerCache | None, ...],
    sources: Places,
    targets: Places,
    source_frames: Places | None = None,
    target_frames: Places | None = None,
    shards: Shards = ONE_DEVICE,
    rows: tuple[Int[Array, ""], Int[Array, ""]] | None = None,
) -> tuple[LayerCache | None, ...]:
    """Every layer that has pages with its page `sources[layer]` copied to page `targets[layer]`, indexes included.
    DONATES layers.

    source_frames, target_frames: of these pages; None: their ids. shards: of the mesh over which layers are split.
    rows: a row of open pages, and the row to copy it to, where layers have some.
    """
    source_frames, target_frames = source_frames or sources, target_frames or targets

    def copied(tree, source, target):
        return jax.tree.map(lambda array: array.at[target].set(array[source]), tree)

    result = []
    for layer, *ids, source, target in zip(layers, sources, targets, source_frames, target_frames, strict=True):
        if isinstance(layer, PagedKV | LatentPages):
            layer = layer.replace(pages=copied(layer.pages, source, target), index=copied(layer.index, *ids))
            if rows is not None and isinstance(layer, PagedKV):
                layer = layer.replace(open=copied(layer.open, *rows))
        else:
            layer = copied(layer, *ids)
        result.append(layer)
    return kept_cut(shards, tuple(result))


@functools.partial(program, static_argnames="numbers", donate_argnames="layers")
def move_frames(
    layers: tuple[LayerCache | None, ...], sources: Int[Array, " n"], targets: Int[Array, " n"], *, numbers: tuple[int, ...]
) -> tuple[LayerCache | None, ...]:
    """The layers `numbers` with the keys and values of frames `sources` copied to frames `targets`; targets below 0 are
    skipped. Rows of indexes stay where they are. DONATES layers."""
    moved = list(layers)
    for number in numbers:
        pages = layers[number].pages
        every_head = [jnp.broadcast_to(frames[:, None], (len(frames), pages.kv_heads)) for frames in (sources, targets)]
        moved[number] = layers[number].replace(pages=copy_tiles(pages, *every_head))
    return tuple(moved)
