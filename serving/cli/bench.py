"""`kvjax bench ...`: benchmarks of whole models. JAX is imported inside the commands."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from kvjax.serving.cli import scheduling, session_bench, tiers
from kvjax.serving.cli.help_pages import WholeSentences
from kvjax.serving.cli.options import (
    LARGEST_BATCH,
    ImplementationOption,
    JsonOption,
    ModelOption,
    forced_to,
    named_run,
    parse_lengths,
    png,
    token_count,
    whole,
)
from pallas_kernels.extras import needs_extras

PackedWeightsOption = Annotated[
    str,
    typer.Option(
        "--weights",
        help="How weights are packed, as kvjax plan --weights takes it, or none; several by commas, each with every --cache-format.",
    ),
]
PackedPagesOption = Annotated[
    list[str] | None,
    typer.Option(
        "--cache-format",
        help="How full pages are packed, as kvjax plan --cache-format takes it, or none; may be given several times. [default: none]",
        show_default=False,
    ),
]

TensorOption = Annotated[
    str, typer.Option("--tensor", help="Devices over which heads, MLPs and the vocabulary are split; several by commas.")
]
ContextOption = Annotated[str, typer.Option("--context", help="Devices over which pages are dealt out; with several, all pairs are timed.")]

bench_app = typer.Typer(
    cls=WholeSentences,
    help="Time whole models. Single ops: python -m pallas_kernels.bench --help.",
    no_args_is_help=True,
    rich_markup_mode=None,
)


@bench_app.callback()
def benchmarks() -> None:
    """Time whole models. Single ops: python -m pallas_kernels.bench --help."""


@bench_app.command("decode")
def decode_command(
    shape: Annotated[
        str,
        typer.Option(
            help="qwen2.5-7b, llama-3.1-8b, llama-3.1-70b, qwen2.5-0.5b, tiny, or a model folder or hub id (only its config.json is read)."
        ),
    ] = "qwen2.5-7b",
    lengths: Annotated[str, typer.Option(help="Tokens in the cache, separated by commas.")] = "8k,32k,128k,512k,1m",
    policies: Annotated[str, typer.Option(help="Decode policies, separated by commas; they take turns.")] = "dense,cascade:8,top:32",
    batch: Annotated[int, typer.Option(help="Sequences decoded together, all of the same length.", **whole(most=LARGEST_BATCH))] = 1,
    steps: Annotated[int, typer.Option(help="Steps per round; the host waits only at the end of a round.", **whole())] = 64,
    rounds: Annotated[int, typer.Option(help="Timed rounds of every policy, after one warm-up round.", **whole())] = 5,
    drafts: Annotated[
        str,
        typer.Option(help="Tokens per sequence and step: 1; or 4, 8 or 16, of which all but one are drafts. Separate several by commas."),
    ] = "1",
    steps_per_launch: Annotated[
        str, typer.Option(help="Steps that the device runs without the host, 1 to 16; they divide --steps. Separate several by commas.")
    ] = "1",
    dtype: scheduling.BenchDtypeOption = "bfloat16",
    layers: Annotated[
        int | None,
        typer.Option(help="Run only so many layers, for small machines. [default: all of the shape]", show_default=False, **whole()),
    ] = None,
    json_out: JsonOption = None,
    implementation: ImplementationOption = None,
    tensor: TensorOption = "1",
    context: ContextOption = "1",
    weights: PackedWeightsOption = "none",
    cache_format: PackedPagesOption = None,
) -> None:
    """Time whole decode steps, from embedding to sampled token, with random weights and a random cache on the device.

    The steps are those of the engine. Dense and sparse steps take turns on one cache. On a GPU, a profile of a few steps shows where the
    time goes. With --steps-per-launch, a row of several steps in one launch has the time of one of them. With --drafts the table shows the
    cost of steps of several tokens, compared with steps of 1 if 1 is among them. With --tensor and --context, rows of several meshes, to
    which kvjax cost fit fits terms for exchanges between devices. With --weights and --cache-format, rows of packed weights and pages, for
    each of which kvjax cost fit makes a cost model. They are fitted to rows of one step per launch, or of
    kvjax cost fit --steps-per-launch, and terms of meshes to those of most steps.
    """
    from kvjax.cache.formats import parse_cache_format
    from kvjax.serving.bench.decode import Plan, config_of, policies_of

    scheduling.check_dtype(dtype)
    sizes = parse_lengths(lengths), policies_of(policies), batch, steps, rounds, parse_lengths(drafts, "drafts")
    config = config_of(shape, layers, dtype)
    kinds = itertools.product(_meshes(tensor, context), _packed(weights, cache_format))
    counts = parse_lengths(steps_per_launch, "steps per launch")
    plans = [Plan(shape, config, *sizes, *mesh, scheme, parse_cache_format(pages, dtype), counts) for mesh, (scheme, pages) in kinds]

    from pallas_kernels.bench.formats import show
    from pallas_kernels.bench.report import drafts_table, step_table

    with forced_to(implementation):
        rows = _measured(plans, json_out, implementation)
    show(step_table(rows) if plans[0].drafts == (1,) else drafts_table(rows))
    _exit_unless_timed(rows)


def _exit_unless_timed(rows: list[dict[str, Any]]) -> None:
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
    from kvjax.packing import SCHEMES

    if unknown := [each for each in weights.split(",") if each not in ("none", *SCHEMES)]:
        raise typer.BadParameter(f"{unknown[0]!r} is not one of none, {', '.join(SCHEMES)}", param_hint="--weights")
    names = [[None if each == "none" else each for each in dict.fromkeys(kind)] for kind in (weights.split(","), cache_format or ["none"])]
    return list(itertools.product(*names))


@bench_app.command("prefill")
def prefill_command(
    shape: Annotated[
        str, typer.Option(help="qwen2.5-7b, llama-3.1-8b, llama-3.1-70b, qwen2.5-0.5b, tiny, or a model folder or hub id.")
    ] = "qwen2.5-7b",
    lengths: Annotated[str, typer.Option(help="Tokens of the prompt, separated by commas.")] = "32k,128k,512k,1m",
    policies: Annotated[str, typer.Option(help="Prefill policies, separated by commas.")] = "dense,momo:128/8",
    chunk: Annotated[
        int | None,
        typer.Option(
            help="Tokens per prefill step, a multiple of 128. [default: 8192; 2048 with --measures]", show_default=False, **whole()
        ),
    ] = None,
    rounds: Annotated[int | None, typer.Option(help="Timed runs of every prompt. [default: 1]", show_default=False, **whole())] = None,
    dtype: Annotated[
        str | None,
        typer.Option(
            help="Type of weights and cache: bfloat16, float16 or float32. [default: bfloat16; with --measures as for `kvjax generate`]",
            show_default=False,
        ),
    ] = None,
    layers: Annotated[int | None, typer.Option(help="Only so many layers. [default: the shape's]", show_default=False, **whole())] = None,
    ops: Annotated[
        bool,
        typer.Option(
            "--ops",
            help="Instead, time the attention of one layer and its steps, beside other projects' dense kernels. With a model as --shape: "
            "all layers, over a text.",
        ),
    ] = False,
    baselines: Annotated[
        bool | None,
        typer.Option(
            "--baselines/--no-baselines",
            help="With --ops: also time other projects' dense kernels, and ours over contiguous keys. Slow for long prompts. "
            "[default: --baselines]",
            show_default=False,
        ),
    ] = None,
    measures: Annotated[
        bool, typer.Option("--measures", help="Instead, measure what lists capture and the error of outputs; needs a real model.")
    ] = False,
    ablate: Annotated[
        bool, typer.Option("--ablate", help="With --measures: vary gamma, chi, k, k_exact, the estimate, trimming and correction.")
    ] = False,
    text: Annotated[
        list[Path] | None, typer.Option(help="With --measures, or --ops of a model: prose to prefill. [default: Python's documentation]")
    ] = None,
    json_out: JsonOption = None,
    implementation: ImplementationOption = None,
    tensor: TensorOption = "1",
    context: ContextOption = "1",
    weights: PackedWeightsOption = "none",
    cache_format: PackedPagesOption = None,
) -> None:
    """Time to first token of whole prompts, with random weights; or details of their attention (--ops, --measures)."""
    from kvjax.serving.cli import prefill as prefill_cli
    from pallas_kernels.bench.cases import SHAPES

    if ops and measures:
        raise typer.BadParameter("--ops and --measures exclude each other", param_hint="--measures")
    of_model = ops and shape not in SHAPES
    if ablate and not measures:
        raise typer.BadParameter("belongs to --measures", param_hint="--ablate")
    if text and not (measures or of_model):
        raise typer.BadParameter("belongs to --measures, and to --ops with a model as the --shape", param_hint="--text")
    if baselines is not None and (not ops or of_model):
        raise typer.BadParameter("belongs to --ops without a model", param_hint="--baselines")
    if measures and shape in SHAPES:
        why = f"--measures needs a real model, but {shape} has no weights: give one, as --shape needle"
        raise typer.BadParameter(why, param_hint="--shape")
    form = "--measures" if measures else "--ops" if ops else None
    packed = _packed(weights, cache_format)
    unused = {"--rounds": rounds, "--layers": layers, "--weights": None if weights == "none" else weights, "--cache-format": cache_format}
    unused |= {name: None if value == "1" else value for name, value in (("--tensor", tensor), ("--context", context))}
    unused |= {"--chunk": chunk} if ops else {}
    for option, value in unused.items():
        if form and value is not None:
            raise typer.BadParameter(f"does nothing with {form}: leave it out, or time whole prompts without {form}", param_hint=option)
    given = {} if chunk is None else {"chunk": chunk}
    try:
        if measures:
            run = prefill_cli.measures_run(shape, lengths, policies, dtype, ablate=ablate, files=text or (), **given)
        elif of_model:
            run = prefill_cli.layers_run(shape, lengths, policies, dtype or "bfloat16", text or ())
        elif ops:
            run = prefill_cli.ops_run(shape, lengths, policies, dtype or "bfloat16", baselines=baselines is not False)
        else:
            given |= {} if rounds is None else {"rounds": rounds}
            given |= {"layers": layers, "packed": packed, "meshes": _meshes(tensor, context)}
            run = prefill_cli.time_run(shape, lengths, policies, dtype or "bfloat16", **given)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    with forced_to(implementation):
        rows = prefill_cli.show(run, json_out, implementation)
    _exit_unless_timed(rows)


@bench_app.command("overlap")
def overlap_command(
    model: ModelOption = "needle",
    length: Annotated[str, typer.Option(help="Tokens of text, the decoded ones included.")] = "16k",
    steps: Annotated[int, typer.Option(help="Decode steps at the end of the text.", **whole(2))] = 64,
    ks: Annotated[str, typer.Option("--k", help="How many keys of a step, separated by commas.")] = "512,2048",
    kind: Annotated[str, typer.Option(help="relu: as a lightning indexer scores; logits: without relu.")] = "relu",
    text: Annotated[list[Path] | None, typer.Option(help="Prose to decode. [default: Python's documentation]")] = None,
    json_out: JsonOption = None,
    plot: Annotated[Path | None, typer.Option(help="File (PNG) for a picture.", **png())] = None,
    save: Annotated[
        Path | None,
        typer.Option(dir_okay=False, help="File (.npz) for the last two steps' scores, for --rows of pallas_kernels.bench.top_k."),
    ] = None,
) -> None:
    """Measure how many of its best keys a query shares with the previous query, layer by layer: the value of a hint to top_k.

    After a dense prefill, the text is forced through decode steps. Scores come from the model's own attention: `sum_h relu(q_h . k)`.
    """
    if plot is not None:
        needs_extras("kvjax bench overlap --plot", "plots")
    from kvjax.serving.cli.overlap import measure_overlap

    try:
        measure_overlap(model, length, steps, ks, kind=kind, files=text or (), json_out=json_out, plot=plot, save=save)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


@bench_app.command("transformers")
def transformers_command(
    model: Annotated[
        str, typer.Option("--model", "-m", help="Model folder, hub id or 'needle'; or a shape with random weights, such as qwen2.5-0.5b.")
    ] = "needle",
    tokens: Annotated[int, typer.Option(help="Tokens of the prompt; they are random.", **token_count())] = 8128,
    policies: Annotated[str, typer.Option(help="Decode policies of kvjax, separated by commas.")] = "dense,cascade:8",
    steps: Annotated[int, typer.Option(help="Timed steps after the prompt.", **whole())] = 32,
    rounds: Annotated[int, typer.Option(help="Timed rounds; in a round every side runs the prompt and the steps.", **whole())] = 3,
    chunk: Annotated[int, typer.Option(help="Tokens that kvjax prefills at a time, a multiple of 128.", **token_count())] = 512,
    dtype: scheduling.BenchDtypeOption = "bfloat16",
    python: Annotated[
        str,
        typer.Option(
            help="The Python that runs transformers; torch and transformers must be installed there. [default: this one]",
            show_default=False,
        ),
    ] = "",
    json_out: JsonOption = None,
) -> None:
    """Time a prompt and the steps after it on the CPU, by kvjax and by transformers, with the same weights and in turns.

    transformers runs in a process of its own: PyTorch is not installed with kvjax.
    """
    import sys

    from kvjax.serving.bench.against_transformers import Comparison, comparison_rows

    scheduling.check_dtype(dtype)
    sizes = {"tokens": tokens, "steps": steps, "rounds": rounds, "chunk": chunk}
    plan = Comparison(model, dtype, policies=tuple(policies.split(",")), python=python or sys.executable, **sizes)
    scheduling.run(json_out, "transformers", lambda say: comparison_rows(plan, say))


@bench_app.command("cpu")
def cpu_command(
    model: Annotated[str, typer.Option("--model", "-m", help="Model folder, or what else kvjax.load takes.")],
    gguf: Annotated[
        str, typer.Option(help="GGUF file of the same model for llama.cpp, which writes it anew as Q8_0 and Q4_0. [default: no llama.cpp]")
    ] = "",
    tokens: Annotated[int, typer.Option(help="Tokens of the prompt; they are random.", **token_count())] = 2048,
    weights: Annotated[str, typer.Option(help="Formats of kvjax's weights, separated by commas.")] = "float32,int8,int4",
    steps: Annotated[int, typer.Option(help="Timed steps after the prompt.", **whole())] = 32,
    rounds: Annotated[int, typer.Option(help="Timed rounds; in a round every side runs the prompt and the steps.", **whole())] = 3,
    chunk: Annotated[int, typer.Option(help="Tokens that kvjax prefills at a time, a multiple of 128.", **token_count())] = 512,
    torch_python: Annotated[str, typer.Option(help="The Python that has torch and transformers. [default: this one]")] = "",
    llama_python: Annotated[str, typer.Option(help="The Python that has llama-cpp-python. [default: this one]")] = "",
    json_out: JsonOption = None,
) -> None:
    """Time a prompt and the steps after it on the CPU: kvjax with several formats of weights, transformers and llama.cpp, in turns."""
    import sys

    from kvjax.serving.bench.on_cpu import CpuRun, cpu_rows

    pythons = torch_python or sys.executable, llama_python or sys.executable
    plan = CpuRun(model, tokens, steps, rounds, chunk, tuple(weights.split(",")), gguf or None, *pythons)
    scheduling.run(json_out, "cpu", lambda say: cpu_rows(plan, say))


def _measured(plans: Sequence[Any], json_out: Path | None, implementation: str | None) -> list[dict[str, Any]]:
    """Run the plans, show their progress, and write rows as they arrive."""
    from kvjax.serving.bench.decode import run_plan
    from pallas_kernels.bench.formats import stages
    from pallas_kernels.bench.measure import copy_rate
    from pallas_kernels.bench.results import write_result

    rows: list[dict[str, Any]] = []
    with stages("copy bandwidth") as say:
        copy = copy_rate()
        for row in itertools.chain.from_iterable(run_plan(plan, copy["bytes_per_s"], say) for plan in plans):
            rows.append(row)
            if json_out is not None:
                kind = "decode" if plans[0].drafts == (1,) else "drafts"  # no cost model is fitted to rows of drafts
                write_result(json_out, named_run(kind, implementation) | {"copy": copy, "rows": rows})
    return rows


for _name, _command in (scheduling.COMMANDS | tiers.COMMANDS | session_bench.COMMANDS).items():
    bench_app.command(_name)(_command)
