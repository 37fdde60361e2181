"""page_index: signature, validation, dispatch."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels import dispatch

INDEX_ROWS = {"bounds": 2, "mean": 1}
"""Rows an index holds per block: bounds are (max, min), mean is one row."""


def page_index(
    keys: Float[Array, "... P D"], *, kind: str, block_size: int, implementation: str | None = None
) -> Float[Array, "... P/block_size R D"]:
    """Build the index of full pages.

    keys: keys of whole pages as stored (after norm and RoPE), any leading axes. kind: "bounds" gives two rows per block, the
    elementwise max and min of its keys (Quest, ICML 2024), exact in the keys' dtype; "mean" gives one row, their mean, summed in
    float32 and rounded once. block_size: tokens per block, divides P.

    Returns `[..., P/block_size, R, D]` in the keys' dtype, R = `INDEX_ROWS[kind]`. A NaN among a block's keys shows in its index.
    Memory: the result, R / block_size of the keys.

    Raises ValueError for an unknown kind, a block size that does not divide P, or keys that are not floating point.
    """
    if kind not in INDEX_ROWS:
        raise ValueError(f"index kind {kind!r} is unknown; there are {', '.join(sorted(INDEX_ROWS))}")
    if keys.ndim < 2 or not jnp.issubdtype(keys.dtype, jnp.floating):
        raise ValueError(f"keys must be floating point [..., P, D], got {dispatch.signature(keys=keys)}")
    if block_size <= 0 or keys.shape[-2] % block_size:
        raise ValueError(f"block_size {block_size} does not divide the page size {keys.shape[-2]} of {dispatch.signature(keys=keys)}")
    name = dispatch.choose("page_index", implementation, f"{kind}{block_size} {dispatch.signature(keys=keys)}")
    return dispatch.load("page_index", name)(keys, kind=kind, block_size=block_size)
