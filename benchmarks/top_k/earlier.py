"""Continuing a run of the benchmark of `top_k` that was cut: which cases are missing, and which runs the rows of one
file come from."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.top_k.cases import Case


def load_run(file: Path) -> dict[str, Any]:
    """The run in a file of results. ValueError for another file."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as problem:
        raise ValueError(f"{file} is no JSON: {problem}") from None
    if not isinstance(found, dict):
        raise ValueError(f"{file} holds no run of a benchmark")
    return found


def continued(earlier: dict[str, Any] | None) -> list[dict[str, Any]]:
    """The runs that this run continues, the first one first: their provenance, copy and the names of their cases."""
    if earlier is None:
        return []
    before = earlier.get("continues", [])
    theirs = {name for run in before for name in run["cases"]}
    own = {name: earlier[name] for name in ("provenance", "copy", "took")}
    return [*before, own | {"cases": [row["case"] for row in earlier["rows"] if row["case"] not in theirs]}]


def missing(cases: Sequence[Case], earlier: dict[str, Any], device: str, implementation: str | None) -> list[Case]:
    """The cases that a run lacks, or that failed in it; failed ones are removed from the run. ValueError for a run of
    another bench, another device, or another implementation of the op."""
    if earlier.get("bench") != "top-k":
        raise ValueError(f"--only-missing takes a JSON of this benchmark, got one of {earlier.get('bench')!r}")
    if (earlier["provenance"]["device"], earlier["implementation"]) != (device, implementation):
        theirs = f"{earlier['provenance']['device']}, implementation {earlier['implementation']}"
        raise ValueError(f"times of one file must be of one device and implementation; it has {theirs}, this is {device}, {implementation}")
    earlier["rows"] = [row for row in earlier["rows"] if "failed" not in row]
    there = {row["case"] for row in earlier["rows"]}
    return [case for case in cases if case.name not in there]
