"""page_index: signature, validation, dispatch."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Float, UInt8

from pallas_kernels.core import dispatch
from pallas_kernels.selection.page_index.codes import INDEX_KINDS, index_shape


@dataclasses.dataclass(frozen=True)
class Call:
    """The static arguments of a call, as `page_index` explains them."""

    kind: str
    block_size: int

    def __post_init__(self):
        if self.kind not in INDEX_KINDS:
            raise ValueError(f"index kind {self.kind!r} is unknown; there are {', '.join(sorted(INDEX_KINDS))}")


def page_index(
    keys: Float[Array, "... P D"], *, kind: str, block_size: int, implementation: str | None = None
) -> Float[Array, "... P/block_size R W"] | UInt8[Array, "... P/block_size R W"]:
    """Build the index of full pages.

    Args:
        keys: keys of whole pages as stored (after norm and RoPE), any leading axes.
        kind: "bounds" gives two rows per block, the elementwise max and min of its keys (Quest, ICML 2024), exact in
            the keys' dtype. "mean" gives one row, their mean, summed in float32 and rounded once. "keys1", "keys2",
            "keys4" and "keys8" give the keys in 1, 2, 4 or 8 bits a number, as uint8
            (`pallas_kernels.selection.page_index.codes`); `coded_keys` reads them.
        block_size: tokens per block, divides P.
        implementation: see `pallas_kernels.core.dispatch`.

    Returns `[..., P/block_size, R, W]` with R, W = `index_shape(...)`, in `index_dtype(...)`. A NaN among a block's
    keys shows in its index. Memory: the result; while keys are coded, a float32 copy of them.

    Raises ValueError for an unknown kind, a block size that does not divide P, a head dim whose codes are not whole
    bytes, or keys that are not floating point.
    """
    call = Call(kind, block_size)
    if keys.ndim < 2 or not jnp.issubdtype(keys.dtype, jnp.floating):
        raise ValueError(f"keys must be floating point [..., P, D], got {dispatch.signature(keys=keys)}")
    if block_size <= 0 or keys.shape[-2] % block_size:
        raise ValueError(f"block_size {block_size} does not divide the page size {keys.shape[-2]} of {dispatch.signature(keys=keys)}")
    index_shape(kind, block_size, keys.shape[-1])
    return dispatch.run("page_index", implementation, f"{kind}{block_size} {dispatch.signature(keys=keys)}", call, keys)
