"""all_gather on real GPUs, two or more: the kernel gives the bits of all devices, in long chains too, and with devices
out of step.

pytest -m gpu tests/pallas_kernels/collectives/all_gather
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from all_gather_suite import AXIS, CASES, STEPS, Case, check, size_of
from all_reduce_suite import mesh_of
from jax.sharding import PartitionSpec

from pallas_kernels.collectives.all_gather import all_gather
from pallas_kernels.collectives.all_gather.api import KERNEL_BYTES
from pallas_kernels.collectives.preparation import before_loop

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("hopper")]

KERNEL = functools.partial(all_gather, implementation="mosaic_gpu")


@pytest.mark.parametrize("case", [name for name, case in CASES.items() if case.devices > 1])
def test_the_kernel_gives_the_bits_of_all_devices(case):
    check(KERNEL, case, calls=5)


@pytest.mark.parametrize("case", [name for name, case in STEPS.items() if size_of(case) <= KERNEL_BYTES])
def test_exchanges_of_decode_steps(case):
    check(KERNEL, STEPS[case], calls=5)


@pytest.mark.parametrize("turns", [1, 8])
@pytest.mark.parametrize("busy", [None, 0, 1])
@pytest.mark.parametrize("devices", [2, 4, 8])
def test_a_long_chain_is_right_every_time(devices, busy, turns):
    """56 exchanges in a program, also by a loop, each of numbers made from the one before, 50 runs in a row without
    waiting between them; a busy device comes late to every exchange. Whole numbers, so that every sum is exact."""
    mesh = mesh_of(Case(devices, ()))

    def device(own, work):
        def turn(_, own):
            for _ in range(56 // turns):
                if busy is not None:
                    late = jax.lax.cond(jax.lax.axis_index(AXIS) == busy, lambda w: (w @ w).ravel()[0], lambda w: w[0, 0], work)
                    own = own + (late * 0).astype(own.dtype)
                (found,) = KERNEL([own], axis_name=AXIS, mesh=mesh)
                own = (own * 3 + found.sum(0)) % 1021
            return own

        if turns == 1:
            return turn(0, own[0])[None]
        with before_loop(turn, 0, own[0]) as ready:
            return jax.lax.fori_loop(0, turns, ready, own[0])[None]

    split = PartitionSpec(AXIS)
    program = jax.jit(jax.shard_map(device, mesh=mesh, in_specs=(split, PartitionSpec()), out_specs=split, check_vma=False))
    start = np.random.default_rng(0).integers(0, 1021, (devices, 900)).astype(np.int32)
    expected = start.astype(np.int64)
    for _ in range(56):
        expected = (expected * 3 + expected.sum(0)) % 1021
    for found in [program(start, jnp.zeros((2048, 2048), jnp.bfloat16)) for _ in range(50)]:
        np.testing.assert_array_equal(np.asarray(found), expected)
