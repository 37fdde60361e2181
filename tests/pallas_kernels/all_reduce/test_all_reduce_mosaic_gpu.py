"""The GPU form of all_reduce, without a GPU: lowered, and its protocol on emulated devices that write to each other's memory."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import random

import cuda_kernels
import numpy as np
import paging
import pytest
from all_reduce_suite import AXIS, Case, compiled_call, lowered, ordered_sum, parts_of, production
from emulator import devices
from emulator.values import Fault
from hypothesis import given, settings
from hypothesis import strategies as st
from quick_cases import one_in, some_long

from pallas_kernels.all_reduce import mosaic_gpu

KERNEL = paging.implementation("all_reduce", "mosaic_gpu")


@pytest.mark.parametrize("case", one_in(5, production()))
def test_gpu_form_lowers(case):
    """One kernel, which reaches into other devices' memory without NVSHMEM and without multicast, and before which XLA puts its barrier."""
    case = production()[case]
    text = lowered(KERNEL, case)
    assert text.count("custom_call @") == 1
    assert "uses_xla_collective_metadata = true" in text
    assert "skip_device_barrier = false" in text
    assert f'xla_replica_ids = "{",".join(map(str, range(case.devices)))}"' in text
    assert "st.global.v4.b32" in text  # to the row of each device, 16 bytes at a time
    assert "red.release.sys.global.add.u32" in text
    assert "fence.acquire.sys" in text
    assert "nvshmem" not in text
    assert "multimem" not in text
    assert "symmetric_memory_parameters" not in text


def test_on_the_inner_axis_of_a_mesh_it_lowers():
    text = lowered(KERNEL, Case(4, (1, 3584), "bfloat16", others=2))
    assert 'xla_replica_ids = "0,1,2,3,4,5,6,7"' in text


def compiled(devices: int) -> dict[str, tuple]:
    calls = {name: case for name, case in production().items() if case.devices == devices and case.shape[0] in (1, 8)}
    return {
        name: (compiled_call, {"parts": ((devices, *case.shape), case.dtype), "residual": (case.shape, case.dtype)}, {})
        for name, case in calls.items()
    }


@pytest.mark.parametrize("gpu", some_long(["H200", "B200", "B300"], "B300"))
@pytest.mark.parametrize("devices", [2, 4, 8])
def test_gpu_form_compiles_without_spilling(tmp_path, capsys, devices, gpu):
    found = cuda_kernels.check_spills(gpu, tmp_path, capsys, compiled(devices), (), 1, devices=devices)
    assert max(kernel["registers"] for kernels in found.values() for kernel in kernels) <= 64


@pytest.mark.parametrize("rows", range(1, 9))
def test_all_ctas_of_a_launch_have_room_at_once(rows):
    """GPUs with NVLink of these compute capabilities have 78 cores or more."""
    for width, itemsize in itertools.product((2048, 3584, 4096, 5120, 7168, 8192), (2, 4)):
        piece = mosaic_gpu.piece_of(rows * width, itemsize)
        assert rows * width % piece == 0
        assert mosaic_gpu.THREADS <= piece <= mosaic_gpu.PIECE_BYTES // itemsize
    assert mosaic_gpu.MOST_CTAS <= 78


@pytest.mark.parametrize("size", [256, 512, 1024, 2048])
def test_on_emulated_threads_a_piece_is_copied_to_every_row(emulated, size):
    """And nothing else is written."""
    x = np.random.default_rng(size).integers(0, 2**31, size // 4, np.int32)
    arrays = x, [np.full(size // 4 + 8, -1, np.int32) for _ in range(3)]
    stage = lambda arrays, _: mosaic_gpu.copy_piece(size, *arrays)  # noqa: E731
    emulated.run_cluster(stage, ctas=1, threads=mosaic_gpu.THREADS, arrays=arrays, scratch_words={})
    for row in arrays[1]:
        assert row.tolist() == [*x, *[-1] * 8]


# The protocol


@dataclasses.dataclass(frozen=True)
class Setting:
    """What is run on emulated devices. kind: of numbers, see `Case`."""

    devices: int = 3
    ctas: int = 2
    calls: int = 4
    with_residual: bool = True
    dtype: str = "float32"


def run(s: Setting, adversary, **options) -> None:
    """All calls give the bits of the definition on all devices, in the order of this adversary."""
    size = 4 * s.ctas
    case = Case(s.devices, (size,), s.dtype, s.with_residual)
    given = [parts_of(case, seed) for seed in range(s.calls)]
    shape = mosaic_gpu.Shape(AXIS, s.devices, size, 4, s.with_residual)
    body = functools.partial(mosaic_gpu.add_piece, shape)
    found = devices.run_calls(mosaic_gpu, body, given, ctas=s.ctas, adversary=adversary, **options)
    for call, (of_call, (parts, residual)) in enumerate(zip(found, given, strict=True)):
        expected = ordered_sum(parts, residual)
        for device, of_device in enumerate(of_call):
            assert of_device.tobytes() == expected.tobytes(), f"call {call}: device {device} has other numbers"


SPEEDS = (0.01, 1, 100)


@settings(max_examples=60, deadline=None)
@given(
    s=st.builds(
        Setting, devices=st.integers(2, 4), ctas=st.integers(1, 3), calls=st.integers(1, 5), with_residual=st.booleans(),
        dtype=st.sampled_from(["float32", "bfloat16"]),
    ),
    seed=st.integers(0, 2**32 - 1),
    speeds=st.lists(st.sampled_from(SPEEDS), min_size=5, max_size=5),
)  # fmt: skip
def test_in_random_orders_all_devices_have_the_sum(s, seed, speeds):
    """Calls one after the other, in the same memory; any device, and the wires, may be a thousand times as fast as others."""
    run(s, devices.Adversary(seed, speeds))


@pytest.mark.parametrize("slow", range(4))
@pytest.mark.parametrize("fast", range(4))
def test_with_one_device_far_ahead_and_one_far_behind(slow, fast):
    """The last of four is the wires."""
    speeds = [1.0] * 4
    speeds[fast], speeds[slow] = 1e6, 1e-6
    run(Setting(calls=6), devices.Adversary(slow + 4 * fast, speeds))


def orders(s: Setting, interrupts: int):
    """Every adversary that interrupts a thread so many times, at whatever turns: what to do at which turn."""
    found = [{}]
    for _ in range(interrupts):
        deeper = []
        for told in found:
            adversary = devices.Interrupting(told)
            yield adversary
            run_on = max(told, default=-1) + 1
            deeper += [told | {turn: n} for turn in range(run_on, len(adversary.widths)) for n in range(adversary.widths[turn])]
        found = deeper
    for told in found:
        yield devices.Interrupting(told)


def run_orders(s: Setting, interrupts: int, **options) -> int:
    count = 0
    for adversary in orders(s, interrupts):
        run(s, adversary, **options)
        count += 1
    return count


def test_wherever_one_thread_is_interrupted():
    assert run_orders(Setting(devices=2, ctas=1, calls=2), 1) > 100


@pytest.mark.long
def test_wherever_two_threads_are_interrupted():
    assert run_orders(Setting(devices=2, ctas=1, calls=2), 2) > 5000


# Mutants of the protocol


class NoWait(devices.Cta):
    def wait(self, value):
        super().wait(0)


class WaitsForOneLess(devices.Cta):
    def wait(self, value):
        super().wait(value - 1)


class WaitsForOneMore(devices.Cta):
    def wait(self, value):
        super().wait(value + 1)


class NoSignal(devices.Cta):
    def signal(self, device_id):
        pass


class NoSignalToTheLast(devices.Cta):
    def signal(self, device_id):
        if device_id[AXIS] != 2:
            super().signal(device_id)


class SignalsItself(devices.Cta):
    def signal(self, device_id):
        super().signal({AXIS: self.device})


class SignalsTwice(devices.Cta):
    def signal(self, device_id):
        super().signal(device_id)
        super().signal(device_id)


class SignalsWithoutRelease(devices.Cta):
    def release(self):
        pass


class SignalsBeforeItWrites(devices.Cta):
    """The signals of a CTA come when it begins."""

    def load(self, ref, index):
        if not hasattr(self, "signalled"):
            self.signalled = True
            for device in range(len(ref.memory)):
                if device != self.device:
                    super().signal({AXIS: device})
        return super().load(ref, index)

    def signal(self, device_id):
        self.release()


class OneRow(devices.Cta):
    """A single row for all."""

    def _row(self, index):
        return (0, *index[1:]) if isinstance(index, tuple) else index

    def load(self, ref, index):
        return super().load(ref, self._row(index))

    def store(self, ref, index, value):
        super().store(ref, self._row(index), value)


class ForgetsOwnPart(devices.Cta):
    def store(self, ref, index, value):
        if ref.remote or not isinstance(index, tuple):
            super().store(ref, index, value)


class WritesToOneDevice(devices.Cta):
    def remote_ref(self, ref, device_id):
        return super().remote_ref(ref, {AXIS: 0 if self.device else 1})


class BeginsWithItsOwn(devices.Cta):
    """Adds its own row first."""

    def load(self, ref, index):
        if isinstance(index, tuple):
            index = ((index[0] + self.device) % len(ref.memory), *index[1:])
        return super().load(ref, index)


class OtherPiece(devices.Cta):
    """Reads the buffer where another CTA's piece is."""

    def load(self, ref, index):
        if isinstance(index, tuple):
            row, piece = index
            index = row, slice(4 - piece.start, 8 - piece.start)
        return super().load(ref, index)


MUTANTS = {
    "no wait": {"cta_type": NoWait},
    "one signal less is waited for": {"cta_type": WaitsForOneLess},
    "one signal more is waited for": {"cta_type": WaitsForOneMore},
    "no signal": {"cta_type": NoSignal},
    "no signal to the last device": {"cta_type": NoSignalToTheLast},
    "signals itself": {"cta_type": SignalsItself},
    "signals twice": {"cta_type": SignalsTwice},
    "signals without release": {"cta_type": SignalsWithoutRelease},
    "signals before it writes": {"cta_type": SignalsBeforeItWrites},
    "one row for all devices": {"cta_type": OneRow},
    "own part is forgotten": {"cta_type": ForgetsOwnPart},
    "writes to one device": {"cta_type": WritesToOneDevice},
    "each begins with its own": {"cta_type": BeginsWithItsOwn},
    "another CTA's piece": {"cta_type": OtherPiece},
    "no barrier before the kernel": {"barrier": False},
    "room for one CTA at once": {"resident": 1},
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_mutant_of_the_protocol_fails(mutant):
    rng = random.Random(mutant)
    for seed in range(30):
        try:
            run(Setting(), devices.Adversary(seed, [rng.choice(SPEEDS) for _ in range(4)]), **MUTANTS[mutant])
        except AssertionError:
            return
    pytest.fail("the protocol survives this mutant")


LOST = {"no wait": {"cta_type": NoWait}, "signals without release": {"cta_type": SignalsWithoutRelease}, "no barrier": {"barrier": False}}


@pytest.mark.parametrize("mutant", LOST)
def test_one_interruption_finds_mutants(mutant):
    with pytest.raises(AssertionError):
        run_orders(Setting(devices=2, ctas=1, calls=2), 1, **LOST[mutant])


@pytest.mark.parametrize(("mutant", "fault"), [("no signal", devices.Deadlock), ("signals twice", devices.Unconsumed)])
def test_faults_are_told_apart(mutant, fault):
    assert issubclass(fault, Fault)
    with pytest.raises(fault):
        run(Setting(devices=2, ctas=1, calls=1), devices.Adversary(0), **MUTANTS[mutant])


def test_without_the_barrier_memory_of_other_work_is_written_to_and_signals_are_lost():
    """By a device that is ahead of its neighbour: while that one still uses the memory, or before it zeroes its semaphores."""
    found = set()
    for seed in range(60):
        try:
            run(Setting(devices=2, ctas=1), devices.Adversary(seed), barrier=False)
        except AssertionError as fault:
            found.add(type(fault))
    assert {devices.Overwritten, devices.Deadlock} <= found


def test_numbers_are_as_random_as_asked():
    parts, residual = parts_of(Case(3, (8,)), 0)
    assert len(np.unique(np.concatenate([parts.ravel(), residual]))) == 32
