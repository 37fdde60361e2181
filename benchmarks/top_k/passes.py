"""`python -m benchmarks.top_k.passes`: how many passes over a row `top_k` takes, by kind of row, without a GPU.

The kernel's decisions are replayed (`benchmarks.top_k.replay`). They depend only on scores, hint and sizes, so the
counts are the kernel's, on any machine. Rows are those of `benchmarks.top_k`, but more of them, one row at a time.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from benchmarks.run import main
from benchmarks.top_k import cases as top_k_cases
from benchmarks.top_k import replay, score_rows
from benchmarks.top_k import report as top_k_report
from benchmarks.top_k.cases import Captured
from pallas_kernels.core.options import JsonOption
from pallas_kernels.core.results import write_result
from pallas_kernels.selection.top_k import plan

LENGTH, K = 131072, 2048
SHARE = 0.4
"""Share of the answer that the hint of drawn rows has, as in the benchmark's `stale-40`."""


@dataclasses.dataclass(frozen=True)
class Rows:
    """Rows `[R, N]` of one kind, and for each the answer of the step before, `[R, k]`."""

    kind: str
    k: int
    scores: np.ndarray
    hints: np.ndarray


def drawn(distribution: str, count: int, *, n: int = LENGTH, k: int = K) -> Rows:
    """Independent rows of a distribution."""
    rows = score_rows.drawn_rows(distribution, count, n, seed=2000)
    return Rows(distribution, k, rows.scores, score_rows.stale_hint(rows, k, SHARE, seed=2000))


def yarn(count: int, *, n: int = LENGTH, k: int = K) -> Rows:
    """The last of two steps of RoPE scores. Each row has its own query and keys."""
    steps = [score_rows.yarn_rows(n, 2, seed=2000 + row) for row in range(count)]
    return Rows("yarn", k, np.stack([last for _, last in steps]), np.stack([score_rows.top_indices(before, k) for before, _ in steps]))


def captured(name: str, rows: Captured, k: int) -> Rows:
    """A row of each layer of a model."""
    return Rows(name, k, rows.scores, np.stack([score_rows.top_indices(before, k) for before in rows.before]))


def counted(rows: Rows, start: str) -> dict[str, Any]:
    """The replay's figures for each row, with the op started from `start` (of `plan.STARTS`): passes, candidates, and
    the hint's share."""
    count, n = rows.scores.shape
    shape = plan.shape_of(1, n, rows.k, plan.Config(start=start), has_lengths=False, counted=True)

    def one(row: int) -> tuple[int, int, float]:
        found = replay.replay_row(shape, rows.scores[row], rows.hints[row])
        answer = score_rows.top_indices(rows.scores[row], rows.k)
        return found.passes, found.candidates, score_rows.overlap(answer, rows.hints[row])

    with ThreadPoolExecutor() as pool:
        passes, candidates, shares = zip(*pool.map(one, range(count)), strict=True)
    return {
        "rows": rows.kind,
        "n": n,
        "k": rows.k,
        "start": start,
        "count": count,
        "overlap": float(np.mean(shares)),
        "capacity": shape.capacity,
        "passes": list(passes),
        "candidates": list(candidates),
    }


def kinds(files: dict[str, Captured], count: int) -> Iterator[Callable[[], Rows]]:
    """Functions that make each kind of rows."""
    for distribution in score_rows.DISTRIBUTIONS:
        yield lambda distribution=distribution: drawn(distribution, count)
    yield lambda: yarn(count)
    for name, rows in files.items():
        for k in top_k_cases.KS[1:]:
            if k <= rows.scores.shape[1] // 2:
                yield lambda name=name, rows=rows, k=k: captured(name, rows, k)


def count_all(files: dict[str, Captured], count: int) -> list[dict[str, Any]]:
    """A row of figures per kind of rows and per start."""
    made: Sequence[Rows] = [make() for make in kinds(files, count)]
    return [counted(rows, start) for rows in made for start in plan.STARTS]


def count_passes(
    json_out: JsonOption = None,
    rows: Annotated[list[Path] | None, typer.Option(help="Captured rows, .npz (benchmarks.overlap --save); several times.")] = None,
    count: Annotated[int, typer.Option(help="Rows of each synthetic kind.", min=1)] = 32,
) -> None:
    """Count the passes of top_k by kind of row, replayed on the CPU."""
    try:
        files = {file.stem: top_k_cases.load_captured(file) for file in rows or ()}
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    found = count_all(files, count)
    if json_out is not None:
        write_result(json_out, {"bench": "top-k-passes", "rows": found})
    typer.echo(top_k_report.passes_table(found))


if __name__ == "__main__":
    main(count_passes)
