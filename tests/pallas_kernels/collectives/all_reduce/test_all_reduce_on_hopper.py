"""all_reduce on real GPUs, two or more: the kernel gives the bits of the definition, in long chains too, and with
devices out of step."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from all_reduce_suite import AXIS, CASES, Case, check, mesh_of, on_mesh, parts_of, production
from jax.sharding import PartitionSpec

from pallas_kernels.collectives.all_reduce import all_reduce
from pallas_kernels.collectives.preparation import before_loop
from pallas_kernels.core import dispatch

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("hopper")]

KERNEL = functools.partial(all_reduce, implementation="mosaic_gpu")
COUNTS = [2, 4, 8]
OPS = {"kernel": KERNEL, "xla": functools.partial(all_reduce, implementation="xla")}


@pytest.mark.parametrize("case", production())
def test_the_kernel_gives_the_bits_of_the_definition(case):
    """Five calls in one program, run twice."""
    check(KERNEL, production()[case], calls=5)


@pytest.mark.parametrize("case", [name for name, case in CASES.items() if case.devices > 1])
def test_xla_gives_the_bits_of_the_definition(case):
    check(OPS["xla"], case)


@pytest.mark.parametrize("kind", ["cancelling", "random"])
@pytest.mark.parametrize("devices", COUNTS)
@pytest.mark.parametrize("rows", range(1, 9))
def test_rows(devices, rows, kind):
    check(KERNEL, Case(devices, (rows, 3584), "bfloat16", kind=kind))
    check(KERNEL, Case(devices, (1, rows, 3584), "float32", with_residual=False, kind=kind))


def test_on_the_inner_axis_of_a_mesh():
    check(KERNEL, Case(2, (2, 3584), "bfloat16", others=2))


def chain(op, mesh, count: int, busy: int | None = None, turns: int = 1):
    """`count` additions, each of parts made from the sum before. busy: the device that multiplies matrices before each.
    turns: in a loop of so many turns."""

    def device(part, factor, work, residual):
        factor = factor[0]

        def turn(_, carry):
            part, residual = carry
            for _ in range(count // turns):
                if busy is not None:
                    late = jax.lax.cond(jax.lax.axis_index(AXIS) == busy, lambda w: (w @ w).ravel()[0], lambda w: w[0, 0], work)
                    part = part + (late * 0).astype(part.dtype)
                residual = op(part, axis_name=AXIS, residual=residual, mesh=mesh)
                part = residual * factor
            return part, residual

        carry = part[0], residual
        if turns == 1:
            return turn(0, carry)[1][None]
        with before_loop(turn, 0, carry) as ready:
            return jax.lax.fori_loop(0, turns, ready, carry)[1][None]

    split, whole = PartitionSpec(AXIS), PartitionSpec()
    return jax.jit(jax.shard_map(device, mesh=mesh, in_specs=(split, split, whole, whole), out_specs=split, check_vma=False))


@pytest.mark.parametrize("turns", [1, 8])
@pytest.mark.parametrize("busy", [None, 0, 1])
@pytest.mark.parametrize("devices", COUNTS)
@pytest.mark.parametrize("width", [3584, 8192])
def test_a_long_chain_has_the_bits_of_xla_every_time(devices, width, busy, turns, tools):
    """56 calls in a program, also by a loop, and 50 runs of it in a row without waiting; a busy device comes late to
    every call."""
    case = Case(devices, (1, width), "bfloat16")
    mesh, (parts, residual) = mesh_of(case), parts_of(case, 0)
    factor = np.random.default_rng(1).uniform(-0.5 / devices, 0.5 / devices, parts.shape).astype(parts.dtype)
    arrays = parts, factor, jnp.zeros((2048, 2048), jnp.bfloat16), residual
    expected = np.asarray(chain(OPS["xla"], mesh, 56, busy)(*arrays))
    program = chain(KERNEL, mesh, 56, busy, turns)
    found = [program(*arrays) for _ in range(50)]
    for each in found:
        tools.assert_same_bits(each, expected)
    for of_device in expected:
        tools.assert_same_bits(of_device, expected[0])


@pytest.mark.parametrize("devices", COUNTS)
def test_it_is_picked(devices):
    case = dataclasses.replace(CASES["one row of a batch"], devices=devices)
    mesh, (parts, residual) = mesh_of(case), parts_of(case, 0)
    with dispatch.listening() as heard:
        jax.eval_shape(on_mesh(all_reduce, mesh, 1, with_residual=True), (parts,), (residual,))
    assert heard == {"all_reduce": "mosaic_gpu"}
