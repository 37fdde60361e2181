"""`kvjax needle`: how many needles a model finds. JAX is imported inside the command."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvjax.serving.cli.options import (
    MAX_BATCH,
    NOT_MEASURED,
    EngineOptions,
    JsonOption,
    SeedOption,
    TextOption,
    option,
    read_texts,
    several_policies,
    several_prefills,
    takes_engine,
    token_count,
    whole,
)

if TYPE_CHECKING:
    from kvjax.evaluation.retrieval import NeedleResult


@takes_engine(
    first=("model", "policy", "length", "trials", "text"),
    without=NOT_MEASURED,
    model="needle",
    policy=several_policies("dense, cascade:8"),
    prefill=several_prefills("dense"),
)
def needle_command(
    engine: EngineOptions,
    length: Annotated[int, option("Tokens of haystack, question and answer, as 8192 or 8k.", **token_count())] = 8192,
    trials: Annotated[int, option("Needles to look for.", **whole(most=MAX_BATCH))] = 16,
    text: TextOption = None,
    json_out: JsonOption = None,
    distractors: Annotated[int, option("Additional needles of the same template in each haystack.", **whole(0, MAX_BATCH))] = 16,
    seed: SeedOption = 0,
) -> None:
    """Count the needles that a model finds in a long text under each policy. Haystacks are prefilled once; questions
    are decoded by the policy.

    With several prefill policies everything runs once for each, and paired differences from the first are printed.
    """
    prefills = list(dict.fromkeys(engine.prefill or ["dense"]))
    haystack, names = read_texts(text)
    policies = engine.policy or ["dense", "cascade:8"]

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
    loaded = engine.load()
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
                batch=engine.max_batch,
                page_size=engine.page_size,
                prefill_chunk=engine.prefill_chunk,
                prefill=name,
                cache_format=engine.cache_format,
                on_tokens=lambda count: progress.advance(task, count),
            )
    packed = f", pages packed as {engine.cache_format}" if engine.cache_format else ""
    typer.echo(f"{trials} needles in {length:,} tokens, {distractors} distractors each{packed}")
    for name, results in found.items():
        if engine.prefill:
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

        ran = {"model": engine.model, "fingerprint": fingerprint(loaded), "dtype": loaded.config.compute_dtype}
        ran |= {"cache_format": engine.cache_format} if engine.cache_format else {}
        figures = {"results": [result.figures() for result in found[prefills[0]]]}
        if engine.prefill:
            others = [
                {"prefill": name, "describe": parse_prefill(name).describe(), "results": [result.figures() for result in found[name]]}
                for name in prefills[1:]
            ]
            figures |= {"prefill": prefills[0], "prefill_chunk": engine.prefill_chunk, "other_prefills": others, "pairs": pairs}
        write_result(json_out, {**ran, **sizes, "text": names} | figures)


def _beside(first: str, other: str, reference: NeedleResult, result: NeedleResult) -> dict[str, Any]:
    """Needles found after one prefill policy compared with another, trial by trial, under one decode policy."""
    import dataclasses

    from kvjax.evaluation.statistics import paired

    pair = paired(*([answer.hit for answer in each.answers] for each in (reference, result)))
    return {"prefill": other, "beside": first, "policy": result.policy, **dataclasses.asdict(pair)}
