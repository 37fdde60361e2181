"""Fits cost models to measured steps, and measures their error on held-out steps.

Bandwidth and c0 are fitted to dense steps of one device with everything on it, and c1 of each policy to its own. With
these fixed, steps with pages in host memory give the term of the bus, and steps of several devices that of exchanges.
All fits are least squares of relative errors, and no fitted value is negative.
"""

from __future__ import annotations

import contextlib
import dataclasses
import statistics
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
from scipy.optimize import lsq_linear

from kvjax.cache.host_pool import FrameCounts
from kvjax.checks import check_amount, whole_number
from kvjax.cost_model.bytes import StepBytes, step_bytes
from kvjax.cost_model.exchanges import NO_EXCHANGES, Exchanges, ExchangeTerm, step_exchanges
from kvjax.cost_model.predict import FREE, BusTerm, CostModel, Price, Terms, sizes_of, worthwhile
from kvjax.model.config import ModelConfig
from kvjax.policies.decode.naming import parse_recorded
from pallas_kernels.core.results import devices_of, launch_text, packed_text

DEVICE, HOST, MESH = "device", "host", "mesh"
"""Kinds of cells: everything on one device; with pages in host memory; on several devices."""

OWN_LISTS, RECORDED = "own", "recorded"
"""Kinds of lists of a row of `benchmarks.tiers`: those that the policy chooses itself, of random keys; those of the
embedded model."""


@dataclasses.dataclass(frozen=True)
class Cell:
    """A measured step of `batch` sequences of `length` tokens. policy: its name. seconds: per step. bytes: those one
    device had to read.

    steps: of a launch. tensor, context, exchanges: of a mesh. device_bytes: of the cache, where pages lie in host
    memory; lists: the kind of its lists; hits: the measured share of listed bytes there that the hot buffer held, None
    where nothing was listed.
    """

    length: int
    batch: int
    policy: str
    seconds: float
    bytes: StepBytes
    steps: int = 1
    tensor: int = 1
    context: int = 1
    exchanges: Exchanges = NO_EXCHANGES
    device_bytes: int | None = None
    lists: str = OWN_LISTS
    hits: float | None = None

    @property
    def kind(self) -> str:
        """DEVICE, HOST or MESH."""
        return MESH if self.tensor * self.context > 1 else DEVICE if self.device_bytes is None else HOST

    @property
    def place(self) -> tuple[int, ...]:
        """What cells have in common whose policies can be compared."""
        return self.tensor, self.context, self.device_bytes or 0, self.batch, self.length

    def predicted(self, terms: Terms) -> float | None:
        """Its seconds by a fit; None if the fit has no price of its policy."""
        price = terms.find_price(parse_recorded(self.policy))
        return None if price is None else sum(terms.parts(self.bytes, price, self.exchanges, self.hits or 0.0).values())


GROUPS: dict[str, Callable[[Cell], Any]] = {
    "cell": lambda cell: cell.place,
    "length": lambda cell: cell.length,
    "batch": lambda cell: cell.batch,
    "mesh or tier": lambda cell: (cell.tensor, cell.context, cell.device_bytes),
}
"""The groups of cells that are held out together."""


class Key(NamedTuple):
    """What one cost model is fitted to. weights, cache_format: how weights and pages are packed, by name; None: they
    are not."""

    device: str
    shape: str
    layers: int
    dtype: str
    weights: str | None = None
    cache_format: str | None = None


# Reading


def read_cells(
    runs: Sequence[dict[str, Any]], config_of: Callable[[str, int], ModelConfig], steps_per_launch: int = 1
) -> dict[Key, list[Cell]]:
    """The measured cells of results of `kvjax bench decode` and `tiers`, by what a cost model is fitted to.

    Rows that were skipped or failed are left out, and so are rows of one device of other launches than
    `steps_per_launch`. Of a cell that was measured twice the later one counts, and on meshes that of most steps per
    launch. config_of: gives the model's configuration for a shape's name and a number of layers. ValueError for a
    result of another command, and for rows whose bytes are not those counted here.
    """
    groups: dict[Key, list[Cell]] = {}
    for run in sorted(runs, key=lambda run: run["provenance"]["date"]):
        if run.get("bench") not in ("decode", "tiers"):
            raise ValueError(f"this is a result of kvjax bench {run.get('bench')!r}: give those of kvjax bench decode or tiers")
        for row in run["rows"]:
            if "median_s" not in row:
                continue
            where = ", ".join(f"{name} {row[name]}" for name in ("shape", "tokens", "batch", "policy") if name in row)
            steps = whole_number(f"{where}: steps_per_launch", row.get("steps_per_launch", 1), 1)
            if devices_of(row) == 1 and steps != steps_per_launch:
                continue
            check_amount(f"{where}: median_s", row["median_s"], above_zero=True)
            config, packed = config_of(row["shape"], row["layers"]), {name: row.get(name) for name in ("weights", "cache_format")}
            cell = _tier_cell(row, config, where) if run["bench"] == "tiers" else _decode_cell(row, config, packed, where, steps)
            if cell is not None:
                groups.setdefault(Key(run["provenance"]["device"], row["shape"], row["layers"], row["dtype"], **packed), []).append(cell)
    return {key: merged(cells) for key, cells in groups.items()}


def _decode_cell(row: dict[str, Any], config: ModelConfig, packed: dict[str, Any], where: str, steps: int) -> Cell:
    policy, mesh = parse_recorded(row["policy"]), {name: row.get(name, 1) for name in ("tensor", "context")}
    moved = step_bytes(config, policy, row["tokens"], row["batch"], dtype=row["dtype"], **packed, **mesh)
    counted, several = sum(row["bytes"].values()), devices_of(row) > 1
    # On a mesh lists are spread evenly in the count, not quite in a pool.
    if moved.total != counted and not (several and abs(moved.total / counted - 1) <= 0.01):
        raise ValueError(f"{where}: the row counts {counted:,} bytes, kvjax.cost_model {moved.total:,}; measure it again")
    exchanges = step_exchanges(config, policy, row["batch"], dtype=row["dtype"], **mesh) if several else NO_EXCHANGES
    return Cell(row["tokens"], row["batch"], row["policy"], row["median_s"], moved, steps, **mesh, exchanges=exchanges)


def _tier_cell(row: dict[str, Any], config: ModelConfig, where: str) -> Cell | None:
    """The cell of a row of `benchmarks.tiers`; None for packed pages, and for recorded lists with everything on the
    device, which another op attends by."""
    if row.get("cache_format"):
        return None
    if "asked_bytes" not in row:
        raise ValueError(f"{where}: the row does not say what was listed in host memory, so it is an earlier version's; measure it again")
    frames = None if row["frames"] is None else FrameCounts(*row["frames"])
    sized = step_bytes(config, parse_recorded(row["name"]), row["mean_length"], dtype=row["dtype"], frames=frames)
    if abs(sized.kv / row["read_bytes"] - 1) > 0.02:
        said = f"the step read {row['read_bytes']:,.0f} bytes, kvjax.cost_model counts {sized.kv:,}"
        raise ValueError(f"{where}: {said}; measure it again")
    cell = Cell(row["tokens"], 1, row["name"], row["median_s"], sized)
    if frames is None:
        return cell if row["lists"] == OWN_LISTS else None
    asked, copied = row["asked_bytes"], row["copied_bytes"]
    moved = dataclasses.replace(sized, in_place=round(max(0.0, row["host_bytes"] - copied)), listed=round(asked))
    hits = 1 - copied / asked if asked else None
    return dataclasses.replace(cell, bytes=moved, device_bytes=row["device_bytes"], lists=row["lists"], hits=hits)


def merged(cells: Iterable[Cell]) -> list[Cell]:
    """One cell for each place, policy and kind of list: the last one measured, on meshes of those with most steps per
    launch."""
    latest = {(*cell.place, cell.policy, cell.lists): cell for cell in sorted(cells, key=lambda cell: cell.steps)}
    return [latest[key] for key in sorted(latest)]


# Fitting


def solve(cells: Sequence[Cell], kind: str = DEVICE) -> Terms:
    """The terms of one device, and the one of cells of another kind. ValueError if the cells cannot tell the values."""
    found = _solve_device([cell for cell in cells if cell.kind == DEVICE])
    if kind == DEVICE:
        return found
    some = [cell for cell in cells if cell.kind == kind]
    known = [cell.predicted(found) for cell in some]
    if lacking := [cell.policy for cell, seconds in zip(some, known, strict=True) if seconds is None]:
        how = "tiers --resident" if kind == HOST else "decode --tensor 1 --context 1"
        raise ValueError(f"there is no row of {lacking[0]} with everything on one device: measure it, too (kvjax bench {how})")
    if kind == HOST:
        over_bus = np.array([cell.bytes.over_bus(cell.hits or 0.0) for cell in some]) / 1e9
        if len(set(over_bus.round(3))) < 2:
            raise ValueError(
                "the bus needs rows that read at least two amounts there, in place or through the hot buffer: "
                "python -m benchmarks.tiers --policies dense,top:32 --fresh 32 --recorded FILE"
            )
        slope, layer = _fit([over_bus, np.array([cell.bytes.hot_layers for cell in some]) * 1e-6], some, known)
        if not slope:
            raise ValueError("steps take no longer with more bytes over the bus, so there is no rate to fit: measure longer sequences")
        return dataclasses.replace(found, bus=BusTerm("", 1e9 / slope, layer * 1e-6))
    if not some:
        raise ValueError("there is no row of several devices to fit")
    counts, received, choosing = np.array([cell.exchanges for cell in some]).T
    latency, slope, choose = _fit([counts * 1e-6, received / 1e9, choosing * 1e-6], some, known)
    link = 1e9 / slope if slope > 1e-9 else None
    return dataclasses.replace(found, exchanges=ExchangeTerm("", latency * 1e-6, link, choose * 1e-6 if choosing.any() else None))


def _solve_device(cells: Sequence[Cell]) -> Terms:
    dense = [cell for cell in cells if cell.policy == "dense"]
    gigabytes = np.array([cell.bytes.total for cell in dense]) / 1e9
    if len(set(gigabytes)) < 2:
        raise ValueError(
            f"bandwidth and c0 need dense rows of at least two sizes with everything on the device, got {len(set(gigabytes))}: measure "
            "more lengths or batches (kvjax bench decode --policies dense,... --lengths 8k,32k,128k)"
        )
    slope, c0 = _fit([gigabytes, np.ones(len(dense))], dense, 0.0)
    if slope * np.ptp(gigabytes) < 1e-3 * max(cell.seconds for cell in dense):
        raise ValueError("dense steps take no longer with more bytes, so there is no bandwidth to fit: measure longer sequences")
    found, c1 = Terms(1e9 / slope, c0, ()), {}
    for policy in dict.fromkeys(cell.policy for cell in cells if cell.policy != "dense"):
        rows = [cell for cell in cells if cell.policy == policy]
        known = [sum(found.parts(cell.bytes, FREE).values()) for cell in rows]
        scanned = np.array([cell.bytes.index for cell in rows]) / 1e9
        columns = [np.ones(len(rows)), scanned] if len(set(scanned)) > 1 else [np.ones(len(rows))]
        fixed, per_gigabyte = (*_fit(columns, rows, known), 0.0)[:2]
        c1[policy] = Price(fixed, per_gigabyte / 1e9)
    return dataclasses.replace(found, c1=tuple(c1.items()))


def _fit(columns: Sequence[np.ndarray], cells: Sequence[Cell], known: Any) -> list[float]:
    """Coefficients >= 0 for which known + columns @ coefficients is closest to the times, by least squares of relative
    errors.

    A negative coefficient would predict a gain where nothing is saved, especially at lengths shorter than the measured
    ones. Columns of zeros get 0.
    """
    seconds, found = np.array([cell.seconds for cell in cells]), np.zeros(len(columns))
    told = [number for number, column in enumerate(columns) if column.any()]
    matrix = np.stack([columns[number] for number in told], axis=1) / seconds[:, None]
    target = 1 - np.asarray(known) / seconds
    found[told] = np.maximum(lsq_linear(matrix, target, bounds=(0, np.inf), method="bvls").x, 0)  # it may miss by a rounding
    return found.tolist()


def fit(cells: Sequence[Cell], config: ModelConfig, key: Key, *, source: str) -> CostModel:
    """The cost model of one device and model, with the terms that its cells tell. Errors are those of cells held out
    one by one: of speed-ups for one device, and for other terms the larger of the mean errors of times and of
    speed-ups."""
    cells = merged(cells)
    kinds, found, error = {cell.kind for cell in cells}, {}, {}
    for kind in (DEVICE, *sorted(kinds - {DEVICE})):
        found[kind] = solve(cells, kind)
        held = errors(held_out(cells, kind, "cell"))
        error[kind] = held["speedup"][0] if kind == DEVICE else max(each[0] for each in (held["seconds"], held["speedup"]) if each)
    bus = exchanges = None
    if HOST in kinds:
        shares = [cell.hits for cell in cells if cell.kind == HOST and cell.lists == RECORDED and cell.hits is not None]
        own = {"hits": statistics.mean(shares) if shares else None, "measured": tuple(each[2:] for each in _ranges(cells, HOST))}
        bus = dataclasses.replace(found[HOST].bus, model=key.shape, **own, error=error[HOST])
    if MESH in kinds:
        own = {"policies": tuple(sorted({cell.policy for cell in cells if cell.kind == MESH})), "measured": _ranges(cells, MESH)}
        exchanges = dataclasses.replace(found[MESH].exchanges, model=key.shape, **own, error=error[MESH])
    return CostModel(
        bytes_per_s=found[DEVICE].bytes_per_s,
        c0=found[DEVICE].c0,
        c1=found[DEVICE].c1,
        bus=bus,
        exchanges=exchanges,
        device=key.device,
        model=key.shape,
        sizes=sizes_of(config),
        dtype=key.dtype,
        measured=tuple(each[2:] for each in _ranges(cells, DEVICE)),
        error=error[DEVICE],
        source=source,
        weights=key.weights,
        cache_format=key.cache_format,
        steps_per_launch=max(cell.steps for cell in cells if cell.kind == DEVICE),
    )


def _ranges(cells: Sequence[Cell], kind: str) -> tuple[tuple[int, int, int, int, int], ...]:
    """(tensor, context, batch, shortest, longest) of the cells of a kind."""
    lengths: dict[tuple[int, int, int], list[int]] = {}
    for cell in cells:
        if cell.kind == kind:
            lengths.setdefault((cell.tensor, cell.context, cell.batch), []).append(cell.length)
    return tuple((*place, min(some), max(some)) for place, some in sorted(lengths.items()))


# Errors


class Forecast(NamedTuple):
    """A cell, and its seconds as predicted by a fit to other cells."""

    cell: Cell
    seconds: float


def held_out(cells: Sequence[Cell], kind: str, by: str) -> list[Forecast]:
    """Predictions of every cell of a kind by a fit to all cells outside its group. by: a name in `GROUPS`.

    A group is left out whole, including its dense rows. A cell is missing if its policy then has no c1. ValueError if
    the other cells cannot be fitted, or no cell can be predicted.
    """
    group, found = GROUPS[by], []
    for key in dict.fromkeys(group(cell) for cell in cells if cell.kind == kind):
        fitted = solve([cell for cell in cells if group(cell) != key], kind)
        inside = [cell for cell in cells if cell.kind == kind and group(cell) == key]
        found += [Forecast(cell, seconds) for cell in inside if (seconds := cell.predicted(fitted)) is not None]
    if not found:
        raise ValueError(f"no cell can be predicted when cells are held out by {by}: measure more lengths and batches")
    return found


def errors(found: Sequence[Forecast]) -> dict[str, Any]:
    """{"count": cells, "seconds": (mean, worst), "speedup": (mean, worst)}: relative errors of times, and of speed-ups
    over dense at the same place (None without any)."""
    dense = {each.cell.place: each for each in found if each.cell.policy == "dense"}
    pairs = [(dense[each.cell.place], each) for each in found if each.cell.policy != "dense" and each.cell.place in dense]
    times = [abs(each.seconds / each.cell.seconds - 1) for each in found]
    gains = [abs((beside.seconds / each.seconds) / (beside.cell.seconds / each.cell.seconds) - 1) for beside, each in pairs]
    shares = {name: (statistics.mean(some), max(some)) if some else None for name, some in (("seconds", times), ("speedup", gains))}
    return {"count": len(found)} | shares


def regret(cells: Sequence[Cell]) -> float:
    """Mean share of time that is lost by choosing on one device with a cost model that has not seen the place, against
    the fastest policy there. ValueError if nothing can be chosen."""
    cells, lost = [cell for cell in cells if cell.kind == DEVICE], []
    for place in dict.fromkeys(cell.place for cell in cells):
        here = {cell.policy: cell for cell in cells if cell.place == place}
        if "dense" not in here or len(here) == 1:
            continue
        seen = [cell for cell in cells if cell.place != place]
        fitted, error = solve(seen), errors(held_out(seen, DEVICE, "cell"))["speedup"][0]
        predicted = {name: seconds for name, cell in here.items() if (seconds := cell.predicted(fitted)) is not None}
        best = min(cell.seconds for cell in here.values())
        lost.append(here[worthwhile(predicted, error)].seconds / best - 1)
    if not lost:
        raise ValueError("no place has a dense row and another one: measure them together (kvjax bench decode --policies)")
    return statistics.mean(lost)


def checks(cells: Sequence[Cell]) -> dict[str, Any]:
    """How good a fit is on cells that it has not seen: {"errors": {kind: {group: `errors`}}, "regret": `regret`}. Left
    out is what cannot be held out: a group of all cells, or one without which nothing can be fitted."""
    found: dict[str, Any] = {"errors": {}, "regret": None}
    for kind in dict.fromkeys(cell.kind for cell in cells):
        some = found["errors"].setdefault(kind, {})
        for by, group in GROUPS.items():
            if len({group(cell) for cell in cells if cell.kind == kind}) > 1:
                with contextlib.suppress(ValueError):
                    some[by] = errors(held_out(cells, kind, by))
    with contextlib.suppress(ValueError, TypeError):  # too few cells to hold the error of the rest out
        found["regret"] = regret(cells)
    return found


Rows = tuple[tuple[str, ...], list[tuple[str, ...]]]


def named(cost: dict[str, Any]) -> str:
    """The model of a cost model in a file, what is packed, and its launches."""
    return cost["model"] + packed_text(cost) + launch_text(cost)


def error_table(file: dict[str, Any]) -> Rows:
    """Columns and rows: errors on held-out cells."""
    rows = []
    for cost, checked in zip(file["cost_models"], file["held_out"], strict=True):
        for kind, groups in checked["errors"].items():
            for by, found in groups.items():
                shown = [f"{part[0]:.1%}, {part[1]:.1%}" if (part := found[name]) else "-" for name in ("seconds", "speedup")]
                rows.append((named(cost), kind, f"a {by}", str(found["count"]), *shown))
    return ("model", "kind", "held out together", "cells", "time: mean, worst error", "speed-up: mean, worst error"), rows
