"""Tables of prefill: the attention of one layer and its steps, time to first token, and what lists capture."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from operator import itemgetter
from typing import Any

from kvjax.serving.bench.tables import TIME_COLUMNS, time_cells
from pallas_kernels.core.tables import estimate, markdown, tokens_text

Row = dict[str, Any]


OP_COLUMNS = ("op", "shape", "tokens", "policy", "path", "ms", "TFLOP/s", "of peak", "TB/s")


OP_COLUMNS += ("error", "same bits", "lists full", "x best dense")


MEASURES = (("captured", min), ("of_oracle", min), ("error", max), ("error_with_delta", max))


MEASURES += (("error_between", max), ("error_between_with_delta", max))
"""Figures of `measures_table`, and the function that picks the worst layer."""


MEASURES_COLUMNS = ("model", "tokens", "policy", "blocks", "captured", "of the oracle's", "error", "with delta")


MEASURES_COLUMNS += ("between: error", "with delta", "sparsity")


BY_ROWS = "rows: of their oracle's"
"""A further column, if any run has measured it."""


MISSED = "missed, sampled"
"""Another column, beside the captured share: what was sampled, with the interval of the worst layer."""


STEPS = ("query-sparse", "union", "select", "block-sparse", "delta", "sparse")


def merged_ops(runs: Sequence[dict[str, Any]]) -> list[Row]:
    """The rows of several runs of `--ops`; of rows for the same case the last is kept. All rows of dense attention of a
    prompt come from one run, the last that has other projects' kernels too, because they are compared with these. So do
    all policies that this run has."""
    rows, compared = {}, set()
    for run in runs:
        others = {(row["shape"], row["tokens"]) for row in run["rows"] if row["op"] == "baseline" and "median_s" in row}
        for row in run["rows"]:
            place = row["shape"], row["tokens"]
            key = row["op"], *place, row["policy"]
            if place in compared - others and (row["op"] in ("dense", "baseline") or key in rows):
                continue
            rows[key] = row
        compared |= others
    return list(rows.values())


def op_cells(row: Row) -> tuple[str, ...]:
    """The cells of `OP_COLUMNS`."""
    first = row["op"], row["shape"], tokens_text(row["tokens"]), row["policy"]
    if "median_s" not in row:
        return *first, row.get("skipped") or f"FAILED {row['failed']}", *[""] * (len(OP_COLUMNS) - 5)
    path = ", ".join(sorted(set(row["path"].values())))
    return (
        *first,
        path if row["clock"] == "trace" else f"{path} ({row['clock']})",
        f"{row['median_s'] * 1e3:,.3f}",
        f"{row['flops_per_s'] / 1e12:,.0f}" if "flops_per_s" in row else "",
        f"{row['fraction_of_peak']:.2f}" if "fraction_of_peak" in row else "",
        f"{row['bytes_per_s'] / 1e12:.2f}" if "bytes_per_s" in row else "",
        f"{row['error']:.1e}" if "error" in row else "",
        {True: "yes", False: "NO"}.get(row.get("same_bits"), ""),
        f"{row['lists_full']:.3f}" if "lists_full" in row else "",
        f"{row['speedup']['times']:.2f}" if "speedup" in row else "",
    )


def op_table(rows: Sequence[Row]) -> str:
    """Every row."""
    return markdown(OP_COLUMNS, map(op_cells, rows))


def path_table(runs: Sequence[dict[str, Any]]) -> str:
    """Every op of prefill on the paths of other platforms. A path's ops are the last column."""
    lines = []
    for run in runs:
        for row in run["rows"]:
            if "median_s" in row:
                rate = f"{row['flops_per_s'] / 1e12:,.0f}" if "flops_per_s" in row else "-"
                error = f"{row['error']:.1e}" if row.get("error") is not None else "-"
                names = ", ".join(sorted(set(row["path"].values()))) or "-"
                lines.append(
                    (run["implementation"], row["op"], tokens_text(row["tokens"]), f"{row['median_s'] * 1e3:,.2f}", rate, error, names)
                )
    return markdown(("path", "op", "tokens", "ms", "TFLOP/s", "error", "implementations"), lines)


def steps_table(rows: Sequence[Row]) -> str:
    """Milliseconds of the fastest dense attention of the same run, of each step, and of the whole sparse attention, for
    policies that were timed at their shape's longest prompt."""
    lines = []
    timed = [row for row in rows if "median_s" in row]
    wholes = sorted((row for row in timed if row["op"] == "sparse"), key=itemgetter("tokens"))
    longest = {row["shape"]: row["tokens"] for row in wholes}
    kept = {(row["shape"], row["policy"]) for row in wholes if row["tokens"] == longest[row["shape"]]}
    shapes = list(dict.fromkeys(row["shape"] for row in timed))
    for whole in sorted((row for row in wholes if (row["shape"], row["policy"]) in kept), key=lambda row: shapes.index(row["shape"])):
        place = [whole[name] for name in ("shape", "tokens", "policy")]
        steps = {row["op"]: row["median_s"] for row in timed if [row[name] for name in ("shape", "tokens", "policy")] == place}
        times = (f"{steps[name] * 1e3:,.2f}" if name in steps else "-" for name in STEPS)
        faster = whole["speedup"]
        fastest = f"{whole['median_s'] * faster['times'] * 1e3:,.2f} ({faster['over'].rpartition('/')[2]})"
        lines.append((whole["shape"], tokens_text(whole["tokens"]), whole["policy"], fastest, *times, f"{faster['times']:.2f}"))
    return markdown(("shape", "tokens", "policy", "fastest dense, ms", *STEPS, "x dense"), lines)


def time_table_of_runs(runs: Sequence[dict[str, Any]]) -> str:
    """Time to first token in runs of the same prompts on several paths. Each row is compared with dense in its own
    run."""
    return markdown(TIME_COLUMNS, (time_cells(row, run["rows"]) for run in runs for row in run["rows"]))


def layers_table(rows: Sequence[Row]) -> str:
    """Attention of a model's layers over a text, by policy: the mean of the layers."""
    lines = []
    for row in sorted(rows, key=lambda row: row["tokens"]):
        first = row["shape"], tokens_text(row["tokens"]), row["policy"]
        if "failed" in row:
            lines.append((*first, f"FAILED {row['failed']}", *[""] * 4))
            continue
        keys = "" if row["keys_read"] is None else f"{row['keys_read']:,.0f}"
        path = ", ".join(sorted(set(row["path"].values())))
        lines.append((*first, path, f"{layer_seconds(row) * 1e3:.3f}", f"{row['speedup']['times']:.2f}", keys, f"{row['error']:.1e}"))
    return markdown(("model", "tokens", "policy", "path", "ms per layer", "x dense", "keys read", "error"), lines)


def layer_seconds(row: Row) -> float:
    """Seconds of one layer's attention, on average."""
    return row["median_s"] / row["layers"]


def measures_table(rows: Sequence[Row]) -> str:
    """Captured attention and output errors of each policy: the mean over the layers (the worst layer)."""
    lines = []
    rows = [row for row in rows if "captured" in row]
    with_rows = any(row.get("of_oracle_by_rows") is not None for row in rows)
    with_missed = any(row.get("missed") is not None for row in rows)
    names = _short_names(dict.fromkeys(row["policy"] for row in rows))
    places = dict.fromkeys((row["shape"], row["tokens"], row["policy"]) for row in rows)
    for shape, tokens, policy in sorted(places, key=lambda place: place[:2]):
        here = [row for row in rows if (row["shape"], row["tokens"], row["policy"]) == (shape, tokens, policy)]
        listed = [row["listed"] for row in here if row.get("listed") is not None]
        cells = (_mean_and_worst([row[name] for row in here if row.get(name) is not None], worst) for name, worst in MEASURES)
        sparsity = f"{here[0]['sparsity']:.3f}" if here[0]["sparsity"] is not None else ""
        blocks = f"{sum(listed) / len(listed):.1f}" if listed else ""
        by_rows = [row["of_oracle_by_rows"] for row in here if row.get("of_oracle_by_rows") is not None]
        more = (_mean_and_worst(by_rows, min),) if with_rows else ()
        captured, *cells = cells
        missed = (_missed([row["missed"] for row in here if row.get("missed") is not None]),) if with_missed else ()
        lines.append((shape, tokens_text(tokens), names[policy], blocks, captured, *missed, *cells, sparsity, *more))
    at = MEASURES_COLUMNS.index("captured") + 1
    return markdown(MEASURES_COLUMNS[:at] + (MISSED,) * with_missed + MEASURES_COLUMNS[at:] + (BY_ROWS,) * with_rows, lines)


def _missed(layers: Sequence[dict[str, float]]) -> str:
    """The mean of the layers, and the worst layer with its interval."""
    if not layers:
        return ""
    worst = max(layers, key=itemgetter("value"))
    return f"{sum(layer['value'] for layer in layers) / len(layers):.4f} ({estimate(worst, '.4f')})"


def _short_names(policies: Iterable[str]) -> dict[str, str]:
    """Short names of policies: of `Name(field=value, ...)` only the fields in which they differ from each other; others
    as they are."""
    fields = {policy: dict(re.findall(r"(\w+)=([^,)]+)", policy)) for policy in policies}
    written_out = [found for found in fields.values() if found]
    differ = {name for found in written_out for name in found if len({other.get(name) for other in written_out}) > 1}
    return {
        policy: f"{policy.split('(')[0]}({', '.join(f'{name}={found[name]}' for name in found if name in differ)})" if found else policy
        for policy, found in fields.items()
    }


def _mean_and_worst(values: list[float], worst) -> str:
    return f"{sum(values) / len(values):.4f} ({worst(values):.4f})" if values else ""
