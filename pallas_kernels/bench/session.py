"""A run: the bandwidth of a copy, baselines, then every case. Rows are written as they come."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from pallas_kernels.bench.cases import BASELINES, Case
from pallas_kernels.bench.cases import baselines as baselines_of
from pallas_kernels.bench.measure import Skipped, add_speedups, copy_rate, read_rate, row_of, torch_rows
from pallas_kernels.core.dispatch import forced
from pallas_kernels.core.results import write_result


def run(
    cases: Sequence[Case],
    implementation: str | None,
    *,
    baselines: bool,
    json_out: Path | None,
    console: Console,
    baseline_names: Sequence[str] | None = None,
) -> list[dict[str, Any]]:
    """Measure every case and return the rows, baselines first. A case that cannot run here has `skipped`, one that
    raised has `failed`. Rows of `project` have the fraction of the rate of reads too, since they write next to nothing.

    implementation: the path to force (`pallas_kernels.core.dispatch.forced`), or "reference"; None takes the usual one.
    baseline_names: which baselines; None takes this backend's.
    """
    names = BASELINES.get(jax.default_backend(), ()) if baseline_names is None else baseline_names
    others = baselines_of(cases, names) if baselines else []
    with_torch, ours = [c for c in others if c.policy.startswith("torch-")], [c for c in others if not c.policy.startswith("torch-")]
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    rows: list[dict[str, Any]] = []
    copy: dict[str, Any] = {}
    read: dict[str, Any] = {}

    def write() -> None:
        add_speedups(rows)
        if json_out is not None:
            rates = {"copy": copy} | ({"read": read} if read else {})
            write_result(json_out, {"bench": "ops", **rates, "implementation": implementation, "rows": rows})

    path, named = (contextlib.nullcontext(), implementation) if implementation in (None, "reference") else (forced(implementation), None)
    with path, Progress(*columns, console=console) as progress:
        bar = progress.add_task("copy bandwidth", total=len(others) + len(cases))
        copy |= copy_rate()
        rate = copy["bytes_per_s"]
        if any(case.op == "project" for case in cases):
            read |= read_rate()
        if with_torch:
            progress.update(bar, description="PyTorch baselines")
            gc.collect()
            rows += torch_rows(with_torch, rate)
            progress.advance(bar, len(with_torch))
        for case in (*ours, *cases):
            progress.update(bar, description=case.name)
            of_reads = read["bytes_per_s"] if case.op == "project" else None
            rows.append(_guarded(case, lambda case=case, of_reads=of_reads: row_of(case, named, rate, of_reads)))
            write()
            if not console.is_terminal:
                console.print(_line(rows[-1]), highlight=False, soft_wrap=True)
            progress.advance(bar)
    return rows


def _guarded(case: Case, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """The row, or a row with the reason why there is none. So one failing case does not end the run."""
    nothing = {"case": case.name, "op": case.op, "shape": case.shape, "tokens": case.tokens, "batch": case.batch, "policy": case.policy}
    try:
        return make()
    except (Skipped, NotImplementedError) as reason:
        return nothing | {"skipped": str(reason)}
    except Exception as error:
        return nothing | {"failed": f"{type(error).__name__}: {' '.join(str(error).split())[:600]}"}


def _line(row: dict[str, Any]) -> str:
    """One line about a row, for logs."""
    if "median_s" not in row:
        return f"{row['case']}: {'skipped: ' + row['skipped'] if 'skipped' in row else 'FAILED: ' + row['failed']}"
    said = f"{row['case']}: {row['median_s'] * 1e6:.2f} us, {row['fraction_of_copy']:.0%} of copy"
    reads = f", {row['fraction_of_read']:.0%} of read" if "fraction_of_read" in row else ""
    unpacked = f", {row['unpacked']['times']:.3f} of unpacked" if "unpacked" in row else ""
    return f"{said}{reads}, error {row.get('error', 0):.1e}{unpacked}"
