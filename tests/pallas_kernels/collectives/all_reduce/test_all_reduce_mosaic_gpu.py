"""The GPU form of all_reduce, without a GPU: lowered, and its protocol on emulated devices that write to each other's
memory."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import pickle
import random
import re
from unittest import mock

import cuda_kernels
import numpy as np
import paging
import pytest
from all_reduce_suite import AXIS, Case, compiled_call, lowered, ordered_sum, parts_of, production
from emulator import devices
from emulator.values import Fault
from hypothesis import given, settings
from hypothesis import strategies as st
from quick_cases import one_in, rest_long, some_long

from pallas_kernels.collectives import peer_buffers
from pallas_kernels.collectives.all_reduce import mosaic_gpu
from pallas_kernels.hopper.threads import lanes

KERNEL = paging.implementation("all_reduce", "mosaic_gpu")

MAX_REGISTERS = 128
"""Of 128 threads, so many leave room for four CTAs on a core."""


@pytest.mark.parametrize("case", one_in(5, production()))
def test_gpu_form_lowers(case):
    """One kernel reaches into other devices' memory by XLA's means, without NVSHMEM and without multicast, and XLA puts
    its barrier before it. The one that adds is a plain kernel."""
    case = production()[case]
    text = lowered(KERNEL, case)
    kernels = [line for line in text.splitlines() if "custom_call @" in line]
    (first,) = (line for line in kernels if "uses_xla_collective_metadata = true" in line)
    adds = "".join(line for line in kernels if "uses_xla_collective_metadata = false" in line)
    assert "skip_device_barrier = false" in first
    assert f'xla_replica_ids = "{",".join(map(str, range(case.devices)))}"' in first
    assert "red.release.sys.global.add.u32" in first
    assert "fence.acquire.sys" in first
    assert "st.volatile.global.v4.b32" in adds
    assert "ld.volatile.global.v4.u32" in adds
    assert "nvshmem" not in text
    assert "multimem" not in text
    assert "symmetric_memory_parameters" not in text


def test_on_the_inner_axis_of_a_mesh_it_lowers():
    text = lowered(KERNEL, Case(4, (1, 3584), "bfloat16", others=2))
    assert 'xla_replica_ids = "0,1,2,3,4,5,6,7"' in text


CALLS = 4
"""In one program."""


def compiled(devices: int) -> dict[str, tuple]:
    calls = {name: case for name, case in production().items() if case.devices == devices and case.shape[0] in (1, 8)}
    found = {
        name: (compiled_call, {"parts": ((devices, *case.shape), case.dtype), "residual": (case.shape, case.dtype)}, {})
        for name, case in calls.items()
    }
    call, arrays, _ = next(iter(found.values()))
    return found | {"several": (call, arrays, {"calls": CALLS}), "a loop": (call, arrays, {"calls": CALLS, "turns": 3})}


@pytest.mark.parametrize("gpu", some_long(["H200", "B200", "B300"], "B300"))
@pytest.mark.parametrize("devices", [2, 4, 8])
def test_gpu_form_compiles_without_spilling_and_meets_the_others_once(tmp_path, capsys, devices, gpu):
    """Every call asks for a buffer and a table. XLA keeps one pair of a program, before its loop, and copies
    neither."""
    found = cuda_kernels.check_spills(gpu, tmp_path, capsys, compiled(devices), (), 2, devices=devices)
    assert max(kernel["registers"] for kernels in found.values() for kernel in kernels) <= MAX_REGISTERS
    programs = pickle.loads((tmp_path / "found.programs").read_bytes())
    for name, program in programs.items():
        kernels, meet = cuda_kernels.kernels_that_meet(program)
        assert len(meet) == 1, name
        assert len(kernels) - 2 == (CALLS if name in ("several", "a loop") else 1), "one more adds nothing, before"
        assert name == "a loop" or [line in meet for line in kernels[:3]] == [False, True, False]
        assert not re.search(rf"s32\[{peer_buffers.buffer_words(devices)}\]\S* copy", program)


@pytest.mark.parametrize("rows", range(1, 9))
def test_all_ctas_of_a_launch_have_room_at_once(rows):
    """GPUs with NVLink of these compute capabilities have 78 cores or more."""
    for width, itemsize in itertools.product((2048, 3584, 4096, 5120, 7168, 8192), (2, 4)):
        piece = peer_buffers.piece_of(rows * width, itemsize)
        assert rows * width % piece == 0
        assert peer_buffers.THREADS <= piece <= peer_buffers.PIECE_BYTES // itemsize
    assert peer_buffers.MAX_CTAS <= 78


def on_threads(emulated, stage, arrays, scratch_words=None):
    return emulated.run_cluster(
        lambda arrays, scratch: stage(arrays, scratch),
        ctas=1, threads=peer_buffers.THREADS, arrays=arrays, scratch_words=scratch_words or {},
    )  # fmt: skip


@pytest.mark.parametrize("size", [256, 512, 1024, 2048])
def test_on_emulated_threads_a_piece_is_sent_to_every_buffer_and_comes_back(emulated, size):
    """Two words of a line, each followed by the call's number; nothing else is written, and every word arrives in its
    place."""
    x, place, call = np.random.default_rng(size).integers(0, 2**31, size // 4, np.int32), 64, 7
    lines = size // 8 * peer_buffers.LINE_WORDS
    several = [np.full(place + peer_buffers.LINES * peer_buffers.LINE_WORDS + 8, -1, np.int32) for _ in range(3)]

    def send(arrays, _):
        peer_buffers.send_lines(size, *arrays, lanes.i32(place), lanes.i32(call))

    on_threads(emulated, send, (x, several))
    for buffer in several:
        assert sorted(buffer[place : place + lines : 2]) == sorted(x)
        assert (buffer[place + 1 : place + lines : 2] == call).all()
        assert (buffer[:place] == -1).all()
        assert (buffer[place + lines :] == -1).all()
    whole = np.concatenate(
        [several[0][:place], *(buffer[place : place + peer_buffers.LINES * peer_buffers.LINE_WORDS] for buffer in several)]
    )

    def receive(buffer, scratch):
        peer_buffers.receive_lines(size, 3, buffer, scratch["received"], lanes.i32(place), lanes.i32(call))

    found = on_threads(emulated, receive, whole, {"received": 3 * size // 4})["received"]
    assert found.ravel().tolist() == [*x] * 3


@pytest.mark.parametrize("late", [1, 3, 4 * 64 + 1, 4 * 127 + 3])
def test_on_emulated_threads_a_piece_is_not_taken_before_each_number_is_there(emulated, late):
    """Threads wait for ever if one number of a line is missing."""
    buffer = np.zeros(2 * peer_buffers.LINES * peer_buffers.LINE_WORDS, np.int32)
    buffer[1::2] = 7
    buffer[late] = 6

    def receive(buffer, scratch):
        peer_buffers.receive_lines(1024, 2, buffer, scratch["received"], lanes.i32(0), lanes.i32(7))

    with mock.patch.object(emulated, "MAX_TURNS", 20), pytest.raises(Fault, match="has not ended"):
        on_threads(emulated, receive, buffer, {"received": 512})


def test_on_emulated_threads_a_part_of_a_buffer_is_cleared(emulated):
    words = peer_buffers.part_words(2)
    buffer = np.full(peer_buffers.MAX_CTAS + 4 * words, -1, np.int32)
    on_threads(emulated, lambda buffer, _: peer_buffers.clear_part(words, buffer, lanes.i32(2)), buffer)
    start = peer_buffers.MAX_CTAS + 2 * words
    assert np.flatnonzero(buffer == 0).tolist() == [2, *range(start, start + words)]
    assert buffer.min() == -1


@pytest.mark.parametrize("devices", [2, 4, 8])
def test_places_of_lines_are_apart(devices):
    """Every CTA, half and sender has its own, and they fill the buffer behind the counts."""
    shape = peer_buffers.MAX_CTAS, 2, devices
    found = sorted(peer_buffers.lines_at(devices, *at) for at in np.ndindex(*shape))
    size = peer_buffers.LINES * peer_buffers.LINE_WORDS
    assert found == [peer_buffers.MAX_CTAS + n * size for n in range(len(found))]
    assert found[-1] + size == peer_buffers.buffer_words(devices)
    part = peer_buffers.part_words(devices)
    for cta, half, sender in np.ndindex(*shape):
        assert (peer_buffers.lines_at(devices, cta, half, sender) - peer_buffers.MAX_CTAS) // part == cta


# The protocol


@dataclasses.dataclass(frozen=True)
class Setting:
    """What is run on emulated devices. kind: of numbers, see `Case`."""

    devices: int = 3
    ctas: int = 2
    calls: int = 5
    per_program: int = 4
    dtype: str = "float32"


def added(shape: peer_buffers.Shape, given: list[tuple[np.ndarray, np.ndarray]], **options) -> list[np.ndarray]:
    """What all devices have after calls with these parts and residuals."""
    calls = [(parts, np.broadcast_to(residual, parts.shape)) for parts, residual in given]
    return devices.run_calls(mosaic_gpu.add_piece, shape, calls, [np.full_like(parts, np.nan) for parts, _ in given], **options)


def run(s: Setting, adversary, **options) -> None:
    """All calls give the bits of the definition on all devices, in the order of this adversary."""
    size = 4 * s.ctas
    case = Case(s.devices, (size,), s.dtype)
    given = [parts_of(case, seed) for seed in range(s.calls)]
    shape = peer_buffers.Shape(AXIS, s.devices, size, 4)
    found = added(shape, given, per_program=s.per_program, adversary=adversary, **options)
    for call, (of_call, (parts, residual)) in enumerate(zip(found, given, strict=True)):
        expected = ordered_sum(parts, residual)
        for device, of_device in enumerate(of_call):
            assert of_device.tobytes() == expected.tobytes(), f"call {call}: device {device} has other numbers"


SPEEDS = (0.01, 1, 100)


@settings(max_examples=60, deadline=None)
@given(
    s=st.builds(
        Setting, devices=st.integers(2, 4), ctas=st.integers(1, 3), calls=st.integers(1, 6),
        per_program=st.integers(1, 6), dtype=st.sampled_from(["float32", "bfloat16"]),
    ),
    seed=st.integers(0, 2**32 - 1),
    speeds=st.lists(st.sampled_from(SPEEDS), min_size=5, max_size=5),
)  # fmt: skip
def test_in_random_orders_all_devices_have_the_sum(s, seed, speeds):
    """Programs one after the other, in the same memory; any device, and the wires, may be a thousand times as fast as
    others."""
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


SMALL = Setting(devices=2, ctas=1, calls=3, dtype="bfloat16")


@pytest.mark.parametrize("calls", rest_long([2, 3], 2))  # from the third call on, a half of a buffer is used again
def test_wherever_one_thread_is_interrupted(calls):
    assert run_orders(dataclasses.replace(SMALL, calls=calls), 1) > 100


@pytest.mark.long
def test_wherever_two_threads_are_interrupted():
    assert run_orders(SMALL, 2) > 5000


# Mutants of the protocol


class TakesWhatIsThere(devices.Cta):
    def receive(self, buffer, places, call):
        return np.array([self.load_pair(buffer, place)[0] for place in places], np.int32)


class LooksAtOneNumberOfALine(devices.Cta):
    def receive(self, buffer, places, call):
        super().receive(buffer, places[::2], call)
        return np.array([self.load_pair(buffer, place)[0] for place in places], np.int32)


class DoesNotWaitForTheLast(devices.Cta):
    def receive(self, buffer, places, call):
        super().receive(buffer, places[: -len(places) // 3], call)
        return np.array([self.load_pair(buffer, place)[0] for place in places], np.int32)


class NumbersComeFirst(devices.Cta):
    """Of a pair."""

    def send_pair(self, buffer, place, word, call):
        for part, value in ((place + 1, call), (place, word)):
            self.machine.messages.append(devices._Message(lambda part=part, value=value: buffer.__setitem__(part, value)))


class DoesNotSendToTheLast(devices.Cta):
    def send(self, buffers, *rest):
        super().send(buffers[:2], *rest)


class DoesNotSendToItself(devices.Cta):
    def send(self, buffers, *rest):
        super().send([buffer for device, buffer in enumerate(buffers) if device != self.device], *rest)


class SendsToOneDevice(devices.Cta):
    def send(self, buffers, *rest):
        super().send([buffers[0]] * len(buffers), *rest)


class DoesNotCount(devices.Cta):
    def store(self, ref, index, value):
        if index != self.number or ref.dtype != np.int32:
            super().store(ref, index, value)


class CountsByTwo(devices.Cta):
    def store(self, ref, index, value):
        super().store(ref, index, value + 1 if ref.dtype == np.int32 else value)


class DoesNotClear(devices.Cta):
    """Anything but the count."""

    def clear(self, buffer, start, words):
        super().clear(buffer, 0, 0)
        buffer[self.number] = 0


class ClearsHalf(devices.Cta):
    def clear(self, buffer, start, words):
        super().clear(buffer, start, words // 2)


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


class SignalsBeforeItClears(devices.Cta):
    def clear(self, buffer, start, words):
        for device in range(3):
            if device != self.device:
                super().signal({AXIS: device})
        super().clear(buffer, start, words)

    def signal(self, device_id):
        pass


class BeginsWithItsOwn(devices.Cta):
    """Adds its own piece first."""

    def load(self, ref, index):
        if ref.memory[0].ndim == 2:
            index = (index + self.device) % len(ref.memory)
        return super().load(ref, index)


def other_places(change):
    """`lines_at` with changed arguments: devices, cta, call, sender."""
    return mock.patch.object(peer_buffers, "lines_at", lambda *args, original=peer_buffers.lines_at: original(*change(*args)))


class HasNoBuffers(devices.Cta):
    def load(self, ref, index):
        found = super().load(ref, index)
        return np.int32(peer_buffers.CLOSED) if len(ref.memory[0]) == 2 * len(ref.memory) + 1 else found


def test_without_buffers_nothing_is_sent_awaited_or_written():
    case, shape = Case(3, (8,)), peer_buffers.Shape(AXIS, 3, 8, 4)
    found = added(shape, [parts_of(case, 0)] * 2, per_program=2, adversary=devices.Adversary(0), cta_type=HasNoBuffers)
    assert np.isnan(found).all()


MUTANTS = {
    "no wait for lines": {"cta_type": TakesWhatIsThere},
    "one number of a line is looked at": {"cta_type": LooksAtOneNumberOfALine},
    "no wait for the last device's lines": {"cta_type": DoesNotWaitForTheLast},
    "numbers come before words": {"cta_type": NumbersComeFirst},
    "nothing is sent to the last device": {"cta_type": DoesNotSendToTheLast},
    "nothing is sent to itself": {"cta_type": DoesNotSendToItself},
    "all is sent to one device": {"cta_type": SendsToOneDevice},
    "calls are not counted": {"cta_type": DoesNotCount},
    "calls are counted by two": {"cta_type": CountsByTwo},
    "buffers are not cleared": {"cta_type": DoesNotClear},
    "half of a buffer is cleared": {"cta_type": ClearsHalf},
    "no wait": {"cta_type": NoWait},
    "one signal less is waited for": {"cta_type": WaitsForOneLess},
    "one signal more is waited for": {"cta_type": WaitsForOneMore},
    "no signal": {"cta_type": NoSignal},
    "no signal to the last device": {"cta_type": NoSignalToTheLast},
    "signals itself": {"cta_type": SignalsItself},
    "signals twice": {"cta_type": SignalsTwice},
    "signals before it clears": {"cta_type": SignalsBeforeItClears},
    "each begins with its own": {"cta_type": BeginsWithItsOwn},
    "one half for all calls": {"places": lambda n, cta, call, sender: (n, cta, 0, sender)},
    "one place for all devices": {"places": lambda n, cta, call, sender: (n, cta, call, 0)},
    "one part for all CTAs": {"places": lambda n, cta, call, sender: (n, 0, call, sender)},
    "no barrier before the buffers are opened": {"barrier": False},
    "room for one CTA at once": {"resident": 1},
}


def run_mutant(s: Setting, adversary, places=None, **options) -> None:
    with other_places(places) if places else contextlib.nullcontext():
        run(s, adversary, **options)


@pytest.mark.parametrize("mutant", MUTANTS)
def test_mutant_of_the_protocol_fails(mutant):
    rng = random.Random(mutant)
    for seed in range(30):
        try:
            run_mutant(Setting(), devices.Adversary(seed, [rng.choice(SPEEDS) for _ in range(4)]), **MUTANTS[mutant])
        except AssertionError:
            return
    pytest.fail("the protocol survives this mutant")


LOST = ("no wait for lines", "buffers are not cleared", "no wait")


@pytest.mark.parametrize("mutant", LOST)
def test_one_interruption_finds_mutants(mutant):
    with pytest.raises(AssertionError):
        run_orders(SMALL, 1, **MUTANTS[mutant])


@pytest.mark.parametrize(("mutant", "fault"), [("no signal", devices.Deadlock), ("signals twice", devices.Unconsumed)])
def test_faults_are_told_apart(mutant, fault):
    assert issubclass(fault, Fault)
    with pytest.raises(fault):
        run(Setting(devices=2, ctas=1, calls=1), devices.Adversary(0), **MUTANTS[mutant])


def test_without_the_barrier_signals_are_lost():
    """By a device that is ahead of its neighbour, which then zeroes its semaphores."""
    found = set()
    for seed in range(60):
        try:
            run(Setting(devices=2, ctas=1), devices.Adversary(seed), barrier=False)
        except AssertionError as fault:
            found.add(type(fault))
    assert found == {devices.Deadlock}


def test_numbers_are_as_random_as_asked():
    parts, residual = parts_of(Case(3, (8,)), 0)
    assert len(np.unique(np.concatenate([parts.ravel(), residual]))) == 32
