"""Pictures of a run's figures: recall against budget, KL against budget, disagreements against margin."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from kvjax.evaluation.teacher_forcing import ALONE
from pallas_kernels.core.pictures import color_of, legend_below, log_ticks, picture
from pallas_kernels.core.tables import span

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MARKS = ("o", "s", "D", "v", "^", "P", "X", "*")
"""Plot markers of tasks and haystacks, in the order in which the figures list them."""


def draw(figures: dict[str, Any], folder: Path) -> list[Path]:
    """Write recall.png, kl.png and disagreements.png from the figures of `report.summarize` to a folder. Returns their
    paths."""
    lengths = list(dict.fromkeys(row["length"] for row in figures["forced"]))
    paths = [folder / f"{name}.png" for name in ("recall", "kl", "disagreements")]
    for path, plot, stacked in zip(paths, (recall, divergence, disagreements), (False, False, True), strict=True):
        # A plot of margins has eight labels on its axis, which need the whole width.
        rows, columns, height = (len(lengths), 1, 2.3) if stacked else (1, len(lengths), 3.4)
        with picture(path, rows, columns, height=height, sharey=True) as (figure, axes):
            for axis, length in zip(axes.flat, lengths, strict=True):
                plot(figures, length, axis)
                axis.set_title(f"{length:,} tokens")
                if not stacked:
                    axis.label_outer()
                elif axis is not axes.flat[-1]:
                    axis.set_xlabel("")
            legend_below(figure, axes.flat)
    return paths


def reach(intervals: Sequence[Mapping[str, float]]) -> list[list[float]]:
    """How far intervals reach below and above their values, as matplotlib takes errors."""
    return [[max(sign * (each[end] - each["value"]), 0) for each in intervals] for end, sign in (("low", -1), ("high", 1))]


def recall(figures: dict[str, Any], length: int, axis: Axes) -> None:
    """Plot the share of valid trials found over keys read per step. Each policy has a colour, each task and haystack a
    marker."""
    rows = [row for row in figures["retrieval"] if row["length"] == length and row["exact_match"]]
    kinds = list(dict.fromkeys((row["task"], row["haystack"]) for row in figures["retrieval"]))
    for number, kind in enumerate(kinds):
        mine = [row for row in rows if (row["task"], row["haystack"]) == kind]
        _by_budget(axis, mine, "exact_match", MARKS[number % len(MARKS)], f", {' in '.join(kind)}" if len(kinds) > 1 else "")
    axis.set(ylabel="found (Wilson 95%)", ylim=(-0.03, 1.03))


def divergence(figures: dict[str, Any], length: int, axis: Axes) -> None:
    """Plot the mean KL to dense over keys read per step, and the noise floor."""
    rows = [row for row in figures["forced"] if row["length"] == length and row["policy"] != "dense"]
    _by_budget(axis, [row for row in rows if row["policy"] != ALONE and row["kl"]["value"] > 0], "kl", "o", "")
    floor = next(row["kl"]["value"] for row in rows if row["policy"] == ALONE)
    if floor > 0:
        axis.axhline(floor, color=color_of(ALONE), linestyle=":", label=f"{ALONE} (noise floor)")
    log_ticks(axis.yaxis)
    axis.set(ylabel="mean KL(dense || policy), nats (95%)")


def disagreements(figures: dict[str, Any], length: int, axis: Axes) -> None:
    """Plot the share of forced steps at which a policy and dense disagree, by dense's margin at the step."""
    rows = [row for row in figures["forced"] if row["length"] == length and row["policy"] != "dense"]
    cells = rows[0]["by_margin"]
    ranges = [span(cell["from"], cell["to"], "g") if cell["to"] else f"over {cell['from']:g}" for cell in cells]
    for row in rows:
        shares = [cell["disagreements"] / cell["steps"] if cell["steps"] else np.nan for cell in row["by_margin"]]
        line = ":" if row["policy"] == ALONE else "-"
        axis.plot(range(len(cells)), shares, line, marker="o", color=color_of(row["policy"]), label=row["policy"])
    axis.set_xticks(range(len(cells)), [f"{name}\n{cell['steps']:,}" for name, cell in zip(ranges, cells, strict=True)])
    axis.set(xlabel="margin of dense's two best tokens, nats (below: steps)", ylabel="steps that disagree")
    axis.grid()


def _by_budget(axis: Axes, rows: Iterable[dict], field: str, mark: str, kind: str) -> None:
    """Plot `field` with its interval over keys read (log scale): a point for each policy, and a dotted line for
    dense."""
    for row in rows:
        name, found = row["policy"], row[field]
        style = {"color": color_of(name), "label": f"{name}{kind}"}
        if name == "dense":
            axis.axhline(found["value"], linestyle=":", **style)
        elif name != ALONE:
            axis.errorbar([row["keys_per_step"]], [found["value"]], reach([found]), marker=mark, linestyle="none", capsize=3, **style)
    log_ticks(axis.xaxis, most=4)
    axis.set(xlabel="keys read per step")
    axis.grid()
