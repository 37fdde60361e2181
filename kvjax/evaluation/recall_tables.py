"""Tables of a recall run, and of needles after each prefill, from their JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pallas_kernels.core.tables import estimate, markdown, span

NOISE = "dense again"


COLUMNS = ("tokens", "prefill", "facts", "facts, 95%", "lost/gained", "facts, difference, 95%", "by distance", "passages")


COLUMNS += ("passages, difference, 95%", "KL, text", "KL, text, 95%", "KL, all")


def recall_rows(figures: dict[str, Any]) -> list[tuple[str, ...]]:
    """The cells of `COLUMNS`, a row per length and policy. Invalid cells are marked."""
    return [_cells(row, next(cell for cell in figures["cells"] if cell["length"] == row["length"])) for row in figures["rows"]]


def _cells(row: dict[str, Any], cell: dict[str, Any]) -> tuple[str, ...]:
    name = f"{NOISE} (noise)" if row["policy"] == NOISE else row["policy"]
    dense, kl = row["policy"] == "dense", row["kl_text"]
    facts, passages = ("invalid", *[""] * 4), ("invalid", "")
    if not cell["facts_invalid"]:
        share, shares = row["share"], [f"{each['hits'] / each['facts']:.0%}" if each["facts"] else "-" for each in row["by_distance"]]
        pairs = ("", "") if dense else ("-{lost}/+{gained}".format(**row["against_dense"]), estimate(row["against_dense"]["difference"]))
        facts = (f"{row['hits']}/{row['facts']}", span(share["low"], share["high"]), *pairs, ", ".join(shares))
    if not cell["passages_invalid"]:
        passages = (f"{row['passages']['value']:.1%}", "" if dense else estimate(row["passages_against_dense"]))
    apart = ("", "", "") if dense else (f"{kl['value']:.2g}", span(kl["low"], kl["high"], ".2g"), f"{row['kl']['value']:.2g}")
    return f"{row['length']:,}", name, *facts, *passages, *apart


def remarks(figures: dict[str, Any]) -> list[str]:
    """Remarks below the table: invalid cells, lengths that are not finished, policies that failed."""
    lines = []
    for cell in figures["cells"]:
        for which in ("facts", "passages"):
            lines += [f"invalid, {which} at {cell['length']:,} tokens: {why}" for why in cell[f"{which}_invalid"]]
        if cell["prompts"] < cell["of"]:
            lines.append(f"{cell['length']:,} tokens: {cell['prompts']} of {cell['of']} prompts done")
    return lines + [f"{name} failed and was left out: {why}" for name, why in figures["failed"].items()]


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
