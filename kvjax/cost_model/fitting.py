"""Fits cost models to measured steps, and measures their error on held-out steps.

Bandwidth and c0 are fitted to dense steps of one device with everything on it, and c1 of each policy to its own. With these fixed, steps
with pages in host memory give the term of the bus, and steps of several devices that of exchanges. All fits are least squares of relative
errors, and no fitted value is negative.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import math
import re
import statistics
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
from scipy.optimize import lsq_linear

from kvjax.cache.host_pool.mapped_memory import FrameCounts
from kvjax.cost_model.bytes import StepBytes, step_bytes
from kvjax.cost_model.exchanges import Exchange, ExchangeTerm, counts_of, layers_that_choose, step_exchanges
from kvjax.cost_model.predict import BusTerm, CostModel, Price, interpolated, sizes_of, worthwhile
from kvjax.model.config import ModelConfig
from kvjax.policies.decode.naming import parse_recorded
from pallas_kernels.core.results import devices_of, launch_text, packed_text

DEVICE, HOST, MESH = "device", "host", "mesh"
"""Kinds of cells: everything on one device; with pages in host memory; on several devices."""

OWN_LISTS, RECORDED = "own", "recorded"
"""Kinds of lists of a row of `benchmarks.tiers`: those that the policy chooses itself, of random keys; those of the embedded model."""


@dataclasses.dataclass(frozen=True)
class Cell:
    """A measured step of `batch` sequences of `length` tokens. policy: its name. seconds: per step. bytes: those one device had to read.

    steps: of a launch. tensor, context, exchanges, choosing: of a mesh; choosing counts layers that choose over devices. device_bytes: of
    the cache, where pages lie in host memory; lists: the kind of its lists; hits: the measured share of listed bytes there that the hot
    buffer held, None where nothing was listed.
    """

    length: int
    batch: int
    policy: str
    seconds: float
    bytes: StepBytes
    steps: int = 1
    tensor: int = 1
    context: int = 1
    exchanges: tuple[Exchange, ...] = ()
    choosing: int = 0
    device_bytes: int | None = None
    lists: str = OWN_LISTS
    hits: float | None = None

    @property
    def kind(self) -> str:
        """DEVICE, HOST or MESH."""
        return MESH if self.tensor * self.context > 1 else DEVICE if self.device_bytes is None else HOST

    @property
    def place(self) -> tuple:
        """What cells have in common whose policies can be compared."""
        return self.tensor, self.context, self.device_bytes or 0, self.batch, self.length

    @property
    def bus_bytes(self) -> float:
        """Bytes that came over the bus."""
        return self.bytes.in_place + self.bytes.copied(self.hits or 0.0)


GROUPS: dict[str, dict[str, Callable[[Cell], Any]]] = {
    DEVICE: {
        "cell": lambda cell: cell.place,
        "length": lambda cell: cell.length,
        "batch": lambda cell: cell.batch,
        "budget": lambda cell: None if cell.policy == "dense" else cell.policy,
    },
    HOST: {
        "cell": lambda cell: cell.place,
        "length": lambda cell: cell.length,
        "device size": lambda cell: (cell.kind, cell.device_bytes),
        "kind of list": lambda cell: (cell.policy, cell.lists) if cell.kind == HOST and cell.bytes.hot_layers else None,
    },
    MESH: {
        "cell": lambda cell: cell.place,
        "length": lambda cell: cell.length,
        "batch": lambda cell: cell.batch,
        "mesh": lambda cell: (cell.tensor, cell.context),
        "number of devices": lambda cell: cell.tensor * cell.context,
    },
}
"""By kind of cell, the groups of cells that are held out together. Cells of group None, and rows of one device that the others need,
stay."""

TERM = {DEVICE: "c1", HOST: "bus", MESH: "exchanges"}
"""The term that is left out for comparison: a fit without it must do worse."""


class Key(NamedTuple):
    """What one cost model is fitted to. weights, cache_format: how weights and pages are packed, by name; None: they are not."""

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

    Rows that were skipped or failed are left out, and so are rows of one device of other launches than `steps_per_launch`. Of a cell that
    was measured twice the later one counts, and on meshes that of most steps per launch. config_of: gives the model's configuration for a
    shape's name and a number of layers. ValueError for a result of another command, and for rows whose bytes or exchanges are not those
    counted here.
    """
    groups: dict[Key, list[Cell]] = {}
    for run in sorted(runs, key=lambda run: run["provenance"]["date"]):
        if run.get("bench") not in ("decode", "tiers"):
            raise ValueError(f"this is a result of kvjax bench {run.get('bench')!r}: give those of kvjax bench decode or tiers")
        for row in run["rows"]:
            if "median_s" not in row or (devices_of(row) == 1 and launch_of(row) != steps_per_launch):
                continue
            packed = {name: row.get(name) for name in ("weights", "cache_format")}
            if run["bench"] == "tiers":
                cell = None if row.get("cache_format") else _tier_cell(row, config_of(row["shape"], row["layers"]))
            else:
                cell = _decode_cell(row, config_of(row["shape"], row["layers"]), packed)
            if cell is not None:
                groups.setdefault(Key(run["provenance"]["device"], row["shape"], row["layers"], row["dtype"], **packed), []).append(cell)
    return {key: merged(cells) for key, cells in groups.items()}


def _decode_cell(row: dict[str, Any], config: ModelConfig, packed: dict[str, Any]) -> Cell:
    policy, mesh = parse_recorded(row["policy"]), {name: row.get(name, 1) for name in ("tensor", "context")}
    several = devices_of(row) > 1
    where = f"{row['shape']}, {row['tokens']:,} tokens, batch {row['batch']}, {row['policy']}"
    where += ", tensor {tensor} x context {context}".format(**mesh) if several else ""
    moved = step_bytes(config, policy, row["tokens"], row["batch"], dtype=row["dtype"], **packed, **mesh)
    counted = sum(row["bytes"].values())
    # On a mesh lists are spread evenly in the count, not quite in a pool.
    if moved.total != counted and not (several and abs(moved.total / counted - 1) <= 0.01):
        raise ValueError(f"{where}: the row counts {counted:,} bytes, kvjax.cost_model {moved.total:,}; measure it again")
    cell = Cell(row["tokens"], row["batch"], row["policy"], seconds_of(row, where), moved, launch_of(row), **mesh)
    if not several:
        return cell
    exchanges = step_exchanges(config, policy, row["batch"], dtype=row["dtype"], **mesh)
    ran = {(each["kind"], each["axis"], each["size"], each["bytes"]): each["count"] for each in row["exchanges"]}
    sums, gathers = (row["path"].get(op, "xla") for op in ("all_reduce", "all_gather"))
    # A program whose kernel leaves large arrays to XLA has both implementations, and its row names XLA.
    asked = [counts_of(exchanges, sums, each) for each in dict.fromkeys((gathers, "mosaic_gpu"))]
    if ran not in asked:
        counts = " or ".join(map(str, asked))
        raise ValueError(f"{where}: the program exchanged {ran}, kvjax.cost_model counts {counts}; measure it again")
    choosing = layers_that_choose(config, policy) if row["context"] > 1 else 0
    return dataclasses.replace(cell, exchanges=exchanges, choosing=choosing)


def _tier_cell(row: dict[str, Any], config: ModelConfig) -> Cell | None:
    """The cell of a row of `benchmarks.tiers`; None for recorded lists with everything on the device, which another op attends by."""
    where = f"{row['shape']}, {row['tokens']:,} tokens, {row['policy']}"
    if "asked_bytes" not in row:
        raise ValueError(f"{where}: the row does not say what was listed in host memory, so it is an earlier version's; measure it again")
    frames = None if row["frames"] is None else FrameCounts(*row["frames"])
    sized = step_bytes(config, parse_recorded(row["name"]), row["mean_length"], dtype=row["dtype"], frames=frames)
    if abs(sized.kv / row["read_bytes"] - 1) > 0.02:
        said = f"the step read {row['read_bytes']:,.0f} bytes, kvjax.cost_model counts {sized.kv:,}"
        raise ValueError(f"{where}: {said}; measure it again")
    cell = Cell(row["tokens"], 1, row["name"], seconds_of(row, where), sized)
    if frames is None:
        return cell if row["lists"] == OWN_LISTS else None
    asked, copied = row["asked_bytes"], row["copied_bytes"]
    moved = dataclasses.replace(sized, in_place=round(max(0.0, row["host_bytes"] - copied)), listed=round(asked))
    hits = 1 - copied / asked if asked else None
    return dataclasses.replace(cell, bytes=moved, device_bytes=row["device_bytes"], lists=row["lists"], hits=hits)


def merged(cells: Iterable[Cell]) -> list[Cell]:
    """One cell for each place, policy and kind of list: the last one measured, on meshes of those with most steps per launch."""
    latest = {(*cell.place, cell.policy, cell.lists): cell for cell in sorted(cells, key=lambda cell: cell.steps)}
    return [latest[key] for key in sorted(latest)]


def launch_of(row: dict[str, Any]) -> int:
    """Steps per launch of a row; 1 in older rows, and in those of `benchmarks.tiers`. ValueError for what is no number of steps."""
    steps = row.get("steps_per_launch", 1)
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
        named = ", ".join(f"{name} {row[name]}" for name in ("shape", "tokens", "batch", "policy") if name in row)
        raise ValueError(f"{named}: steps_per_launch is {steps!r}, and must be a whole number of at least 1; measure it again")
    return steps


def launches_in(run: dict[str, Any]) -> dict[int, int]:
    """How many timed rows of one device a result has, by their steps per launch. Rows of `benchmarks.tiers` with packed pages are left
    out, because no cost model takes them."""
    tiers = run.get("bench") == "tiers"
    rows = [row for row in run["rows"] if "median_s" in row and devices_of(row) == 1 and not (tiers and "cache_format" in row)]
    return dict(collections.Counter(map(launch_of, rows)))


def seconds_of(row: dict[str, Any], where: str) -> float:
    """A row's time. where: names the row in the error. ValueError for what is no time: a fit would fail elsewhere, or be wrong."""
    seconds = row["median_s"]
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 < seconds < math.inf:
        raise ValueError(f"{where}: median_s is {seconds!r}, and a time is a number of seconds above 0; measure it again")
    return seconds


# Fitting


@dataclasses.dataclass(frozen=True)
class Parameters:
    """Fitted values: as in `CostModel`, but seconds per byte of the bus and of links. c1: by policy; 0 for dense. choose_s: None if no step
    chose over devices."""

    bytes_per_s: float
    c0: float
    c1: dict[str, Price]
    bus: float = 0.0
    layer_s: float = 0.0
    latency_s: float = 0.0
    link: float = 0.0
    choose_s: float | None = None

    def seconds(self, cell: Cell) -> float:
        """Predicted time of a cell. KeyError for a policy whose c1 is neither measured nor between two measured ones."""
        price = self.c1.get(cell.policy) or interpolated(parse_recorded(cell.policy), self.c1)
        if price is None:
            raise KeyError(cell.policy)
        found = cell.bytes.from_device / self.bytes_per_s + self.c0 + price.fixed + price.per_byte * cell.bytes.index
        if cell.kind == HOST:
            found += cell.bus_bytes * self.bus + cell.bytes.hot_layers * self.layer_s
        for each in cell.exchanges:
            found += each.count * self.latency_s + each.received * self.link
        return found + cell.choosing * (self.choose_s or 0.0)


def solve(cells: Sequence[Cell], kind: str = DEVICE, *, without: str | None = None, per_byte: bool = True) -> Parameters:
    """The parameters of one device, and the term of cells of another kind. without: a term that is left out. per_byte: whether c1 has
    seconds per byte of index scanned. ValueError if the cells cannot tell the values."""
    found = _solve_device([cell for cell in cells if cell.kind == DEVICE], without, per_byte)
    if kind == DEVICE:
        return found
    some = [cell for cell in cells if cell.kind == kind]
    if lacking := sorted({cell.policy for cell in some} - set(found.c1)):
        how = "tiers --resident" if kind == HOST else "decode --tensor 1 --context 1"
        raise ValueError(f"there is no row of {lacking[0]} with everything on one device: measure it, too (kvjax bench {how})")
    if without == TERM[kind]:
        return found
    known = np.array([found.seconds(cell) for cell in some])
    if kind == HOST:
        if len({round(cell.bus_bytes / 1e6) for cell in some}) < 2:
            raise ValueError(
                "the bus needs rows that read at least two amounts there, in place or through the hot buffer: "
                "python -m benchmarks.tiers --policies dense,top:32 --fresh 32 --recorded FILE"
            )
        columns = [np.array([cell.bus_bytes for cell in some]) / 1e9, np.array([cell.bytes.hot_layers for cell in some]) * 1e-6]
        slope, layer = _fit(columns, some, known)
        if not slope:
            raise ValueError("steps take no longer with more bytes over the bus, so there is no rate to fit: measure longer sequences")
        return dataclasses.replace(found, bus=slope / 1e9, layer_s=layer * 1e-6)
    if not some:
        raise ValueError("there is no row of several devices to fit")
    columns = [
        np.array([sum(each.count for each in cell.exchanges) for cell in some]) * 1e-6,
        np.array([sum(each.received for each in cell.exchanges) for cell in some]) / 1e9,
        np.array([cell.choosing for cell in some]) * 1e-6,
    ]
    latency, slope, choose = _fit(columns, some, known)
    choose_s = choose * 1e-6 if columns[-1].any() else None
    return dataclasses.replace(found, latency_s=latency * 1e-6, link=slope / 1e9, choose_s=choose_s)


def _solve_device(cells: Sequence[Cell], without: str | None, per_byte: bool) -> Parameters:
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
    c1 = {"dense": Price(0.0)}
    for policy in dict.fromkeys(cell.policy for cell in cells if cell.policy != "dense"):
        rows = [cell for cell in cells if cell.policy == policy]
        known = np.array([cell.bytes.total for cell in rows]) / 1e9 * slope + c0
        scanned = np.array([cell.bytes.index for cell in rows]) / 1e9
        if without == "c1":
            c1[policy] = Price(0.0)
        elif not per_byte or len(set(scanned)) < 2:
            c1[policy] = Price(*_fit([np.ones(len(rows))], rows, known))
        else:
            fixed, slower = _fit([np.ones(len(rows)), scanned], rows, known)
            c1[policy] = Price(fixed, slower / 1e9)
    return Parameters(1e9 / slope, c0, c1)


def _fit(columns: Sequence[np.ndarray], cells: Sequence[Cell], known: Any) -> list[float]:
    """Coefficients >= 0 for which known + columns @ coefficients is closest to the times, by least squares of relative errors.

    A negative coefficient would predict a gain where nothing is saved, especially at lengths shorter than the measured ones. Columns of
    zeros get 0.
    """
    seconds, found = np.array([cell.seconds for cell in cells]), np.zeros(len(columns))
    told = [number for number, column in enumerate(columns) if column.any()]
    matrix = np.stack([columns[number] for number in told], axis=1) / seconds[:, None]
    found[told] = np.maximum(lsq_linear(matrix, 1 - known / seconds, bounds=(0, np.inf), method="bvls").x, 0)  # it may miss by a rounding
    return found.tolist()


def fit(cells: Sequence[Cell], config: ModelConfig, key: Key, *, source: str, per_byte: bool = True) -> CostModel:
    """The cost model of one device and model, with the terms that its cells tell. Errors are those of cells held out one by one: of
    speed-ups for one device, and for other terms the larger of the mean errors of times and of speed-ups."""
    cells = merged(cells)
    kinds, found, error = {cell.kind for cell in cells}, {}, {}
    for kind in (DEVICE, *sorted(kinds - {DEVICE})):
        found[kind] = solve(cells, kind, per_byte=per_byte)
        held = errors(held_out(cells, kind, "cell", per_byte=per_byte))
        error[kind] = held["speedup"][0] if kind == DEVICE else max(each[0] for each in (held["seconds"], held["speedup"]) if each)
    bus = exchanges = None
    if HOST in kinds:
        shares = [cell.hits for cell in cells if cell.kind == HOST and cell.lists == RECORDED and cell.hits is not None]
        hits, measured = statistics.mean(shares) if shares else None, tuple(each[2:] for each in _ranges(cells, HOST))
        bus = BusTerm(key.shape, 1 / found[HOST].bus, found[HOST].layer_s, hits, measured, error[HOST])
    if MESH in kinds:
        solved, names = found[MESH], tuple(sorted({cell.policy for cell in cells if cell.kind == MESH}))
        link = 1 / solved.link if solved.link > 1e-18 else math.inf
        exchanges = ExchangeTerm(key.shape, solved.latency_s, link, solved.choose_s, names, _ranges(cells, MESH), error[MESH])
    return CostModel(
        device=key.device,
        model=key.shape,
        sizes=sizes_of(config),
        dtype=key.dtype,
        bytes_per_s=found[DEVICE].bytes_per_s,
        c0=found[DEVICE].c0,
        c1=tuple((name, price) for name, price in found[DEVICE].c1.items() if name != "dense"),
        measured=tuple(each[2:] for each in _ranges(cells, DEVICE)),
        error=error[DEVICE],
        source=source,
        bus=bus,
        exchanges=exchanges,
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


def held_out(cells: Sequence[Cell], kind: str, by: str, *, without: str | None = None, per_byte: bool = True) -> list[Forecast]:
    """Predictions of every cell of a kind by a fit to all cells outside its group. by: a name in `GROUPS[kind]`.

    A group is left out whole, including its dense rows. A cell is missing if its policy then has no c1: by "budget", these are the largest
    and the smallest budget. ValueError if the other cells cannot be fitted, or no cell can be predicted.
    """
    if by not in GROUPS[kind]:
        raise ValueError(f"cells can be held out by {', '.join(GROUPS[kind])}, not by {by!r}")
    group, found = GROUPS[kind][by], []
    for key in dict.fromkeys(group(cell) for cell in cells if cell.kind == kind):
        if key is None:
            continue
        fitted = solve([cell for cell in cells if group(cell) != key], kind, without=without, per_byte=per_byte)
        for cell in cells:
            if cell.kind == kind and group(cell) == key:
                with contextlib.suppress(KeyError):
                    found.append(Forecast(cell, fitted.seconds(cell)))
    if not found:
        raise ValueError(f"no cell can be predicted when cells are held out by {by}: measure more lengths, batches or budgets")
    dense = [cell for cell in cells if cell.kind == kind and cell.policy == "dense"]
    if by == "budget":  # dense rows are in every fit
        fitted = solve(cells, kind, without=without, per_byte=per_byte)
        found += [Forecast(cell, fitted.seconds(cell)) for cell in dense]
    return found


def errors(found: Sequence[Forecast]) -> dict[str, Any]:
    """{"count": cells, "seconds": (mean, worst), "speedup": (mean, worst)}: relative errors of times, and of speed-ups over dense at the
    same place (None without any)."""
    dense = {each.cell.place: each for each in found if each.cell.policy == "dense"}
    pairs = [(dense[each.cell.place], each) for each in found if each.cell.policy != "dense" and each.cell.place in dense]
    times = [abs(each.seconds / each.cell.seconds - 1) for each in found]
    gains = [abs((beside.seconds / each.seconds) / (beside.cell.seconds / each.cell.seconds) - 1) for beside, each in pairs]
    shares = {name: (statistics.mean(some), max(some)) if some else None for name, some in (("seconds", times), ("speedup", gains))}
    return {"count": len(found)} | shares


def regret(cells: Sequence[Cell]) -> dict[str, float]:
    """Mean share of time that is lost by choosing with a cost model that has not seen the place, against the fastest policy there: "mean";
    and by always choosing dense: "always dense". Of one device. ValueError if nothing can be chosen."""
    cells = [cell for cell in cells if cell.kind == DEVICE]
    lost, dense = [], []
    for place in dict.fromkeys(cell.place for cell in cells):
        here = {cell.policy: cell for cell in cells if cell.place == place}
        if "dense" not in here or len(here) == 1:
            continue
        seen = [cell for cell in cells if cell.place != place]
        fitted, error = solve(seen), errors(held_out(seen, DEVICE, "cell"))["speedup"][0]
        chosen = worthwhile({name: fitted.seconds(cell) for name, cell in here.items()}, error)
        best = min(cell.seconds for cell in here.values())
        lost.append(here[chosen].seconds / best - 1)
        dense.append(here["dense"].seconds / best - 1)
    if not lost:
        raise ValueError("no place has a dense row and another one: measure them together (kvjax bench decode --policies)")
    return {"mean": statistics.mean(lost), "always dense": statistics.mean(dense)}


def checks(cells: Sequence[Cell]) -> dict[str, Any]:
    """How good a fit is on cells that it has not seen: {"errors": {kind: {group: {"all": `errors`, "without": those without the term of
    `TERM`}}}, "regret": `regret`}. Where a group cannot be held out, a sentence stands in its place."""
    found: dict[str, Any] = {"errors": {}, "regret": None}
    for kind in dict.fromkeys(cell.kind for cell in cells):
        for by in GROUPS[kind]:
            try:
                both = {name: errors(held_out(cells, kind, by, without=term)) for name, term in (("all", None), ("without", TERM[kind]))}
            except ValueError as error:
                both = str(error)
            found["errors"].setdefault(kind, {})[by] = both
    with contextlib.suppress(ValueError, TypeError):  # too few cells to hold the error of the rest out
        found["regret"] = regret(cells)
    return found


Rows = tuple[tuple[str, ...], list[tuple[str, ...]]]


def _named(cost: dict[str, Any]) -> str:
    return cost["model"] + packed_text(cost) + launch_text(cost)


def term_table(file: dict[str, Any]) -> Rows:
    """Columns and rows: the fitted values of a file's cost models."""
    rows = []
    for cost in file["cost_models"]:
        terms = {"bandwidth": f"{cost['bytes_per_s'] / 1e12:.3f} TB/s", "c0": f"{cost['c0'] * 1e3:.3f} ms"}
        for name, price in cost["c1"].items():
            terms[f"c1({name})"] = f"{price['fixed'] * 1e3:.3f} ms + {price['per_byte'] * 1e12:.3f} ms/GB of index"
        if (bus := cost["bus"]) is not None:
            hits = "hits not measured" if bus["hits"] is None else f"hits of recorded lists {bus['hits']:.0%}"
            terms["bus"] = f"{bus['per_s'] / 1e9:.1f} GB/s + {bus['layer_s'] * 1e6:.1f} us a layer; {hits}"
        if (term := cost["exchanges"]) is not None:
            link = "no time told" if term["link_per_s"] is None else f"{term['link_per_s'] / 1e9:.1f} GB/s"
            choose = "" if term["choose_s"] is None else f"; {term['choose_s'] * 1e6:.1f} us a layer that chooses over devices"
            terms["exchanges"] = f"{link} + {term['latency_s'] * 1e6:.1f} us each{choose}"
        rows += [(cost["device"], _named(cost), *each) for each in terms.items()]
    return ("device", "model", "term", "fitted"), rows


def error_table(file: dict[str, Any]) -> Rows:
    """Columns and rows: errors on held-out cells, and beside them those of a fit without the term in question."""
    rows = []
    for cost, checked in zip(file["cost_models"], file["held_out"], strict=True):
        for kind, groups in checked["errors"].items():
            for by, both in groups.items():
                first = _named(cost), kind, f"a {by}"
                if isinstance(both, str):
                    rows.append((*first, f"cannot be: {re.split(': |[,;] got ', both, maxsplit=1)[0]}", "", "", ""))
                    continue
                shown = [f"{part[0]:.1%}, {part[1]:.1%}" if (part := both["all"][name]) else "-" for name in ("seconds", "speedup")]
                part = both["without"]["speedup"] or both["without"]["seconds"]
                rows.append((*first, str(both["all"]["count"]), *shown, f"{part[0]:.1%}, {part[1]:.1%} ({TERM[kind]})"))
    heads = "time: mean, worst error", "speed-up: mean, worst error", "speed-up without a term"
    return ("model", "pages", "held out together", "cells", *heads), rows
