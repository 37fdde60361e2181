"""The marked part of docs/fidelity.md, made from committed panels.

    python -m kvjax.fidelity.documents benchmarks/results/h200/fidelity-*.json --into docs/fidelity.md

replaces what stands between `<!-- fidelity:evidence -->` and `<!-- /fidelity -->`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from kvjax.fidelity.report import panel_rows, remarks
from pallas_kernels.bench.report import markdown, source

MARK = re.compile(r"(<!-- fidelity:evidence -->\n).*?(<!-- /fidelity -->)", re.DOTALL)


def evidence(panels: Sequence[dict[str, Any]]) -> str:
    """Tables of all panels' lengths under one another, what must be read with them, and where they come from."""
    made = [panel_rows(figures) for figures in panels]
    columns = made[0][0]
    rows = [(f"{length:,}", *cells) for _, rows in made for length, cells in rows]
    lines = [f"* {line}" for figures in panels for line in remarks(figures)]
    sources = dict.fromkeys(map(source, panels))
    return "\n".join((markdown(("tokens", *columns), rows), "", *lines, "", *sources))


def rendered(text: str, panels: Sequence[dict[str, Any]]) -> str:
    """A document with its marked part made anew. ValueError where it has none."""
    if not MARK.search(text):
        raise ValueError("there is no part between <!-- fidelity:evidence --> and <!-- /fidelity -->")
    return MARK.sub(lambda found: f"{found[1]}{evidence(panels)}\n{found[2]}", text)


def load(files: Sequence[Path]) -> list[dict[str, Any]]:
    """Panels by file, the shortest contexts first."""
    return sorted((json.loads(file.read_text(encoding="utf-8")) for file in files), key=lambda panel: panel["settings"]["lengths"])


def write_document(
    files: Annotated[list[Path], typer.Argument(metavar="PANEL.json...", help="Panels of kvjax fidelity.")],
    into: Annotated[Path, typer.Option(help="Document whose marked part is replaced.")],
) -> None:
    """Make the tables of a document from panels."""
    into.write_text(rendered(into.read_text(encoding="utf-8"), load(files)), encoding="utf-8")


if __name__ == "__main__":
    typer.run(write_document)
