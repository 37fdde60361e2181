"""all_gather: every implementation gives the bits of all devices, on simulated devices; the Hopper kernel lowered, and
its body on emulated devices; mutants; refusals; what is picked where."""

from __future__ import annotations

import functools
import itertools
import pickle
import re

import cuda_kernels
import jax
import jax.numpy as jnp
import numpy as np
import paging
import pytest
from all_gather_suite import AXIS, CASES, STEPS, Case, check, compiled_call, given, lowered, size_of
from all_reduce_suite import mesh_of
from emulator import devices
from quick_cases import in_turn, one_in, some_long

from pallas_kernels.collectives import peer_buffers
from pallas_kernels.collectives.all_gather import all_gather, mosaic_gpu
from pallas_kernels.collectives.all_gather.api import KERNEL_BYTES
from pallas_kernels.core import dispatch

MAX_REGISTERS = 128
"""Of 128 threads, so many leave room for four CTAs on a core."""

KERNEL = paging.implementation("all_gather", "mosaic_gpu")
IMPLEMENTATIONS = {name: functools.partial(all_gather, implementation=name) for name in ("xla", "reference")}


@pytest.mark.parametrize(("name", "case"), in_turn(IMPLEMENTATIONS, CASES))
def test_all_devices_have_the_bits_of_all(name, case):
    check(IMPLEMENTATIONS[name], case)


def _of_all(x):
    return jax.lax.all_gather(x, AXIS)


def _me():
    return jax.lax.axis_index(AXIS)


MUTANTS = {
    "zeros": lambda x: jnp.zeros_like(_of_all(x)),
    "its own for all": lambda x: jnp.broadcast_to(x, _of_all(x).shape),
    "begins with its own": lambda x: jnp.roll(_of_all(x), -_me(), axis=0),
    "backwards": lambda x: _of_all(x)[::-1],
    "nothing of the last": lambda x: _of_all(x).at[-1].set(0),
    "its own is missing": lambda x: _of_all(x).at[_me()].set(0),
    "the first device alone has them": lambda x: jnp.where(_me() == 0, _of_all(x), 0),
    "through numbers": lambda x: (_of_all(x).astype(jnp.float32) + 0).astype(x.dtype),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_mutant_fails(tools, name):
    op = lambda arrays, *, axis_name, mesh: tuple(map(MUTANTS[name], arrays))  # noqa: E731
    tools.must_fail(check, op, [case for case in CASES if CASES[case].devices > 1])


# The GPU form, without a GPU


@pytest.mark.parametrize("name", CASES)
def test_arrays_go_to_words_and_come_back(name):
    arrays = [x[0] for x in given(CASES[name], 3)]
    for x in arrays:
        words = mosaic_gpu._as_words(jnp.asarray(x))
        assert words.size == mosaic_gpu.words_of(x.shape, x.dtype.itemsize)
        found = mosaic_gpu._from_words(jnp.stack([words, words]), x.shape, x.dtype)
        assert np.asarray(found).tobytes() == np.stack([x, x]).tobytes()


@pytest.mark.parametrize("case", one_in(4, {name: case for name, case in STEPS.items() if size_of(case) <= KERNEL_BYTES}))
def test_gpu_form_lowers(case):
    """One kernel reaches into other devices' memory by XLA's means, however many calls there are; nothing is left to
    XLA."""
    text = lowered(KERNEL, STEPS[case], calls=2)
    kernels = [line for line in text.splitlines() if "custom_call @" in line]
    assert sum("uses_xla_collective_metadata = true" in line for line in kernels) == 1
    assert text.count("call @_open") == 2
    assert "stablehlo.all_gather" not in text
    assert "multimem" not in text


def test_a_launch_waits_for_the_one_before():
    """They use one buffer. XLA sees that only by an operand that is a part of the result before."""
    text = lowered(KERNEL, STEPS["2 devices, batch 1, logits"])
    launches = re.findall(r"(%\d+) = func.call @_collect\((.*?)\)", text)
    parts = dict(re.findall(r"(%\d+) = stablehlo.slice (%\d+) ", text))
    assert len(launches) == 3
    for (result, _), (_, operands) in itertools.pairwise(launches):
        assert parts[operands.split(", ")[-1]] == result


@pytest.mark.parametrize("others", [1, 2])
def test_on_the_outer_axis_of_a_mesh_it_lowers(others):
    """Pages are sharded over the outer axis."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()[: 4 * others]).reshape(4, others), ("context", AXIS))

    def device(x):
        return KERNEL([x[0]], axis_name="context", mesh=mesh)[0][None]

    split = jax.sharding.PartitionSpec("context")
    program = jax.jit(jax.shard_map(device, mesh=mesh, in_specs=split, out_specs=split, check_vma=False))
    text = program.trace(jax.ShapeDtypeStruct((4, 200), jnp.float32)).lower(lowering_platforms=("cuda",)).as_text()
    assert f'xla_replica_ids = "{",".join(map(str, range(4 * others)))}"' in text


CALLS = 4
"""In one program."""


@pytest.mark.parametrize("gpu", some_long(["H200", "B200"], "B200"))
@pytest.mark.parametrize("num_devices", [2, 4, 8])
def test_gpu_form_compiles_without_spilling_and_meets_the_others_once(tmp_path, capsys, num_devices, gpu):
    calls = {name: case for name, case in STEPS.items() if case.devices == num_devices and "batch 1" in name}
    launches = {name: mosaic_gpu.launches_of(size_of(case) // 4)[0] for name, case in calls.items()}
    found = {
        name: (compiled_call, {f"array{n}": ((num_devices, *shape), dtype) for n, (shape, dtype) in enumerate(case.arrays)}, {})
        for name, case in calls.items()
    }
    call, arrays, _ = next(iter(found.values()))
    found |= {"several": (call, arrays, {"calls": CALLS}), "a loop": (call, arrays, {"calls": CALLS, "turns": 3})}
    kernels = cuda_kernels.check_spills(gpu, tmp_path, capsys, found, (), 2, devices=num_devices)
    assert max(kernel["registers"] for each in kernels.values() for kernel in each) <= MAX_REGISTERS
    programs = pickle.loads((tmp_path / "found.programs").read_bytes())
    for name, program in programs.items():
        kernels, meet = cuda_kernels.kernels_that_meet(program)
        assert len(meet) == 1, name
        assert len(kernels) - 2 == launches.get(name, CALLS), "one more does nothing, before"
        assert not re.search(rf"s32\[{peer_buffers.buffer_words(num_devices)}\]\S* copy", program)


@pytest.mark.parametrize("words", [1, 127, 128, 129, 511, 512, 513, 20_000, 32_768, 32_769, 38_016, 76_032, 2**18])
def test_launches_hold_all_words(words):
    count, size, piece = mosaic_gpu.launches_of(words)
    assert count == -(-words // 32_768)
    assert words <= count * size < words + count * piece
    assert peer_buffers.THREADS <= piece <= mosaic_gpu.WORDS
    assert piece & (piece - 1) == 0
    assert size % piece == 0
    assert size // piece <= peer_buffers.MAX_CTAS
    assert piece == peer_buffers.THREADS or piece < 2 * words


def in_launches(monkeypatch):
    """The form for GPUs, whose launches XLA runs here."""
    monkeypatch.setattr(mosaic_gpu, "_collect", lambda s, buffer, table, words, *_: jax.lax.all_gather(words, s.axis_name).reshape(-1))
    monkeypatch.setattr(mosaic_gpu, "prepared", lambda key, make: (None, None))
    monkeypatch.setattr(peer_buffers, "unsuitable", lambda mesh: None)
    return KERNEL


LARGE = Case(2, (((76_031,), "float32"), ((3,), "bfloat16")))
"""In three launches; the second array ends in the last one's rest."""


def test_what_goes_in_several_launches_comes_back_in_order(monkeypatch):
    check(in_launches(monkeypatch), LARGE)


def test_mutant_of_the_launches_order_fails(monkeypatch):
    split = jnp.split
    monkeypatch.setattr(jnp, "split", lambda x, parts, axis=0: split(x, parts, axis)[:: -1 if axis == 0 else 1])
    with pytest.raises(AssertionError):
        check(in_launches(monkeypatch), LARGE)


def collected(num_devices: int, adversary, cta_type=devices.Cta, calls: int = 5, body=mosaic_gpu.collect_pieces) -> None:
    """All devices have the words of all, in the order of this adversary."""
    shape = peer_buffers.Shape(AXIS, num_devices, 8, 4)
    words = [np.random.default_rng(call).integers(-(2**31), 2**31, (num_devices, 8)).astype(np.int32) for call in range(calls)]
    outs = [np.zeros((num_devices, num_devices * 8), np.int32) for _ in words]
    found = devices.run_calls(body, shape, [(each,) for each in words], outs, per_program=3, adversary=adversary, cta_type=cta_type)
    for of_call, each in zip(found, words, strict=True):
        for of_device in of_call:
            assert of_device.tobytes() == each.tobytes()


@pytest.mark.parametrize("num_devices", [2, 3, 4])
@pytest.mark.parametrize("seed", range(4))
def test_in_random_orders_all_devices_have_the_words_of_all(num_devices, seed):
    speeds = [(0.01, 1, 100)[(seed + n) % 3] for n in range(num_devices + 1)]
    collected(num_devices, devices.Adversary(seed, speeds))


class WritesToOnePlace(devices.Cta):
    """The words of all devices where those of the first belong."""

    def store(self, ref, index, value):
        super().store(ref, slice(index.start % 8, index.stop % 8 or 8) if isinstance(index, slice) else index, value)


class BeginsWithItsOwn(devices.Cta):
    def load(self, ref, index):
        if ref.memory[0].ndim == 2:
            index = (index + self.device) % len(ref.memory)
        return super().load(ref, index)


@pytest.mark.parametrize("cta_type", [WritesToOnePlace, BeginsWithItsOwn])
def test_mutant_of_the_body_fails(cta_type):
    with pytest.raises(AssertionError):
        collected(3, devices.Adversary(0), cta_type)


# Refusals, and what is picked


def traced(*arrays, num_devices=2, **keywords):
    """Trace a call over so many devices."""
    mesh = mesh_of(Case(num_devices, ()))
    op = functools.partial(all_gather, **({"axis_name": AXIS, "mesh": mesh} | keywords))
    whole = jax.sharding.PartitionSpec()
    function = jax.shard_map(lambda *x: op(x), mesh=mesh, in_specs=(whole,) * len(arrays), out_specs=whole, check_vma=False)
    return jax.eval_shape(function, *arrays)


def of(*shape, dtype="float32"):
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))


BAD = {
    "nothing": (lambda: traced(), "at least one, and none empty; got none"),
    "an empty array": (lambda: traced(of(2), of(0, 8)), r"none empty; got array0 float32\[2\] array1 float32\[0, 8\]"),
    "bytes": (lambda: traced(of(8, dtype="uint8")), r"must be of float32, int32, bfloat16, float16; got array0 uint8\[8\]"),
    "no mesh": (lambda: all_gather([jnp.zeros(8)], axis_name="rows"), "no axis 'rows' here: call this inside jax.shard_map"),
    "another mesh": (lambda: traced(of(8), mesh=mesh_of(Case(4, ()))), "the one of this shard_map, with 2 devices along 'tensor'"),
}


@pytest.mark.parametrize("case", BAD)
def test_wrong_input_is_refused(case):
    call, message = BAD[case]
    with pytest.raises(ValueError, match=message):
        call()


def chosen(*arrays, **keywords):
    with dispatch.listening() as heard:
        traced(*arrays, **keywords)
    return heard["all_gather"]


def test_on_hopper_the_kernel_is_taken_for_decode_steps(on_hopper):
    for case in STEPS.values():
        arrays = [of(*shape, dtype=dtype) for shape, dtype in case.arrays]
        assert chosen(*arrays, num_devices=case.devices) == ("mosaic_gpu" if size_of(case) <= KERNEL_BYTES else "xla")


def test_on_a_cpu_xla_is_picked():
    assert chosen(of(1, 28, 128)) == "xla"


REFUSED = {
    "a chunk": ({}, of(4096, 128), "takes up to 1048576 bytes of all arrays, got 2097152"),
    "one device": ({"num_devices": 1}, of(128), "exchanges over 2 to 8 devices, got 1"),
    "no mesh": ({"mesh": None}, of(128), "has to know the devices: pass mesh"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_the_kernel_cannot_take_is_refused(on_hopper, case):
    keywords, x, reason = REFUSED[case]
    assert chosen(x, **keywords) == "xla"
    with pytest.raises(NotImplementedError, match=f"all_gather 'mosaic_gpu': {reason}"):
        traced(x, implementation="mosaic_gpu", **keywords)
