"""Tables of decode steps and of whole prompts."""

from __future__ import annotations

from collections.abc import Sequence
from operator import itemgetter
from typing import Any

from rich.table import Table

from pallas_kernels.core.results import launch_text, mesh_text, packed_text
from pallas_kernels.core.tables import markdown, span, tokens_text
from pallas_kernels.core.tables import table as terminal_table

Row = dict[str, Any]

STEP_COLUMNS = (
    "shape",
    "tokens",
    "batch",
    "policy",
    "path",
    "blocks",
    "keys",
    "ms",
    "p10 to p90",
    "device ms",
    "idle ms",
    "in graphs",
    "GB",
    "TB/s",
    "of copy",
    "temp MB",
)


def line_name(row: Row) -> str:
    """A row's policy, what of its step is split or packed, and how many steps a launch has."""
    return row["policy"] + mesh_text(row) + packed_text(row) + launch_text(row)


def step_cells(row: Row) -> tuple[str, ...]:
    """The cells of `STEP_COLUMNS`."""
    first = row["shape"], tokens_text(row["tokens"]), str(row["batch"]), line_name(row)
    if "median_s" not in row:
        return *first, row.get("skipped") or f"FAILED {row['failed']}", *[""] * (len(STEP_COLUMNS) - 5)
    profile = row["profile"]
    milli = {key: row[key] * 1e3 for key in ("median_s", "p10_s", "p90_s")}
    return (
        *first,
        ", ".join(sorted(set(row["path"].values()))),
        f"{row['blocks_read']:,.1f}" + (" (all)" if row["reads_everything"] else ""),
        f"{row['keys_read']:,.0f}",
        f"{milli['median_s']:.2f}",
        span(milli["p10_s"], milli["p90_s"], ".2f"),
        f"{profile['period_s'] * 1e3:.2f}" if profile else "",
        f"{profile['idle_s'] * 1e3:.2f}" if profile else "",
        f"{profile['in_graphs']:.0%}" if profile else "",
        f"{sum(row['bytes'].values()) / 1e9:.2f}",
        f"{row['bytes_per_s'] / 1e12:.2f}",
        f"{row['fraction_of_copy']:.2f}",
        f"{row['temp_bytes'] / 1e6:,.1f}",
    )


def step_table(rows: Sequence[Row]) -> Table:
    """For the terminal."""
    return terminal_table(STEP_COLUMNS, map(step_cells, rows), left=5)


DRAFT_COLUMNS = ("shape", "tokens", "batch", "policy", "tokens of a step", "path", "ms", "p10 to p90", "device ms", "of one token's")


def draft_cells(row: Row) -> tuple[str, ...]:
    """The cells of `DRAFT_COLUMNS`."""
    first = row["shape"], tokens_text(row["tokens"]), str(row["batch"]), f"`{row['policy']}`{packed_text(row)}", str(row["drafted"])
    if "median_s" not in row:
        return *first, row.get("skipped") or f"FAILED {row['failed']}", *[""] * (len(DRAFT_COLUMNS) - 6)
    return (
        *first,
        ", ".join(sorted(set(row["path"].values()))),
        f"{row['median_s'] * 1e3:.2f}",
        span(row["p10_s"] * 1e3, row["p90_s"] * 1e3, ".2f"),
        f"{row['profile']['period_s'] * 1e3:.2f}" if row["profile"] else "",
        "" if row["of_one"] is None else f"{row['of_one']:.3f}",
    )


def drafts_table(rows: Sequence[Row]) -> Table:
    """For the terminal."""
    return terminal_table(DRAFT_COLUMNS, map(draft_cells, rows), left=6)


TIME_COLUMNS = ("shape", "tokens", "policy", "chunk", "path", "s", "tokens/s", "x dense", "temp GB", "peak GB beyond weights and cache")


def time_cells(row: Row, rows: Sequence[Row]) -> tuple[str, ...]:
    """The cells of `TIME_COLUMNS`. rows: all rows, to find the dense one of the same prompt."""
    first = row["shape"], tokens_text(row["tokens"]), row["policy"] + mesh_text(row) + packed_text(row), f"{row['chunk']:,}"
    if "median_s" not in row:
        return *first, row.get("skipped") or f"FAILED {row['failed']}", *[""] * (len(TIME_COLUMNS) - 5)
    place = ("shape", "tokens", "layers", "chunk", "weights", "cache_format")  # older rows lack the last two
    alike = (r for r in rows if all(r.get(k) == row.get(k) for k in place) and mesh_text(r) == mesh_text(row))
    dense = next((r for r in alike if r["policy"] == "dense" and "median_s" in r), None)
    return (
        *first,
        ", ".join(sorted(set(row["path"].values()))),
        f"{row['median_s']:.2f}",
        f"{row['tokens_per_s']:,.0f}",
        f"{dense['median_s'] / row['median_s']:.2f}" if dense else "",
        f"{row['temp_bytes'] / 1e9:.2f}",
        f"{(row['peak_bytes'] - row['held_bytes']) / 1e9:.2f}" if row["peak_bytes"] else "",
    )


def time_table(rows: Sequence[Row]) -> str:
    """Time to first token, short prompts first."""
    return markdown(TIME_COLUMNS, (time_cells(row, rows) for row in sorted(rows, key=itemgetter("tokens"))))


def split_table(rows: Sequence[Row]) -> str:
    """Where the time of the profiled chunks goes, short prompts first."""
    profiled = sorted((row for row in rows if row.get("profile")), key=itemgetter("tokens"))
    names = max((list(row["profile"]["parts_s"][0]) for row in profiled), key=len, default=[])
    lines = []
    for row in profiled:
        parts = row["profile"]["parts_s"]
        together = {name: sum(of.get(name, 0.0) for of in parts) / len(parts) for name in names}
        total = sum(together.values())
        shares = (f"{seconds * 1e3:,.1f} ({seconds / total:.0%})" for seconds in together.values())
        name = row["policy"] + mesh_text(row) + packed_text(row)
        lines.append((row["shape"], tokens_text(row["tokens"]), name, f"{total * 1e3:,.1f}", *shares))
    return markdown(("shape", "tokens", "policy", "ms a chunk", *names), lines)
