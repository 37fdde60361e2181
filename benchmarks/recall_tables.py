"""Markdown tables of evaluation, from committed figures: by pandas, and for recall runs and for needles after each
prefill."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import pandas

from kvjax.evaluation.recall_report import COLUMNS, recall_rows, remarks
from pallas_kernels.core.tables import estimate


def markdown(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table of texts. The first column is aligned to the left, the others to the right."""
    sides = ("left", *["right"] * (len(columns) - 1))
    return pandas.DataFrame(list(rows), columns=list(columns)).to_markdown(index=False, disable_numparse=True, colalign=sides)


def recall_table(runs: Sequence[dict[str, Any]]) -> str:
    """Every run's rows and remarks, by length. Rows that several runs share (dense, the control) appear once."""
    found = sorted(dict.fromkeys(cells for run in runs for cells in recall_rows(run)), key=lambda cells: int(cells[0].replace(",", "")))
    lines = dict.fromkeys(f"* {line}" for run in runs for line in remarks(run))
    return "\n\n".join(filter(None, (markdown(COLUMNS, found), "\n".join(lines))))


def needles_table(runs: Sequence[dict[str, Any]]) -> str:
    """Needles found by dense decoding after each prefill policy beside dense prefill, on the same haystacks."""
    rows = []
    for run in sorted(runs, key=lambda run: run["length"]):
        (dense,) = run["results"]
        for pair, other in zip(run["pairs"], run["other_prefills"], strict=True):
            found = [f"{result['hits']}/{run['trials']}" for result in (dense, *other["results"])]
            rows.append((f"{run['length']:,}", pair["prefill"], *found, f"-{pair['lost']}/+{pair['gained']}", estimate(pair["difference"])))
    return markdown(("tokens", "prefill", "found after dense", "after this", "lost/gained", "difference, 95%"), rows)
