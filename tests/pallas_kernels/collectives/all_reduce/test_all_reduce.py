"""all_reduce: every implementation gives the bits of the definition on simulated devices; mutants; refusals; what is
picked where."""

from __future__ import annotations

import functools
import logging
from types import SimpleNamespace
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import paging
import pytest
from all_reduce_suite import AXIS, CASES, Case, check, lowered, mesh_of, on_mesh, parts_of, production
from jax.sharding import Mesh
from quick_cases import in_turn, one_in

from pallas_kernels.collectives import peer_buffers
from pallas_kernels.collectives.all_reduce import all_reduce, xla
from pallas_kernels.core import dispatch


def _in_parts(*arrays, **keywords):
    """Whatever the size, as large arrays are added."""
    with mock.patch.object(xla, "GATHERED_BYTES", 0):
        return paging.implementation("all_reduce", "xla")(*arrays, **keywords)


IMPLEMENTATIONS = {name: paging.implementation("all_reduce", name) for name in ("xla", "reference")} | {"xla, in parts": _in_parts}


@pytest.mark.parametrize(("name", "case"), in_turn(IMPLEMENTATIONS, CASES))
def test_bits_are_those_of_the_definition(name, case):
    check(IMPLEMENTATIONS[name], case)


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_a_row_has_the_same_bits_in_any_company(name, tools):
    case = CASES["cancelling"]
    mesh, (parts, residual) = mesh_of(case), parts_of(case, 0)
    program = jax.jit(on_mesh(IMPLEMENTATIONS[name], mesh, 1, with_residual=True))
    (together,) = program((parts,), (residual,))
    for row in (0, 5):
        (alone,) = program((parts[:, row : row + 1],), (residual[row : row + 1],))
        tools.assert_same_bits(alone, together[:, row : row + 1])


@pytest.mark.parametrize("devices", [2, 4])
def test_large_arrays_are_added_in_parts(devices):
    """Where that is less to receive: with two devices it is as much."""
    rows = xla.GATHERED_BYTES // 2**10 // devices
    for more, exchanges in ((0, {"all_gather": 1}), (1, {"all_gather": 1} if devices == 2 else {"all_gather": 1, "all_to_all": 1})):
        text = lowered(IMPLEMENTATIONS["xla"], Case(devices, (rows + more, 512), "bfloat16"))
        found = {name: text.count(f'"stablehlo.{name}"') for name in ("all_gather", "all_to_all", "all_reduce")}
        assert {name: count for name, count in found.items() if count} == exchanges


# Mutants


def _added(parts, residual, dtype):
    total = functools.reduce(jnp.add, [part.astype(jnp.float32) for part in parts])
    return (total if residual is None else total + residual.astype(jnp.float32)).astype(dtype)


def mutant(change):
    """change: (parts of all devices, residual, own number) -> what is added instead, in order; or the result itself."""

    def op(x, *, axis_name, residual, mesh):
        found = change(jax.lax.all_gather(x, axis_name), residual, jax.lax.axis_index(axis_name))
        return _added(*found, x.dtype) if isinstance(found, tuple) else found

    return op


def _replaced(parts, number, part):
    return parts.at[number].set(part)


def _rounded_each_time(parts, residual, me):
    total = functools.reduce(jnp.add, list(parts))
    return total if residual is None else total + residual


def _residual_first(parts, residual, me):
    return (parts, None) if residual is None else (jnp.concatenate([residual[None], parts]), None)


def _rounded_before_the_residual(parts, residual, me):
    total = _added(parts, None, parts.dtype)
    return total if residual is None else total + residual


class Stale:
    """The part of the last device is that of the call before."""

    def __init__(self):
        self.before = None

    def __call__(self, x, *, axis_name, residual, mesh):
        parts, before = jax.lax.all_gather(x, axis_name), self.before
        self.before = parts
        return _added(parts if before is None else _replaced(parts, -1, before[-1]), residual, x.dtype)


def _times(residual, factor):
    return None if residual is None else residual * jnp.asarray(factor, residual.dtype)


MUTANTS = {
    "zeros": mutant(lambda parts, residual, me: jnp.zeros_like(parts[0])),
    "own part alone": mutant(lambda parts, residual, me: (parts[me][None], residual)),
    "one device is left out": mutant(lambda parts, residual, me: (parts[:-1], residual)),
    "the next device is left out": mutant(
        lambda parts, residual, me: (_replaced(parts, (me + 1) % len(parts), jnp.zeros_like(parts[0])), residual)
    ),
    "own part twice": mutant(lambda parts, residual, me: (jnp.concatenate([parts, parts[me][None]]), residual)),
    "own part in the place of the first": mutant(lambda parts, residual, me: (_replaced(parts, 0, parts[me]), residual)),
    "no residual": mutant(lambda parts, residual, me: (parts, None)),
    "residual twice": mutant(lambda parts, residual, me: (parts, _times(residual, 2))),
    "residual once per device": mutant(lambda parts, residual, me: (parts, _times(residual, len(parts)))),
    "residual on the first device only": mutant(lambda parts, residual, me: (parts, _times(residual, me == 0))),
    "residual first": mutant(_residual_first),
    "backwards": mutant(lambda parts, residual, me: (parts[::-1], residual)),
    "each device begins with its own part": mutant(lambda parts, residual, me: (jnp.roll(parts, -me, axis=0), residual)),
    "rounded after each addition": mutant(_rounded_each_time),
    "rounded before the residual": mutant(_rounded_before_the_residual),
    "mean": mutant(lambda parts, residual, me: (parts / jnp.asarray(len(parts), parts.dtype), residual)),
    "the first device alone has the sum": mutant(lambda parts, residual, me: jnp.where(me == 0, _added(parts, residual, parts.dtype), 0)),
    "float32": mutant(lambda parts, residual, me: _added(parts, residual, jnp.float32)),
    "a part of the call before": Stale(),
}
SEVERAL = [name for name, case in CASES.items() if case.devices > 1]


@pytest.mark.parametrize("name", MUTANTS)
def test_mutant_fails(tools, name):
    tools.must_fail(check, MUTANTS[name], SEVERAL)


def test_the_pattern_of_mutants_is_sound():
    for case in ("4 devices, bfloat16", "cancelling", "no residual"):
        check(mutant(lambda parts, residual, me: (parts, residual)), case)


# Refusals


def traced(x, residual=None, *, devices=2, **keywords):
    """Trace a call over so many devices."""
    over = mesh_of(Case(devices, ()))
    op = functools.partial(all_reduce, **({"axis_name": AXIS, "mesh": over} | keywords))
    whole = jax.sharding.PartitionSpec()
    function = jax.shard_map(lambda x, r: op(x, residual=r), mesh=over, in_specs=whole, out_specs=whole, check_vma=False)
    return jax.eval_shape(function, x, residual)


def of(*shape, dtype="bfloat16"):
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))


BAD = {
    "one axis": (lambda: traced(of(8)), r"x must be \[R, E\] or \[B, T, E\], no axis empty; got x bfloat16\[8\]"),
    "no rows": (lambda: traced(of(0, 8)), r"no axis empty; got x bfloat16\[0, 8\]"),
    "whole numbers": (lambda: traced(of(2, 8, dtype="int32")), r"one of float32, bfloat16, float16; got x int32\[2, 8\]"),
    "another residual": (lambda: traced(of(2, 8), of(1, 8)), r"x's shape and dtype; got x bfloat16\[2, 8\] residual bfloat16\[1, 8\]"),
    "a residual of another dtype": (
        lambda: traced(of(2, 8), of(2, 8, dtype="float32")),
        r"x's shape and dtype; .*residual float32\[2, 8\]",
    ),
    "no mesh": (
        lambda: all_reduce(jnp.zeros((2, 8)), axis_name="rows"),
        "no axis 'rows' here: call this inside",
    ),
    "another mesh": (
        lambda: traced(of(2, 8), mesh=Mesh(np.array(jax.devices()[:4]), (AXIS,))),
        r"the one of this shard_map, with 2 devices along 'tensor'; got \{'tensor': 4\}",
    ),
    "a config": (lambda: traced(of(2, 8), config=7, implementation="xla"), "implementation 'xla' of all_reduce takes no config, got 7"),
}


@pytest.mark.parametrize("case", BAD)
def test_wrong_input_is_refused(case):
    call, message = BAD[case]
    with pytest.raises(ValueError, match=message):
        call()


# What is picked


def test_on_a_cpu_xla_is_picked_and_said(caplog):
    with caplog.at_level(logging.INFO, logger="pallas_kernels.core.dispatch"):
        traced(of(2, 3, 136), devices=4)
    assert dispatch.chosen()["all_reduce", "x bfloat16[2, 3, 136] over 4 devices"] == "xla"
    assert "all_reduce x bfloat16[2, 3, 136] over 4 devices: xla (picked)" in caplog.text


def chosen_on_hopper(*arrays, **keywords):
    with dispatch.listening() as heard:
        traced(*arrays, **keywords)
    return heard["all_reduce"]


@pytest.mark.parametrize("case", one_in(4, production()))
def test_on_hopper_the_kernel_is_picked_for_decode_steps(on_hopper, case):
    case = production()[case]
    assert chosen_on_hopper(of(*case.shape, dtype=case.dtype), devices=case.devices) == "mosaic_gpu"


def _other_order():
    return Mesh(np.array(jax.devices()[:2][::-1]).reshape(1, 2), ("context", AXIS))


REFUSED = {
    "9 rows of 8192": ({}, of(9, 8192), "takes up to 64 pieces of 1024 numbers .2048 bytes., got 73728 numbers"),
    "a chunk": ({}, of(1, 512, 3584), "takes up to 64 pieces of 1024 numbers"),
    "8 rows of 8192 in float32": ({}, of(8, 8192, dtype="float32"), "takes up to 64 pieces of 512 numbers .2048 bytes., got 65536"),
    "an odd width": ({}, of(1, 2880), "the numbers of x must be a multiple of 128, got 2880"),
    "a width of many small pieces": ({}, of(1, 128 * 65), "takes up to 64 pieces of 128 numbers .256 bytes., got 8320 numbers"),
    "one device": ({"devices": 1}, of(1, 4096), "adds over 2 to 8 devices, got 1"),
    "no mesh": ({"mesh": None}, of(1, 4096), "has to know the devices: pass mesh"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_the_kernel_cannot_take_goes_to_xla(on_hopper, case):
    keywords, x, reason = REFUSED[case]
    assert chosen_on_hopper(x, **keywords) == "xla"
    with pytest.raises(NotImplementedError, match=f"all_reduce 'mosaic_gpu': {reason}"):
        traced(x, implementation="mosaic_gpu", **keywords)


@pytest.mark.parametrize(("name", "value"), [("process_index", 1), ("device_count", 16)])
def test_several_processes_go_to_xla(on_hopper, monkeypatch, name, value):
    """This process is another one than the devices'; or JAX has devices of other processes too."""
    assert chosen_on_hopper(of(1, 4096)) == "mosaic_gpu"
    monkeypatch.setattr(jax, name, lambda: value)
    assert chosen_on_hopper(of(1, 4096)) == "xla"
    with pytest.raises(NotImplementedError, match="reaches devices of one process alone, and there are several processes"):
        traced(of(1, 4096), implementation="mosaic_gpu")


def test_a_mesh_of_other_devices_goes_to_xla(on_hopper):
    assert chosen_on_hopper(of(1, 4096), mesh=_other_order()) == "xla"
    with pytest.raises(NotImplementedError, match=r"a mesh of the first devices in their order, got devices \[1, 0\]"):
        traced(of(1, 4096), mesh=_other_order(), implementation="mosaic_gpu")


KINDS = {
    "NVIDIA H100 80GB HBM3": True,
    "NVIDIA H200": True,
    "NVIDIA GB200": True,
    "NVIDIA H100 PCIe": False,
    "NVIDIA H200 NVL": False,
}


@pytest.mark.parametrize("kind", KINDS)
def test_without_nvlink_between_all_devices_xla_is_picked(kind):
    devices = [SimpleNamespace(id=n, process_index=0, device_kind=kind) for n in range(2)]
    why = peer_buffers.unsuitable(SimpleNamespace(devices=np.array(devices)))
    assert (why is None) == KINDS[kind]
    assert why is None or why == f"needs NVLink between all devices, which {kind} have between pairs at most"


def test_on_gpus_that_never_have_nvlink_xla_is_picked(on_hopper, monkeypatch):
    monkeypatch.setattr(dispatch, "_compute_capability", lambda: "12.0")
    assert chosen_on_hopper(of(1, 4096)) == "xla"
    monkeypatch.setattr(dispatch, "_compute_capability", lambda: "10.3")
    assert chosen_on_hopper(of(1, 4096)) == "mosaic_gpu"
