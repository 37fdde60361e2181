"""The clock: reading a trace, telling calls and ops apart, and what counts as an op's time."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from jax.profiler import ProfileData

from pallas_kernels.bench import timing
from pallas_kernels.bench.ops import chained
from pallas_kernels.bench.timing import Kernel, device_time, kernel_timing, plain_name, read_kernels, record, split_calls

PAUSE_NS = timing.PAUSE * 1e9


def trace(*lines: tuple[str, str, list[tuple[str, int, int]]]) -> ProfileData:
    """lines: plane, line, events (name, start, duration), in nanoseconds."""
    names = sorted({name for _, _, events in lines for name, _, _ in events})
    metadata = "".join(f'event_metadata {{ key: {i + 1} value {{ id: {i + 1} name: "{name}" }} }} ' for i, name in enumerate(names))
    text = ""
    for plane, line, events in lines:
        body = "".join(
            f"events {{ metadata_id: {names.index(name) + 1} offset_ps: {start * 1000} duration_ps: {duration * 1000} }} "
            for name, start, duration in events
        )
        text += f'planes {{ name: "{plane}" lines {{ name: "{line}" timestamp_ns: 5 {body} }} {metadata} }} '
    return ProfileData.from_text_proto(text)


def calls_of(*ops: list[tuple[str, float, float]], calls: int, period: float) -> list[Kernel]:
    """`calls` calls, a long pause apart; each runs the ops `period` nanoseconds apart. An op: (name, start, end) of its
    kernels."""
    kernels = []
    for call in range(calls):
        for number, op in enumerate(ops):
            origin = call * (PAUSE_NS + period * len(ops)) + number * period
            kernels += [Kernel(name, origin + start, origin + end) for name, start, end in op]
    return kernels


def test_kernels_are_those_of_the_first_gpus_streams_by_start():
    found = read_kernels(
        trace(
            ("/host:CPU", "Stream #1", [("host", 0, 1)]),
            ("/device:GPU:0", "Stream #13(Kernel)", [("b", 30, 7), ("a", 10, 5)]),
            ("/device:GPU:1", "Stream #13(Kernel)", [("other", 0, 1)]),
        )
    )
    assert [(k.name, k.end - k.start) for k in found] == [("a", 5), ("b", 7)]
    assert found[1].start - found[0].start == 20


def test_streams_are_merged_and_derived_lines_left_out():
    profile = ProfileData.from_text_proto(
        'planes { name: "/device:GPU:0" '
        'lines { name: "Stream #13(Kernel)" events { metadata_id: 1 offset_ps: 5000 duration_ps: 1000 } } '
        'lines { name: "XLA Ops" events { metadata_id: 1 offset_ps: 0 duration_ps: 9000 } } '
        'lines { name: "Stream #14(MemcpyD2D)" events { metadata_id: 1 offset_ps: 2000 duration_ps: 1000 '
        'stats { metadata_id: 9 str_value: "kind_src:pinned kind_dst:device size:4096 dest:0 async:1" } } } '
        'event_metadata { key: 1 value { id: 1 name: "k" } } stat_metadata { key: 9 value { id: 9 name: "memcpy_details" } } }'
    )
    assert [(k.start, k.end, k.size) for k in read_kernels(profile)] == [(2, 3, 4096), (5, 6, None)]


def test_a_trace_without_kernels_says_what_it_has():
    with pytest.raises(RuntimeError, match="XLA Ops"):
        read_kernels(trace(("/device:GPU:0", "XLA Ops", [("a", 0, 1)])))


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="there is a GPU, so there are kernels")
def test_without_a_gpu_there_is_nothing_to_record():
    with pytest.raises(RuntimeError, match="no kernel"):
        record(lambda: jax.block_until_ready(jnp.ones(3) + 1))


def test_gaps_between_an_ops_kernels_count_and_those_between_ops_do_not():
    op = [("select", 0, 2000), ("gather", 3000, 7000), ("combine", 7000, 8000)]
    found = kernel_timing(calls_of(op, op, op, calls=4, period=10_000), calls=4, chain=3)
    assert found.split
    assert found.ops == 12
    assert found.median_s == found.p10_s == found.p90_s == pytest.approx(8e-6)
    assert found.period_s == pytest.approx(10e-6)
    assert found.idle_s == pytest.approx(1e-6)
    assert [(k.name, k.runs_per_op) for k in found.kernels] == [("gather", 1), ("select", 1), ("combine", 1)]
    assert [k.total_s for k in found.kernels] == pytest.approx([4e-6, 2e-6, 1e-6])


def test_spread_is_over_ops():
    slow, fast = [("k", 0, 4000)], [("k", 0, 2000)]
    found = kernel_timing(calls_of(fast, fast, fast, slow, calls=5, period=9000), calls=5, chain=4)
    assert (found.median_s, found.p90_s) == pytest.approx((2e-6, 4e-6))


def test_kernels_that_run_together_are_busy_once():
    found = kernel_timing(calls_of([("a", 0, 6000), ("b", 1000, 2000), ("c", 5000, 8000)], calls=2, period=9000), calls=2, chain=1)
    assert found.median_s == pytest.approx(8e-6)
    assert found.idle_s == 0


@pytest.mark.parametrize("first", [[("b", 0, 3000)], [("a", 0, 1000), ("a", 1000, 3000)]], ids=["names", "count"])
def test_ops_that_cannot_be_told_apart_share_the_call(first):
    ops = first, [("a", 0, 3000)]
    found = kernel_timing(calls_of(*ops, calls=3, period=5000), calls=3, chain=2)
    assert not found.split
    assert found.median_s == pytest.approx(4e-6)
    assert found.period_s == pytest.approx(4e-6)
    assert found.ops == 6
    assert sum(kernel.total_s for kernel in found.kernels) == pytest.approx(3e-6)


def test_a_kernel_run_twice_in_an_op_is_counted_twice():
    op = [("k", 0, 1000), ("k", 2000, 5000)]
    (kernel,) = kernel_timing(calls_of(op, op, calls=2, period=9000), calls=2, chain=2).kernels
    assert (kernel.runs_per_op, kernel.median_s, kernel.total_s) == pytest.approx((2, 2e-6, 4e-6))


def test_the_share_of_kernels_in_graphs():
    kernels = [Kernel("a", 0, 1000, graph=7), Kernel("b", 1000, 2000, graph=7), Kernel("c", 2000, 3000)]
    assert kernel_timing(kernels, calls=1, chain=1).in_graphs == pytest.approx(2 / 3)


def test_a_kernel_knows_the_graph_that_launched_it():
    text = (
        'planes { name: "/device:GPU:0" lines { name: "Stream #13(Kernel)" '
        "events { metadata_id: 1 offset_ps: 0 duration_ps: 1000 stats { metadata_id: 2 uint64_value: 58 } } "
        "events { metadata_id: 1 offset_ps: 5000 duration_ps: 1000 } } "
        'event_metadata { key: 1 value { id: 1 name: "k" } } stat_metadata { key: 2 value { id: 2 name: "cuda_graph_id" } } }'
    )
    assert [kernel.graph for kernel in read_kernels(ProfileData.from_text_proto(text))] == [58, None]


def test_the_timeline_is_that_of_the_last_op():
    kernels = calls_of([("a_1", 0, 1000), ("b", 1500, 3000)], [("a_2", 0, 1100), ("b", 1600, 3000)], calls=1, period=5000)
    assert timing.timeline(kernels, 2) == [("a", 0, 1100), ("b", 1600, 1400)]
    assert timing.timeline(kernels[:-1], 2) == []


def test_calls_must_be_equal_and_apart():
    good = calls_of([("a", 0, 1000)], [("a", 0, 1000)], calls=3, period=2000)
    assert [len(group) for group in split_calls(good, 3)] == [2, 2, 2]
    with pytest.raises(RuntimeError, match="do not fall into 3 equal calls"):
        split_calls(good[:-1], 3)
    with pytest.raises(RuntimeError, match="do not fall into 6 equal calls"):
        split_calls(good, 6)
    with pytest.raises(RuntimeError, match="do not fall into 9 equal calls"):
        split_calls(good, 9)
    with pytest.raises(RuntimeError, match="0 kernels do not fall into 2 equal calls"):
        split_calls([], 2)


def test_a_long_kernel_is_no_pause():
    """A pause runs from the latest end so far, not from the end of the kernel that started last."""
    call = [("long", 0, 2 * PAUSE_NS), ("short", 10, 20), ("last", 2 * PAUSE_NS + 5, 2 * PAUSE_NS + 6)]
    kernels = calls_of(call, calls=2, period=2 * PAUSE_NS + 6)
    assert [len(group) for group in split_calls(kernels, 2)] == [3, 3]


def test_names_lose_their_numbers():
    assert plain_name("loop_add_fusion_12") == plain_name("loop_add_fusion") == "loop_add_fusion"
    assert plain_name("gemm.7.1") == "gemm"
    assert plain_name("sm90_64x128_kernel2d") == "sm90_64x128_kernel2d"


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="the wall clock is the CPU's")
def test_on_the_cpu_the_clock_is_the_wall():
    seen = []

    def call(x):
        seen.append(int(x))
        return x + 1

    found = device_time(call, [(jnp.int32(1),), (jnp.int32(2),)], calls=5, chain=4, warmup=1)
    assert seen == [1, 1, 2, 1, 2, 1]
    assert (found.clock, found.ops, found.split, found.kernels, found.idle_s) == ("wall", 20, False, (), None)
    assert 0 < found.p10_s <= found.median_s <= found.p90_s
    assert timing.wall_timing([4.0, 8.0, 12.0], 4).median_s == 2
    assert dataclasses.asdict(found) == found.figures()


@pytest.mark.gpu
@pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs an NVIDIA GPU")
def test_on_a_gpu_the_clock_is_the_trace():
    def op(pool, x):
        return (x * pool).sum(axis=0)

    def time_of(rows):
        own = tuple((jnp.full((rows, 4096), i, jnp.float32),) for i in range(8))
        return device_time(chained(op), [(jnp.float32(3), own)], calls=10, chain=8)

    small, large = time_of(2**15), time_of(2**16)
    for found in (small, large):
        assert (found.clock, found.ops) == ("trace", 80)
        assert found.split
        assert 0 < found.median_s <= found.period_s * 1.05
        assert sum(kernel.total_s for kernel in found.kernels) <= found.median_s * 1.1
    assert 1.6 < large.median_s / small.median_s < 2.4
    bytes_per_s = 2**16 * 4096 * 4 / large.median_s
    assert 2e11 < bytes_per_s < 2e13
