"""What every implementation of all_gather is tested with: inputs, the checker, and how a call is run and lowered over a
mesh."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import paging
from all_reduce_suite import mesh_of
from jax.sharding import Mesh, PartitionSpec

from pallas_kernels.collectives.preparation import before_loop

AXIS = "tensor"


@dataclasses.dataclass(frozen=True)
class Case:
    """devices: along the axis. arrays: shape and dtype of each. others: devices along an axis before it."""

    devices: int
    arrays: tuple[tuple[tuple[int, ...], str], ...]
    others: int = 1


def merged(heads: int, batch: int = 1, dtype: str = "bfloat16") -> tuple:
    """Outputs of attention and their log-sum-exp, of heads of 128 numbers."""
    return ((batch, 1, heads, 128), dtype), ((batch, 1, heads), "float32")


def candidates(heads: int, k: int, batch: int = 1) -> tuple:
    """The best blocks and their scores."""
    return ((batch, 1, heads, k), "float32"), ((batch, 1, heads, k), "int32")


CASES = {
    f"{devices} devices, {name}": Case(devices, arrays)
    for devices in (2, 4, 8)
    for name, arrays in {"merged": merged(7), "candidates": candidates(2, 35)}.items()
}
CASES |= {
    "one number": Case(2, (((1,), "float16"),)),
    "odd halves": Case(4, (((3, 5), "bfloat16"), ((7,), "float16"), ((2, 1, 3), "int32"))),
    "a batch": Case(4, merged(28, batch=2)),
    "several CTAs": Case(2, (((70, 128), "float32"),)),
    "the inner axis of a mesh": Case(4, candidates(4, 9), others=2),
    "one device": Case(1, merged(2)),
}
STEPS = {
    f"{devices} devices, batch {batch}, {name}": Case(devices, arrays)
    for devices in (2, 4, 8)
    for batch in (1, 2, 8)
    for name, arrays in {"merged": merged(28, batch), "candidates": candidates(4, 37, batch)}.items()
}
"""Exchanges of decode steps of a 7B model."""

STEPS |= {
    f"{devices} devices, batch {batch}, logits": Case(devices, (((batch, 152_064 // devices), "float32"),))
    for devices in (2, 4, 8)
    for batch in (1, 8)
}
STEPS |= {f"{devices} devices, batch 1, counts": Case(devices, (((1,), "int32"), ((1,), "int32"))) for devices in (2, 4, 8)}


def given(case: Case, seed: int) -> tuple[np.ndarray, ...]:
    """The arrays of all devices, `[devices, *shape]`: random bits, so all kinds of numbers that are not finite, too."""
    rng = np.random.default_rng(seed)
    shapes = [((case.devices, *shape), jnp.dtype(dtype)) for shape, dtype in case.arrays]
    return tuple(rng.integers(0, 256, (*shape, dtype.itemsize), np.uint8).view(dtype)[..., 0] for shape, dtype in shapes)


def on_mesh(op: Callable, case: Case, calls: int) -> Callable:
    """A function of the arrays of several calls: the results of all devices, one call after the other in one
    program."""
    mesh = mesh_of(case)

    def device(*several):
        found = []
        for arrays in several:
            found.append(tuple(x[None] for x in op([x[0] for x in arrays], axis_name=AXIS, mesh=mesh)))
        return tuple(found)

    every = PartitionSpec(tuple(mesh.axis_names))
    specs = (PartitionSpec(AXIS),) * calls
    return jax.shard_map(device, mesh=mesh, in_specs=specs, out_specs=every, check_vma=False)


def check(op: Callable, name: str | Case, calls: int = 2) -> None:
    """All devices have the bits of all, in calls one after the other, and again when the program runs again."""
    case = CASES[name] if isinstance(name, str) else name
    arguments = [given(case, seed) for seed in range(calls)]
    program = jax.jit(on_mesh(op, case, calls))
    for _ in range(2):
        for found, expected in zip(program(*arguments), arguments, strict=True):
            for of_all, wanted in zip(found, expected, strict=True):
                assert of_all.dtype == wanted.dtype
                assert of_all.shape == (case.others * case.devices, *wanted.shape)
                for device, of_device in enumerate(np.asarray(of_all)):
                    assert _bits(of_device) == _bits(wanted), f"device {device} has other bits"


def _bits(x: np.ndarray) -> bytes:
    """The bits; any NaN is like any other."""
    return (x if x.dtype == np.int32 else np.where(np.isnan(x), np.array(np.nan, x.dtype), x)).tobytes()


def structs(case: Case) -> tuple[jax.ShapeDtypeStruct, ...]:
    """The arrays of all devices."""
    return tuple(jax.ShapeDtypeStruct((case.devices, *shape), jnp.dtype(dtype)) for shape, dtype in case.arrays)


def size_of(case: Case) -> int:
    """Bytes of a device's arrays."""
    return sum(math.prod(shape) * jnp.dtype(dtype).itemsize for shape, dtype in case.arrays)


def lowered(op: Callable, case: Case, platform: str = "cuda", calls: int = 1) -> str:
    """The text of a program of several calls, lowered for a platform that need not be there."""
    program = jax.jit(on_mesh(op, case, calls))
    return program.trace(*[structs(case)] * calls).lower(lowering_platforms=(platform,)).as_text()


def compiled_call(*, mesh: Mesh, calls: int = 1, turns: int | None = None, **arrays):
    """Calls of the GPU form over all devices of a mesh, each of what the one before found, for
    `cuda_kernels.check_spills`. turns: in a loop of so many."""

    op = paging.implementation("all_gather", "mosaic_gpu")

    def device(*arrays):
        def turn(_, own):
            for _ in range(calls):
                own = [x[1] for x in op(own, axis_name=AXIS, mesh=mesh)]
            return own

        own = [x[0] for x in arrays]
        if turns is None:
            return tuple(x[None] for x in turn(0, own))
        with before_loop(turn, 0, own) as ready:
            return tuple(x[None] for x in jax.lax.fori_loop(0, turns, ready, own))

    split = PartitionSpec(AXIS)
    return jax.shard_map(device, mesh=mesh, in_specs=(split,) * len(arrays), out_specs=split, check_vma=False)(*arrays.values())
