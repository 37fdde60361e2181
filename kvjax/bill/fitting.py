"""Fits the bill to measured steps, and measures its error on held-out steps.

Bandwidth and c0 are fitted to dense rows only, by least squares of the relative error. Then c1 of each policy is fitted to its own rows.
No fitted value is negative.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
from scipy.optimize import lsq_linear

from kvjax.bill.step_bill import Bill, Price, interpolated, sizes_of
from kvjax.bill.volume import StepBytes, step_bytes
from kvjax.model import ModelConfig
from kvjax.policies.decode.naming import parse_recorded
from pallas_kernels.core.results import devices_of

FORMS = {
    "none": "c1 = 0: no free sparse parameter",
    "fixed": "c1 a constant per policy",
    "scan": "c1 a constant per policy, and seconds per byte of index scanned",
}
"""Forms of c1, which is fitted to sparse rows. "none" is the form that the paper registered before measuring, and then refuted; "fixed" is
the form that replaced it there; "scan" is ours."""

GROUPS: dict[str, Callable[[Cell], Any]] = {
    "cell": lambda cell: (cell.length, cell.batch),
    "length": lambda cell: cell.length,
    "batch": lambda cell: cell.batch,
    "budget": lambda cell: None if cell.policy == "dense" else cell.policy,
}
"""Groups of cells that are held out together: all policies at one (length, batch), all cells of a length, of a batch, or of a sparse
policy."""


@dataclasses.dataclass(frozen=True)
class Cell:
    """A measured step of `batch` sequences of `length` tokens. policy: its name. seconds: per step. bytes: those the step had to read."""

    length: int
    batch: int
    policy: str
    seconds: float
    bytes: StepBytes


@dataclasses.dataclass(frozen=True)
class Parameters:
    """The fitted values. c0: seconds. c1: by policy; 0 for dense."""

    bytes_per_s: float
    c0: float
    c1: dict[str, Price]

    def seconds(self, cell: Cell) -> float:
        """Predicted time of a cell. KeyError for a policy whose c1 is neither measured nor between two measured ones."""
        return self.on_device(cell.policy, cell.bytes)

    def on_device(self, policy: str, moved: StepBytes) -> float:
        """Predicted time of a policy's step without bytes that come from elsewhere. KeyError as for `seconds`."""
        price = self.c1.get(policy) or interpolated(parse_recorded(policy), self.c1)
        if price is None:
            raise KeyError(policy)
        return moved.from_device / self.bytes_per_s + self.c0 + price.fixed + price.per_byte * moved.index


@dataclasses.dataclass(frozen=True)
class Forecast:
    """A cell, with the prediction of a fit to other cells (or to all cells, in-sample). Speed-ups are over dense at the same length and
    batch.

    seconds, speedup: predicted. measured_speedup: that of the cell.
    """

    cell: Cell
    seconds: float
    speedup: float
    measured_speedup: float

    @property
    def error(self) -> float:
        """The error of the predicted speed-up, relative to the measured one."""
        return self.speedup / self.measured_speedup - 1


@dataclasses.dataclass(frozen=True)
class Errors:
    """Mean and worst relative error of the predicted speed-ups of `count` sparse cells, and their R^2."""

    count: int
    mean: float
    worst: float
    r2: float


class Key(NamedTuple):
    """What one bill is fitted to. weights, cache_format: how weights and pages are packed, by name; None: they are not."""

    device: str
    shape: str
    layers: int
    dtype: str
    weights: str | None = None
    cache_format: str | None = None


def read_cells(run: dict[str, Any], config_of: Callable[[str, int], ModelConfig], steps_per_launch: int = 1) -> dict[Key, list[Cell]]:
    """The measured cells of a `kvjax bench decode` JSON, by what a bill is fitted to. Rows that were skipped or failed are left out, and so
    are rows of several devices (`kvjax.bill.mesh_fitting`) and of other launches.

    config_of: gives the model's configuration for a shape's name and a number of layers. steps_per_launch: of the rows that are taken.
    ValueError if the file is of another command, or if a row's bytes differ from those of `step_bytes`.
    """
    if run.get("bench") != "decode":
        raise ValueError(
            f"this is not a result of kvjax bench decode: its field 'bench' is {run.get('bench')!r}; run that, with --json FILE"
        )
    groups: dict[Key, list[Cell]] = {}
    for row in run["rows"]:
        if "median_s" not in row or devices_of(row) > 1 or launch_of(row) != steps_per_launch:
            continue
        config = config_of(row["shape"], row["layers"])
        packed = {name: row.get(name) for name in ("weights", "cache_format")}
        moved = step_bytes(config, parse_recorded(row["policy"]), row["tokens"], row["batch"], dtype=row["dtype"], **packed)
        where = f"{row['shape']}, {row['tokens']:,} tokens, batch {row['batch']}, {row['policy']}"
        counted = sum(row["bytes"].values())
        if moved.total != counted:
            raise ValueError(f"{where}: the row counts {counted:,} bytes, kvjax.bill {moved.total:,}; measure it again")
        key = Key(run["provenance"]["device"], row["shape"], row["layers"], row["dtype"], **packed)
        groups.setdefault(key, []).append(Cell(row["tokens"], row["batch"], row["policy"], seconds_of(row, where), moved))
    return groups


def launch_of(row: dict[str, Any]) -> int:
    """Steps per launch of a row; 1 in older rows, and in those of `kvjax bench tiers`. ValueError for what is no number of steps."""
    steps = row.get("steps_per_launch", 1)
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
        named = ", ".join(f"{name} {row[name]}" for name in ("shape", "tokens", "batch", "policy") if name in row)
        raise ValueError(f"{named}: steps_per_launch is {steps!r}, and must be a whole number of at least 1; measure it again")
    return steps


def launches_of(runs: Iterable[dict[str, Any]]) -> tuple[int, ...]:
    """The numbers of steps per launch of timed rows of one device, in results of `kvjax bench decode` and `tiers`, ascending."""
    return tuple(sorted(set().union(*map(launches_in, runs))))


def launches_in(run: dict[str, Any]) -> dict[int, int]:
    """How many timed rows of one device a result has, by their steps per launch. Rows of `kvjax bench tiers` with packed pages are left
    out, because no bill takes them."""
    tiers = run.get("bench") == "tiers"
    rows = [row for row in run["rows"] if "median_s" in row and devices_of(row) == 1 and not (tiers and "cache_format" in row)]
    return dict(collections.Counter(map(launch_of, rows)))


def seconds_of(row: dict[str, Any], where: str) -> float:
    """A row's time. where: names the row in the error. ValueError for what is no time: a fit would fail elsewhere, or be wrong."""
    seconds = row["median_s"]
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 < seconds < math.inf:
        raise ValueError(f"{where}: median_s is {seconds!r}, and a time is a number of seconds above 0; measure it again")
    return seconds


def merged(cells: Iterable[Cell]) -> list[Cell]:
    """One cell for each length, batch and policy: the last one measured."""
    return sorted({(cell.length, cell.batch, cell.policy): cell for cell in cells}.values(), key=lambda c: (c.batch, c.length, c.policy))


def solve(cells: Sequence[Cell], form: str = "fixed") -> Parameters:
    """The parameters, from dense rows and then from sparse rows. form: one of `FORMS`.

    ValueError if the dense rows cannot tell bandwidth from c0.
    """
    if form not in FORMS:
        raise ValueError(f"the bill's form is one of {', '.join(FORMS)}, not {form!r}")
    dense = [cell for cell in cells if cell.policy == "dense"]
    gigabytes = np.array([cell.bytes.total for cell in dense]) / 1e9
    if len(set(gigabytes)) < 2:
        raise ValueError(
            f"bandwidth and c0 need dense rows of at least two sizes with everything on the device, got {len(set(gigabytes))}: measure "
            "more lengths or batches (kvjax bench decode --policies dense,... --lengths 8k,32k,128k)"
        )
    slope, c0 = relative_fit([gigabytes, np.ones(len(dense))], dense, 0.0)
    if slope * np.ptp(gigabytes) < 1e-3 * max(cell.seconds for cell in dense):
        raise ValueError("dense steps take no longer with more bytes, so there is no bandwidth to fit: measure longer sequences")
    c1 = {"dense": Price(0.0)}
    for policy in dict.fromkeys(cell.policy for cell in cells if cell.policy != "dense"):
        rows = [cell for cell in cells if cell.policy == policy]
        known = np.array([cell.bytes.total for cell in rows]) / 1e9 * slope + c0
        scanned = np.array([cell.bytes.index for cell in rows]) / 1e9
        if form == "none":
            c1[policy] = Price(0.0)
        elif form == "fixed" or len(set(scanned)) < 2:
            c1[policy] = Price(*relative_fit([np.ones(len(rows))], rows, known))
        else:
            fixed, slower = relative_fit([np.ones(len(rows)), scanned], rows, known)
            c1[policy] = Price(fixed, slower / 1e9)
    return Parameters(1e9 / slope, c0, c1)


def relative_fit(columns: Sequence[np.ndarray], cells: Sequence[Cell], known: Any) -> list[float]:
    """Coefficients >= 0 for which known + columns @ coefficients is closest to the times, by least squares of relative errors.

    A negative coefficient would predict a gain where nothing is saved, especially at lengths shorter than the measured ones.
    """
    seconds = np.array([cell.seconds for cell in cells])
    found = lsq_linear(np.stack(columns, axis=1) / seconds[:, None], 1 - known / seconds, bounds=(0, np.inf), method="bvls")
    return np.maximum(found.x, 0).tolist()  # it may miss a bound by a rounding


def forecasts(cells: Sequence[Cell], by: str | None, form: str = "fixed") -> list[Forecast]:
    """Predictions of every sparse cell. by: a name in `GROUPS`, for a fit to all cells outside the cell's group; None, for a fit to all
    cells (in-sample).

    A group is left out whole, including its dense rows. A cell is missing if its policy then has no c1: by "budget", these are the largest
    and the smallest budget. ValueError if the other cells cannot be fitted, or no cell can be predicted.
    """
    cells = merged(cells)
    if by is not None and by not in GROUPS:
        raise ValueError(f"cells can be held out by {', '.join(GROUPS)}, not by {by!r}")
    dense = {(cell.length, cell.batch): cell for cell in cells if cell.policy == "dense"}
    group = GROUPS[by] if by else lambda cell: cell.policy == "dense"
    found = []
    for key in dict.fromkeys(map(group, cells)):
        asked = [cell for cell in cells if group(cell) == key and cell.policy != "dense" and (cell.length, cell.batch) in dense]
        if not asked:
            continue
        fitted = solve(cells if by is None else [cell for cell in cells if group(cell) != key], form)
        for cell in asked:
            beside = dense[cell.length, cell.batch]
            with contextlib.suppress(KeyError):
                seconds = fitted.seconds(cell)
                found.append(Forecast(cell, seconds, fitted.seconds(beside) / seconds, beside.seconds / cell.seconds))
    if not found:
        raise ValueError(f"no sparse cell can be predicted when cells are held out by {by}: measure more lengths, batches or budgets")
    return found


def errors(found: Sequence[Forecast]) -> Errors:
    """Errors of predicted speed-ups."""
    measured, predicted = (np.array([getattr(each, name) for each in found]) for name in ("measured_speedup", "speedup"))
    relative = np.abs(predicted / measured - 1)
    spread = ((measured - measured.mean()) ** 2).sum()
    r2 = 1 - float(((predicted - measured) ** 2).sum() / spread) if spread else float("nan")
    return Errors(len(found), float(relative.mean()), float(relative.max()), r2)


def fit(
    cells: Sequence[Cell],
    config: ModelConfig,
    *,
    device: str,
    model: str,
    dtype: str,
    source: str,
    form: str = "fixed",
    weights: str | None = None,
    cache_format: str | None = None,
    steps_per_launch: int = 1,
) -> Bill:
    """The bill of one device and model. weights, cache_format: how those are packed. steps_per_launch: of all cells. Its `error` is the
    mean over cells held out one (length, batch) at a time."""
    cells = merged(cells)
    found = solve(cells, form)
    lengths: dict[int, list[int]] = {}
    for cell in cells:
        lengths.setdefault(cell.batch, []).append(cell.length)
    return Bill(
        device=device,
        model=model,
        sizes=sizes_of(config),
        dtype=dtype,
        bytes_per_s=found.bytes_per_s,
        c0=found.c0,
        c1=tuple((name, price) for name, price in found.c1.items() if name != "dense"),
        measured=tuple((batch, min(some), max(some)) for batch, some in sorted(lengths.items())),
        error=errors(forecasts(cells, "cell", form)).mean,
        source=source,
        weights=weights,
        cache_format=cache_format,
        steps_per_launch=steps_per_launch,
    )
