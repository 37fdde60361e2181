"""Pictures of a panel's figures: recall against budget, KL against budget, disagreements against margin."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from kvjax.fidelity.forcing import ALONE
from kvjax.policies import name_of, parse
from pallas_kernels.bench.formats import span

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MARKS = {"top": "o", "mean": "v", "quest": "D", "window": "s"}


def draw(figures: dict[str, Any], folder: Path) -> list[Path]:
    """Write recall.png, kl.png and disagreements.png from the figures of `report.summarize` to a folder; returns their paths."""
    from matplotlib.figure import Figure

    lengths = list(dict.fromkeys(row["length"] for row in figures["forced"]))
    paths = []
    for name, plot in (("recall", recall), ("kl", divergence), ("disagreements", disagreements)):
        figure = Figure(figsize=(6.5 * len(lengths), 4.5), layout="constrained")
        axes = figure.subplots(1, len(lengths), squeeze=False, sharey=True)[0]
        for axis, length in zip(axes, lengths, strict=True):
            plot(figures, length, axis)
            axis.set_title(f"{length:,} tokens")
        paths.append(_save(figure, folder / f"{name}.png"))
    return paths


def recall(figures: dict[str, Any], length: int, axis: Axes) -> None:
    """Share of valid trials found against keys read per step; a colour per task and haystack, a mark per kind of policy."""
    rows = [row for row in figures["retrieval"] if row["length"] == length and row["exact_match"]]
    for number, kind in enumerate(dict.fromkeys((row["task"], row["haystack"]) for row in rows)):
        mine = [row for row in rows if (row["task"], row["haystack"]) == kind]
        _by_budget(axis, mine, "exact_match", f"C{number}", " in ".join(kind))
    axis.set(ylabel="found (Wilson 95%)", ylim=(-0.03, 1.03))


def divergence(figures: dict[str, Any], length: int, axis: Axes) -> None:
    """Mean KL to dense against keys read per step. The legend says the noise floor, which mostly lies far below."""
    rows = [row for row in figures["forced"] if row["length"] == length and row["policy"] != "dense"]
    _by_budget(axis, [row for row in rows if row["policy"] != ALONE and row["kl"]["value"] > 0], "kl", None, "")
    floor = next(row["kl"]["value"] for row in rows if row["policy"] == ALONE)
    axis.plot([], [], " ", label=f"noise floor {floor:.1g}")
    axis.set(ylabel="mean KL(dense || policy), nats (95%)", yscale="log")
    axis.legend(fontsize=8)


def disagreements(figures: dict[str, Any], length: int, axis: Axes) -> None:
    """Share of forced steps on which a policy and dense disagree, by the margin that dense had."""
    rows = [row for row in figures["forced"] if row["length"] == length and row["policy"] != "dense"]
    cells = rows[0]["by_margin"]
    ranges = [span(cell["from"], cell["to"], "g") if cell["to"] else f"over {cell['from']:g}" for cell in cells]
    for number, row in enumerate(rows):
        shares = [cell["disagreements"] / cell["steps"] if cell["steps"] else np.nan for cell in row["by_margin"]]
        style = {"color": "gray", "linestyle": ":"} if row["policy"] == ALONE else {"color": f"C{number}"}
        axis.plot(range(len(cells)), shares, marker="o", label=row["policy"], **style)
    ticks = [f"{name}\n{cell['steps']:,}" for name, cell in zip(ranges, cells, strict=True)]
    axis.set_xticks(range(len(cells)), ticks, fontsize=8)
    axis.set(xlabel="margin of dense's two best tokens, nats (below: steps)", ylabel="share of steps that disagree")
    axis.legend(fontsize=8)


def _by_budget(axis: Axes, rows: list[dict], field: str, color: str | None, kind: str) -> None:
    """`field` with its interval over keys read, log scale; policies of one family (top, mean, ...) joined, dense dotted.

    color: None is one for each family.
    """
    families: dict[str, list[dict]] = {}
    for row in rows:
        families.setdefault(_family(row["policy"]), []).append(row)
    for family, found in families.items():
        if family == ALONE:
            continue
        if family == "dense":
            axis.axhline(found[0][field]["value"], color=color, linestyle=":", linewidth=1)
            continue
        found.sort(key=lambda row: row["keys_per_step"])
        value, low, high = (np.array([row[field][end] for row in found]) for end in ("value", "low", "high"))
        label = ", ".join(filter(None, (family, kind)))
        style = {"color": color, "marker": MARKS.get(family, "P"), "capsize": 2, "linewidth": 1}
        axis.errorbar([row["keys_per_step"] for row in found], value, np.maximum([value - low, high - value], 0), label=label, **style)
    axis.set(xscale="log", xlabel="keys read per step and KV head")
    axis.xaxis.set_major_formatter("{x:,.0f}")
    axis.xaxis.set_minor_formatter("{x:,.0f}")
    axis.tick_params(axis="x", which="both", labelsize=8)
    axis.legend(fontsize=8)


def _family(name: str) -> str:
    """What policies of different budgets have in common: the name before the colon."""
    if name in (ALONE, "dense"):
        return name
    return name_of(parse(name)).split(":", 1)[0]


def _save(figure: Figure, path: Path) -> Path:
    partial = path.with_name(path.name + ".partial")
    figure.savefig(partial, format="png", dpi=120)
    partial.replace(path)
    return path
