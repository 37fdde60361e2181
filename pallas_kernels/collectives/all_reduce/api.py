"""all_reduce: signature, validation, dispatch."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Float

from pallas_kernels.core import dispatch

DTYPES = ("float32", "bfloat16", "float16")


@dataclasses.dataclass(frozen=True)
class Call:
    """The static arguments of a call, as `all_reduce` and `all_gather` explain them. num_devices: along the axis."""

    axis_name: str
    num_devices: int
    mesh: Mesh | None
    config: Any


def all_reduce(
    x: Float[Array, "*rows E"],
    *,
    axis_name: str,
    residual: Float[Array, "*rows E"] | None = None,
    mesh: Mesh | None = None,
    config: Any = None,
    implementation: str | None = None,
) -> Float[Array, "*rows E"]:
    """The sum of `x` over the devices of an axis, and `residual` once, on each of these devices. For use inside
    `jax.shard_map`.

    The numbers of a place are widened to float32, added in the order of the devices, then the residual is added, and
    the sum is rounded once, to x's dtype. Every implementation does this, so all of them give the same bits, on all
    devices, every time, whatever rows are beside a row. `jax.lax.psum` promises no order and may round to x's dtype
    after each addition.

    Args:
        x: `[R, E]` or `[B, T, E]`, this device's part: float32, bfloat16 or float16.
        axis_name: the axis of the mesh. `jax.shard_map` needs `check_vma=False`: JAX cannot show that the results are
            the same everywhere.
        residual: of x's shape and dtype, the same on all devices of the axis.
        mesh: the one that `jax.shard_map` was given. "mosaic_gpu" has to know its devices; without it another
            implementation is picked.
        config: settings of the implementation; no implementation takes any so far.
        implementation: see `pallas_kernels.core.dispatch`.

    "mosaic_gpu" takes up to 128 KiB of x and is for decode steps. "xla" takes everything else. Each device sends x to
    every other one, or, above 4 MiB on all devices together and with more than two devices, a part of x to each and
    then a part of the sum to each. Memory: as many bytes as are received.

    Returns the sum, of x's shape and dtype. Not differentiated by "mosaic_gpu"; name "xla" for that.

    Raises ValueError for arguments that do not fit together, or outside of `jax.shard_map`; NotImplementedError for an
    implementation that cannot run here.
    """
    arrays = dispatch.signature(x=x, residual=residual)
    if x.ndim not in (2, 3) or 0 in x.shape:
        raise ValueError(f"x must be [R, E] or [B, T, E], no axis empty; got {arrays}")
    if x.dtype.name not in DTYPES:
        raise ValueError(f"x must be one of {', '.join(DTYPES)}; got {arrays}")
    if residual is not None and (residual.shape != x.shape or residual.dtype != x.dtype):
        raise ValueError(f"residual must have x's shape and dtype; got {arrays}")
    count = size_of_axis(axis_name, mesh)
    call = Call(axis_name, count, mesh, config)
    return dispatch.run("all_reduce", implementation, f"{arrays} over {count} devices", call, x, residual)


def size_of_axis(axis_name: str, mesh: Mesh | None) -> int:
    """Devices along an axis. ValueError outside of `jax.shard_map`, and for a mesh that is not its own."""
    try:
        count = jax.lax.axis_size(axis_name)
    except NameError:
        raise ValueError(f"there is no axis {axis_name!r} here: call this inside jax.shard_map over a mesh that has it") from None
    if mesh is not None and mesh.shape.get(axis_name) != count:
        raise ValueError(f"mesh must be the one of this shard_map, with {count} devices along {axis_name!r}; got {dict(mesh.shape)}")
    return count


def add_in_order(parts: Float[Array, "n *rows E"], residual: Float[Array, "*rows E"] | None) -> Float[Array, "*rows E"]:
    """The sum of the parts, and the residual, by the order and the rounding that `all_reduce` promises.

    Without the barrier XLA may go on with the sum as it was before the rounding, which the kernel's callers never see.
    """
    total = parts[0].astype(jnp.float32)
    for part in parts[1:]:
        total = total + part.astype(jnp.float32)
    if residual is not None:
        total = total + residual.astype(jnp.float32)
    return jax.lax.optimization_barrier(total.astype(parts.dtype))
