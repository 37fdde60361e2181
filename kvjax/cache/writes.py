"""Writing to pages: append keys and values, seal the pages that fill.

All functions are pure; under jit with a donated cache the updates are in place.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kvjax.cache.types import IndexSpec, PagedKV
from pallas_kernels.page_index import page_index


def append(
    layer: PagedKV,
    k: Float[Array, "B T K D"],
    v: Float[Array, "B T K D"],
    positions: Int[Array, "B T"],
    valid: Bool[Array, "B T"],
    page_table: Int[Array, "B M"],
    indexes: tuple[IndexSpec, ...],
) -> PagedKV:
    """Write the valid tokens at their positions, then seal each page whose last token is among them.

    positions: tokens from the start of the sequence; those of one row are consecutive. A valid token whose page is not in the table is
    dropped, not written elsewhere; the engine reserves pages beforehand, so it does not happen there. Sealing reads each page that may
    have filled once: at most (T - 1) // P + 1 per row.
    """
    num_pages, _, page_size, _ = layer.k.shape
    page = _physical(page_table, positions // page_size, valid, num_pages)
    offset = positions % page_size
    k_pages = layer.k.at[page, :, offset].set(k.astype(layer.k.dtype), mode="drop")
    v_pages = layer.v.at[page, :, offset].set(v.astype(layer.v.dtype), mode="drop")
    # XLA may fuse the write into readers, which then read the pool from before it and so need a copy of all of it.
    k_pages, v_pages = jax.lax.optimization_barrier((k_pages, v_pages))
    if not indexes:
        return layer.replace(k=k_pages, v=v_pages)
    last = offset == page_size - 1
    # At most this many pages of a row can fill in one call: keep the filled ones, one slot each, by their order in the row.
    span = (positions.shape[1] - 1) // page_size + 1
    slot = positions // page_size - (positions[:, :1] // page_size)
    sealed = jnp.full((page.shape[0], span), num_pages, page.dtype)
    rows = jnp.arange(page.shape[0])[:, None]
    sealed = sealed.at[rows, jnp.where(last, slot, span)].set(page, mode="drop")
    return layer.replace(k=k_pages, v=v_pages, index=seal(layer.index, k_pages, sealed.reshape(-1), indexes))


def seal(
    index: dict[str, Float[Array, "N K nb R D"]], k_pages: Float[Array, "N K P D"], pages: Int[Array, " n"], indexes: tuple[IndexSpec, ...]
) -> dict[str, Float[Array, "N K nb R D"]]:
    """Build the indexes of `pages` (physical; numbers outside the pool are skipped) from their keys."""
    keys = k_pages.at[pages].get(mode="fill", fill_value=0)
    built = dict(index)
    for spec in indexes:
        rows = page_index(keys, kind=spec.kind, block_size=spec.block_size)
        built[spec.name] = index[spec.name].at[pages].set(rows, mode="drop")
    return built


def copy_page(layers: tuple[PagedKV, ...], source: Int[Array, ""], target: Int[Array, ""]) -> tuple[PagedKV, ...]:
    """Every layer with page `source` copied to page `target`, indexes included."""
    return tuple(
        PagedKV(
            k=layer.k.at[target].set(layer.k[source]),
            v=layer.v.at[target].set(layer.v[source]),
            index={name: array.at[target].set(array[source]) for name, array in layer.index.items()},
        )
        for layer in layers
    )


def _physical(page_table: Int[Array, "B M"], logical: Int[Array, "B T"], valid: Bool[Array, "B T"], num_pages: int) -> Int[Array, "B T"]:
    """Physical page of each token, or `num_pages` (outside the pool, so that writes drop) where there is none."""
    page = jnp.take_along_axis(page_table, jnp.clip(logical, 0, page_table.shape[1] - 1), axis=1)
    there = valid & (logical >= 0) & (logical < page_table.shape[1]) & (page >= 0)
    return jnp.where(there, page, num_pages)
