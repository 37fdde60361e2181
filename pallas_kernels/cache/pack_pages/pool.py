"""Packing whole pages to their places in a pool."""

from __future__ import annotations

import jax
from jaxtyping import Array, Float, Int

from pallas_kernels.cache.pack_pages.api import pack_pages
from pallas_kernels.core.page_format import unpack
from pallas_kernels.core.pages import Pages


def put_pages(
    pages: Pages, k: Float[Array, "n K P D"], v: Float[Array, "n K P Dv"] | None, frames: Int[Array, " n"]
) -> tuple[Pages, Float[Array, "n K P D"]]:
    """Write the numbers of n whole pages to `frames` (those outside the pool are skipped), packed as the pages' formats
    say. v is None where V is a view of K.

    Returns the pages, and the keys as they are read from then on. Under jit with the pages donated, the update is in
    place.
    """
    put: dict[str, Array] = {}
    keys = k.astype(pages.k.dtype) if pages.k_packed is None else k
    for name, numbers, packed in (("k", k, pages.k_packed), ("v", v, pages.v_packed)):
        if numbers is None:
            continue
        codes, scales = (numbers, None) if packed is None else pack_pages(numbers, format=packed)
        put |= {name: codes} if scales is None else {name: codes, f"{name}_scales": scales}
        if name == "k" and packed is not None:
            # XLA may leave out the rounding of numbers that are made wide again. Indexes would then be of keys that
            # nobody reads.
            keys = jax.lax.optimization_barrier(unpack(packed, codes, scales))
    arrays = {}
    for name, new in put.items():
        pool = getattr(pages, name)
        arrays[name] = pool.at[frames].set(new.astype(pool.dtype), mode="drop")
    # XLA may fuse the write into its readers. They would then read the pool as it was before, and need a copy of it.
    return jax.lax.optimization_barrier(pages.replace(**arrays)), keys
