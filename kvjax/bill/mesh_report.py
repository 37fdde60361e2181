"""How good the terms of a mesh are, as figures for JSON and as tables."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from kvjax.bill.mesh_fitting import MESH_GROUPS, MESH_TERMS, mesh_errors, mesh_forecasts
from kvjax.bill.mesh_terms import LAWS
from pallas_kernels.core.results import launch_text, packed_text

if TYPE_CHECKING:
    from kvjax.bill.fitting import Cell
    from kvjax.bill.mesh_fitting import MeshCell

    Rows = tuple[tuple[str, ...], list[tuple[str, ...]]]


def mesh_checks(base: Sequence[Cell], cells: Sequence[MeshCell], form: str, law: str) -> dict[str, Any]:
    """Errors on held-out cells of a mesh, by what is held out, by the law of latency and by terms; and every cell, held out by mesh, length
    and batch. form: of c1. law: of the bill; the other laws are shown with all terms.

    errors: {group: {"law, terms": `mesh_errors`}}. impossible: {group: why}, for groups that cannot be held out with these cells. cells:
    measured and predicted seconds.
    """
    found: dict[str, Any] = {"errors": {}, "impossible": {}, "cells": []}
    forms = [(law, terms) for terms in MESH_TERMS] + [(other, "all") for other in LAWS if other != law]
    for by in MESH_GROUPS:
        try:
            errors = {f"{each}, {terms}": mesh_errors(mesh_forecasts(base, cells, by, form, each, terms)) for each, terms in forms}
        except ValueError as error:
            found["impossible"][by] = str(error)
        else:
            found["errors"][by] = errors
    if "cell" in found["errors"]:
        for each in mesh_forecasts(base, cells, "cell", form, law):
            fields = {name: getattr(each.cell, name) for name in ("length", "batch", "policy", "tensor", "context")}
            found["cells"].append(fields | {"measured_s": each.cell.seconds, "predicted_s": each.seconds})
    return found


def named(bill: dict[str, Any]) -> str:
    """The model of a bill, what of it is packed, and the steps of a launch, if they are several."""
    return bill["model"] + packed_text(bill) + launch_text(bill)


def not_held_out(why: str) -> str:
    """The cell of a table for what cannot be held out: the error without what was found, and without what to measure."""
    return f"cannot be: {re.split(': |[,;] got ', why, maxsplit=1)[0]}"


def mesh_table(file: dict[str, Any]) -> Rows:
    """Columns and rows: the fitted terms of a mesh."""
    rows = []
    for bill in file["bills"]:
        if (terms := bill.get("mesh")) is None:
            continue
        link = "not told from nothing" if terms["link_per_s"] is None else f"{terms['link_per_s'] / 1e9:.1f}"
        choice = "not measured" if terms["choose_s"] is None else f"{terms['choose_s'] * 1e6:.1f}"
        for kind, each in terms["latency"].items():
            times = f"{each['launch'] * 1e6:.1f}", f"{each['hop'] * 1e6:.1f}", terms["law"], ", ".join(map(str, each["sizes"]))
            rows.append((bill["device"], named(bill), kind, *times, link, choice))
    heads = ("exchange", "us", "and us a hop", "hops", "devices measured", "GB/s received", "us a layer that chooses")
    return ("device", "model", *heads), rows


def mesh_error_table(file: dict[str, Any]) -> Rows:
    """Columns and rows: errors on held-out cells of a mesh."""
    rows = []
    for bill, checked in zip(file["bills"], file.get("held_out_meshes", ()), strict=False):
        if checked is None:
            continue
        for by, forms in checked["errors"].items():
            for name, found in forms.items():
                law, terms = name.split(", ")
                shown = [f"{part['mean']:.1%}, {part['worst']:.1%}" if (part := found[each]) else "-" for each in ("seconds", "speedup")]
                rows.append((named(bill), f"a {by}", law, MESH_TERMS[terms], str(found["count"]), *shown))
        rows += [(named(bill), f"a {by}", "", not_held_out(why), "", "", "") for by, why in checked["impossible"].items()]
    heads = "time: mean, worst error", "speed-up: mean, worst error"
    return ("model", "held out together", "hops", "terms", "cells", *heads), rows


MESH_TABLES = {"mesh": mesh_table, "mesh-errors": mesh_error_table}
"""Tables of files with terms of a mesh."""
