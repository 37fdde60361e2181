"""Times all_reduce over the devices of one machine, beside `psum`, in the same run.

    python -m benchmarks.exchange --json exchange.json
    python -m benchmarks.exchange '2/8x3584/*' 'tiny/*'

A program adds `CHAIN` times, as a decode step does: each addition is followed by one elementwise kernel that makes the
next parts from the sum. The same chain without exchanges is timed too. On GPUs the clock is that of the first one's
trace.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
import typer
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array

from benchmarks.run import exit_if_failed, main
from pallas_kernels.bench.timing import Timing, device_time
from pallas_kernels.collectives.all_reduce import all_reduce
from pallas_kernels.core import dispatch
from pallas_kernels.core.options import JsonOption
from pallas_kernels.core.results import write_result
from pallas_kernels.core.tables import markdown, stages

AXIS, CHAIN = "tensor", 56
DTYPE = jnp.bfloat16

BY = ("all_reduce", "xla", "psum", "none")
"""What adds: all_reduce by what dispatch picks, and by its "xla"; `jax.lax.psum`, then the residual; nothing, for the
rest of the chain."""


@dataclasses.dataclass(frozen=True)
class Case:
    """devices: how many. rows, width: of the array. by: one of `BY`."""

    devices: int
    rows: int
    width: int
    by: str

    @property
    def name(self) -> str:
        """A unique name, as `--list` prints it."""
        return f"{self.devices}/{self.rows}x{self.width}/{self.by}"


class Skipped(Exception):
    """Why a case was not measured here."""


def all_cases() -> list[Case]:
    """Every case: rows of decode steps, of drafted tokens and of a chunk of prefill. Those of 128 columns are for
    tests."""
    sizes = [(rows, width) for width in (3584, 8192) for rows in (1, 2, 4, 8, 32)] + [(2048, 3584), (2, 128)]
    return [Case(devices, *size, by) for devices in (2, 4, 8) for size in sizes for by in BY]


def matching(patterns: Sequence[str]) -> list[Case]:
    """The cases whose name matches any of the globs; without patterns, all but the tiny ones. ValueError for a pattern
    without a case."""
    cases = all_cases()
    for pattern in patterns:
        if not fnmatch.filter([case.name for case in cases], pattern):
            raise ValueError(f"no case matches {pattern!r}; --list prints them all")
    if not patterns:
        return [case for case in cases if case.width > 128]
    return [case for case in cases if any(fnmatch.fnmatch(case.name, pattern) for pattern in patterns)]


def adder(case: Case, mesh: Mesh) -> Callable[[Array, Array], Array]:
    """(part, residual) of one device -> the sum."""
    if case.by == "psum":
        return lambda x, residual: jax.lax.psum(x, AXIS) + residual
    if case.by == "none":
        return lambda x, residual: x + residual
    name = None if case.by == "all_reduce" else case.by
    return lambda x, residual: all_reduce(x, axis_name=AXIS, residual=residual, mesh=mesh, implementation=name)


def program(case: Case, mesh: Mesh, chain: int) -> Callable[[Array, Array, Array], Array]:
    """A compiled function of the parts `[devices, R, E]`, factors `[devices, 1, E]`, and the residual: `chain`
    additions, each of the parts that the factors make of the sum before; what every device has, `[devices, R, E]`."""
    add = adder(case, mesh)

    def device(part, factor, residual):
        part, factor = part[0], factor[0]
        for _ in range(chain):
            residual = add(part, residual)
            residual = jax.lax.optimization_barrier(residual)
            part = residual * factor
        return residual[None]

    split, whole = PartitionSpec(AXIS), PartitionSpec()
    return jax.jit(jax.shard_map(device, mesh=mesh, in_specs=(split, split, whole), out_specs=split, check_vma=False))


def make_inputs(case: Case, mesh: Mesh) -> tuple[Array, Array, Array]:
    """Parts, factors and residual, each on its device. Factors keep the numbers of a long chain within bounds."""
    rng, split = np.random.default_rng(case.rows), NamedSharding(mesh, PartitionSpec(AXIS))
    numbers = rng.standard_normal((case.devices + 1, case.rows, case.width)).astype(DTYPE)
    factors = rng.uniform(-1, 1, (case.devices, 1, case.width)).astype(DTYPE) / DTYPE(2 * case.devices)
    placed = [jax.device_put(each, split) for each in (numbers[:-1], factors)]
    return *placed, jax.device_put(numbers[-1], NamedSharding(mesh, PartitionSpec()))


def row_of(case: Case, calls: int) -> dict[str, Any]:
    """One addition checked on every device, then a chain of them timed."""
    devices = jax.local_devices()
    if len(devices) < case.devices:
        raise Skipped(f"needs {case.devices} devices, and there are {len(devices)}")
    mesh = Mesh(np.array(devices[: case.devices]), (AXIS,))
    inputs = make_inputs(case, mesh)
    with dispatch.listening() as path:
        once = program(case, mesh, 1)
        found = np.asarray(once(*inputs))
    chained = program(case, mesh, CHAIN)
    several = [np.asarray(chained(*inputs)) for _ in range(2)]
    row = {"case": case.name, **dataclasses.asdict(case), "dtype": DTYPE.__name__, "chain": CHAIN, "path": path}
    row |= {"same_on_all": all(_same(several[0][0], each) for each in several[0]), "same_bits": _same(*several)}
    row |= {"bytes": inputs[0].nbytes // case.devices, "error": None if case.by == "none" else _error(found, *inputs)}
    timing: Timing = device_time(chained, [inputs], calls=calls, chain=CHAIN)
    return row | timing.figures()


def _same(one: np.ndarray, other: np.ndarray) -> bool:
    return one.tobytes() == other.tobytes()


def _error(found: np.ndarray, parts: Array, _: Array, residual: Array) -> float:
    """The largest ||found - sum|| / ||sum|| of a row on any device, the sum being in float64."""
    exact = np.asarray(parts, np.float64).sum(axis=0) + np.asarray(residual, np.float64)
    off = np.linalg.norm(found.astype(np.float64) - exact, axis=-1) / np.linalg.norm(exact, axis=-1)
    return float(off.max())


def run(cases: Sequence[Case], *, calls: int, json_out: Path | None, say: Callable[[str], Any]) -> list[dict[str, Any]]:
    """Measure all cases, and write rows as they come. A case that raised has `failed`, one without its devices
    `skipped`."""
    rows: list[dict[str, Any]] = []
    for case in cases:
        say(case.name)
        try:
            rows.append(row_of(case, calls))
        except Skipped as why:
            rows.append({"case": case.name, "skipped": str(why)})
        except Exception as error:
            rows.append({"case": case.name, "failed": f"{type(error).__name__}: {' '.join(str(error).split())[:600]}"})
        if json_out is not None:
            write_result(json_out, {"bench": "exchange", "rows": rows})
    return rows


COLUMNS = ("case", "runs", "us each", "less the chain's rest", "in graphs", "error", "same on all devices", "same bits")


def table(rows: Sequence[dict[str, Any]]) -> str:
    """The measured rows, a line per case."""
    measured = [row for row in rows if "period_s" in row]
    rest = {(row["devices"], row["rows"], row["width"]): row["period_s"] for row in measured if row["by"] == "none"}
    lines = []
    for row in measured:
        others = rest.get((row["devices"], row["rows"], row["width"]))
        times = [f"{row['period_s'] * 1e6:.1f}", "-" if others is None else f"{(row['period_s'] - others) * 1e6:.1f}"]
        graphs, error = ("-" if row[key] is None else form.format(row[key]) for key, form in (("in_graphs", "{:.0%}"), ("error", "{:.1e}")))
        same = ["yes" if row[key] else "no" for key in ("same_on_all", "same_bits")]
        lines.append([row["case"], row["path"].get("all_reduce", row["by"]), *times, graphs, error, *same])
    return markdown(COLUMNS, lines)


HELP = """Time all_reduce over the devices of this machine beside psum, in chains as long as those of a decode step.

CASES are globs over names `devices/ROWSxWIDTH/by`, as in '2/*/psum' or '4/1x8192/*'; without any, all but the tiny ones. by: all_reduce
(as dispatch picks), xla (the same without the kernel), psum, none (the rest of the chain). Cases for which devices are missing are skipped.

On GPUs, launches are captured together as CUDA graphs only with the flags that docs/devices.md names: measure with and without them.
"""


def bench(
    cases: Annotated[list[str] | None, typer.Argument(help="Globs over the names of cases.", show_default=False)] = None,
    list_cases: Annotated[bool, typer.Option("--list", help="Print the names and stop.")] = False,
    json_out: JsonOption = None,
    calls: Annotated[int, typer.Option(help="Timed calls of each chain.", min=1)] = 10,
) -> None:
    """See HELP."""
    # By default JAX allocates most of the memory at its start.
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    try:
        chosen = matching(cases or ())
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="CASES") from None
    if list_cases:
        typer.echo("\n".join(case.name for case in (chosen if cases else all_cases())))
        return
    with stages() as say:
        rows = run(chosen, calls=calls, json_out=json_out, say=say)
    print(table(rows))
    exit_if_failed(rows)


if __name__ == "__main__":
    main(bench, help=HELP)
