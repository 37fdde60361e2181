"""page_index: signature, validation, dispatch."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels import dispatch

INDEX_ROWS = {"bounds": 2, "mean": 1}
"""Rows of an index per block: bounds are (max, min), mean is one row."""


@dataclasses.dataclass(frozen=True)
class Call:
    """The static arguments of a call, as `page_index` explains them."""

    kind: str
    block_size: int

    def __post_init__(self):
        if self.kind not in INDEX_ROWS:
            raise ValueError(f"index kind {self.kind!r} is unknown; there are {', '.join(sorted(INDEX_ROWS))}")


def page_index(
    keys: Float[Array, "... P D"], *, kind: str, block_size: int, implementation: str | None = None
) -> Float[Array, "... P/block_size R D"]:
    """Build the index of full pages.

    Args:
        keys: keys of whole pages as stored (after norm and RoPE), any leading axes.
        kind: "bounds" gives two rows per block, the elementwise max and min of its keys (Quest, ICML 2024), exact in the keys' dtype.
            "mean" gives one row, their mean, summed in float32 and rounded once.
        block_size: tokens per block, divides P.
        implementation: see `pallas_kernels.dispatch`.

    Returns `[..., P/block_size, R, D]` in the keys' dtype, R = `INDEX_ROWS[kind]`. A NaN among a block's keys shows in its index. Memory:
    the result, R / block_size of the keys.

    Raises ValueError for an unknown kind, a block size that does not divide P, or keys that are not floating point.
    """
    call = Call(kind, block_size)
    if keys.ndim < 2 or not jnp.issubdtype(keys.dtype, jnp.floating):
        raise ValueError(f"keys must be floating point [..., P, D], got {dispatch.signature(keys=keys)}")
    if block_size <= 0 or keys.shape[-2] % block_size:
        raise ValueError(f"block_size {block_size} does not divide the page size {keys.shape[-2]} of {dispatch.signature(keys=keys)}")
    return dispatch.run("page_index", implementation, f"{kind}{block_size} {dispatch.signature(keys=keys)}", call, keys)
