"""all_gather: signature, validation, dispatch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jax.sharding import Mesh
from jaxtyping import Array

from pallas_kernels.collectives.all_reduce.api import Call, size_of_axis
from pallas_kernels.core import dispatch

DTYPES = ("float32", "int32", "bfloat16", "float16")

KERNEL_BYTES = 2**20
"""Of all arrays of a call, what "mosaic_gpu" takes. Logits of a step of one token take 0.15 MB on each of four
devices."""


def all_gather(
    arrays: Sequence[Array], *, axis_name: str, mesh: Mesh | None = None, config: Any = None, implementation: str | None = None
) -> tuple[Array, ...]:
    """The arrays of each device of an axis, on all of these devices, in one exchange. For use inside `jax.shard_map`.

    Bits are those that were given; only a NaN may become another NaN.

    Args:
        arrays: at least one, of any shapes that are not empty, the same on all devices: float32, int32, bfloat16 or
            float16.
        axis_name: the axis of the mesh. `jax.shard_map` needs `check_vma=False`: JAX cannot show that the results are
            the same everywhere.
        mesh: the one that `jax.shard_map` was given. "mosaic_gpu" has to know its devices.
        config: settings of the implementation; no implementation takes any so far.
        implementation: see `pallas_kernels.core.dispatch`.

    "mosaic_gpu" takes up to 1 MiB of all arrays together, 128 KiB in each launch, and is for decode steps. Memory: as
    many bytes as are received.

    Returns for each array those of all devices, in their order: `[n, *shape]`.

    Raises ValueError for no arrays, empty ones or other dtypes, or outside of `jax.shard_map`; NotImplementedError for
    an implementation that cannot run here.
    """
    arrays = tuple(arrays)
    named = dispatch.signature(**{f"array{n}": x for n, x in enumerate(arrays)})
    if not arrays or any(0 in x.shape for x in arrays):
        raise ValueError(f"arrays must be at least one, and none empty; got {named or 'none'}")
    if any(x.dtype.name not in DTYPES for x in arrays):
        raise ValueError(f"arrays must be of {', '.join(DTYPES)}; got {named}")
    count = size_of_axis(axis_name, mesh)
    call = Call(axis_name, count, mesh, config)
    return dispatch.run("all_gather", implementation, f"{named} over {count} devices", call, *arrays)
