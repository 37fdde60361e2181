"""Splits a batch over devices: every device has all weights, and some of the batch's sequences."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

AXIS = "batch"


def batch_mesh(batch: int, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """A mesh with one axis, `AXIS`, of as many of the devices as divide `batch` evenly. devices: None: all that this
    process has."""
    devices = jax.local_devices() if devices is None else devices
    count = max(n for n in range(1, len(devices) + 1) if batch % n == 0)
    return Mesh(np.array(devices[:count]), (AXIS,))


def whole(mesh: Mesh) -> NamedSharding:
    """The sharding of arrays that every device has whole: weights, optimizer state."""
    return NamedSharding(mesh, P())


def split(mesh: Mesh) -> NamedSharding:
    """The sharding of arrays `[B, ...]` of which every device has B / devices rows."""
    return NamedSharding(mesh, P(AXIS))


def on_each(function: Callable, mesh: Mesh, arrays: int, *, joined: bool) -> Callable:
    """`function(params, *arrays)` on every device at once, with all of `params` and the device's rows of each of the
    arrays.

    joined: whether results are rows, which are put together again; otherwise all devices must have the same (`total`).
    """
    specs = {"in_specs": (P(), *[P(AXIS)] * arrays), "out_specs": P(AXIS) if joined else P()}
    return jax.shard_map(function, mesh=mesh, **specs, check_vma=False)  # JAX cannot show that results of gradients are the same


def compiled(function: Any, mesh: Mesh, *arguments: Any) -> Callable:
    """A jitted function, compiled for arguments like these on the mesh. MemoryError as `check_memory`."""
    program = function.lower(*arguments).compile()
    sizes = program.memory_analysis()
    if sizes is not None:
        check_memory(sizes.temp_size_in_bytes + sizes.output_size_in_bytes - sizes.alias_size_in_bytes, mesh.devices.flat)
    return program


def check_memory(needed: int, devices: Iterable[jax.Device]) -> None:
    """MemoryError if a device has fewer bytes free than a program needs there beside its arguments. Devices that do not
    say, as CPUs, are left out. It comes before the program: one device that fails inside leaves the others waiting for
    it in an exchange, for ever."""
    for device in devices:
        stats = device.memory_stats() or {}
        if "bytes_limit" in stats and needed > (free := stats["bytes_limit"] - stats["bytes_in_use"]):
            raise MemoryError(
                f"a step takes {needed / 1e9:.1f} GB of each device beside weights and batch, and {device} has {free / 1e9:.1f} GB free: "
                "use shorter or smaller batches, more devices, or devices with more memory that nothing else uses"
            )


def total(values: Any) -> Any:
    """The sum of each array of a pytree over the devices, for functions of `on_each`."""
    return jax.lax.psum(values, AXIS)
