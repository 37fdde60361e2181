"""The table of a run of ops."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.table import Table

from pallas_kernels.core.tables import span
from pallas_kernels.core.tables import table as terminal_table

Row = dict[str, Any]


COLUMNS = ("case", "path", "blocks", "keys", "us", "p10 to p90", "idle us", "MB", "TB/s", "of copy", "error", "same bits", "x best dense")


def cells(row: Row) -> tuple[str, ...]:
    """The cells of `COLUMNS`. The second cell of a row without a time gives the reason."""
    if "median_s" not in row:
        return row["case"], row.get("skipped") or f"FAILED {row['failed']}", *[""] * (len(COLUMNS) - 2)
    path = ", ".join(sorted(set(row["path"].values())))
    micro = {key: row[key] * 1e6 for key in ("median_s", "p10_s", "p90_s")}
    return (
        row["case"],
        path if row["clock"] == "trace" else f"{path} ({row['clock']})",
        f"{row['blocks_read']:,.0f}",
        f"{row['keys_read']:,.0f}",
        f"{micro['median_s']:,.2f}",
        span(micro["p10_s"], micro["p90_s"], ",.2f"),
        "" if row["idle_s"] is None else f"{row['idle_s'] * 1e6:.2f}",
        f"{sum(row['bytes'].values()) / 1e6:,.2f}",
        f"{row['bytes_per_s'] / 1e12:.3f}",
        f"{row['fraction_of_copy']:.2f}",
        f"{row['error']:.1e}" if "error" in row else "",
        {True: "yes", False: "NO"}.get(row.get("same_bits"), ""),
        f"{row['speedup']['times']:.2f}" if "speedup" in row else "",
    )


def table(rows: Sequence[Row]) -> Table:
    """For the terminal. Where rows have them, columns more: the fraction of the rate of reads, and times over those of
    unpacked pages."""
    more = {
        "of read": [f"{row['fraction_of_read']:.2f}" if "fraction_of_read" in row else "" for row in rows],
        "of unpacked": [f"{row['unpacked']['times']:.3f}" if "unpacked" in row else "" for row in rows],
    }
    more = {name: column for name, column in more.items() if any(column)}
    return terminal_table((*COLUMNS, *more), ((*cells(row), *rest) for row, *rest in zip(rows, *more.values(), strict=True)), left=2)


def micro_text(row: Row) -> str:
    return f"{row['median_s'] * 1e6:,.1f}" if "median_s" in row else "-"


def speedup_text(row: Row) -> str:
    return f" ({row['speedup']['times']:.2f}x)" if "speedup" in row else ""
