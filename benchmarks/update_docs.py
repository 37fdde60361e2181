"""Makes the tables of all documents from committed results, and their pictures.

    python -m benchmarks.update_docs             # after new results
    python -m benchmarks.update_docs --pictures  # their pictures, too
    python -m benchmarks.update_docs --check     # changes nothing; says which documents would change

A table stands between a mark such as `<!-- bench:decode-step -->` and `<!-- /bench -->`, mostly in a page of
docs/measured/. `PAGES` says which results each document shows. Those of docs/cost-model.md are of the cost models that
`kvjax cost fit` makes of results.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks import cost_model_docs, evidence, overview, recall_pictures, report
from benchmarks.designs import block_scores
from benchmarks.run import main
from benchmarks.top_k import report as top_k_report
from kvjax.evaluation import plots

ROOT = Path(__file__).resolve().parents[1]
RESULTS, DOCS = ROOT / "benchmarks" / "results", ROOT / "docs"
FITTED = ROOT / "kvjax" / "cost_model" / "fitted"


@dataclasses.dataclass(frozen=True)
class Tables:
    """Tables that a document has of the files of `folder` that match `patterns`, by `make(text, files)`, which returns
    the document."""

    patterns: Sequence[str]
    make: Callable[[str, Sequence[Path]], str] = lambda text, files: report.rendered(text, report.load(files))
    folder: Path = RESULTS

    @property
    def files(self) -> list[Path]:
        """The files. ValueError for a pattern that no file matches."""
        found = {pattern: sorted(self.folder.glob(pattern)) for pattern in self.patterns}
        if lacking := [pattern for pattern, files in found.items() if not files]:
            raise ValueError(f"no file of {self.folder.relative_to(ROOT)} is called {lacking[0]}; mend PAGES of benchmarks/update_docs.py")
        return list(dict.fromkeys(file for files in found.values() for file in files))


def _runs(part: str, *patterns: str) -> Tables:
    """A part of that name, of runs of `kvjax evaluate`."""
    return Tables(patterns, lambda text, files: evidence.rendered(text, evidence.load(files), part))


def _scores(text: str, files: Sequence[Path]) -> str:
    (file,) = files
    return block_scores.rendered(text, json.loads(file.read_text(encoding="utf-8")))


KINDS = ("ops", "decode", "draft", "prefill", "host", "throughput", "gaps", "cold", "default", "programs")
SESSIONS = ("cpu/sessions", "cpu/session-tokens", "cpu/session-idle")
SESSIONS += ("h200/session-tokens", "h200/session-tokens-16k", "h200/session-tokens-int4", "h200/session-tokens-int4-1")

PAGES = {
    "measured/decode": [Tables([f"h200/{kind}*.json" for kind in KINDS] + ["cpu/draft-acceptance*.json"])],
    "measured/cache-formats": [
        Tables(["*/packed-attention*.json", "*/packed-chunks*.json"]),
        _runs("cache-formats", "cpu/fidelity-cache-formats.json", "h200/pages-fidelity-*.json"),
    ],
    "cost-model": [Tables(["nvidia-h200.json", "nvidia-h200-packed.json"], cost_model_docs.rendered, FITTED)],
    "measured/devices": [Tables(["*/exchange*.json", "*/mesh-*.json"])],
    "measured/evaluation": [
        _runs("evidence", "h200/fidelity-*.json"),
        *(_runs(part, f"cpu/fidelity-{part}.json") for part in ("released", "baselines", "near-miss")),
    ],
    "measured/formats": [
        Tables(["*/packed-matrices*.json", "*/packed-steps*.json", "*/packed-prompts*.json"]),
        _runs("weights", "h200/weights-fidelity*.json"),
    ],
    "measured/long-model": [_runs("long", "h200/long-*.json")],
    "measured/platforms": [Tables(["cpu/transformers-*.json", "h200/platform-*.json", "cpu/cpu-smollm2.json"])],
    "measured/prefill": [Tables(["*/*prefill*.json", "*/block-mass.json"])],
    "measured/real-checkpoints": [
        *(_runs(part, "h200/real*-*.json", "h200/passage-*.json") for part in ("overview", "real")),
        _runs("smollm2", "h200/smollm2-*.json"),
        _runs("recall", "h200/echo-*.json"),
    ],
    "measured/selectors": [Tables(["h200/designs-block-scores.json"], _scores)],
    "measured/sessions": [Tables([f"{name}.json" for name in (*SESSIONS, "h200/session-turn", "h200/session-turn-128")])],
    "measured/tiers": [Tables(["*/reuse*.json", "*/tiers*.json"])],
    "measured/top-k": [Tables(["*/top-k*.json"])],
}
"""Every document with tables."""


def made(page: str, text: str) -> str:
    """A document with all its tables made again."""
    for tables in PAGES[page]:
        text = tables.make(text, tables.files)
    return text


def draw(folder: Path) -> None:
    """Draw the pictures of the documents into a folder like docs/measured/."""
    runs = [run for page in ("decode", "prefill", "top-k") for tables in PAGES[f"measured/{page}"] for run in report.load(tables.files)]

    def rows_of(kind: str) -> list[dict[str, Any]]:
        return report.merged([run for run in runs if run["bench"] == kind])

    ops, steps, layers = map(rows_of, ("ops", "decode", "prefill-layers"))
    recalls = [run for run in runs if run["bench"] == "prefill-echo"]
    overview.plot(ops, steps, folder / "step-time.png")
    report.plot(ops, folder / "decode-op.png", scale=1e6, unit="us")
    report.plot(steps, folder / "decode-step.png", scale=1e3, unit="ms")
    report.plot_timeline(steps, folder / "decode-timeline.png")
    (mesh,) = report.load([RESULTS / "h200" / "mesh-steps-4.json"])
    report.plot_timeline(report.merged([mesh]), folder / "mesh-timeline.png")
    top_k_report.plot(top_k_report.merged([run for run in runs if run["bench"] == "top-k"]), folder / "top-k.png")
    top_k_report.plot_overlap([run for run in runs if run["bench"] == "overlap"][-1]["rows"], folder / "top-k-overlap.png")
    recall_pictures.plot(recalls, folder / "prefill-echo.png")
    recall_pictures.plot_against_time(recalls, layers, folder / "prefill-echo-time.png")
    plots.draw(evidence.load(PAGES["measured/evaluation"][0].files)[0], folder)


def update_command(
    check: Annotated[bool, typer.Option("--check", help="Change nothing; exit with status 1 if a document would change.")] = False,
    pictures: Annotated[bool, typer.Option("--pictures", help="Draw the pictures, too.")] = False,
) -> None:
    """Make the tables of all documents from committed results."""
    stale = []
    for page in PAGES:
        file = DOCS / f"{page}.md"
        text = file.read_text(encoding="utf-8")
        if (new := made(page, text)) != text:
            stale.append(page)
            if not check:
                file.write_text(new, encoding="utf-8")
    for page in stale:
        typer.echo(f"docs/{page}.md {'is not what its results make' if check else 'is new'}")
    if check and stale:
        typer.echo("run: python -m benchmarks.update_docs", err=True)
        raise typer.Exit(1)
    if pictures:
        draw(DOCS / "measured")


if __name__ == "__main__":
    main(update_command)
