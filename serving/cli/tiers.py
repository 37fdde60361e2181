"""`kvjax bench tiers`, `tiered-prefill` and `lists`: sequences larger than the device. JAX is imported inside the commands."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvjax.serving.cli.options import JsonOption, byte_counts, number, parse_lengths, token_count, whole
from kvjax.serving.cli.scheduling import BenchChunkOption, BenchDtypeOption, LayersOption, ShapeOption, config_of_shape, plan_of, run
from kvjax.serving.flags import allow_host_pages

BenchFormatOption = Annotated[
    str | None,
    typer.Option("--cache-format", help="How full pages are packed, as kvjax plan --cache-format takes it.", show_default=False),
]


def tiers_command(
    shape: ShapeOption = "qwen2.5-7b",
    tokens: Annotated[str, typer.Option(help="Tokens of the sequences, separated by commas.")] = "1m",
    device_memory: Annotated[
        str | None,
        typer.Option(
            help="What the cache takes on the device, as 8GB; the rest lies in host memory. Several sizes are separated by commas.",
            show_default=False,
        ),
    ] = None,
    resident: Annotated[
        bool, typer.Option("--resident", help="Time sequences with everything on the device, too, where that fits.")
    ] = False,
    policies: Annotated[str, typer.Option(help="Decode policies, separated by commas.")] = "top:32,dense",
    fresh: Annotated[int, typer.Option(help="Time top:K with lists that share nothing between steps, too; 0: not.", **whole(0))] = 0,
    recorded: Annotated[
        Path | None, typer.Option(exists=True, dir_okay=False, help="Time the lists of this file of `kvjax bench lists`, too.")
    ] = None,
    steps: Annotated[int, typer.Option(help="Steps in a round.", **whole())] = 16,
    rounds: Annotated[int, typer.Option(help="Timed rounds.", **whole())] = 8,
    seconds: Annotated[
        float, typer.Option(help="How long the rounds of a row may take; slow steps then run fewer to a round.", **number(above=0))
    ] = 60.0,
    cache_format: BenchFormatOption = None,
    steps_per_launch: Annotated[
        int, typer.Option(help="Decode steps that the device runs without the host; --steps must be a multiple.", **whole(most=16))
    ] = 1,
    dtype: BenchDtypeOption = "bfloat16",
    layers: LayersOption = None,
    json_out: JsonOption = None,
) -> None:
    """Time decode steps of sequences whose pages lie in host memory where the device has no room for them.

    Weights and pages are random; there is no prefill. `kvjax cost fit` takes the result: it needs --resident, several --tokens, the policy
    dense, --fresh and --recorded (docs/cost-model.md).
    """
    allow_host_pages()
    from kvjax.serving.bench.decode import policies_of
    from kvjax.serving.bench.lists import Fresh, Replayed
    from kvjax.serving.bench.tiers import Tiered, tiered_rows

    named = [*policies_of(policies)] if policies else []
    named += [Fresh(fresh)] if fresh else []
    named += [Replayed.of(recorded)] if recorded else []
    if not named:
        raise typer.BadParameter("name at least one policy", param_hint="--policies")
    sizes = byte_counts(device_memory, "--device-memory") if device_memory else ()
    fields = {"tokens": parse_lengths(tokens, "tokens"), "policies": tuple(named), "steps": steps, "rounds": rounds, "seconds": seconds}
    fields |= {"device_bytes": (*sizes, *([None] if resident or not sizes else [])), "cache_format": cache_format}
    fields["steps_per_launch"] = steps_per_launch
    plan = plan_of(Tiered, shape, config_of_shape(shape, layers, dtype), **fields)
    run(json_out, "tiers", lambda say: tiered_rows(plan, say))


def tiered_prefill_command(
    shape: ShapeOption = "qwen2.5-7b",
    tokens: Annotated[str, typer.Option(help="Tokens of the prompts, separated by commas.")] = "1m",
    device_memory: Annotated[
        str,
        typer.Option(help="What the cache takes on the device, as 4GB or 2GB,8GB; the rest lies in host memory. Empty: only --resident."),
    ] = "4GB",
    resident: Annotated[bool, typer.Option("--resident", help="Time prompts with everything on the device, too, where that fits.")] = False,
    policies: Annotated[str, typer.Option(help="Prefill policies, separated by commas.")] = "momo:128/8,bounds:32",
    chunk: BenchChunkOption = 32_768,
    cache_format: BenchFormatOption = None,
    dtype: BenchDtypeOption = "bfloat16",
    layers: LayersOption = None,
    json_out: JsonOption = None,
) -> None:
    """Time whole prompts of which the device has room for a part, in the engine.

    Weights and tokens are random. Earlier pages are copied from host memory once for each layer and chunk, so large chunks copy less.
    """
    allow_host_pages()
    from kvjax.serving.bench.prefill import policies_of
    from kvjax.serving.bench.tiered_prompts import TieredPrompts, tiered_prompt_rows

    fields = {"tokens": parse_lengths(tokens, "tokens"), "policies": policies_of(policies), "chunk": chunk}
    sizes = byte_counts(device_memory, "--device-memory") if device_memory else ()
    fields |= {"device_bytes": (*sizes, *([None] if resident or not sizes else [])), "cache_format": cache_format}
    plan = plan_of(TieredPrompts, shape, config_of_shape(shape, layers, dtype), **fields)
    run(json_out, "tiered-prefill", lambda say: tiered_prompt_rows(plan, say))


def lists_command(
    tokens: Annotated[int, typer.Option(help="Tokens of text before the first step.", **token_count(2048, 32_000))] = 16_384,
    steps: Annotated[int, typer.Option(help="Steps to record.", **whole(2))] = 64,
    k: Annotated[int, typer.Option("--k", help="Distant pages that each KV head lists.", **whole())] = 32,
    json_out: JsonOption = None,
) -> None:
    """Record which pages the embedded model lists in consecutive steps, for `kvjax bench tiers --recorded`."""
    from kvjax.serving.bench.lists import recorded_row

    run(json_out, "lists", lambda say: [recorded_row(tokens, steps, k)])


COMMANDS = {"tiers": tiers_command, "tiered-prefill": tiered_prefill_command, "lists": lists_command}
"""Of `kvjax bench`."""
