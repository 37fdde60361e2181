"""`kvjax batch`: every record of a file, by one engine or several replicas here, or by several on a Ray cluster."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvjax.serving.cli.options import (
    OUTPUT,
    DraftOption,
    DraftWeightsOption,
    EngineOptions,
    StepsPerLaunchOption,
    in_first,
    named_as_options,
    not_typed,
    number,
    option,
    takes_engine,
    whole,
)
from pallas_kernels.core.optional import needs_extras

if TYPE_CHECKING:
    from kvjax.scheduler.processes import Processes
    from kvjax.serving.batch.records import Defaults
    from kvjax.serving.batch.results import Summary
    from kvjax.serving.batch.setup import Setup

CLUSTER = "Ray cluster"


@takes_engine(first=("out", "model", "policy", "max_new_tokens", "max_batch"))
def batch_command(
    ctx: typer.Context,
    engine: EngineOptions,
    source: Annotated[
        Path,
        typer.Argument(
            metavar="IN.jsonl",
            help="One record per line: plain, or OpenAI's batch file format; may be compressed by gzip. Or IN.parquet: one per row.",
        ),
    ],
    out: Annotated[
        Path,
        option(
            "Output file: one line per record, in the input's order. Parquet or compressed if it ends in .parquet or .gz.", "--out", "-o"
        ),
    ],
    max_new_tokens: Annotated[int, option("The most tokens to generate, for records that do not say.", **whole())] = 128,
    temperature: Annotated[
        float | None, option("For records that do not say; 0 is greedy. [default: 0; 1 for OpenAI's format]", **number(least=0))
    ] = None,
    seed: Annotated[int, option("For records without a seed: this and the record's id make one.", **whole(-(2**63), 2**63 - 1))] = 0,
    steps_per_launch: StepsPerLaunchOption = "auto",
    draft: DraftOption = None,
    draft_weights: DraftWeightsOption = None,
    overwrite: Annotated[bool, option("Replace OUT.jsonl if it exists.", "--overwrite", panel=OUTPUT)] = False,
    continue_anyway: Annotated[
        bool,
        option(
            "Continue a killed job with another --max-batch. The last bits of its answers may differ from those of one run, and the "
            "summary says so.",
            "--continue-anyway",
            panel=OUTPUT,
        ),
    ] = False,
    fail_on_error: Annotated[
        bool, option("Exit with status 1 if a record could not be answered.", "--fail-on-error", panel=OUTPUT)
    ] = False,
    progress: Annotated[
        bool,
        option(
            "With --reuse, --host-memory or --disk: also show which pages are kept where, what was found, and what was copied or moved, "
            "while it runs.",
            "--progress",
            panel=OUTPUT,
        ),
    ] = False,
    ray: Annotated[
        bool,
        option("Run on a Ray cluster: the one of RAY_ADDRESS or of this machine, else a new one, of this machine.", "--ray", panel=CLUSTER),
    ] = False,
    replicas: Annotated[
        int | None, option("With --ray: workers, each with its own model and engine. [default: 1]", panel=CLUSTER, **whole())
    ] = None,
    gpus_per_replica: Annotated[
        float | None,
        option("With --ray: GPUs of each, as 0.5 or 2. [default: 1 if the cluster has any, else 0]", panel=CLUSTER, **number(least=0)),
    ] = None,
    cpus_per_replica: Annotated[float | None, option("With --ray: CPUs of each. [default: 1]", panel=CLUSTER, **number(above=0))] = None,
) -> None:
    """Answer every record of a file.

    Answers are written to OUT.jsonl.partial, which is renamed to OUT.jsonl at the end. To continue a killed job, run
    the same command again: it does only what is missing, also where lines were added at the end of the input. A record
    that cannot be answered gets an error in its own output line. Equal lines with one id have one answer; a job whose
    lines with one id differ is refused.
    """
    from rich.console import Console

    from kvjax.serving.batch.file_jobs import check_paths, partial_path
    from kvjax.serving.batch.records import Defaults
    from kvjax.serving.batch.resume import WITH_DEFAULT

    if ray:
        needs_extras("kvjax batch --ray", "ray")
    if engine.coordinator is None:  # else the first process does so
        check_paths(source, out, overwrite)
    with named_as_options():
        setup = engine.setup(
            steps_per_launch=steps_per_launch,
            draft=draft,
            draft_weights=draft_weights,
            left_out=not_typed(ctx, *WITH_DEFAULT),
        )
    cluster = {"replicas": replicas, "gpus_per_replica": gpus_per_replica, "cpus_per_replica": cpus_per_replica}
    given = {name: value for name, value in cluster.items() if value is not None}
    _check_together(engine, given, ray=ray, progress=progress)
    options = {"defaults": Defaults(max_new_tokens, temperature, seed), "overwrite": overwrite, "console": Console(stderr=True)}
    options["continue_anyway"] = continue_anyway
    try:
        if ray:
            from kvjax.serving.batch.ray import run_on_ray

            with named_as_options():
                summary = run_on_ray(source, out, setup, **given, **options)
        else:
            with engine.joined() as job:
                summary = _run_here(source, out, setup, job, stores=progress, **options)
    except KeyboardInterrupt:
        if partial_path(out).exists():
            typer.echo(f"interrupted; the answers so far are in {partial_path(out)}: run the same command again to continue", err=True)
        raise
    if summary is not None:
        _report(summary, out, fail_on_error)


def _check_together(engine: EngineOptions, cluster: dict[str, Any], *, ray: bool, progress: bool) -> None:
    """typer.BadParameter for options that do not go together. cluster: those for Ray that were given."""
    if progress and not any(engine.stores().values()):
        raise typer.BadParameter("shows where pages are: give --reuse, --host-memory or --disk, too", param_hint="--progress")
    if cluster and not ray:
        raise typer.BadParameter("is for a job on a Ray cluster: give --ray, too", param_hint=f"--{next(iter(cluster)).replace('_', '-')}")
    if ray and engine.data > 1:
        raise typer.BadParameter("is for engines of one process: with --ray give --replicas", param_hint="--data")
    if engine.coordinator is not None and (ray or engine.data > 1):
        raise typer.BadParameter("is for one engine of several processes: leave out --ray and --data", param_hint="--coordinator")
    for name, value in (("--disk", engine.disk), ("--progress", progress or None)):
        if ray and value is not None:
            raise typer.BadParameter("is for one engine: leave it out with --ray", param_hint=name)


def _run_here(
    source: Path,
    out: Path,
    setup: Setup,
    job: Processes | None,
    *,
    defaults: Defaults,
    overwrite: bool,
    continue_anyway: bool,
    **options: Any,
) -> Summary | None:
    """The job by one engine, or several replicas, in this process; or by one engine of several processes, of which the
    first gets a summary."""
    from kvjax.serving.batch.file_jobs import FileJob
    from kvjax.serving.batch.job import run_records

    first = job is None or job.number == 0
    if first:  # before the model is loaded, which takes long
        files = FileJob(source, out, defaults, overwrite=overwrite, anyway=continue_anyway, setup=setup)
        records = list(files.records())
    with named_as_options():
        if job is not None:
            setup.agree(job)
    loaded = setup.load()
    with named_as_options():
        setup = setup.sized(loaded, records) if first else setup
        setup = setup if job is None else job.share(setup)
        engines = setup.engines(loaded)
    if first:
        typer.echo(setup.describe(engines[0]), err=True)
    try:
        sizes = {"slots": setup.slots, "steps_per_launch": setup.steps_per_launch, "draft": setup.draft}
        return in_first(job, engines[0], lambda: run_records(files, records, engines, setup=setup, **sizes, **options))
    finally:
        for engine in engines:
            for stats in (engine.stats(), engine.pool_stats()):
                if stats is not None:
                    typer.echo(str(stats), err=True)
            engine.close()


def _report(summary: Summary, out: Path, fail_on_error: bool) -> None:
    """Print the closing figures and the first errors; exits with status 1 if the job counts as failed."""
    typer.echo(str(summary))
    for line, message in summary.first_errors:
        named = message.startswith("input line ")  # where a record has no id
        typer.echo(message if named else f"line {line}: {message}", err=True)
    if summary.errors > len(summary.first_errors):
        typer.echo(f"and {summary.errors - len(summary.first_errors):,} more with an error; see {out}", err=True)
    if no_room := summary.nothing_fitted:
        typer.echo("no record fits into the pool: give more --pages, --device-memory or --host-memory, or fewer --max-new-tokens", err=True)
    if no_room or (fail_on_error and summary.errors):
        raise typer.Exit(1)
