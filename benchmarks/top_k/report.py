"""Tables and plots of `top_k`: time beside other selections, what a hint is worth, the reach, and how much consecutive
top k share."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from pallas_kernels.core import pictures
from pallas_kernels.core.tables import markdown, span, tokens_text

Row = dict[str, Any]
HINT = "stale-40"
"""The hint that tables and targets call a step old."""

FROM_HINT = "top_k:start=hint"
HINTS = ("none", "random", "static", "stale-20", "stale-40", "stale-80", "step")
RADIX = {"radix-one-cta": "radix, 1 CTA a row", "radix": "radix, as many CTAs"}
"""Names of the two forms of the radix selection in tables and plots."""

OTHERS = {**RADIX, "lax.top_k": "lax.top_k", "torch": "torch"}
WIDE = 64
"""From this many rows on, tables also show the 90th percentile: the slowest row decides the time."""

ROW_COLUMNS = (
    "case",
    "path",
    "us",
    "p10 to p90",
    "MB",
    "TB/s",
    "of copy",
    "hint shares",
    "exact",
    "same bits",
    "passes",
    "candidates",
    "steps",
)


def merged(runs: Sequence[dict[str, Any]]) -> list[Row]:
    """The rows of several runs. Of rows of one case the last is kept."""
    return list({row["case"]: row for run in runs for row in run["rows"]}.values())


def timed(rows: Iterable[Row]) -> list[Row]:
    """The rows that have a time."""
    return [row for row in rows if "median_s" in row]


def best_torch(rows: Sequence[Row]) -> Row | None:
    """The faster of torch.topk's two forms."""
    return min((row for row in rows if row["implementation"].startswith("torch")), key=lambda row: row["median_s"], default=None)


def at(rows: Iterable[Row], hint: str, implementation: str) -> Row | None:
    """The row of a hint and an implementation; of torch, the faster form."""
    here = [row for row in timed(rows) if row["hint"] == hint]
    return best_torch(here) if implementation == "torch" else next((row for row in here if row["implementation"] == implementation), None)


def compared(rows: Iterable[Row]) -> list[Row]:
    """The rows of places at which the op was also started from a hint."""
    return [row for here in _places(rows).values() if any(row["implementation"] == FROM_HINT for row in here) for row in here]


def _places(rows: Iterable[Row]) -> dict[tuple, list[Row]]:
    """Rows by what they rank: kind of rows, k, batch, scores."""
    found: dict[tuple, list[Row]] = {}
    for row in timed(rows):
        found.setdefault((row["rows"], row["k"], row["batch"], row["n"]), []).append(row)
    return found


def _micro(row: Row | None) -> str:
    return "-" if row is None else f"{row['median_s'] * 1e6:,.1f}"


def _with_p90(row: Row | None) -> str:
    """Microseconds, with the 90th percentile if there are many rows."""
    return _micro(row) + (f" ({row['p90_s'] * 1e6:,.1f})" if row and row["batch"] >= WIDE and "p90_s" in row else "")


def _times(slow: Row | None, fast: Row | None) -> str:
    return "-" if slow is None or fast is None else f"{slow['median_s'] / fast['median_s']:.2f}"


def main_table(rows: Sequence[Row]) -> str:
    """Microseconds (of many rows with p90) on normal rows: the op without a hint and with one a step old that shares
    40%, other selections, and how many times as long these take as the op with its hint."""
    lines = []
    for (kind, k, batch, n), here in sorted(_places(rows).items(), key=lambda item: (-item[0][1], *item[0][2:])):
        ours, hinted = at(here, "none", "top_k"), at(here, HINT, "top_k")
        others = [at(here, "none", name) for name in OTHERS]
        if kind == "normal" and ours:
            ratios = (_times(other, hinted) for other in others)
            lines.append((f"{k:,}", str(batch), tokens_text(n), _with_p90(ours), _with_p90(hinted), *map(_micro, others), *ratios))
    return markdown(("k", "rows", "scores", "no hint", "hint 40%", *OTHERS.values(), *(f"x {name}" for name in OTHERS.values())), lines)


def hint_table(rows: Sequence[Row], kind: Callable[[str], bool]) -> str:
    """Microseconds (passes over the row, on average) by hint, for the kinds of rows in `kind`; the op's variants
    below."""
    kept = [row for row in timed(rows) if kind(row["rows"])]
    ours = [row for row in kept if row["implementation"].partition(":")[0] == "top_k"]
    hints = [hint for hint in HINTS if any(row["hint"] == hint for row in ours)]
    lines = []
    for (name, k, batch, n), here in sorted(_places(kept).items(), key=lambda item: (item[0][0], -item[0][1], *item[0][2:])):
        for form in sorted({row["implementation"] for row in here if row in ours}):
            cells = [_with_passes(at(here, hint, form)) for hint in hints]
            form = form.partition(":")[2] or "default"
            others = (_micro(at(here, "none", other)) for other in RADIX)
            lines.append((f"{name}, {tokens_text(n)}", str(batch), f"{k:,}", form, *cells, *others))
    return markdown(("scores", "rows", "k", "start", *hints, *RADIX.values()), lines)


def _with_passes(row: Row | None) -> str:
    counts = (row or {}).get("counts")
    return _micro(row) + (f" ({counts['passes']['mean']:.1f})" if counts else "")


def passes_table(rows: Sequence[Row]) -> str:
    """Passes over a row and candidates, by kind of row and by start."""
    lines = []
    for row in rows:
        passes, candidates = row["passes"], row["candidates"]
        once, mean = (sum(p == 1 for p in passes), sum(passes) / len(passes))
        held = f"{row['overlap']:.2f}" if row["start"] == "hint" else ""
        found = f"{once} of {row['count']}", f"{mean:.2f}", str(max(passes)), f"{sum(candidates) / len(candidates):,.0f}"
        place = f"{row['rows']}, {tokens_text(row['n'])}", f"{row['k']:,}", row["start"], held
        lines.append((*place, *found, f"{max(candidates):,} of {row['capacity']:,}"))
    columns = ("rows", "k", "start", "hint shares", "in one pass", "passes on average", "at most", "candidates on average", "at most")
    return markdown(columns, lines)


def row_cells(row: Row) -> tuple[str, ...]:
    """The cells of `ROW_COLUMNS`. The second cell of a row without a time gives the reason."""
    if "median_s" not in row:
        return row["case"], row.get("skipped") or f"FAILED {row['failed']}", *[""] * (len(ROW_COLUMNS) - 2)
    counts = row.get("counts") or {}
    counted = (counts.get(name) for name in ("passes", "candidates", "steps"))
    yes = {True: "yes", False: "NO"}
    return (
        row["case"],
        row["path"] if row["clock"] == "trace" else f"{row['path']} ({row['clock']})",
        f"{row['median_s'] * 1e6:,.2f}",
        span(row["p10_s"] * 1e6, row["p90_s"] * 1e6, ",.2f"),
        f"{sum(row['bytes'].values()) / 1e6:,.2f}",
        f"{row['bytes_per_s'] / 1e12:.3f}",
        f"{row['fraction_of_copy']:.2f}",
        "" if row["overlap"] is None else f"{row['overlap']:.2f}",
        yes.get(row["exact"], ""),
        yes.get(row["same_bits"], ""),
        *("" if found is None else f"{found['mean']:,.1f} (at most {found['most']:,})" for found in counted),
    )


def row_table(rows: Sequence[Row]) -> str:
    """Every row with all its columns."""
    return markdown(ROW_COLUMNS, map(row_cells, rows))


def phase_table(rows: Sequence[Row]) -> str:
    """Clock cycles of each phase and its share of them, of the rows that have been counted."""
    counted = [row for row in timed(rows) if row.get("phases")]
    if not counted:
        return "*No row of this run has counted cycles.*"
    names = list(counted[0]["phases"])
    lines = []
    for row in counted:
        total = sum(row["phases"].values())
        lines.append((row["case"], _micro(row), *(f"{cycles:,.0f} ({cycles / total:.0%})" for cycles in row["phases"].values())))
    return markdown(("case", "us", *names), lines)


# The reach


def targets(rows: Sequence[Row]) -> list[tuple[str, str, float, bool]]:
    """The targets, as (what, bound, figure, whether it holds). A target over several places has the worst figure. Only
    targets whose rows exist."""
    places = {(n, batch): here for (kind, k, batch, n), here in _places(rows).items() if (kind, k) == ("normal", 2048)}
    found: list[tuple[str, str, float, bool]] = []

    def at_most(what: str, row: Row | None, bound: float) -> None:
        if row is not None:
            micro = row["median_s"] * 1e6
            found.append((what, f"at most {bound:g} us", micro, micro <= bound))

    def at_least(what: str, ratios: Sequence[tuple[float, str]], bound: float, unit: str = "times") -> None:
        if ratios:
            worst, where = min(ratios)
            found.append((f"{what}; least at {where}", f"at least {bound:g} {unit}", worst, worst >= bound))

    for n, batch, with_hint, without in ((131072, 1, 12.5, 18), (1048576, 1, 22, 22), (131072, 8, 16, 16), (131072, 64, 20, 20)):
        here, name = places.get((n, batch), ()), f"{tokens_text(n)} scores, {batch} row{'s' * (batch > 1)}"
        at_most(f"{name}, hint a step old", at(here, HINT, "top_k"), with_hint)
        at_most(f"{name}, no hint", at(here, "none", "top_k"), without)
    here = places.get((131072, 1), ())
    pairs = [(at(here, "none", other), at(here, HINT, "top_k"), other) for other in ("lax.top_k", "torch")]
    at_least("128K scores, 1 row, hint a step old, against", [(_ratio(a, b), name) for a, b, name in pairs if a and b], 3.5)
    ours = [row for row in timed(rows) if row["implementation"].partition(":")[0] == "top_k"]
    mine = [row for row in ours if (row["rows"], row["hint"], row["implementation"]) == ("normal", HINT, "top_k") and row["n"] >= 65536]
    for name, what in (
        ("radix-one-cta", "a radix select of one CTA a row, as the paper's"),
        ("radix", "the same radix select over as many CTAs as ours"),
    ):
        at_least(f"64K scores and more, hint a step old, against {what}", _against(mine, rows, name), 1.9)
    default = [row for row in ours if row["implementation"] == "top_k"]
    at_least("against lax.top_k, in every cell where it was measured", _against(default, rows, "lax.top_k"), 1)
    small = [row for row in default if row["n"] == 8192]
    at_most("8K scores, the slowest cell", max(small, key=lambda row: row["median_s"], default=None), 12)
    if ours:
        exact = sum(row["exact"] for row in ours)
        found.append(("the set of a stable sort, in every row of the op", "always", float(exact), exact == len(ours)))
    return found


def _ratio(slow: Row, fast: Row) -> float:
    return slow["median_s"] / fast["median_s"]


def _against(rows: Sequence[Row], among: Sequence[Row], other: str) -> list[tuple[float, str]]:
    """(how many times as long the other takes at the same place, the case) of each row that has such another."""
    key = ("rows", "n", "batch", "k")
    others = {tuple(row[name] for name in key): row for row in timed(among) if row["implementation"] == other}
    pairs = [(row, others.get(tuple(row[name] for name in key))) for row in rows]
    return [(_ratio(slow, row), row["case"]) for row, slow in pairs if slow]


def target_table(rows: Sequence[Row]) -> str:
    """The targets, the measured figures, and whether each target holds."""
    lines = [
        (what, bound, f"{figure:,.2f}" if bound != "always" else f"{figure:,.0f} of its cells", "yes" if ok else "**no**")
        for what, bound, figure, ok in targets(rows)
    ]
    return markdown(("what", "asked for", "measured", "holds"), lines)


def picture(rows: Sequence[Row]) -> str:
    """The Markdown that shows `plot`'s file, for a document in the same folder."""
    return "![Time over the scores of a row, by hint, beside other selections](top-k.png)"


def plot(rows: Sequence[Row], file: Path) -> None:
    """Microseconds over the scores of a row, k 2,048: a panel per batch, a line per form of the op and a dotted line
    per other selection; and a panel by hint, for the op started from it."""
    kept = [row for row in timed(rows) if (row["rows"], row["k"]) == ("normal", 2048)]
    batches = sorted({row["batch"] for row in kept})
    if not batches:
        raise ValueError("no normal row with k = 2,048 has a time to draw")
    hinted = compared([row for row in kept if row["batch"] == 1])
    panels = len(batches) + bool(hinted)
    lines = [("none", "top_k", "no hint", "-"), (HINT, "top_k", "hint 40%", "--")]
    lines += [("none", name, label, ":") for name, label in OTHERS.items()]
    with pictures.picture(file, *pictures.grid_of(panels, 2), height=2.8) as (figure, axes):
        for axis, batch in zip(axes.flat, batches, strict=False):
            here = {n: [row for row in kept if (row["batch"], row["n"]) == (batch, n)] for n in sorted({row["n"] for row in kept})}
            for number, (hint, implementation, label, style) in enumerate(lines):
                line = [(n, found["median_s"] * 1e6) for n, of in here.items() if (found := at(of, hint, implementation))]
                if line:
                    axis.plot(*zip(*line, strict=True), style, marker="o", label=label, color=f"C{number}")
            axis.set(title=f"{batch} row{'s' * (batch > 1)}, k 2,048", xlabel="scores of a row", ylabel="us")
            pictures.token_ticks(axis.xaxis, list(here))
            pictures.log_ticks(axis.yaxis)
            axis.grid()
        pictures.legend_below(figure, axes.flat[: len(batches)], columns=3)
        if hinted:
            _draw_hints(axes.flat[len(batches)], hinted)
        for axis in axes.flat[panels:]:
            axis.remove()


def _draw_hints(axis, rows: Sequence[Row]) -> None:
    """A line over hints per length, for the op started from the hint; dotted: its default without a hint."""
    hints = [hint for hint in HINTS if any(row["hint"] == hint and row["implementation"] == FROM_HINT for row in rows)]
    for number, n in enumerate(sorted({row["n"] for row in rows})):
        here = [row for row in rows if row["n"] == n]
        line = [(hint, found["median_s"] * 1e6) for hint in hints if (found := at(here, hint, FROM_HINT))]
        style = {"color": ("#555555", "#000000", "#999999")[number % 3]}  # colours are for implementations, so lengths are grey
        axis.plot(*zip(*line, strict=True), "-", marker="o", label=f"{tokens_text(n)}, from the hint", **style)
        if default := at(here, "none", "top_k"):
            axis.axhline(default["median_s"] * 1e6, linestyle=":", label=f"{tokens_text(n)}, default", **style)
    pictures.log_ticks(axis.yaxis)
    axis.set(title="1 row, k 2,048, by hint", xlabel="hint", ylabel="us", ylim=(None, 2.2 * axis.get_ylim()[1]))
    axis.grid()
    axis.legend(loc="upper center", ncols=2, handlelength=1.3, columnspacing=0.8, borderpad=0.2)


# Documents


def parts(runs: Sequence[dict[str, Any]]) -> dict[str, tuple[Sequence[dict[str, Any]], Callable[[], str]]]:
    """The parts of documents that marks can name: for each the runs that it is made from, and the function that makes
    it."""
    times, shares, passes = ([run for run in runs if run["bench"] == kind] for kind in ("top-k", "overlap", "top-k-passes"))
    rows = merged(times)

    def captured(kind: str) -> bool:
        return "." in kind

    made: dict[str, Callable[[], str]] = {
        "top-k": lambda: main_table(rows),
        "top-k-targets": lambda: target_table(rows),
        "top-k-hints": lambda: hint_table(compared(rows), lambda kind: kind == "normal"),
        "top-k-plot": lambda: picture(rows),
        "top-k-distributions": lambda: hint_table(rows, lambda kind: kind != "normal" and not captured(kind)),
        "top-k-captured": lambda: hint_table(rows, captured),
        "top-k-phases": lambda: phase_table(rows),
        "top-k-rows": lambda: row_table(rows),
    }
    return {name: (times, make) for name, make in made.items()} | {
        "top-k-overlap": (shares, lambda: overlap_table([row for run in shares for row in run["rows"]])),
        "top-k-passes": (passes, lambda: passes_table([row for run in passes for row in run["rows"]])),
    }


# Captured rows


def overlap_table(rows: Sequence[Row]) -> str:
    """Share of a step's top k that is also in an earlier step's, by layer: raw by age, and shifted for steps one
    apart."""
    ages = sorted({row["age"] for row in rows})
    lines = []
    for k, layer in dict.fromkeys((row["k"], row["layer"]) for row in sorted(rows, key=lambda row: (row["k"], row["layer"]))):
        here = {row["age"]: row for row in rows if (row["k"], row["layer"]) == (k, layer)}
        near = here[ages[0]]
        reach = f"{near['raw']:.2f} ({span(near['raw_p10'], near['raw_p90'], '.2f')})"
        lines.append(
            (
                f"{k:,}",
                str(layer),
                reach,
                *(f"{here[age]['raw']:.2f}" for age in ages[1:]),
                f"{near['shifted']:.2f}",
                f"{near['chance']:.2f}",
            )
        )
    return markdown(("k", "layer", f"raw, {ages[0]} step apart (p10 to p90)", *map(str, ages[1:]), "shifted", "chance"), lines)


def plot_overlap(rows: Sequence[Row], file: Path) -> None:
    """Per k, raw and shifted overlap of consecutive steps by layer, and raw overlap by age, a line per layer."""
    import numpy as np

    ks, layers = (list(dict.fromkeys(row[name] for row in rows)) for name in ("k", "layer"))
    with pictures.picture(file, 2, len(ks), height=2.8, sharey=True) as (figure, axes):
        for above, below, k in zip(*axes, ks, strict=True):
            here = [row for row in rows if row["k"] == k]
            nearest = [row for row in here if row["age"] == min(row["age"] for row in here)]
            for number, (name, color) in enumerate((("raw", "#333333"), ("shifted", "#bbbbbb"))):
                heights = np.array([row[name] for row in nearest])
                reach = np.abs(np.array([[row[f"{name}_p{p}"] for row in nearest] for p in (10, 90)]) - heights)
                places = np.arange(len(layers)) + 0.4 * (number - 0.5)
                above.bar(places, heights, 0.38, yerr=reach, ecolor="#d55e00", capsize=2, label=name, color=color)
            above.axhline(nearest[0]["chance"], color="0.4", linestyle=":", label="chance")
            above.set(title=f"k = {k:,}, {nearest[0]['age']} step apart", xlabel="layer", ylim=(0, 1))
            above.set_xticks(range(len(layers)), layers)
            for number, layer in enumerate(layers):
                line = [(row["age"], row["raw"]) for row in here if row["layer"] == layer]
                below.plot(*zip(*line, strict=True), marker="o", label=f"layer {layer}", color=f"C{number % 10}")
            below.axhline(here[0]["chance"], color="0.4", linestyle=":")
            ages = sorted({row["age"] for row in here})
            below.set(xlabel="steps apart", xscale="log", ylim=(0, 1))
            below.set_xticks(ages, ages)
            below.minorticks_off()
            below.grid()
        for axis, label in zip(axes[:, 0], ("shared top k (bars: p10 to p90)", "shared top k, raw"), strict=True):
            axis.set_ylabel(label)
        pictures.legend_below(figure, axes[:, 0], columns=5)
