"""How long a compiled function keeps the device busy.

On a GPU the clock is the profiler's trace: start and end of every kernel, also those inside CUDA graphs, so that gaps
between the kernels of an op count. On a CPU it is the wall clock. Only JAX's public profiler is used
(`jax.profiler.trace`, `jax.profiler.ProfileData`).

A timed program holds `chain` ops, one after the other. The calls of a session are separated by a pause that is much
longer than any gap inside a call. The ops of a call have the same kernels, so counting kernels separates them.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.profiler import ProfileData

PAUSE = 3e-3
"""Seconds between two calls. Longer than any gap inside a call that keeps the device busy."""


@dataclasses.dataclass(frozen=True)
class Kernel:
    """One kernel, copy or memset that ran on the device; times in nanoseconds of the trace. graph: number of the CUDA
    graph that launched it, None if it was launched by itself. size: bytes of a copy, where the trace tells them."""

    name: str
    start: float
    end: float
    graph: int | None = None
    size: int | None = None


@dataclasses.dataclass(frozen=True)
class KernelTime:
    """The kernels of one name in an op: seconds of one run (the median), runs per op, and seconds of all runs in an op
    (the average)."""

    name: str
    median_s: float
    runs_per_op: float
    total_s: float


@dataclasses.dataclass(frozen=True)
class Timing:
    """Seconds of one op. clock: "trace" (device) or "wall".

    median_s, p10_s, p90_s: from the start of an op's first kernel to the end of its last, over `ops` ops. period_s:
    from the start of an op to the start of the next, the pause between them included; less than `median_s` only where
    ops overlap. idle_s: the part of the median op in which no kernel ran. split: whether the ops of a call could be
    separated; if not, every figure is a call's figure divided by its ops. in_graphs: share of the kernels that CUDA
    graphs launched.
    """

    clock: str
    ops: int
    median_s: float
    p10_s: float
    p90_s: float
    period_s: float
    idle_s: float | None
    split: bool
    in_graphs: float | None
    kernels: tuple[KernelTime, ...]

    def figures(self) -> dict[str, Any]:
        """For JSON."""
        return dataclasses.asdict(self)


def device_time(call: Callable, arguments: Sequence[tuple], *, calls: int, chain: int = 1, warmup: int = 2) -> Timing:
    """Time `calls` calls of a compiled function, after `warmup` untimed ones. Calls take their arguments in turn from
    `arguments`.

    chain: how many ops one call runs. Each call ends before the next starts. The device must have nothing else to do.
    """
    for i in range(warmup):
        jax.block_until_ready(call(*arguments[i % len(arguments)]))
    if jax.default_backend() != "gpu":
        return wall_timing([_seconds(call, arguments[i % len(arguments)]) for i in range(calls)], chain)

    def run():
        for i in range(calls):
            jax.block_until_ready(call(*arguments[i % len(arguments)]))
            time.sleep(PAUSE)

    return kernel_timing(record(run), calls, chain)


def record(run: Callable[[], Any]) -> list[Kernel]:
    """What the first GPU did while `run()` ran, by start. `run` must wait for everything that it launches."""
    options = jax.profiler.ProfileOptions()
    options.host_tracer_level = 0
    options.python_tracer_level = 0
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder, profiler_options=options):
            run()
        (file,) = Path(folder).rglob("*.xplane.pb")
        return read_kernels(ProfileData.from_file(str(file)))


def read_kernels(profile: ProfileData) -> list[Kernel]:
    """The kernels, copies and memsets of the first GPU of a trace, by start. RuntimeError if there are none."""
    planes = {plane.name: list(plane.lines) for plane in profile.planes}
    lines = planes.get("/device:GPU:0", [])
    events = [event for line in lines if line.name.startswith("Stream") for event in line.events]
    kernels = [_kernel_of(event) for event in events]
    if not kernels:
        found = {name: [line.name for line in lines] for name, lines in planes.items()}
        raise RuntimeError(f"the trace holds no kernel of /device:GPU:0; its planes and lines are {found}")
    return sorted(kernels, key=lambda kernel: (kernel.start, kernel.end))


def _kernel_of(event: Any) -> Kernel:
    stats = dict(event.stats)
    size = re.search(r"\bsize:(\d+)", str(stats.get("memcpy_details", "")))
    return Kernel(event.name, event.start_ns, event.start_ns + event.duration_ns, stats.get("cuda_graph_id"), size and int(size[1]))


def kernel_timing(kernels: Sequence[Kernel], calls: int, chain: int) -> Timing:
    """The timing of `calls` calls of `chain` ops each, from all their kernels."""
    groups = split_calls(kernels, calls)
    ops = [split_ops(group, chain) for group in groups]
    split = all(found is not None for found in ops)
    units = [op for found in ops for op in found] if split else groups
    share = 1 if split else chain
    spans = np.array([_span(unit) for unit in units]) * 1e-9 / share
    periods = [_span(group) / chain for group in groups]
    if split and chain > 1:
        periods = [(found[-1][0].start - found[0][0].start) / (chain - 1) for found in ops]
    idle = np.median([_span(unit) - _busy(unit) for unit in units]) * 1e-9 / share
    middle, low, high = (float(np.quantile(spans, q)) for q in (0.5, 0.1, 0.9))
    totals = tuple(_kernel_times(units, share))
    in_graphs = float(np.mean([kernel.graph is not None for kernel in kernels]))
    return Timing("trace", len(units) * share, middle, low, high, float(np.median(periods)) * 1e-9, float(idle), split, in_graphs, totals)


def timeline(kernels: Sequence[Kernel], chain: int) -> list[tuple[str, int, int]]:
    """Name, start and duration of each kernel of the last of `chain` ops, in nanoseconds from that op's start; empty
    where ops cannot be separated."""
    op = (split_ops(list(kernels), chain) or [[]])[-1]
    return [(plain_name(kernel.name), round(kernel.start - op[0].start), round(kernel.end - kernel.start)) for kernel in op]


def wall_timing(seconds: Sequence[float], chain: int) -> Timing:
    """The timing of calls of `chain` ops that took `seconds` by the wall clock."""
    each = np.array(seconds) / chain
    middle, low, high = (float(np.quantile(each, q)) for q in (0.5, 0.1, 0.9))
    return Timing("wall", len(each) * chain, middle, low, high, middle, None, False, None, ())


def ops_timing(ops: Sequence[list[Kernel]]) -> Timing:
    """The timing of separate ops, from the kernels of each. What ran between them is left out."""
    spans = np.array([_span(op) for op in ops]) * 1e-9
    idle = float(np.median([_span(op) - _busy(op) for op in ops])) * 1e-9
    middle, low, high = (float(np.quantile(spans, q)) for q in (0.5, 0.1, 0.9))
    in_graphs = float(np.mean([kernel.graph is not None for op in ops for kernel in op]))
    return Timing("trace", len(ops), middle, low, high, middle, idle, True, in_graphs, tuple(_kernel_times(list(ops), 1)))


def split_calls(kernels: Sequence[Kernel], calls: int, *, alike: bool = True) -> list[list[Kernel]]:
    """Cut at the `calls` - 1 longest pauses. RuntimeError unless these are clearly longer than others and, if calls are
    alike, all ran equally many kernels."""
    ends = np.maximum.accumulate(np.array([kernel.end for kernel in kernels], np.float64))
    pauses = np.array([kernel.start for kernel in kernels[1:]], np.float64) - ends[:-1]
    cuts = np.sort(np.argsort(-pauses, kind="stable")[: calls - 1])
    bounds = [0, *(int(cut) + 1 for cut in cuts), len(kernels)]
    groups = [list(kernels[a:b]) for a, b in itertools.pairwise(bounds)]
    sizes = sorted({len(group) for group in groups})
    shortest = pauses[cuts].min(initial=np.inf) * 1e-9
    if len(groups) != calls or (alike and len(sizes) > 1) or shortest < PAUSE / 2:
        kind = "equal calls" if alike else "calls"
        raise RuntimeError(f"{len(kernels)} kernels do not fall into {calls} {kind}: {sizes} kernels, {shortest:.1e} s apart at least")
    return groups


def plain_name(name: str) -> str:
    """A kernel's name without the number that XLA gives to the copies of an instruction."""
    return re.sub(r"([._]\d+)+$", "", name)


def split_ops(group: list[Kernel], chain: int) -> list[list[Kernel]] | None:
    """The kernels of each op of a call, or None where their names do not repeat."""
    size, rest = divmod(len(group), chain)
    if rest:
        return None
    ops = [group[i * size : (i + 1) * size] for i in range(chain)]
    names = {tuple(plain_name(kernel.name) for kernel in op) for op in ops}
    return ops if len(names) == 1 else None


def _kernel_times(units: list[list[Kernel]], share: int) -> list[KernelTime]:
    """Kernels by name, those that take longest first."""
    found: dict[str, list[float]] = {}
    for unit in units:
        for kernel in unit:
            found.setdefault(plain_name(kernel.name), []).append((kernel.end - kernel.start) * 1e-9)
    ops = len(units) * share
    times = [KernelTime(name, float(np.median(s)), len(s) / ops, float(np.sum(s)) / ops) for name, s in found.items()]
    return sorted(times, key=lambda time: -time.total_s)


def _span(kernels: Sequence[Kernel]) -> float:
    return max(kernel.end for kernel in kernels) - min(kernel.start for kernel in kernels)


def _busy(kernels: Sequence[Kernel]) -> float:
    """Nanoseconds in which at least one of the kernels ran. They must be sorted by start."""
    total, until = 0.0, -np.inf
    for kernel in kernels:
        total += max(0.0, kernel.end - max(kernel.start, until))
        until = max(until, kernel.end)
    return total


def _seconds(call: Callable, arguments: tuple) -> float:
    started = time.perf_counter()
    jax.block_until_ready(call(*arguments))
    return time.perf_counter() - started
