"""`kvjax bench ...`: benchmarks of whole models. JAX is imported inside the commands."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from kvjax.serving.cli.options import (
    MAX_BATCH,
    ImplementationOption,
    JsonOption,
    WholeSentences,
    forced_to,
    named_run,
    option,
    parse_lengths,
    whole,
)

PackedWeightsOption = Annotated[
    str,
    option(
        "How weights are packed, as kvjax plan --weights takes it, or none; several by commas, each with every --cache-format.", "--weights"
    ),
]
PackedPagesOption = Annotated[
    list[str] | None,
    option(
        "How full pages are packed, as kvjax plan --cache-format takes it, or none; may be given several times. [default: none]",
        "--cache-format",
    ),
]

BenchDtypeOption = Annotated[str, option("Type of weights and cache: bfloat16, float16 or float32.")]
TensorOption = Annotated[str, option("Devices over which heads, MLPs and the vocabulary are split; several by commas.", "--tensor")]
ContextOption = Annotated[str, option("Devices over which pages are dealt out; with several, all pairs are timed.", "--context")]

MOVED = {
    "cold": "compiling cold",
    "cpu": "on_cpu",
    "gaps": "traffic gaps",
    "host": "host",
    "lists": "lists",
    "overlap": "overlap",
    "prefill --measures": "prefill_measures",
    "prefill --ops": "prefill_ops",
    "programs": "compiling programs",
    "replicas": "replicas",
    "reuse": "reuse",
    "session-tokens": "session_costs tokens",
    "session-turn": "session_costs turn",
    "sessions": "sessions",
    "throughput": "traffic throughput",
    "tiered-prefill": "tiered_prompts",
    "tiers": "tiers",
    "transformers": "against_transformers",
}
"""Commands that left the package, and the scripts of the repository that do the same."""


class Benchmarks(WholeSentences):
    """The commands of `kvjax bench`. One that moved to the repository's benchmarks answers with its new name."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """The command that the arguments name. ValueError for one that moved."""
        for old in (args[0], *(f"{args[0]} {word}" for word in args[1:])):
            if old in MOVED:
                raise ValueError(f"`kvjax bench {old}` is now `python -m benchmarks.{MOVED[old]}`, in a clone of the repository")
        return super().resolve_command(ctx, args)


bench_app = typer.Typer(
    cls=Benchmarks,
    help="Time whole models. Single ops: python -m pallas_kernels.bench --help.",
    no_args_is_help=True,
    rich_markup_mode=None,
)


@bench_app.callback()
def benchmarks() -> None:
    """Time whole models. Single ops: python -m pallas_kernels.bench --help."""


def check_dtype(dtype: str) -> None:
    """BadParameter for a `--dtype` that models do not have."""
    if dtype not in ("bfloat16", "float16", "float32"):
        raise typer.BadParameter(f"{dtype!r} is not one of bfloat16, float16, float32", param_hint="--dtype")


@bench_app.command("decode")
def decode_command(
    shape: Annotated[
        str,
        option("qwen2.5-7b, llama-3.1-8b, llama-3.1-70b, qwen2.5-0.5b, tiny, or a model folder or hub id (only its config.json is read)."),
    ] = "qwen2.5-7b",
    lengths: Annotated[str, option("Tokens in the cache, separated by commas.")] = "8k,32k,128k,512k,1m",
    policies: Annotated[str, option("Decode policies, separated by commas; they take turns.")] = "dense,cascade:8,top:32",
    batch: Annotated[int, option("Sequences decoded together, all of the same length.", **whole(most=MAX_BATCH))] = 1,
    steps: Annotated[int, option("Steps per round; the host waits only at the end of a round.", **whole())] = 64,
    rounds: Annotated[int, option("Timed rounds of every policy, after one warm-up round.", **whole())] = 5,
    drafts: Annotated[
        str, option("Tokens per sequence and step: 1; or 4, 8 or 16, of which all but one are drafts. Separate several by commas.")
    ] = "1",
    steps_per_launch: Annotated[
        str, option("Steps that the device runs without the host, 1 to 16; they divide --steps. Separate several by commas.")
    ] = "1",
    dtype: BenchDtypeOption = "bfloat16",
    layers: Annotated[int | None, option("Run only so many layers, for small machines. [default: all of the shape]", **whole())] = None,
    json_out: JsonOption = None,
    implementation: ImplementationOption = None,
    tensor: TensorOption = "1",
    context: ContextOption = "1",
    weights: PackedWeightsOption = "none",
    cache_format: PackedPagesOption = None,
) -> None:
    """Time whole decode steps, from embedding to sampled token, with random weights and a random cache on the device.

    The steps are those of the engine. Dense and sparse steps take turns on one cache. On a GPU, a profile of a few
    steps shows where the time goes. With --steps-per-launch, a row of several steps in one launch has the time of one
    of them. With --drafts the table shows the cost of steps of several tokens, compared with steps of 1 if 1 is among
    them. With --tensor and --context, rows of several meshes, to which kvjax cost fit fits terms for exchanges between
    devices. With --weights and --cache-format, rows of packed weights and pages, for each of which kvjax cost fit makes
    a cost model. They are fitted to rows of one step per launch, or of kvjax cost fit --steps-per-launch, and terms of
    meshes to those of most steps.
    """
    from kvjax.cache.formats import parse_cache_format
    from kvjax.serving.bench.decode import Plan, config_of, policies_of

    check_dtype(dtype)
    sizes = parse_lengths(lengths), policies_of(policies), batch, steps, rounds, parse_lengths(drafts, "drafts")
    config = config_of(shape, layers, dtype)
    kinds = itertools.product(_meshes(tensor, context), _packed(weights, cache_format))
    counts = parse_lengths(steps_per_launch, "steps per launch")
    plans = [Plan(shape, config, *sizes, *mesh, scheme, parse_cache_format(pages, dtype), counts) for mesh, (scheme, pages) in kinds]

    from kvjax.serving.bench.tables import drafts_table, step_table
    from pallas_kernels.core.tables import show

    with forced_to(implementation):
        rows = _measured(plans, json_out, implementation)
    show(step_table(rows) if plans[0].drafts == (1,) else drafts_table(rows))
    exit_unless_timed(rows)


def exit_unless_timed(rows: list[dict[str, Any]]) -> None:
    """Exit with status 1 if a row failed, or if all were skipped: then nothing was timed."""
    if any("failed" in row for row in rows):
        raise typer.Exit(1)
    if all("skipped" in row for row in rows):
        typer.echo(f"nothing was timed: {rows[0]['skipped'] if rows else 'there are no rows'}", err=True)
        raise typer.Exit(1)


def _meshes(tensor: str, context: str) -> list[tuple[int, int]]:
    """All pairs of tensor and context, each once."""
    return list(dict.fromkeys(itertools.product(parse_lengths(tensor, "tensor"), parse_lengths(context, "context"))))


def _packed(weights: str, cache_format: list[str] | None) -> list[tuple[str | None, str | None]]:
    """Pairs of how weights and pages are packed; None: not."""
    from kvjax.model.weight_formats import SCHEMES

    if unknown := [each for each in weights.split(",") if each not in ("none", *SCHEMES)]:
        raise typer.BadParameter(f"{unknown[0]!r} is not one of none, {', '.join(SCHEMES)}", param_hint="--weights")
    names = [[None if each == "none" else each for each in dict.fromkeys(kind)] for kind in (weights.split(","), cache_format or ["none"])]
    return list(itertools.product(*names))


@bench_app.command("prefill")
def prefill_command(
    shape: Annotated[
        str, option("qwen2.5-7b, llama-3.1-8b, llama-3.1-70b, qwen2.5-0.5b, tiny, or a model folder or hub id.")
    ] = "qwen2.5-7b",
    lengths: Annotated[str, option("Tokens of the prompt, separated by commas.")] = "32k,128k,512k,1m",
    policies: Annotated[str, option("Prefill policies, separated by commas.")] = "dense,momo:128/8",
    chunk: Annotated[int, option("Tokens per prefill step, a multiple of 128.", **whole())] = 8192,
    rounds: Annotated[int, option("Timed runs of every prompt.", **whole())] = 1,
    dtype: BenchDtypeOption = "bfloat16",
    layers: Annotated[int | None, option("Only so many layers. [default: the shape's]", **whole())] = None,
    json_out: JsonOption = None,
    implementation: ImplementationOption = None,
    tensor: TensorOption = "1",
    context: ContextOption = "1",
    weights: PackedWeightsOption = "none",
    cache_format: PackedPagesOption = None,
) -> None:
    """Time to first token of whole prompts, with random weights."""
    from kvjax.cache.formats import parse_cache_format
    from kvjax.serving.bench.decode import config_of
    from kvjax.serving.bench.prefill import PrefillPlan, policies_of, run_prefill_plan
    from kvjax.serving.bench.tables import split_table, time_table
    from pallas_kernels.core.results import write_result
    from pallas_kernels.core.tables import show_markdown, stages

    check_dtype(dtype)
    try:
        sizes = parse_lengths(lengths), policies_of(policies), chunk, rounds
        config, kinds = config_of(shape, layers, dtype), itertools.product(_meshes(tensor, context), _packed(weights, cache_format))
        plans = [PrefillPlan(shape, config, *sizes, scheme, parse_cache_format(pages, dtype), *mesh) for mesh, (scheme, pages) in kinds]
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    rows: list[dict[str, Any]] = []
    with forced_to(implementation), stages() as say:
        for row in itertools.chain.from_iterable(run_prefill_plan(each, say) for each in plans):
            rows.append(row)
            if json_out is not None:
                write_result(json_out, named_run("prefill", implementation) | {"rows": rows})
    show_markdown(f"{time_table(rows)}\n\n{split_table(rows)}")
    for row in rows:
        if "failed" in row:
            typer.echo(f"{row['op']} {row['tokens']:,} {row['policy']} failed: {row['failed']}", err=True)
    exit_unless_timed(rows)


def _measured(plans: Sequence[Any], json_out: Path | None, implementation: str | None) -> list[dict[str, Any]]:
    """Run the plans, show their progress, and write rows as they arrive."""
    from kvjax.serving.bench.decode import run_plan
    from pallas_kernels.bench.measure import copy_rate
    from pallas_kernels.core.results import write_result
    from pallas_kernels.core.tables import stages

    rows: list[dict[str, Any]] = []
    with stages("copy bandwidth") as say:
        copy = copy_rate()
        for row in itertools.chain.from_iterable(run_plan(plan, copy["bytes_per_s"], say) for plan in plans):
            rows.append(row)
            if json_out is not None:
                kind = "decode" if plans[0].drafts == (1,) else "drafts"  # no cost model is fitted to rows of drafts
                write_result(json_out, named_run(kind, implementation) | {"copy": copy, "rows": rows})
    return rows
