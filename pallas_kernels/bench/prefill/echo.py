"""Tables and the plot of `kvjax echo`, and the table of needles found after a sparse prefill, from their JSON."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pallas_kernels.bench.prefill.report import layer_seconds
from pallas_kernels.core import pictures
from pallas_kernels.core.tables import estimate, markdown, span, tokens_text

NOISE = "dense again"
COLUMNS = ("tokens", "prefill", "facts", "facts, 95%", "lost/gained", "facts, difference, 95%", "by distance", "passages")
COLUMNS += ("passages, difference, 95%", "KL, text", "KL, text, 95%", "KL, all")


def echo_rows(figures: dict[str, Any]) -> list[tuple[str, ...]]:
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


def echo_table(runs: Sequence[dict[str, Any]]) -> str:
    """Every run's rows and remarks, by length. Rows that several runs share (dense, the control) appear once."""
    found = sorted(dict.fromkeys(cells for run in runs for cells in echo_rows(run)), key=lambda cells: int(cells[0].replace(",", "")))
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


def plot(runs: Sequence[dict[str, Any]], file: Path) -> None:
    """Facts predicted by policy, a bar per length with its Wilson interval, over KL of running text on a logarithmic axis."""
    rows = {(row["length"], row["policy"]): row for run in runs for row in run["rows"]}
    lengths = sorted({length for length, _ in rows})
    policies = list(dict.fromkeys(name for _, name in rows))
    with pictures.picture(file, 2, 1, height=2.6, sharex=True) as (figure, axes):
        above, below = axes.flat
        for number, length in enumerate(lengths):
            here = [(place, rows[length, name]) for place, name in enumerate(policies) if (length, name) in rows]
            places = [place + 0.26 * (number - (len(lengths) - 1) / 2) for place, _ in here]
            shares, label = [row["share"] for _, row in here], f"{tokens_text(length)} tokens"
            errors = [
                [max(0.0, each["value"] - each["low"]) for each in shares],
                [max(0.0, each["high"] - each["value"]) for each in shares],
            ]
            # Colours are for policies, so lengths are grey, the longest the darkest.
            style = {"width": 0.24, "color": f"{0.8 - 0.55 * number / max(len(lengths) - 1, 1):.2f}", "ecolor": "C1", "label": label}
            above.bar(places, [each["value"] for each in shares], yerr=errors, capsize=2, **style)
            apart = [(place, row["kl_text"]["value"]) for place, (_, row) in zip(places, here, strict=True) if row["policy"] != "dense"]
            below.bar(*zip(*apart, strict=True), **style)
        above.set(ylabel="facts predicted (95%)", ylim=(0, 1.05))
        pictures.log_ticks(below.yaxis)
        below.set(ylabel="KL to dense, text, nats")
        below.set_xticks(range(len(policies)), policies, rotation=30, ha="right")
        for axis in (above, below):
            axis.grid(axis="y")
        pictures.legend_below(figure, [above])


def layer_times(timed: Sequence[dict[str, Any]], length: int) -> dict[str, float]:
    """Seconds of one layer's attention over a text of `length` tokens, by policy."""
    return {row["policy"]: layer_seconds(row) for row in timed if row["tokens"] == length and "median_s" in row}


def timed_points(runs: Sequence[dict[str, Any]], timed: Sequence[dict[str, Any]]) -> dict[tuple[int, str], float]:
    """Seconds by length and policy, for policies that were measured in both ways, at lengths where not only dense attention was."""
    places = [(row["length"], row["policy"]) for run in runs for row in run["rows"]]
    times = {length: layer_times(timed, length) for length, _ in places}
    points = {(length, name): times[length][name] for length, name in places if name in times[length]}
    lengths = {length for length, name in points if name != "dense"}
    return {place: seconds for place, seconds in points.items() if place[0] in lengths}


def plot_against_time(runs: Sequence[dict[str, Any]], timed: Sequence[dict[str, Any]], file: Path) -> None:
    """Facts predicted, with Wilson intervals, over the time of one layer's attention over as many tokens: a panel per length, a point per
    policy. Policies that were timed at no length appear only in the legend. ValueError where nothing has both."""
    rows = {(row["length"], row["policy"]): row for run in runs for row in run["rows"] if row["policy"] != NOISE}
    points = timed_points(runs, timed)
    shown = sorted({length for length, _ in points})
    if not shown:
        raise ValueError("no sparse policy has both a time and facts predicted at the same length")
    with pictures.picture(file, *pictures.grid_of(len(shown)), height=2.9, sharey=True) as (figure, axes):
        for axis, length in zip(axes.flat, shown, strict=False):
            for name in dict.fromkeys(name for _, name in rows):
                if (length, name) not in points:
                    continue
                share, at = rows[length, name]["share"], points[length, name] * 1e3
                errors = [[max(0.0, share["value"] - share["low"])], [max(0.0, share["high"] - share["value"])]]
                axis.errorbar(at, share["value"], yerr=errors, fmt="o", capsize=2, label=name, color=pictures.color_of(name))
            axis.set(title=f"{tokens_text(length)} tokens", xlabel="ms per layer", ylim=(0, 1.05))
            axis.grid()
        for axis in axes.flat[len(shown) :]:
            axis.remove()
        axes[0, 0].set_ylabel("facts predicted (95%)")
        for name in dict.fromkeys(name for _, name in rows):
            if not any(name == other for _, other in points):
                nothing = {"yerr": [[], []], "fmt": "x", "label": f"{name}: not timed", "color": pictures.color_of(name)}
                axes.flat[len(shown) - 1].errorbar([], [], **nothing)
        for axis in axes.flat[: len(shown)]:
            pictures.log_ticks(axis.xaxis)
        pictures.legend_below(figure, axes.flat[: len(shown)], columns=3)
