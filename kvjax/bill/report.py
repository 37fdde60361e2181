"""How good a bill is, as figures for JSON, as tables for the terminal, and as the marked parts of a document.

`kvjax bill fit --into DOCUMENT` writes each table of `ALL_TABLES` between the marks `<!-- bill:NAME -->` and `<!-- /bill -->`
of a document. With `--marks packed` it writes those of `<!-- bill:packed-NAME -->`.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from kvjax.bill.bus_fitting import HELD_OUT, TERMS, tier_errors, tier_forecasts
from kvjax.bill.fitting import FORMS, GROUPS, Cell, errors, forecasts
from kvjax.bill.mesh_report import MESH_TABLES, named, not_held_out
from kvjax.bill.regimes import crossover
from kvjax.bill.regret import regrets, summary
from pallas_kernels.core.tables import markdown

if TYPE_CHECKING:
    from kvjax.bill.bus_fitting import TierCell
    from kvjax.bill.step_bill import Bill, Prediction
    from kvjax.model import ModelConfig

MARK = re.compile(r"(<!-- bill:([\w-]+) -->\n).*?(<!-- /bill -->)", re.DOTALL)
IN_SAMPLE = "nothing"
TIER_ERRORS = ("seconds", "speedup", "from_sizes")


def checks(cells: Sequence[Cell], form: str) -> dict[str, Any]:
    """Errors of predicted speed-ups in every form of `FORMS`, by what is held out, and regret of choosing by the bill in `form`.

    errors: {"nothing" or group: {form: Errors}}. regret: {allowed policies: {group: summary}}. impossible: {group: why}, for groups that
    cannot be held out with these cells; they are missing in the others.
    """
    found: dict[str, Any] = {"errors": {}, "regret": {}, "impossible": {}}
    for by in (None, *GROUPS):
        try:
            found["errors"][by or IN_SAMPLE] = {each: dataclasses.asdict(errors(forecasts(cells, by, each))) for each in FORMS}
        except ValueError as error:
            found["impossible"][by] = str(error)
    names = sorted({cell.policy for cell in cells} - {"dense"})
    for allowed in dict.fromkeys((*((name,) for name in names), tuple(names))):
        by_group = found["regret"][", ".join(("dense", *allowed))] = {}
        for by in [by for by in ("cell", "length", "batch") if by not in found["impossible"]]:
            try:
                by_group[by] = summary(regrets(cells, allowed, by, form))
            except ValueError as error:  # the bill's own error is held out within what is seen, which takes one more place
                found["impossible"].setdefault(f"{by}, for a choice", str(error))
    return found


Rows = tuple[tuple[str, ...], list[tuple[str, ...]]]


def parameter_table(file: dict[str, Any]) -> Rows:
    """Columns and rows: the fitted values of a file's bills."""
    rows = []
    for bill in file["bills"]:
        first = bill["device"], named(bill), f"{bill['bytes_per_s'] / 1e12:.3f}", f"{bill['c0'] * 1e3:.3f}"
        prices = bill["c1"] or {"": {"fixed": float("nan"), "per_byte": float("nan")}}
        rows += [(*first, name, f"{price['fixed'] * 1e3:.3f}", f"{price['per_byte'] * 1e12:.3f}") for name, price in prices.items()]
    return ("device", "model", "TB/s", "c0, ms", "policy", "c1, ms", "and ms per GB of index"), rows


def error_table(file: dict[str, Any]) -> Rows:
    """Columns and rows: errors of predicted speed-ups over dense."""
    rows = []
    for bill, checked in zip(file["bills"], file["held_out"], strict=True):
        for by, forms in checked["errors"].items():
            held_out = "nothing (in-sample)" if by == IN_SAMPLE else f"a {by}"
            for form, found in forms.items():
                figures = str(found["count"]), f"{found['mean']:.2%}", f"{found['worst']:.2%}", f"{found['r2']:.4f}"
                rows.append((named(bill), held_out, FORMS[form], *figures))
        rows += [(named(bill), f"a {by}", not_held_out(why), "", "", "", "") for by, why in checked["impossible"].items()]
    return ("model", "held out together", "form of c1", "cells", "mean error", "worst error", "R^2"), rows


def regret_table(file: dict[str, Any]) -> Rows:
    """Columns and rows: the regret of choosing by the bill, on cells that were held out."""
    rows = []
    for bill, checked in zip(file["bills"], file["held_out"], strict=True):
        for allowed, groups in checked["regret"].items():
            for by, found in groups.items():
                shares = (f"{found[name]:+.2%}" for name in ("mean", "worst", "worst_against_dense", "always_dense"))
                rows.append((named(bill), allowed, f"a {by}", str(found["cells"]), *shares))
    return ("model", "allowed", "held out together", "cells", "mean regret", "worst regret", "worst against dense", "always dense"), rows


def tier_checks(base: Sequence[Cell], cells: Sequence[TierCell], form: str) -> dict[str, Any]:
    """Errors on held-out cells with pages in host memory, by what is held out and by the terms of the bus; and every cell, held out by
    length and device size. form: of c1.

    errors: {group: {terms: `tier_errors`}}. impossible: {group: why}, for groups that cannot be held out with these cells. cells: measured
    and predicted seconds.
    """
    found: dict[str, Any] = {"errors": {}, "impossible": {}, "cells": []}
    for by in HELD_OUT:
        try:
            found["errors"][by] = {terms: tier_errors(tier_forecasts(base, cells, by, form, terms)) for terms in TERMS}
        except ValueError as error:
            found["impossible"][by] = str(error)
    if "cell" in found["errors"]:
        for each in tier_forecasts(base, cells, "cell", form):
            cell = each.cell
            fields = {name: getattr(cell, name) for name in ("length", "policy", "lists", "device_bytes", "hits")}
            moved = {"in_place": cell.bytes.in_place, "listed": cell.bytes.listed}
            found["cells"].append(
                fields | moved | {"measured_s": cell.seconds, "predicted_s": each.seconds, "from_sizes_s": each.from_sizes}
            )
    return found


def bus_table(file: dict[str, Any]) -> Rows:
    """Columns and rows: the fitted terms of pages in host memory."""
    rows = []
    for bill in file["bills"]:
        if (bus := bill.get("bus")) is not None:
            hits = "not measured" if bus["hits"] is None else f"{bus['hits']:.0%}"
            rates = f"{bus['in_place_per_s'] / 1e9:.1f}", f"{bus['copied_per_s'] / 1e9:.1f}", f"{bus['layer_s'] * 1e6:.1f}"
            rows.append((bill["device"], named(bill), *rates, hits))
    return ("device", "model", "GB/s in place", "GB/s copied", "us a layer", "hits of recorded lists"), rows


def bus_error_table(file: dict[str, Any]) -> Rows:
    """Columns and rows: errors on cells with pages in host memory."""
    rows = []
    for bill, checked in zip(file["bills"], file.get("held_out_tiers", ()), strict=False):
        if checked is None:
            continue
        for by, forms in checked["errors"].items():
            for terms, found in forms.items():
                shown = [f"{part['mean']:.1%}, {part['worst']:.1%}" if (part := found[name]) else "-" for name in TIER_ERRORS]
                rows.append((named(bill), f"a {by}", TERMS[terms], str(found["count"]), *shown))
        rows += [(named(bill), f"a {by}", not_held_out(why), "", "", "", "") for by, why in checked["impossible"].items()]
    heads = "time: mean, worst error", "speed-up: mean, worst error", "time from sizes: mean, worst error"
    return ("model", "held out together", "terms", "cells", *heads), rows


PROJECTED = (2**13, 2**15, 2**17, 2**19, 2**20)
"""Lengths, in tokens, of the rows of `projections`."""


def projections(bill: Bill, config: ModelConfig, lengths: Sequence[int] = PROJECTED, batches: Sequence[int] = (1, 8)) -> list[dict]:
    """Predicted seconds of dense and of the bill's policies, as fitted and with c0 = 0 (a runtime that costs nothing; a projection)."""
    rows, without, packed = [], bill.without_overhead(), {"weights": bill.weights, "cache_format": bill.cache_format}
    for batch, length in itertools.product(batches, lengths):
        seconds = {
            name: [each.predict(config, name, length, batch, **packed).seconds for each in (bill, without)]
            for name in ("dense", *(name for name, _ in bill.c1))
        }
        rows.append({"tokens": length, "batch": batch, "seconds": seconds})
    return rows


def projection_table(file: dict[str, Any]) -> Rows:
    """Columns and rows: milliseconds and speed-ups over dense, as fitted and with c0 = 0."""
    names = list(dict.fromkeys(name for checked in file["held_out"] for row in checked["projections"] for name in row["seconds"]))
    rows = []
    for bill, checked in zip(file["bills"], file["held_out"], strict=True):
        for row in checked["projections"]:
            dense = row["seconds"]["dense"]
            cells = [f"{dense[0] * 1e3:.2f}, {dense[1] * 1e3:.2f}"]
            for name in names[1:]:
                pair = row["seconds"].get(name)
                cells.append(
                    "" if pair is None else ", ".join(f"{ours * 1e3:.2f} ({d / ours:.2f}x)" for d, ours in zip(dense, pair, strict=True))
                )
            rows.append((named(bill), str(row["batch"]), f"{row['tokens']:,}", *cells))
    return ("model", "batch", "tokens", *(f"{name}: as fitted, c0 = 0" for name in names)), rows


BATCHES = (1, 2, 4, 8, 16, 32, 64)
CROSSINGS = ("policy", "batch", "faster than dense", "from")
"""Columns of `crossing`."""


def known_from(found: Prediction) -> str:
    """Whether a prediction is based on measurements or is a projection, in one word."""
    return "projection" if found.projection else "measurements"


def crossing(bill: Bill, config: ModelConfig, policy: str, batch: int, **options: Any) -> tuple[str, str, str, str]:
    """The length from which a policy is faster than dense at a batch, and whether that was measured: the cells of `CROSSINGS`. options: as
    for `Bill.predict`."""
    start = crossover(bill, config, policy, batch, **options)
    if start is None:
        return policy, f"{batch}", "never", "-"
    found = bill.predict(config, policy, start, batch, **options)
    beside = [max((size for size, *_ in bill.measured if size <= batch), default=0)]
    beside.append(min((size for size, *_ in bill.measured if size >= batch), default=0))
    known = "measurements at this batch" if beside[0] == batch else f"between batches {beside[0]} and {beside[1]}; this one not measured"
    return policy, f"{batch}", f"from {start:,} tokens", f"projection: {'; '.join(found.projection)}" if found.projection else known


TABLES = {
    "parameters": parameter_table,
    "errors": error_table,
    "regret": regret_table,
    "projections": projection_table,
}
TIER_TABLES = {"bus": bus_table, "bus-errors": bus_error_table}
"""Tables of files with terms of pages in host memory."""
ALL_TABLES = TABLES | TIER_TABLES | MESH_TABLES


def rendered(text: str, file: dict[str, Any], prefix: str = "") -> str:
    """A document with the marked parts of this file written anew. prefix: of its marks, so that a document has tables of several files:
    with "packed" they are `<!-- bill:packed-NAME -->`. Parts of other prefixes stay as they are. ValueError for a name that no table has,
    for a mark that is not closed, and for a prefix that has no part in the document."""
    marks, tables = MARK.findall(text), ALL_TABLES
    named = {name: _parted(name) for _, name, _ in marks}
    if unknown := sorted(name for name, (_, table) in named.items() if table not in tables):
        raise ValueError(f"no part is called {unknown[0]!r}; there are {', '.join(tables)}")
    if len(marks) != text.count("<!-- bill:"):
        raise ValueError("a mark <!-- bill:NAME --> is not followed by <!-- /bill -->")
    if prefix and prefix not in {each for each, _ in named.values()}:
        raise ValueError(f"no mark begins with <!-- bill:{prefix}-")
    made = file["provenance"]
    source = f"{made['date'][:10]}; `{made['command']}`."

    def filled(found: re.Match[str]) -> str:
        own, table = named[found[2]]
        return found[0] if own != prefix else f"{found[1]}{markdown(*tables[table](file))}\n\n{source}\n{found[3]}"

    return MARK.sub(filled, text)


def _parted(mark: str) -> tuple[str, str]:
    """The prefix and the table of a mark's name; ("", the name) for a table's own name, and for one that no table has."""
    if mark in ALL_TABLES:
        return "", mark
    found = (mark.removesuffix(f"-{table}") for table in sorted(ALL_TABLES, key=len, reverse=True) if mark.endswith(f"-{table}"))
    prefix = next(found, "")
    return (prefix, mark.removeprefix(f"{prefix}-")) if prefix else ("", mark)
