"""The marked part of a document, from committed runs, and from files of `kvjax recall` and `kvjax needle`.

`rendered` replaces the part between `<!-- evaluation:evidence -->` and `<!-- /evaluation -->`, or the part of another
name; `overview` holds one table of all cells. Figures of another model than the embedded one say whose they are.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.certificates import lists_rows
from benchmarks.recall_tables import markdown, needles_table, recall_table
from benchmarks.report import sources
from kvjax.evaluation.report import controls, ended_early, found_of, kinds_rows, not_counted, points, policy_and_keys, table_rows


def evidence(runs: Sequence[dict[str, Any]]) -> str:
    """The Markdown of all runs, one after the other: for each its tables, whether its control does not fail, what dense
    cannot, and its source. Without runs it says so."""
    return "\n\n".join(map(_made, runs)) or "*Not measured yet.*"


def overview(runs: Sequence[dict[str, Any]]) -> str:
    """One table of all cells of all runs: what dense finds, and for each policy the difference from dense, in points,
    with its 95% interval. Where dense cannot, counts of the policies stand in brackets. Without runs it says so."""
    if not runs:
        return "*Not measured yet.*"
    names = list(dict.fromkeys(row["policy"] for figures in runs for row in figures["retrieval"] if row["policy"] != "dense"))
    lines = []
    for figures in sorted(runs, key=_model_and_length):
        for cell in dict.fromkeys((row["length"], row["task"], row["haystack"]) for row in figures["retrieval"]):
            rows = {row["policy"]: row for row in figures["retrieval"] if (row["length"], row["task"], row["haystack"]) == cell}
            found = [_beside_dense(rows[name]) if name in rows else "" for name in names]
            length, task, haystack = cell
            lines.append([f"`{figures['settings']['model']}`", f"{length:,}", f"{task} in {haystack}", found_of(rows["dense"]), *found])
    return markdown(("model", "tokens", "cell", "dense", *map(policy_and_keys, names)), lines)


def _model_and_length(figures: dict[str, Any]) -> tuple[str, int]:
    return figures["settings"]["model"].casefold(), figures["settings"]["lengths"][0]


def _beside_dense(row: dict[str, Any]) -> str:
    return points(row["against_dense"]["difference"]) if row["against_dense"] else found_of(row)


def _made(figures: dict[str, Any]) -> str:
    if "retrieval" in figures:
        return _run(figures)
    if figures.get("bench") == "prefill-echo":
        title, table = f"**facts and passages repeated in a prompt{_model(figures['settings'])}**", recall_table([figures])
    else:
        title, table = f"**needles found by dense decoding after each prefill{_model(figures)}**", needles_table([figures])
    return "\n\n".join((title, table, sources([figures])))


def _model(settings: dict[str, Any]) -> str:
    return "" if settings["model"] == "needle" else f"; model `{settings['model']}`"


def _run(figures: dict[str, Any]) -> str:
    settings = figures["settings"]
    columns, rows = table_rows(figures)
    trials = f"at most {settings['trials']}" if settings.get("sequential") else settings["trials"]
    what = f"{settings['tasks'][0]} in {settings['haystacks'][0]}, {trials} trials"
    title = f"**{what}; {settings['steps']:,} forced steps{_model(settings)}**"
    parts = [title, markdown(("tokens", *columns), [(f"{length:,}", *cells) for length, cells in rows])]
    parts += [markdown(columns, rows) for columns, rows in (kinds_rows(figures), lists_rows(figures)) if rows]
    silent = [line for line in controls(figures) if "no control" in line or "does not fail" in line]
    said = "\n".join(f"* {line}" for line in (*silent, *not_counted(figures), *ended_early(figures)))
    return "\n\n".join(filter(None, (*parts, said, sources([figures]))))


def rendered(text: str, runs: Sequence[dict[str, Any]], part: str = "evidence") -> str:
    """A document with the marked part of this name written anew. ValueError if it has none."""
    mark = re.compile(rf"(<!-- evaluation:{re.escape(part)} -->\n).*?(<!-- /evaluation -->)", re.DOTALL)
    if not mark.search(text):
        raise ValueError(f"there is no part between <!-- evaluation:{part} --> and <!-- /evaluation -->")
    made = (overview if part == "overview" else evidence)(runs)
    return mark.sub(lambda found: f"{found[1]}{made}\n{found[2]}", text)


def load(files: Sequence[Path]) -> list[dict[str, Any]]:
    """The figures in `files`, sorted: runs first, those of most lengths before others, then fewest tasks and haystacks,
    then most forced steps; then prompt recall and needles, by length."""
    runs = [json.loads(file.read_text(encoding="utf-8")) for file in sorted(files)]
    return sorted(runs, key=_place)


def _place(run: dict[str, Any]) -> tuple[int, ...]:
    if "retrieval" not in run:
        return 1, "bench" not in run, run["length"] if "length" in run else run["settings"]["lengths"][0]
    settings = run["settings"]
    return 0, -len(settings["lengths"]), len(settings["tasks"]) * len(settings["haystacks"]), -settings["steps"]
