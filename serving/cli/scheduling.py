"""`kvjax bench host`, `throughput`, `replicas`, `gaps`, `cold`, `programs`, `reuse`. JAX is imported inside the commands."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvjax.serving.cli.options import (
    ContextOption,
    JsonOption,
    StepsPerLaunchOption,
    TensorOption,
    number,
    parse_lengths,
    token_count,
    whole,
)

if TYPE_CHECKING:
    from kvjax.model import ModelConfig

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
BenchDtypeOption = Annotated[str, typer.Option(help="Type of weights and cache: bfloat16, float16 or float32.")]
BenchChunkOption = Annotated[int, typer.Option(help="Tokens prefilled at a time, a multiple of 128.", **token_count())]


def host_command(
    rows: Annotated[str, typer.Option(help="Sequences decoded together; cases are separated by commas.")] = "64,8",
    pages: Annotated[str, typer.Option(help="Pages of each sequence, case by case.")] = "1024,8192",
    steps: Annotated[int, typer.Option(help="Timed steps.", **whole())] = 2000,
    layers: Annotated[
        int, typer.Option(help="Number of layers. They compute nothing, but a step is called with their arrays.", **whole())
    ] = 28,
    policy: Annotated[str, typer.Option(help="Decode policy; its indexes are among these arrays.")] = "top:32",
    json_out: JsonOption = None,
) -> None:
    """Time the host's part of a decode step, with JAX's share printed separately: Engine.decode_and_sample alone, and Scheduler.step.

    Scheduler.step is also timed with a listener for every token, and with log-probabilities.

    Layers compute nothing and prompts are not prefilled, so the device takes no time. The wait for it between steps is not timed.
    """
    from kvjax.serving.bench.host_time import host_rows

    cases = tuple(zip(parse_lengths(rows, "rows"), parse_lengths(pages, "pages"), strict=False))
    if len(cases) != rows.count(",") + 1 or len(cases) != pages.count(",") + 1:
        raise typer.BadParameter(f"{rows!r} and {pages!r} must have equally many entries", param_hint="--pages")
    run(json_out, "host", lambda say: host_rows(cases, steps=steps, layers=layers, policy=policy, say=say))


def throughput_command(
    shape: ShapeOption = "qwen2.5-7b",
    policies: Annotated[str, typer.Option(help="Decode policies, separated by commas; they run one after the other.")] = "dense,top:32",
    requests: Annotated[int, typer.Option(help="Requests, with a slot for each.", **whole())] = 64,
    prompt: Annotated[int, typer.Option(help="Tokens of each prompt.", **token_count())] = 8000,
    answer: Annotated[int, typer.Option(help="Tokens of each answer.", **whole(2))] = 129,
    prefill: Annotated[str, typer.Option(help="Prefill policy.")] = "dense",
    chunk: BenchChunkOption = 512,
    dtype: BenchDtypeOption = "bfloat16",
    layers: LayersOption = None,
    json_out: JsonOption = None,
) -> None:
    """Time requests through the scheduler, from the first submit to the last completion, with random weights and no bound on gaps."""
    from kvjax.serving.bench.traffic import Traffic, throughput_row

    config = config_of_shape(shape, layers, dtype)
    plan = plan_of(Traffic, shape, config, requests=requests, prompt=prompt, answer=answer, prefill=prefill, chunk=chunk)
    run(json_out, "throughput", lambda say: (throughput_row(plan, policy, say) for policy in policies.split(",")))


def replicas_command(
    shape: ShapeOption = "qwen2.5-7b",
    data: Annotated[str, typer.Option(help="Numbers of replicas, separated by commas; they run one after the other.")] = "1,2",
    tensor: TensorOption = 1,
    context: ContextOption = 1,
    policy: Annotated[str, typer.Option(help="Decode policy.")] = "top:32",
    requests: Annotated[int, typer.Option(help="Requests for each replica, with a slot for each.", **whole())] = 16,
    prompt: Annotated[int, typer.Option(help="Tokens of each prompt.", **token_count())] = 8000,
    answer: Annotated[int, typer.Option(help="Tokens of each answer.", **whole())] = 129,
    prefill: Annotated[str, typer.Option(help="Prefill policy.")] = "dense",
    chunk: BenchChunkOption = 512,
    steps_per_launch: StepsPerLaunchOption = 1,
    dtype: BenchDtypeOption = "bfloat16",
    layers: LayersOption = None,
    json_out: JsonOption = None,
) -> None:
    """Time the same load for each of one, two, or more data-parallel replicas, as a batch job runs them, with random weights."""
    from kvjax.serving.bench.replicas import Load, replicas_rows

    counts = parse_lengths(data, "data")
    sizes = {"requests": requests, "prompt": prompt, "answer": answer, "policy": policy, "prefill": prefill, "chunk": chunk}
    sizes["steps_per_launch"] = steps_per_launch
    plan = plan_of(Load, shape, config_of_shape(shape, layers, dtype), counts, tensor, context, **sizes)
    run(json_out, "replicas", lambda say: replicas_rows(plan, say))


def gaps_command(
    shape: ShapeOption = "qwen2.5-7b",
    max_gap_ms: Annotated[float, typer.Option(help="The scheduler's bound: milliseconds between two tokens.", **number(above=0))] = 60,
    prefill: Annotated[str, typer.Option(help="Prefill policy of the long prompt.")] = "momo:128/8",
    policy: Annotated[str, typer.Option(help="Decode policy of the neighbours.")] = "top:32",
    prompt: Annotated[int, typer.Option(help="Tokens of the long prompt, a multiple of the chunk.", **token_count())] = 2**19,
    computed: Annotated[
        int, typer.Option(help="Tokens at its end that are computed, which take the longest; the others are random pages.", **token_count())
    ] = 2**16,
    neighbours: Annotated[int, typer.Option(help="Sequences that decode beside it.", **whole())] = 7,
    history: Annotated[int, typer.Option(help="Tokens of each of them.", **token_count())] = 2**13,
    chunk: BenchChunkOption = 2048,
    seconds: Annotated[float, typer.Option(help="Time after which each of the two parts ends, finished or not.", **number(above=0))] = 60,
    dtype: BenchDtypeOption = "bfloat16",
    layers: LayersOption = None,
    json_out: JsonOption = None,
) -> None:
    """Measure gaps between tokens of sequences that decode while a long prompt is prefilled, and what the bound on them costs the prompt.

    First part: the prompt alone, without a bound. Second part: with its neighbours and the bound. Weights are random.
    """
    from kvjax.serving.bench.traffic import Gaps, gaps_row

    config = config_of_shape(shape, layers, dtype)
    sizes = {"prompt": prompt, "computed": computed, "neighbours": neighbours, "history": history, "chunk": chunk, "seconds": seconds}
    plan = plan_of(Gaps, shape, config, max_gap_ms=max_gap_ms, prefill=prefill, policy=policy, **sizes)
    run(json_out, "gaps", lambda say: [gaps_row(plan, say)])


def cold_command(
    shape: ShapeOption = "qwen2.5-7b",
    prompt: Annotated[int, typer.Option(help="Tokens of the prompt.", **token_count())] = 2**19,
    computed: Annotated[
        int,
        typer.Option(help="Tokens at its end that are computed; the others would run the same programs, and are skipped.", **token_count()),
    ] = 2**14,
    prefill: Annotated[str, typer.Option(help="Prefill policy.")] = "dense",
    policy: Annotated[str, typer.Option(help="Decode policy of the two tokens after the prompt.")] = "top:32",
    chunk: BenchChunkOption = 8192,
    dtype: BenchDtypeOption = "bfloat16",
    layers: LayersOption = None,
    json_out: JsonOption = None,
) -> None:
    """Measure the time that a first prompt spends on tracing, lowering and compiling without a compilation cache, and count the
    programs."""
    from kvjax.serving.bench.compiling import cold_row

    config = config_of_shape(shape, layers, dtype)
    sizes = {"prompt": prompt, "computed": computed, "chunk": chunk, "prefill": prefill, "policy": policy}
    run(json_out, "cold", lambda say: [cold_row(shape, config, **sizes)])


def reuse_command(
    shape: ShapeOption = "qwen2.5-7b",
    tokens: Annotated[int, typer.Option(help="Tokens that prompts share, whole pages.", **token_count(128))] = 2**17 - 2**10,
    own: Annotated[int, typer.Option(help="Tokens of each prompt after it.", **token_count())] = 64,
    rounds: Annotated[int, typer.Option(help="Timed prompts for each store.", **whole())] = 3,
    folder: Annotated[
        Path | None, typer.Option(exists=True, file_okay=False, help="A folder on the disk to time. [default: the temporary one]")
    ] = None,
    stores: Annotated[str, typer.Option(help="Where its pages are kept, separated by commas; none: nowhere.")] = "none,device,host,disk",
    chunk: BenchChunkOption = 512,
    dtype: BenchDtypeOption = "bfloat16",
    layers: LayersOption = None,
    json_out: JsonOption = None,
) -> None:
    """Time the first token of a prompt whose beginning is known: on the device, in host memory, on disk; and the same prompt computed.

    Weights and prompts are random.
    """
    from kvjax.serving.bench.reuse import Reused, reuse_rows

    sizes = {"tokens": tokens, "own": own, "chunk": chunk, "rounds": rounds, "folder": folder, "stores": tuple(stores.split(","))}
    plan = plan_of(Reused, shape, config_of_shape(shape, layers, dtype), **sizes)
    run(json_out, "reuse", lambda say: reuse_rows(plan, say))


def programs_command(
    shape: ShapeOption = "tiny",
    lengths: Annotated[str, typer.Option(help="Tokens of the prompts, separated by commas.")] = "100,1k,3k,9k",
    policies: Annotated[str, typer.Option(help="Decode policies; each has every length, greedy and sampled.")] = "dense,cascade:8",
    prefill: Annotated[str, typer.Option(help="Prefill policy.")] = "dense",
    chunk: BenchChunkOption = 512,
    dtype: BenchDtypeOption = "bfloat16",
    layers: LayersOption = None,
    json_out: JsonOption = None,
) -> None:
    """Count the programs that a mixed job compiles: several lengths and policies, greedy and sampled, in four slots."""
    from kvjax.serving.bench.compiling import programs_row

    config, known = config_of_shape(shape, layers, dtype), parse_lengths(lengths)
    sizes = {"lengths": known, "policies": tuple(policies.split(",")), "chunk": chunk, "prefill": prefill}
    run(json_out, "programs", lambda say: [programs_row(shape, config, **sizes)])


def config_of_shape(shape: str, layers: int | None, dtype: str) -> ModelConfig:
    """The configuration of `--shape`, `--layers` and `--dtype`."""
    from kvjax.serving.bench.decode import config_of

    check_dtype(dtype)
    return config_of(shape, layers, dtype)


def check_dtype(dtype: str) -> None:
    """BadParameter for a `--dtype` that models do not have."""
    if dtype not in ("bfloat16", "float16", "float32"):
        raise typer.BadParameter(f"{dtype!r} is not one of bfloat16, float16, float32", param_hint="--dtype")


def plan_of(kind: type, *args: Any, **fields: Any) -> Any:
    """A plan of a benchmark; BadParameter where its sizes do not fit together."""
    try:
        return kind(*args, **fields)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


def run(json_out: Path | None, kind: str, rows_of: Callable[[Callable[[str], None]], Iterable[dict[str, Any]]]) -> None:
    """Show progress, write rows as they arrive, and print their table. A row may bring the "provenance" of the process that measured it."""
    from pallas_kernels.bench import scheduling
    from pallas_kernels.core.results import write_result
    from pallas_kernels.core.tables import show, stages, table

    rows: list[dict[str, Any]] = []
    with stages(kind) as say:
        for row in rows_of(say):
            told = {"provenance": row.pop("provenance")} if "provenance" in row else {}
            rows.append(row)
            if json_out is not None:
                write_result(json_out, told | {"bench": kind, "rows": rows})
    columns, cells = scheduling.TABLES[kind]
    show(table(columns, map(cells, rows)))


COMMANDS = {
    "host": host_command,
    "throughput": throughput_command,
    "replicas": replicas_command,
    "gaps": gaps_command,
    "cold": cold_command,
    "programs": programs_command,
    "reuse": reuse_command,
}
"""Of `kvjax bench`."""
