"""Fits the terms of a mesh (`kvjax.bill.mesh_terms`) to rows of `kvjax bench decode --tensor --context`, and measures their error on
held-out rows.

Rows of one device, of launches of one step, give bandwidth, c0 and c1. Of a cell of several devices that was measured with several numbers
of steps per launch, the largest counts: in launches of one step the host's part is the longer one (docs/devices.md). With the terms of one
device fixed, what rows of several devices take longer than their bytes gives latencies of each kind of exchange, the bandwidth of links,
and the seconds of a layer that chooses, by least squares of relative errors. No fitted value is negative. Where a kind was measured with
one size of axis only, what a launch takes cannot be told from a hop, and counts as hops: more devices then take longer in a prediction, not
the same.
"""

from __future__ import annotations

import collections
import dataclasses
import statistics
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from kvjax.bill.exchanges import KINDS, Exchange, counts_of, layers_that_choose, step_exchanges
from kvjax.bill.fitting import Cell, Key, Parameters, launch_of, merged, relative_fit, seconds_of, solve
from kvjax.bill.mesh_terms import LAWS, Latency, MeshRange, MeshTerms, exchange_seconds
from kvjax.bill.volume import StepBytes, step_bytes
from kvjax.model import ModelConfig
from kvjax.policies.decode.naming import parse_recorded
from pallas_kernels.core.results import devices_of

MESH_TERMS = {
    "all": "latency of each kind of exchange, its bytes, and the choice over devices",
    "latency": "latency of each kind of exchange, and the choice over devices",
    "none": "none: exchanges cost nothing",
}
"""Forms of the terms. "all" is the form of a bill; the others show what a term is worth."""

MESH_GROUPS: dict[str, Callable[[MeshCell], Any]] = {
    "cell": lambda cell: (cell.tensor, cell.context, cell.length, cell.batch),
    "length": lambda cell: cell.length,
    "batch": lambda cell: cell.batch,
    "mesh": lambda cell: (cell.tensor, cell.context),
    "number of devices": lambda cell: cell.tensor * cell.context,
}
"""Groups of cells that are held out together. For a length or a batch, its rows of one device are held out, too. The largest number of
devices, held out, says how well fewer of them tell of more."""


@dataclasses.dataclass(frozen=True)
class MeshCell:
    """A measured step on a mesh. seconds: per step. bytes: those that one device had to read. choosing: layers that choose over devices.
    steps: of a launch."""

    length: int
    batch: int
    policy: str
    tensor: int
    context: int
    seconds: float
    bytes: StepBytes
    exchanges: tuple[Exchange, ...]
    choosing: int
    steps: int = 1


@dataclasses.dataclass(frozen=True)
class MeshForecast:
    """A cell, and its seconds as predicted by a fit to other cells."""

    cell: MeshCell
    seconds: float


def read_mesh_cells(run: dict[str, Any], config_of: Callable[[str, int], ModelConfig]) -> dict[Key, list[MeshCell]]:
    """The measured cells of several devices in a `kvjax bench decode` JSON, by what a bill is fitted to. Rows that were skipped or
    failed are left out. config_of: as for `read_cells`.

    ValueError for rows whose bytes are far from those of `step_bytes`, and for rows whose program exchanged something else than
    `step_exchanges` counts.
    """
    groups: dict[Key, list[MeshCell]] = {}
    for row in run["rows"] if run.get("bench") == "decode" else ():
        if "median_s" not in row or devices_of(row) == 1:
            continue
        mesh = {name: row[name] for name in ("tensor", "context")}
        packed = {name: row.get(name) for name in ("weights", "cache_format")}
        config, policy, dtype = config_of(row["shape"], row["layers"]), parse_recorded(row["policy"]), row["dtype"]
        place = f"{row['tokens']:,} tokens, batch {row['batch']}, {row['policy']}, tensor {row['tensor']} x context {row['context']}"
        where = f"{row['shape']}, {place}"
        moved = step_bytes(config, policy, row["tokens"], row["batch"], dtype=dtype, **packed, **mesh)
        counted = sum(row["bytes"].values())
        if abs(moved.total / counted - 1) > 0.01:  # lists are spread evenly in the count, not quite in a pool
            raise ValueError(f"{where}: the row counts {counted:,} bytes, kvjax.bill {moved.total:,}; measure it again")
        exchanges = step_exchanges(config, policy, row["batch"], dtype=dtype, **mesh)
        ran = {(each["kind"], each["axis"], each["size"], each["bytes"]): each["count"] for each in row["exchanges"]}
        sums, gathers = (row["path"].get(op, "xla") for op in ("all_reduce", "all_gather"))
        # A program whose kernel leaves large arrays to XLA has both implementations, and its row names XLA.
        asked = [counts_of(exchanges, sums, each) for each in dict.fromkeys((gathers, "mosaic_gpu"))]
        if ran not in asked:
            raise ValueError(f"{where}: the program exchanged {ran}, kvjax.bill counts {' or '.join(map(str, asked))}; measure it again")
        choosing = layers_that_choose(config, policy) if row["context"] > 1 else 0
        seconds = seconds_of(row, where)
        measured = (row["tokens"], row["batch"], row["policy"], row["tensor"], row["context"], seconds)
        cell = MeshCell(*measured, moved, exchanges, choosing, launch_of(row))
        groups.setdefault(Key(run["provenance"]["device"], row["shape"], row["layers"], dtype, **packed), []).append(cell)
    return groups


def read_mesh_runs(runs: Sequence[dict[str, Any]], config_of: Callable[[str, int], ModelConfig]) -> dict[Key, list[MeshCell]]:
    """The cells of several results, as `read_mesh_cells` gives them. Of a cell that was measured twice the later one counts."""
    found: dict[Key, list[MeshCell]] = collections.defaultdict(list)
    for run in sorted(runs, key=lambda run: run["provenance"]["date"]):
        for key, cells in read_mesh_cells(run, config_of).items():
            found[key] += cells
    return {key: merged_meshes(cells) for key, cells in found.items()}


def merged_meshes(cells: Iterable[MeshCell]) -> list[MeshCell]:
    """One cell for each length, batch, policy and mesh: that of most steps per launch, and of these the last one measured."""
    ordered = sorted(cells, key=lambda cell: cell.steps)  # otherwise in the order in which they were measured
    latest = {(cell.tensor, cell.context, cell.batch, cell.length, cell.policy): cell for cell in ordered}
    return [latest[key] for key in sorted(latest)]


def solve_mesh(base: Parameters, cells: Sequence[MeshCell], law: str = "log2", terms: str = "all") -> MeshTerms:
    """Terms that explain what cells take beside what `base` does; without model, ranges, error and source. ValueError if `base` lacks a
    policy, or there is no cell."""
    if law not in LAWS:
        raise ValueError(f"the law of latency is one of {', '.join(LAWS)}, not {law!r}")
    if terms not in MESH_TERMS:
        raise ValueError(f"terms are one of {', '.join(MESH_TERMS)}, not {terms!r}")
    if lacking := sorted({cell.policy for cell in cells} - set(base.c1)):
        raise ValueError(f"there is no row of {lacking[0]} on one device: measure it, too (kvjax bench decode --tensor 1 --context 1)")
    if not cells:
        raise ValueError("there is no row of several devices to fit")
    sizes = {kind: tuple(sorted({each.size for cell in cells for each in cell.exchanges if each.kind == kind})) for kind in KINDS}
    if terms == "none":
        return _terms(law, {kind: Latency(0.0, 0.0, some) for kind, some in sizes.items() if some}, None, 0.0, cells)
    columns: dict[Any, np.ndarray] = {}
    for kind, some in sizes.items():
        counts = [[(each.count, LAWS[law](each.size)) for each in cell.exchanges if each.kind == kind] for cell in cells]
        if len(some) > 1:
            columns[kind, "launch"] = np.array([sum(count for count, _ in one) for one in counts]) * 1e-6
        if some:
            columns[kind, "hop"] = np.array([sum(count * hops for count, hops in one) for one in counts]) * 1e-6
    columns["choose"] = np.array([cell.choosing for cell in cells]) * 1e-6
    if terms == "all":
        columns["bytes"] = np.array([sum(each.received for each in cell.exchanges) for cell in cells]) / 1e9
    columns = {name: column for name, column in columns.items() if column.any()}
    known = np.array([base.on_device(cell.policy, cell.bytes) for cell in cells])
    found = dict(zip(columns, relative_fit(list(columns.values()), cells, known), strict=True))
    latency = {
        kind: Latency(*(found.get((kind, name), 0.0) * 1e-6 for name in ("launch", "hop")), some) for kind, some in sizes.items() if some
    }
    slope = found.get("bytes", 0.0)
    choose_s = found["choose"] * 1e-6 if "choose" in found else None
    return _terms(law, latency, 1e9 / slope if slope > 1e-9 else None, choose_s, cells)


def _terms(law: str, latency: dict[str, Latency], link: float | None, choose_s: float | None, cells: Sequence[MeshCell]) -> MeshTerms:
    return MeshTerms("", law, tuple(latency.items()), link, choose_s, tuple(sorted({cell.policy for cell in cells})), (), 0.0, "")


def mesh_forecasts(
    base: Sequence[Cell], cells: Sequence[MeshCell], by: str, form: str = "scan", law: str = "log2", terms: str = "all"
) -> list[MeshForecast]:
    """Predictions of every cell by a fit to all cells outside its group. base: cells of one device. by: a name in `MESH_GROUPS`. form: of
    c1. ValueError if the other cells cannot be fitted, or have no exchange of a kind that a cell has."""
    if by not in MESH_GROUPS:
        raise ValueError(f"cells can be held out by {', '.join(MESH_GROUPS)}, not by {by!r}")
    group, found = MESH_GROUPS[by], []
    for key in dict.fromkeys(map(group, cells)):
        seen = [cell for cell in cells if group(cell) != key]
        own = {"length": lambda cell, key=key: cell.length != key, "batch": lambda cell, key=key: cell.batch != key}
        fitted = solve([cell for cell in merged(base) if by not in own or own[by](cell)], form)
        solved = solve_mesh(fitted, seen, law, terms)
        for cell in cells:
            if group(cell) == key:
                seconds = fitted.on_device(cell.policy, cell.bytes) + exchange_seconds(solved, cell.exchanges, cell.choosing, cell.tensor)
                found.append(MeshForecast(cell, seconds))
    return found


def mesh_errors(found: Sequence[MeshForecast]) -> dict[str, Any]:
    """Mean and worst relative error of seconds, and of speed-ups over dense on the same mesh (None without a dense cell)."""
    dense = {MESH_GROUPS["cell"](each.cell): each for each in found if each.cell.policy == "dense"}
    pairs = [(dense[place], each) for each in found if (place := MESH_GROUPS["cell"](each.cell)) in dense and each.cell.policy != "dense"]
    times = [each.seconds / each.cell.seconds - 1 for each in found]
    speedups = [(beside.seconds / each.seconds) / (beside.cell.seconds / each.cell.seconds) - 1 for beside, each in pairs]
    errors: dict[str, Any] = {"count": len(times)}
    for name, some in (("seconds", times), ("speedup", speedups)):
        errors[name] = {"mean": statistics.mean(map(abs, some)), "worst": max(map(abs, some))} if some else None
    return errors


def fit_mesh(
    base: Sequence[Cell], cells: Sequence[MeshCell], *, model: str, source: str, form: str = "scan", law: str = "log2"
) -> MeshTerms:
    """The terms of one device and model. Their `error` is the larger of the mean errors of seconds and of speed-ups, over cells held out by
    mesh, length and batch. base, form: as for `mesh_forecasts`. ValueError if the cells cannot be fitted."""
    solved = solve_mesh(solve(merged(base), form), cells, law)
    errors = mesh_errors(mesh_forecasts(base, cells, "cell", form, law))
    lengths: dict[tuple[int, int, int], list[int]] = {}
    for cell in cells:
        lengths.setdefault((cell.tensor, cell.context, cell.batch), []).append(cell.length)
    return dataclasses.replace(
        solved,
        model=model,
        measured=tuple(MeshRange(*place, min(some), max(some)) for place, some in sorted(lengths.items())),
        error=max(each["mean"] for each in (errors["seconds"], errors["speedup"]) if each),
        source=source,
    )
