"""`python -m pallas_kernels.bench`: time the ops."""

from __future__ import annotations

import os
from typing import Annotated, Any

import typer

from pallas_kernels.core.options import JsonOption

HELP = """Time the ops: device time, bytes that had to move against a copy's bandwidth, error, and speed-up over the best dense kernel.

CASES are globs over names `op/shape/tokens/batch/policy`, as in 'sparse/qwen2.5-7b/128k/b1/top:8' or '*/b8/*'; without any, all but the
tiny ones run. op: dense (paged), sparse (selection, attention and combine as one op), pair (the same as two ops), gather, chunk (prefill),
select, index, append, project.
Dense kernels of others (cuDNN, PyTorch SDPA) run at the same shapes and are rows too, named baseline/...

On a GPU the clock is the profiler's trace, from the start of an op's first kernel to the end of its last, ops of one program captured
together as XLA captures a decode step; elsewhere it is the wall clock, and rows say so.

Render tables: python -m benchmarks.report --help
"""


def bench(
    cases: Annotated[list[str] | None, typer.Argument(help="Globs over the names of cases.", show_default=False)] = None,
    list_cases: Annotated[bool, typer.Option("--list", help="Print the names and stop.")] = False,
    json_out: JsonOption = None,
    implementation: Annotated[
        str | None, typer.Option(help="Take the path of another platform: xla, cudnn, blackwell, ... [default: the one of this device]")
    ] = None,
    baselines: Annotated[bool, typer.Option(help="Run other people's dense kernels at the same shapes.")] = True,
) -> None:
    """See HELP."""
    from pallas_kernels.bench.cases import all_cases, matching

    try:
        chosen = matching(cases or ())
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="CASES") from None
    if list_cases:
        typer.echo("\n".join(case.name for case in (chosen if cases else all_cases())))
        return
    # By default JAX allocates most of the memory at its start, and PyTorch's process needs some.
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"

    from rich.console import Console

    from pallas_kernels.bench.report import table
    from pallas_kernels.bench.session import run
    from pallas_kernels.core.dispatch import forced
    from pallas_kernels.core.tables import show

    if implementation not in (None, "reference"):
        try:
            forced(implementation)
        except (ValueError, NotImplementedError) as error:  # a path that is none, or not here
            raise typer.BadParameter(str(error), param_hint="--implementation") from None
    rows = run(chosen, implementation, baselines=baselines, json_out=json_out, console=Console(stderr=True))
    show(table(rows))
    if failed := [row for row in rows if "failed" in row]:
        _say(failed)
        raise typer.Exit(1)


def _say(failed: list[dict[str, Any]]) -> None:
    for row in failed:
        typer.echo(f"{row['case']} failed: {row['failed']}", err=True)


def main() -> None:
    """Entry point."""
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
    app.command(help=HELP)(bench)
    app()


if __name__ == "__main__":
    main()
