"""Trains the model that finds needles: `python -m train_needle RUN --text BOOKS --held-out BOOK.txt`, in tools/."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pallas_kernels.core.optional import needs_extras
from train_needle.recipe import PRESETS
from train_needle.training import train

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def command(
    folder: Annotated[
        Path,
        typer.Argument(help="Folder of the run: checkpoints, curves, and at the end the model. A run in it is continued.", file_okay=False),
    ],
    text: Annotated[
        list[Path], typer.Option(help="Training text: a .txt or .py file, or a folder of them; may be given several times.", exists=True)
    ],
    held_out: Annotated[
        list[Path], typer.Option(help="Text that training never sees, for evaluation; may be given several times.", exists=True)
    ],
    recipe: Annotated[
        str, typer.Option(help="needle (the embedded model), needle-128k (trained on from it) or toy (minutes on a CPU).")
    ] = "needle",
    python_sources: Annotated[bool, typer.Option(help="Also train on the standard library's sources.")] = True,
    workers: Annotated[
        int | None, typer.Option(help="Processes that make batches. [default: one for each core but one]", show_default=False, min=1)
    ] = None,
    stop_at: Annotated[
        int | None, typer.Option(help="Stop after this many steps, with a checkpoint. [default: the end]", show_default=False, min=1)
    ] = None,
) -> None:
    """Train the model that finds needles, or continue an earlier run in the same folder."""
    if recipe not in PRESETS:
        raise typer.BadParameter(f"{recipe!r} is not a recipe; there are {', '.join(PRESETS)}", param_hint="--recipe")
    needs_extras("train_needle", "plots")
    try:
        model = train(PRESETS[recipe], text, held_out, folder, with_python_sources=python_sources, workers=workers, stop_at=stop_at)
    except ValueError as error:
        typer.echo(f"train_needle: {error}", err=True)
        raise typer.Exit(2) from None
    except KeyboardInterrupt:
        typer.echo(f"interrupted; run the same command again to continue from the last checkpoint in {folder / 'checkpoints'}", err=True)
        raise typer.Exit(130) from None
    typer.echo(f"stopped at step {stop_at}; run again to continue" if model is None else f"the model is in {model}")


if __name__ == "__main__":
    app()
