"""Writing to pages: append keys and values, seal the pages that fill.

All functions are pure; under jit with a donated cache the updates are in place.
"""

from __future__ import annotations

from jaxtyping import Array, Bool, Float, Int

from kvjax.cache.types import IndexSpec, PagedKV
from pallas_kernels.append_tokens import append_tokens
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
    dropped, not written elsewhere; the engine reserves pages beforehand, so it does not happen there. See
    `pallas_kernels.append_tokens`.
    """
    kinds = tuple((spec.name, spec.kind, spec.block_size) for spec in indexes)
    written = append_tokens(layer.k, layer.v, layer.index, k, v, positions, valid, page_table, kinds=kinds)
    return PagedKV(*written)


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
