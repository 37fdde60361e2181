"""Pictures of runs of `kvjax recall`, from their JSON."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.prefill_tables import layer_seconds
from kvjax.evaluation.plots import reach
from kvjax.evaluation.teacher_forcing import ALONE
from pallas_kernels.core import pictures
from pallas_kernels.core.tables import tokens_text


def plot(runs: Sequence[dict[str, Any]], file: Path) -> None:
    """Facts predicted by policy, a bar per length with its Wilson interval, over KL of running text on a logarithmic
    axis."""
    rows = {(row["length"], row["policy"]): row for run in runs for row in run["rows"]}
    lengths = sorted({length for length, _ in rows})
    policies = list(dict.fromkeys(name for _, name in rows))
    with pictures.picture(file, 2, 1, height=2.6, sharex=True) as (figure, axes):
        above, below = axes.flat
        for number, length in enumerate(lengths):
            here = [(place, rows[length, name]) for place, name in enumerate(policies) if (length, name) in rows]
            places = [place + 0.26 * (number - (len(lengths) - 1) / 2) for place, _ in here]
            shares, label = [row["share"] for _, row in here], f"{tokens_text(length)} tokens"
            # Colours are for policies, so lengths are grey, the longest the darkest.
            style = {"width": 0.24, "color": f"{0.8 - 0.55 * number / max(len(lengths) - 1, 1):.2f}", "ecolor": "C1", "label": label}
            above.bar(places, [each["value"] for each in shares], yerr=reach(shares), capsize=2, **style)
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
    """Seconds by length and policy, for policies that were measured in both ways, at lengths where not only dense
    attention was."""
    places = [(row["length"], row["policy"]) for run in runs for row in run["rows"]]
    times = {length: layer_times(timed, length) for length, _ in places}
    points = {(length, name): times[length][name] for length, name in places if name in times[length]}
    lengths = {length for length, name in points if name != "dense"}
    return {place: seconds for place, seconds in points.items() if place[0] in lengths}


def plot_against_time(runs: Sequence[dict[str, Any]], timed: Sequence[dict[str, Any]], file: Path) -> None:
    """Facts predicted, with Wilson intervals, over the time of one layer's attention over as many tokens: a panel per
    length, a point per policy. Policies that were timed at no length appear only in the legend. ValueError where
    nothing has both."""
    rows = {(row["length"], row["policy"]): row for run in runs for row in run["rows"] if row["policy"] != ALONE}
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
                axis.errorbar(at, share["value"], yerr=reach([share]), fmt="o", capsize=2, label=name, color=pictures.color_of(name))
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
