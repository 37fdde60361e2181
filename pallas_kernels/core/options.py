"""Options that the commands of benchmarks share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def _checked(context: typer.Context, path: Path | None) -> Path | None:
    """Refuse a file that cannot be written before any work is done; say at the end where the figures are."""
    if path is None:
        return None
    from pallas_kernels.core.files import check_writable

    try:
        check_writable(path)
    except (ValueError, OSError) as error:
        raise typer.BadParameter(str(error)) from None
    before = _written_at(path)
    context.call_on_close(lambda: typer.echo(f"figures: {path}", err=True) if _written_at(path) != before else None)
    return path


def _written_at(path: Path) -> int | None:
    return path.stat().st_mtime_ns if path.exists() else None


JsonOption = Annotated[
    Path | None,
    typer.Option(
        "--json", callback=_checked, help="File for the figures and their provenance.", show_default=False, rich_help_panel="Output"
    ),
]
