"""`kvjax batch`: every record of a file, by one engine or several replicas here, or by several on a Ray cluster."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvjax.serving.cli.options import (
    MAX_BATCH,
    CacheFormatOption,
    ChunkOption,
    ContextOption,
    CoordinatorOption,
    DataOption,
    DeviceMemoryOption,
    DiskOption,
    DiskSizeOption,
    DtypeOption,
    HostMemoryOption,
    LoraOption,
    MaxMissedOption,
    MaxPositionsOption,
    ModelOption,
    PageSizeOption,
    PolicyOption,
    PrefillOption,
    ProcessesOption,
    ProcessOption,
    ReuseAnyOption,
    ReuseOption,
    StepsPerLaunchOption,
    TensorOption,
    WeightsOption,
    in_first,
    joined,
    named_as_options,
    not_typed,
    number,
    stores,
    watched,
    whole,
)
from pallas_kernels.core.optional import needs_extras

if TYPE_CHECKING:
    from kvjax.scheduler.processes import Processes
    from kvjax.serving.batch.records import Defaults
    from kvjax.serving.batch.results import Summary
    from kvjax.serving.batch.setup import Setup


SourceArgument = Annotated[
    Path,
    typer.Argument(
        metavar="IN.jsonl",
        help="One record per line: plain, or OpenAI's batch file format; may be compressed by gzip. Or IN.parquet: one per row.",
    ),
]
OutOption = Annotated[
    Path,
    typer.Option(
        "--out",
        "-o",
        help="Output file: one line per record, in the input's order. Parquet or compressed if it ends in .parquet or .gz.",
    ),
]
ContinueAnywayOption = Annotated[
    bool,
    typer.Option(
        "--continue-anyway",
        help="Continue a killed job with another --max-batch. The last bits of its answers may differ from those of one run, and the "
        "summary says so.",
    ),
]


def batch_command(
    ctx: typer.Context,
    source: SourceArgument,
    out: OutOption,
    model: ModelOption,
    policy: PolicyOption = None,
    max_missed: MaxMissedOption = None,
    prefill: PrefillOption = None,
    max_batch: Annotated[int, typer.Option(help="Sequences decoded together.", **whole(most=MAX_BATCH))] = 8,
    max_new_tokens: Annotated[int, typer.Option(help="The most tokens to generate, for records that do not say.", **whole())] = 128,
    temperature: Annotated[
        float | None,
        typer.Option(
            help="For records that do not say; 0 is greedy. [default: 0; 1 for OpenAI's format]", show_default=False, **number(least=0)
        ),
    ] = None,
    seed: Annotated[
        int, typer.Option(help="For records without a seed: this and the record's id make one.", **whole(-(2**63), 2**63 - 1))
    ] = 0,
    pages: Annotated[
        int | None,
        typer.Option(help="Pages in the pool. [default: enough for the longest records, or as many as fit]", show_default=False, **whole()),
    ] = None,
    steps_per_launch: StepsPerLaunchOption = 1,
    page_size: PageSizeOption = 128,
    prefill_chunk: ChunkOption = 512,
    cache_format: CacheFormatOption = None,
    dtype: DtypeOption = None,
    weights: WeightsOption = None,
    lora: LoraOption = None,
    max_positions: MaxPositionsOption = None,
    device_memory: DeviceMemoryOption = None,
    tensor: TensorOption = 1,
    context: ContextOption = 1,
    data: DataOption = 1,
    coordinator: CoordinatorOption = None,
    processes: ProcessesOption = None,
    process: ProcessOption = None,
    reuse: ReuseOption = None,
    reuse_any: ReuseAnyOption = False,
    host_memory: HostMemoryOption = None,
    disk: DiskOption = None,
    disk_size: DiskSizeOption = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace OUT.jsonl if it exists.")] = False,
    continue_anyway: ContinueAnywayOption = False,
    fail_on_error: Annotated[bool, typer.Option("--fail-on-error", help="Exit with status 1 if a record could not be answered.")] = False,
    progress: Annotated[
        bool,
        typer.Option(
            "--progress",
            help="With --reuse, --host-memory or --disk: also show which pages are kept where, what was found, and what was copied or "
            "moved, while it runs.",
        ),
    ] = False,
    ray: Annotated[
        bool,
        typer.Option("--ray", help="Run on a Ray cluster: the one of RAY_ADDRESS or of this machine, else a new one, of this machine."),
    ] = False,
    replicas: Annotated[
        int | None,
        typer.Option(help="With --ray: workers, each with its own model and engine. [default: 1]", show_default=False, **whole()),
    ] = None,
    gpus_per_replica: Annotated[
        float | None,
        typer.Option(
            help="With --ray: GPUs of each, as 0.5 or 2. [default: 1 if the cluster has any, else 0]", show_default=False, **number(least=0)
        ),
    ] = None,
    cpus_per_replica: Annotated[
        float | None, typer.Option(help="With --ray: CPUs of each. [default: 1]", show_default=False, **number(above=0))
    ] = None,
) -> None:
    """Answer every record of a file.

    Answers are written to OUT.jsonl.partial, which is renamed to OUT.jsonl at the end. To continue a killed job, run the same command
    again: it does only what is missing, also where lines were added at the end of the input. A record that cannot be answered gets an
    error in its own output line. Equal lines with one id have one answer; a job whose lines with one id differ is refused.
    """
    from rich.console import Console

    from kvjax.serving.batch.file_jobs import check_paths, partial_path
    from kvjax.serving.batch.records import Defaults
    from kvjax.serving.batch.resume import WITH_DEFAULT
    from kvjax.serving.batch.setup import Setup

    if ray:
        needs_extras("kvjax batch --ray", "ray")
    if coordinator is None:  # else the first process does so
        check_paths(source, out, overwrite)
    kept = stores(reuse, reuse_any, host_memory, disk, disk_size)
    cluster = {"replicas": replicas, "gpus_per_replica": gpus_per_replica, "cpus_per_replica": cpus_per_replica}
    given = {name: value for name, value in cluster.items() if value is not None}
    _check_together(given, ray=ray, data=data, coordinator=coordinator, processes=processes, kept=kept, progress=progress)
    sizes = {"pages": pages, "device_bytes": device_memory, "page_size": page_size, "prefill_chunk": prefill_chunk}
    sizes |= {"stores": kept, "weights": weights and weights.value, "steps_per_launch": steps_per_launch}
    sizes["lora"] = tuple(lora or ())
    sizes |= {"tensor": tensor, "context": context, "data": data, "cache_format": cache_format}
    sizes["left_out"] = not_typed(ctx, *WITH_DEFAULT)
    policy = watched(policy, max_missed)
    setup = Setup(model, dtype and dtype.value, max_positions, policy, prefill, max_batch, **sizes)
    options = {"defaults": Defaults(max_new_tokens, temperature, seed), "overwrite": overwrite, "console": Console(stderr=True)}
    options["continue_anyway"] = continue_anyway
    try:
        if ray:
            from kvjax.serving.batch.ray import run_on_ray

            with named_as_options():
                summary = run_on_ray(source, out, setup, **given, **options)
        else:
            with joined(coordinator, processes, process) as job:
                summary = _run_here(source, out, setup, job, stores=progress, **options)
    except KeyboardInterrupt:
        if partial_path(out).exists():
            typer.echo(f"interrupted; the answers so far are in {partial_path(out)}: run the same command again to continue", err=True)
        raise
    if summary is not None:
        _report(summary, out, fail_on_error)


def _check_together(
    cluster: dict[str, Any], *, ray: bool, data: int, coordinator: str | None, processes: int | None, kept: dict[str, Any], progress: bool
) -> None:
    """typer.BadParameter for options that do not go together. cluster: those for Ray that were given. kept: those of stores."""
    if progress and not any(kept.values()):
        raise typer.BadParameter("shows where pages are: give --reuse, --host-memory or --disk, too", param_hint="--progress")
    if cluster and not ray:
        raise typer.BadParameter("is for a job on a Ray cluster: give --ray, too", param_hint=f"--{next(iter(cluster)).replace('_', '-')}")
    if ray and data > 1:
        raise typer.BadParameter("is for engines of one process: with --ray give --replicas", param_hint="--data")
    if coordinator is not None and (ray or data > 1):
        raise typer.BadParameter("is for one engine of several processes: leave out --ray and --data", param_hint="--coordinator")
    if kept["disk"] is not None and coordinator is not None and processes != 1:
        said = "is for one process: each of several would find other pages there after one was killed. Leave it out with --coordinator"
        raise typer.BadParameter(said, param_hint="--disk")
    for option, value in (("--disk", kept["disk"]), ("--progress", progress or None)):
        if ray and value is not None:
            raise typer.BadParameter("is for one engine: leave it out with --ray", param_hint=option)


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
    """The job by one engine, or several replicas, in this process; or by one engine of several processes, of which the first gets a
    summary."""
    from kvjax.serving.batch.file_jobs import FileJob
    from kvjax.serving.batch.job import run_records

    first = job is None or job.number == 0
    if first:  # before the model is loaded, which takes long
        files = FileJob(source, out, defaults, overwrite=overwrite, anyway=continue_anyway, setup=setup)
        records = list(files.records())
    with named_as_options():
        if job is not None:  # the model may lie in another folder there; what it holds is compared when it is loaded
            job.agree({name: value for name, value in vars(setup).items() if name not in ("model", "lora", "left_out")})
    loaded = setup.load()
    with named_as_options():
        setup = setup.sized(loaded, records) if first else setup
        setup = setup if job is None else job.share(setup)
        engines = setup.engines(loaded)
    if first:
        typer.echo(setup.describe(engines[0]), err=True)
    try:
        sizes = {"slots": setup.slots, "steps_per_launch": setup.steps_per_launch}
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
