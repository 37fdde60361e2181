"""`kvjax recall`: how much repeated text inside a prompt sparse prefill still recalls. JAX is imported inside the
command."""

from __future__ import annotations

from typing import Annotated

import typer

from kvjax.serving.cli.options import (
    MAX_BATCH,
    NOT_MEASURED,
    POLICY,
    EngineOptions,
    JsonOption,
    SeedOption,
    TextOption,
    option,
    parse_lengths,
    read_texts,
    several_prefills,
    takes_engine,
    whole,
)

PREFILLS = ("bounds:32+sparse",)


@takes_engine(
    first=("model", "prefill", "lengths", "text", "json_out"),
    without=("policy", "max_batch", "cache_format", *NOT_MEASURED),
    model="needle",
    prefill=several_prefills(", ".join(PREFILLS)),
)
def recall_command(
    engine: EngineOptions,
    lengths: Annotated[str, option("Tokens of whole prompts, separated by commas.")] = "8k",
    facts: Annotated[int, option("Facts of each length, a multiple of those in a prompt.", **whole(most=MAX_BATCH))] = 400,
    facts_per_prompt: Annotated[int, option("Facts stated and asked for in each prompt.", **whole(most=MAX_BATCH))] = 16,
    passages: Annotated[int, option("Passages repeated in each prompt.", **whole(most=MAX_BATCH))] = 8,
    passage_tokens: Annotated[int, option("Tokens of a passage.", **whole())] = 64,
    run_in: Annotated[
        int, option("Tokens at the start of a passage that are not counted: by them the model finds the passage.", **whole())
    ] = 16,
    control: Annotated[
        str, option("Prefill policy that must fail; where it does not, the cell is invalid.", panel=POLICY)
    ] = "window:64+1024",
    text: TextOption = None,
    json_out: JsonOption = None,
    seed: SeedOption = 0,
) -> None:
    """Count the repeated facts and passages of a prompt that prefill predicts, for each prefill policy and for dense.

    Facts are stated early in a prompt, and asked for and answered late in it. Passages appear twice. A repetition
    counts if the logits of prefill predict it. Dense has to do well and the control has to fail, or the cell is marked
    invalid.
    """
    source, names = read_texts(text)

    import dataclasses

    from rich.console import Console

    from kvjax.evaluation.prompt_recall import RecallPlan, RecallRun
    from kvjax.evaluation.recall_report import COLUMNS, recall_rows, remarks, summarize
    from kvjax.model.identity import fingerprint
    from kvjax.serving.bench.prefill import dense_at
    from kvjax.serving.progress import bar
    from pallas_kernels.core.results import write_result
    from pallas_kernels.core.tables import show, table

    plan = RecallPlan(
        prefills=tuple(engine.prefill or PREFILLS),
        lengths=parse_lengths(lengths),
        facts=facts,
        facts_per_prompt=facts_per_prompt,
        passages=passages,
        passage_tokens=passage_tokens,
        run_in=run_in,
        control=control,
        seed=seed,
        page_size=engine.page_size,
        prefill_chunk=engine.prefill_chunk,
    )
    for line in dense_at(plan.prefills, plan.lengths):
        typer.echo(line, err=True)
    loaded = engine.load()
    run = RecallRun(loaded, source, plan)
    stored = loaded.config.compute_dtype
    settings = {"model": loaded.name, "fingerprint": fingerprint(loaded), "dtype": stored, "text": names, **dataclasses.asdict(plan)}
    records, figures = [], None
    with bar(Console(stderr=True)) as progress:
        task = progress.add_task("prefill", total=run.work)
        for record in run.records(lambda tokens: progress.advance(task, tokens)):
            records.append(record)
            progress.update(task, description=f"{record['length']:,} tokens, prompt {record['prompt'] + 1} of {plan.prompts}")
            figures = summarize(plan, records, run.failed)
            if json_out is not None:
                write_result(json_out, {"bench": "prefill-echo", "settings": settings, **figures})
    show(table(COLUMNS, recall_rows(figures), left=2))
    for line in remarks(figures):
        typer.echo(line)
    if run.failed:
        raise typer.Exit(1)
