"""`kvjax needle`: how many needles a model finds. JAX is imported inside the command."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvjax.serving.cli.options import (
    MAX_BATCH,
    POLICIES,
    PREFILLS,
    CacheFormatOption,
    ChunkOption,
    DtypeOption,
    JsonOption,
    LoraOption,
    MaxPositionsOption,
    ModelOption,
    PageSizeOption,
    SeedOption,
    TextOption,
    WeightsOption,
    load_model,
    read_texts,
    token_count,
    whole,
)

if TYPE_CHECKING:
    from kvjax.evaluation.retrieval import NeedleResult


def needle_command(
    model: ModelOption = "needle",
    policy: Annotated[
        list[str] | None,
        typer.Option("--policy", "-p", help=f"May be given several times: {POLICIES}. [default: dense, cascade:8]", show_default=False),
    ] = None,
    prefill: Annotated[
        list[str] | None,
        typer.Option(
            help=f"Prefill policies for the haystacks, each compared with the first on the same trials; may be given several times: "
            f"{PREFILLS}. [default: dense]",
            show_default=False,
        ),
    ] = None,
    text: TextOption = None,
    json_out: JsonOption = None,
    length: Annotated[int, typer.Option(help="Tokens of haystack, question and answer, as 8192 or 8k.", **token_count())] = 8192,
    trials: Annotated[int, typer.Option(help="Needles to look for.", **whole(most=MAX_BATCH))] = 16,
    distractors: Annotated[int, typer.Option(help="Additional needles of the same template in each haystack.", **whole(0, MAX_BATCH))] = 16,
    max_batch: Annotated[int, typer.Option(help="Haystacks held and decoded together.", **whole(most=MAX_BATCH))] = 8,
    seed: SeedOption = 0,
    page_size: PageSizeOption = 128,
    prefill_chunk: ChunkOption = 512,
    dtype: DtypeOption = None,
    weights: WeightsOption = None,
    cache_format: CacheFormatOption = None,
    lora: LoraOption = None,
    max_positions: MaxPositionsOption = None,
) -> None:
    """Count the needles that a model finds in a long text under each policy. Haystacks are prefilled once; questions are decoded by the
    policy.

    With several prefill policies everything runs once for each, and paired differences from the first are printed.
    """
    prefills = list(dict.fromkeys(prefill or ["dense"]))
    haystack, names = read_texts(text)
    policies = policy or ["dense", "cascade:8"]

    from rich.console import Console

    from kvjax.evaluation.retrieval import find_needles
    from kvjax.policies.decode import parse
    from kvjax.policies.prefill import parse_prefill
    from kvjax.serving.cli.demo import table
    from kvjax.serving.progress import bar
    from pallas_kernels.core.results import write_result
    from pallas_kernels.core.tables import estimate, show

    for name in policies:
        parse(name)
    for name in prefills:
        parse_prefill(name)
    loaded = load_model(model, dtype, max_positions, weights=weights, lora=lora)
    sizes = {"length": length, "trials": trials, "distractors": distractors, "seed": seed}
    found = {}
    with bar(Console(stderr=True)) as progress:
        task = progress.add_task("prefill", total=trials * length * len(prefills))
        for name in prefills:
            found[name] = find_needles(
                loaded,
                haystack,
                policies,
                **sizes,
                batch=max_batch,
                page_size=page_size,
                prefill_chunk=prefill_chunk,
                prefill=name,
                cache_format=cache_format,
                on_tokens=lambda count: progress.advance(task, count),
            )
    packed = f", pages packed as {cache_format}" if cache_format else ""
    typer.echo(f"{trials} needles in {length:,} tokens, {distractors} distractors each{packed}")
    for name, results in found.items():
        if prefill:
            typer.echo(f"{parse_prefill(name).describe()}:")
        show(table(results))
        for result in results:
            typer.echo(
                f"{result.policy}: found by third of depth "
                + ", ".join("-" if math.isnan(share) else f"{share:.0%}" for share in result.by_depth())
            )
    pairs = [_beside(prefills[0], name, *both) for name in prefills[1:] for both in zip(found[prefills[0]], found[name], strict=True)]
    for pair in pairs:
        difference = estimate(pair["difference"])
        typer.echo(
            f"{pair['prefill']} prefill, {pair['policy']} decode: -{pair['lost']}/+{pair['gained']} beside {prefills[0]}, {difference}"
        )
    if json_out is not None:
        from kvjax.model.identity import fingerprint

        ran = {"model": model, "fingerprint": fingerprint(loaded), "dtype": loaded.config.compute_dtype}
        ran |= {"cache_format": cache_format} if cache_format else {}
        figures = {"results": [result.figures() for result in found[prefills[0]]]}
        if prefill:
            others = [
                {"prefill": name, "describe": parse_prefill(name).describe(), "results": [result.figures() for result in found[name]]}
                for name in prefills[1:]
            ]
            figures |= {"prefill": prefills[0], "prefill_chunk": prefill_chunk, "other_prefills": others, "pairs": pairs}
        write_result(json_out, {**ran, **sizes, "text": names} | figures)


def _beside(first: str, other: str, reference: NeedleResult, result: NeedleResult) -> dict[str, Any]:
    """Needles found after one prefill policy compared with another, trial by trial, under one decode policy."""
    import dataclasses

    from kvjax.evaluation.statistics import paired

    pair = paired(*([answer.hit for answer in each.answers] for each in (reference, result)))
    return {"prefill": other, "beside": first, "policy": result.policy, **dataclasses.asdict(pair)}
