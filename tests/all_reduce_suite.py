"""What every implementation of all_reduce is tested with: inputs, the checker, and how a call is run and lowered over a
mesh."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import paging
import pytest
from jax.sharding import Mesh, PartitionSpec

from pallas_kernels.collectives.preparation import before_loop

AXIS = "tensor"


@dataclasses.dataclass(frozen=True)
class Case:
    """devices: along the axis. others: devices along an axis before it. kind of numbers: "random", "cancelling" (sums
    of large numbers of both signs and small ones: other orders give other bits in 16 bits, too), "whole" (exact in any
    order)."""

    devices: int
    shape: tuple[int, ...]
    dtype: str = "float32"
    with_residual: bool = True
    kind: str = "random"
    others: int = 1


CASES = {
    f"{devices} devices, {dtype}": Case(devices, (3, 256), dtype) for devices in (2, 4, 8) for dtype in ("float32", "bfloat16", "float16")
}
CASES |= {f"{rows} rows": Case(4, (rows, 128), "bfloat16") for rows in range(1, 9)}
CASES |= {
    "cancelling": Case(4, (8, 512), "bfloat16", kind="cancelling"),
    "cancelling, float16": Case(8, (8, 512), "float16", kind="cancelling"),
    "whole": Case(4, (2, 128), kind="whole"),
    "batches": Case(2, (4, 8, 64), "bfloat16"),
    "one row of a batch": Case(4, (1, 1, 3584), "bfloat16"),
    "no residual": Case(4, (2, 256), "bfloat16", with_residual=False),
    "one number": Case(2, (1, 1)),
    "odd sizes": Case(8, (3, 5, 7)),
    "many rows": Case(4, (300, 256), "bfloat16", kind="cancelling"),
    "the inner axis of a mesh": Case(4, (2, 128), others=2),
    "one device": Case(1, (2, 128), "bfloat16"),
}


def mesh_of(case: Case) -> Mesh:
    """Of the first devices; skips where there are too few."""
    devices = jax.devices()
    if len(devices) < case.others * case.devices:
        pytest.skip(f"needs {case.others * case.devices} devices, and there are {len(devices)}")
    return Mesh(np.array(devices[: case.others * case.devices]).reshape(case.others, case.devices), ("context", AXIS))


def parts_of(case: Case, seed: int) -> tuple[np.ndarray, np.ndarray | None]:
    """The parts of all devices, `[devices, *shape]`, and the residual."""
    rng = np.random.default_rng(seed)
    found = rng.standard_normal((case.devices + 1, *case.shape)).astype(np.float32)
    if case.kind == "whole":
        found = np.round(8 * found)
    if case.kind == "cancelling":
        large = 2.0 ** rng.integers(8, 12, case.shape) * rng.choice((-1, 1), case.shape)
        order = rng.permuted(np.broadcast_to(np.arange(case.devices), (*case.shape, case.devices)), axis=-1)
        for sign, which in ((1, order[..., 0]), (-1, order[..., 1])):
            np.put_along_axis(found, which[None], (sign * large)[None].astype(np.float32), axis=0)
        found *= np.float32(1 + 2**-6)
    found = found.astype(jnp.dtype(case.dtype))
    return found[:-1], found[-1] if case.with_residual else None


def ordered_sum(parts: np.ndarray, residual: np.ndarray | None) -> np.ndarray:
    """What every device has to return, by numpy."""
    total = parts[0].astype(np.float32)
    for part in parts[1:]:
        total = total + part.astype(np.float32)
    if residual is not None:
        total = total + residual.astype(np.float32)
    return total.astype(parts.dtype)


def on_mesh(op: Callable, mesh: Mesh, count: int, with_residual: bool) -> Callable:
    """A function of `count` calls' parts `[devices, *shape]` and residuals, each or None: the results of all devices,
    one call after the other in one program."""

    def device(parts, residuals):
        found = []
        for x, residual in zip(parts, residuals, strict=True):
            found.append(op(x[0], axis_name=AXIS, residual=residual, mesh=mesh)[None])
        return tuple(found)

    split, whole = PartitionSpec(AXIS), PartitionSpec()
    in_specs = (split,) * count, (whole if with_residual else None,) * count
    every = PartitionSpec(tuple(mesh.axis_names))
    return jax.shard_map(device, mesh=mesh, in_specs=in_specs, out_specs=(every,) * count, check_vma=False)


def check(op: Callable, name: str, calls: int = 2) -> None:
    """All devices have the bits of the definition, in calls one after the other, and again when the program runs
    again."""
    case = CASES[name] if isinstance(name, str) else name
    mesh, given = mesh_of(case), [parts_of(case, seed) for seed in range(calls)]
    program = jax.jit(on_mesh(op, mesh, calls, case.with_residual))
    arguments = tuple(parts for parts, _ in given), tuple(residual for _, residual in given)
    for _ in range(2):
        for found, (parts, residual) in zip(program(*arguments), given, strict=True):
            expected = ordered_sum(parts, residual)
            assert found.dtype == expected.dtype
            assert found.shape == (case.others * case.devices, *case.shape)
            for device, of_device in enumerate(np.asarray(found)):
                assert of_device.tobytes() == expected.tobytes(), f"device {device} has other bits"


def lowered(op: Callable, case: Case, platform: str = "cuda") -> str:
    """The text of one call, lowered for a platform that need not be there."""
    mesh, dtype = mesh_of(case), jnp.dtype(case.dtype)
    program = jax.jit(on_mesh(op, mesh, 1, case.with_residual))
    parts = jax.ShapeDtypeStruct((case.devices, *case.shape), dtype)
    residual = jax.ShapeDtypeStruct(case.shape, dtype) if case.with_residual else None
    return program.trace((parts,), (residual,)).lower(lowering_platforms=(platform,)).as_text()


@functools.cache
def production() -> dict[str, Case]:
    """Calls of decode steps, the largest ones included."""
    sizes = {"3584": (1, 2, 3, 5, 8), "8192": (1, 8), "4096": (1, 16)}
    return {
        f"{devices} devices, {rows} x {width} {dtype}": Case(devices, (rows, int(width)), dtype)
        for width, several in sizes.items()
        for rows in several
        for devices in (2, 4, 8)
        for dtype in ("bfloat16", "float32", "float16")
        if dtype == "bfloat16" or (devices == 2 and width == "3584")
    }


def compiled_call(parts, residual, *, mesh: Mesh, calls: int = 1, turns: int | None = None):
    """Calls of the GPU form over all devices of a mesh, each with the sum before as its residual, for
    `cuda_kernels.compile_for`. turns: in a loop of so many."""
    op = paging.implementation("all_reduce", "mosaic_gpu")

    def device(x, residual):
        def turn(_, residual):
            for _ in range(calls):
                residual = op(x[0], axis_name=AXIS, residual=residual, mesh=mesh)
            return residual

        if turns is None:
            return turn(0, residual)[None]
        with before_loop(turn, 0, residual) as ready:
            return jax.lax.fori_loop(0, turns, ready, residual)[None]

    split, whole = PartitionSpec(AXIS), PartitionSpec()
    return jax.shard_map(device, mesh=mesh, in_specs=(split, whole), out_specs=split, check_vma=False)(parts, residual)
