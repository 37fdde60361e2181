"""What the scripts share: options, how rows are written as they arrive, and how a mistake on the command line becomes
one line."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any

import typer

import kvjax
from benchmarks import tables
from kvjax.evaluation.needle import encode_text
from kvjax.policies.prefill import DensePrefill
from kvjax.serving.bench.decode import config_of
from kvjax.serving.bench.prefill import policies_of
from kvjax.serving.cli import app as command_line
from kvjax.serving.cli.bench import check_dtype
from kvjax.serving.cli.options import named_run, read_texts, token_count, whole
from pallas_kernels.core.results import write_result
from pallas_kernels.core.tables import show, show_markdown, stages, table

if TYPE_CHECKING:
    from kvjax.model.config import ModelConfig
    from kvjax.model.protocols import Model
    from kvjax.policies.prefill import PrefillPolicy

Row = dict[str, Any]

ShapeOption = Annotated[
    str,
    typer.Option(
        help="qwen2.5-7b, llama-3.1-8b, llama-3.1-70b, qwen2.5-0.5b, tiny, or a model folder or hub id; its weights are not read."
    ),
]
LayersOption = Annotated[
    int | None,
    typer.Option(help="Run so many layers, the shape's in turn. [default: all of them]", show_default=False, **whole()),
]
BenchChunkOption = Annotated[int, typer.Option(help="Tokens prefilled at a time, a multiple of 128.", **token_count())]
BenchFormatOption = Annotated[
    str | None,
    typer.Option("--cache-format", help="How full pages are packed, as kvjax plan --cache-format takes it.", show_default=False),
]

PackedOption = Annotated[str, typer.Option("--weights", help="How weights are packed, as kvjax.load takes it, or none.")]


def config_of_shape(shape: str, layers: int | None, dtype: str) -> ModelConfig:
    """The configuration of `--shape`, `--layers` and `--dtype`."""
    check_dtype(dtype)
    return config_of(shape, layers, dtype)


def plan_of(kind: type, *args: Any, **fields: Any) -> Any:
    """A plan of a benchmark; BadParameter where its sizes do not fit together."""
    try:
        return kind(*args, **fields)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


def run(
    json_out: Path | None,
    kind: str,
    rows_of: Callable[[Callable[[str], None]], Iterable[Row]],
    *,
    fields: Mapping[str, Any] = MappingProxyType({}),
    table_of: Callable[[Sequence[Row]], str] | None = None,
    implementation: str | None = None,
) -> list[Row]:
    """Show progress, write rows as they arrive, and print their table. Returns the rows.

    Args:
        kind: the `bench` field of the file.
        rows_of: makes the rows, given a function that says what runs now. A row may bring the "provenance" of the
            process that measured it.
        fields: more fields of the file.
        table_of: makes the table, in Markdown; None: the one that documents have.
        implementation: that ops were forced to.
    """
    rows: list[Row] = []
    with stages(kind) as say:
        for row in rows_of(say):
            told = {"provenance": row.pop("provenance")} if "provenance" in row else {}
            rows.append(row)
            if json_out is not None:
                write_result(json_out, told | named_run(kind, implementation) | dict(fields) | {"rows": rows})
    if table_of is not None:
        show_markdown(table_of(rows))
    else:
        columns, cells = tables.TABLES[kind]
        show(table(columns, map(cells, rows)))
    for row in rows:
        if "failed" in row:
            typer.echo(f"{row.get('op', kind)} {row.get('tokens', '')} {row.get('policy', '')} failed: {row['failed']}", err=True)
    return rows


def sparse_of(policies: str) -> list[PrefillPolicy]:
    """The prefill policies except dense; ValueError if there is no other."""
    sparse = [policy for policy in policies_of(policies) if policy != DensePrefill()]
    if not sparse:
        raise ValueError(f"sparse policies are compared with dense attention, which is always timed; got {policies!r}: name a sparse one")
    return sparse


def read_prompt(model: str, dtype: str | None, files: Sequence[Path], longest: int) -> tuple[Model, list[int]]:
    """A model, and the token ids of texts; ValueError if there are fewer than `longest`."""
    loaded, (prose, _) = kvjax.load(model, dtype=dtype), read_texts(files)
    ids = encode_text(loaded.tokenizer, prose).tolist()
    if len(ids) < longest:
        raise ValueError(f"the text has {len(ids):,} tokens, but the longest prompt has {longest:,}: give more with --text")
    return loaded, ids


def exit_if_failed(rows: Iterable[Row]) -> None:
    """Say on stderr which rows were skipped and which failed. Exit with status 1 if one failed."""
    rows = list(rows)
    for kind in ("skipped", "failed"):
        for row in rows:
            if kind in row:
                typer.echo(f"{row['case']} {kind}: {row[kind]}", err=True)
    if any("failed" in row for row in rows):
        raise typer.Exit(1)


def main(command: Callable[..., Any] | None = None, *, help: str | None = None, **commands: Callable[..., Any]) -> None:
    """Run a script: its one command, or the one of `commands` that the command line names. An error is one line, as of
    `kvjax`.

    help: of the one command; None: its docstring.
    """
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None, no_args_is_help=bool(commands))
    for name, each in commands.items() if command is None else [(None, command)]:
        app.command(name, help=help)(each)
    command_line.main(app)
