"""Fits the terms of pages in host memory (`kvjax.bill.bus`) to rows of `kvjax bench tiers`, and measures their error on held-out rows.

Rows with everything on the device give bandwidth, c0 and c1, as those of `kvjax bench decode` do. With these fixed, steps that read in
place give the rate of that, and steps through the hot buffer the rate of copies and the seconds of a layer, by least squares of relative
errors.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from kvjax.bill.bus import Bus
from kvjax.bill.fitting import Cell, Key, Parameters, launch_of, merged, read_cells, relative_fit, seconds_of, solve
from kvjax.bill.volume import StepBytes, step_bytes
from kvjax.cache.spanning import FrameCounts
from kvjax.model import ModelConfig
from kvjax.policies.decode.naming import parse_recorded

OWN, RECORDED = "own", "recorded"
"""Kinds of lists of a row: those that the policy chooses itself, of random keys; those of the embedded model."""

TERMS = {
    "all": "bytes over the bus, and seconds for each layer of the hot buffer",
    "bytes": "bytes over the bus alone",
    "none": "none: pages in host memory cost what others do",
}
"""Forms of the terms. "all" is the form of a bill; the others show what a term is worth."""

HELD_OUT: dict[str, Callable[[TierCell], Any]] = {
    "cell": lambda cell: (cell.length, cell.device_bytes),
    "length": lambda cell: cell.length,
    "device size": lambda cell: cell.device_bytes,
    "kind of list": lambda cell: (cell.policy, cell.lists) if cell.bytes.hot_layers else None,
}
"""Groups of cells that are held out together; those of None are not. For a length, its rows with everything on the device are held out,
too."""


@dataclasses.dataclass(frozen=True)
class TierCell:
    """A measured step of one sequence of about `length` tokens, of which a part lies in host memory.

    policy: its name. lists: the kind of its lists. device_bytes: of the cache. seconds: per step. bytes: those of the step; `in_place`,
    `listed` and, with `hits`, what was copied are measured. sized: the same, with `in_place` and `listed` computed from the sizes. hits:
    the measured share of listed bytes that was found in the hot buffer; None where nothing was listed there.
    """

    length: int
    policy: str
    lists: str
    device_bytes: int
    seconds: float
    bytes: StepBytes
    sized: StepBytes
    hits: float | None


@dataclasses.dataclass(frozen=True)
class Rates:
    """Fitted values, as in `Bus`; seconds per byte."""

    in_place: float
    copied: float
    layer_s: float

    def seconds(self, moved: StepBytes, hits: float) -> float:
        return moved.in_place * self.in_place + moved.copied(hits) * self.copied + self.layer_s * moved.hot_layers


@dataclasses.dataclass(frozen=True)
class TierForecast:
    """A cell, and its seconds as predicted by a fit to other cells: with the measured bytes over the bus, and with those that sizes and the
    other cells' share of hits give (None where these have none)."""

    cell: TierCell
    seconds: float
    from_sizes: float | None


def read_tier_cells(
    run: dict[str, Any], config_of: Callable[[str, int], ModelConfig], steps_per_launch: int = 1
) -> dict[Key, tuple[list[Cell], list[TierCell]]]:
    """The measured cells of a `kvjax bench tiers` JSON, by what a bill is fitted to: with everything on the device, and with pages in host
    memory. Rows that were skipped are left out. config_of, steps_per_launch: as for `read_cells`.

    ValueError for a file of another command, for rows of an earlier version, and for rows whose bytes are far from those of `step_bytes`.
    """
    if run.get("bench") != "tiers":
        raise ValueError(f"this is not a result of kvjax bench tiers: its field 'bench' is {run.get('bench')!r}")
    groups: dict[Key, tuple[list[Cell], list[TierCell]]] = {}
    for row in run["rows"]:
        # Bills of packed pages have no term of a bus yet.
        if "median_s" not in row or launch_of(row) != steps_per_launch or "cache_format" in row:
            continue
        where = f"{row['shape']}, {row['tokens']:,} tokens, {row['policy']}"
        if "asked_bytes" not in row:
            raise ValueError(
                f"{where}: the row does not say what was listed in host memory, so it is an earlier version's; measure it again"
            )
        seconds = seconds_of(row, where)
        config, dtype = config_of(row["shape"], row["layers"]), row["dtype"]
        frames = None if row["frames"] is None else FrameCounts(*row["frames"])
        sized = step_bytes(config, parse_recorded(row["name"]), row["mean_length"], dtype=dtype, frames=frames)
        if abs(sized.kv / row["read_bytes"] - 1) > 0.02:
            raise ValueError(f"{where}: the step read {row['read_bytes']:,.0f} bytes, kvjax.bill counts {sized.kv:,}; measure it again")
        resident, tiered = groups.setdefault(Key(run["provenance"]["device"], row["shape"], row["layers"], dtype), ([], []))
        if frames is None:
            if row["lists"] == OWN:  # the others attend by another op than the policy itself
                resident.append(Cell(row["tokens"], 1, row["name"], seconds, sized))
            continue
        asked, copied = row["asked_bytes"], row["copied_bytes"]
        bytes_read = dataclasses.replace(sized, in_place=round(max(0.0, row["host_bytes"] - copied)), listed=round(asked))
        hits = 1 - copied / asked if asked else None
        named = row["name"], row["lists"], row["device_bytes"], seconds
        tiered.append(TierCell(row["tokens"], *named, bytes_read, sized, hits))
    return groups


def read_runs(
    runs: Sequence[dict[str, Any]], config_of: Callable[[str, int], ModelConfig], steps_per_launch: int = 1
) -> dict[Key, tuple[list[Cell], list[TierCell]]]:
    """The cells of results of `kvjax bench decode` and `tiers`, by what a bill is fitted to, as `read_tier_cells` gives them. Of a
    cell that was measured twice the later one counts. steps_per_launch: as for `read_cells`. Raises as `read_cells` and `read_tier_cells`
    do."""
    found: dict[Key, tuple[list[Cell], list[TierCell]]] = {}
    for run in sorted(runs, key=lambda run: run["provenance"]["date"]):
        if run.get("bench") == "tiers":
            read = read_tier_cells(run, config_of, steps_per_launch)
        else:
            read = {key: (cells, []) for key, cells in read_cells(run, config_of, steps_per_launch).items()}
        for key, parts in read.items():
            for kept, part in zip(found.setdefault(key, ([], [])), parts, strict=True):
                kept += part
    return {key: (merged(cells), merged_tiers(tiered)) for key, (cells, tiered) in found.items()}


def merged_tiers(cells: Sequence[TierCell]) -> list[TierCell]:
    """One cell for each length, device size, policy and kind of list: the last one measured."""
    latest = {(cell.length, cell.device_bytes, cell.policy, cell.lists): cell for cell in cells}
    return [latest[key] for key in sorted(latest)]


def solve_bus(base: Parameters, cells: Sequence[TierCell], terms: str = "all") -> Rates:
    """Seconds per byte and per layer, beside what `base` explains. ValueError if the cells cannot tell them apart, or `base` lacks a
    policy."""
    if terms not in TERMS:
        raise ValueError(f"terms are one of {', '.join(TERMS)}, not {terms!r}")
    if lacking := sorted({cell.policy for cell in cells} - set(base.c1)):
        raise ValueError(f"there is no row of {lacking[0]} with everything on the device: measure it, too (kvjax bench tiers --resident)")
    if terms == "none":
        return Rates(0.0, 0.0, 0.0)
    here, hot = [cell for cell in cells if not cell.bytes.hot_layers], [cell for cell in cells if cell.bytes.hot_layers]
    if len({round(_copied(cell) / 1e6) for cell in hot}) < 2 or not any(cell.bytes.in_place for cell in here):
        raise ValueError(
            f"the bus needs a row that reads in place, as dense does, and rows of at least two sizes that go through the hot buffer; got "
            f"{len(here)} and {len(hot)} rows: kvjax bench tiers --policies dense,top:32 --fresh 32 --recorded FILE"
        )
    known = np.array([base.on_device(cell.policy, cell.bytes) for cell in here])
    (slope,) = relative_fit([np.array([cell.bytes.in_place for cell in here]) / 1e9], here, known)
    columns = [np.array([_copied(cell) for cell in hot]) / 1e9]
    if terms == "all":
        columns.append(np.array([cell.bytes.hot_layers for cell in hot]) * 1e-6)
    known = np.array([base.on_device(cell.policy, cell.bytes) + cell.bytes.in_place / 1e9 * slope for cell in hot])
    per_copied, *per_layer = relative_fit(columns, hot, known)
    if not slope or not per_copied:
        raise ValueError("steps take no longer with more bytes over the bus, so there is no rate to fit: measure longer sequences")
    return Rates(slope / 1e9, per_copied / 1e9, per_layer[0] * 1e-6 if per_layer else 0.0)


def default_hits(cells: Sequence[TierCell]) -> float | None:
    """The mean share of hits of recorded lists; None without one. Lists of random keys, and those that share nothing, are no model's."""
    shares = [cell.hits for cell in cells if cell.lists == RECORDED and cell.hits is not None]
    return statistics.mean(shares) if shares else None


def tier_forecasts(base: Sequence[Cell], cells: Sequence[TierCell], by: str, form: str = "scan", terms: str = "all") -> list[TierForecast]:
    """Predictions of every cell by a fit to all cells outside its group. base: cells with everything on the device. by: a name in
    `HELD_OUT`. form: of c1. ValueError if the other cells cannot be fitted."""
    if by not in HELD_OUT:
        raise ValueError(f"cells can be held out by {', '.join(HELD_OUT)}, not by {by!r}")
    group, found = HELD_OUT[by], []
    for key in dict.fromkeys(map(group, cells)):
        if key is None:
            continue
        seen = [cell for cell in cells if group(cell) != key]
        fitted = solve([cell for cell in merged(base) if by != "length" or cell.length != key], form)
        rates, hits = solve_bus(fitted, seen, terms), default_hits(seen)
        for cell in cells:
            if group(cell) != key:
                continue
            if terms == "none":
                here = dataclasses.replace(cell.bytes, in_place=0)
                found.append(TierForecast(cell, fitted.on_device(cell.policy, here), None))
                continue
            seconds = fitted.on_device(cell.policy, cell.bytes) + rates.seconds(cell.bytes, cell.hits or 0.0)
            sized = fitted.on_device(cell.policy, cell.sized) + rates.seconds(cell.sized, hits or 0.0)
            found.append(TierForecast(cell, seconds, None if hits is None and cell.sized.listed else sized))
    return found


def tier_errors(found: Sequence[TierForecast]) -> dict[str, Any]:
    """Mean and worst relative error of seconds, and of speed-ups over dense at the same length and device size (None without a dense cell).
    from_sizes: mean error of seconds where bytes over the bus come from sizes and the default share of hits; of lists that the share was
    not measured with (random keys, nothing shared) it says little, so only dense and recorded lists count (None without one)."""
    dense = {(each.cell.length, each.cell.device_bytes): each for each in found if each.cell.policy == "dense"}
    pairs = [(dense[place], each) for each in found if (place := (each.cell.length, each.cell.device_bytes)) in dense]
    speedups = [
        (beside.seconds / each.seconds) / (beside.cell.seconds / each.cell.seconds) - 1
        for beside, each in pairs
        if each.cell.policy != "dense"
    ]
    times = [each.seconds / each.cell.seconds - 1 for each in found]
    sized = [
        each.from_sizes / each.cell.seconds - 1
        for each in found
        if each.from_sizes is not None and (each.cell.policy == "dense" or each.cell.lists == RECORDED)
    ]
    errors = {"count": len(times)}
    for name, each in (("seconds", times), ("speedup", speedups), ("from_sizes", sized)):
        errors[name] = {"mean": statistics.mean(map(abs, each)), "worst": max(map(abs, each))} if each else None
    return errors


def fit_bus(base: Sequence[Cell], cells: Sequence[TierCell], *, model: str, source: str, form: str = "scan") -> Bus:
    """The terms of one device and model. Its `error` is the larger of the mean errors of seconds and of speed-ups, over cells held out by
    length and device size. base, form: as for `tier_forecasts`. ValueError if the cells cannot be fitted."""
    rates = solve_bus(solve(merged(base), form), cells)
    errors = tier_errors(tier_forecasts(base, cells, "cell", form))
    lengths = [cell.length for cell in cells]
    return Bus(
        model=model,
        in_place_per_s=1 / rates.in_place,
        copied_per_s=1 / rates.copied,
        layer_s=rates.layer_s,
        hits=default_hits(cells),
        measured=((1, min(lengths), max(lengths)),),
        error=max(each["mean"] for each in (errors["seconds"], errors["speedup"]) if each),
        source=source,
    )


def _copied(cell: TierCell) -> float:
    return cell.bytes.copied(cell.hits or 0.0)
