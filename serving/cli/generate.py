"""`kvjax generate` and `kvjax score`: one prompt, and the log-probability of a text. JAX is imported inside the commands."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvjax.serving.cli.options import (
    CacheFormatOption,
    ChunkOption,
    ContextOption,
    CoordinatorOption,
    DtypeOption,
    LoraOption,
    MaxMissedOption,
    MaxPositionsOption,
    ModelOption,
    PageSizeOption,
    PagesOption,
    PolicyOption,
    PrefillOption,
    ProcessesOption,
    ProcessOption,
    TensorOption,
    TokensOption,
    WeightsOption,
    in_first,
    joined,
    load_model,
    named_as_options,
    number,
    read_text,
    watched,
    whole,
)

if TYPE_CHECKING:
    from jax.sharding import Mesh

    from kvjax.engine.capacity_plan import MemoryPlan
    from kvjax.engine.engine import Engine
    from kvjax.model.protocols import Model


def generate_command(
    model: ModelOption,
    prompt: Annotated[str | None, typer.Argument(help="The prompt; '-' reads it from standard input.", show_default=False)] = None,
    file: Annotated[Path | None, typer.Option("--file", "-f", help="Read the prompt from a text file.", show_default=False)] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Give the prompt as a user's message, through the model's chat template.")] = False,
    system: Annotated[str | None, typer.Option(help="System message; needs --chat.", show_default=False)] = None,
    policy: PolicyOption = None,
    max_missed: MaxMissedOption = None,
    prefill: PrefillOption = None,
    max_new_tokens: TokensOption = 128,
    temperature: Annotated[float, typer.Option(help="0 is greedy.", **number(least=0))] = 0.0,
    top_k: Annotated[int, typer.Option(help="Draw from this many best tokens; 0 or -1 is all.", **whole(-1))] = 0,
    top_p: Annotated[
        float, typer.Option(help="Draw from the most likely tokens that together have this probability.", **number(least=0, most=1))
    ] = 1.0,
    seed: Annotated[int, typer.Option(help="Seed of random draws, 64 bits.", **whole(-(2**63), 2**63 - 1))] = 0,
    stop: Annotated[
        list[str] | None, typer.Option(help="Text that ends the answer; may be given several times.", show_default=False)
    ] = None,
    stats: Annotated[bool, typer.Option("--stats", help="Print token counts, rates, and blocks and keys read per step to stderr.")] = False,
    pages: PagesOption = None,
    page_size: PageSizeOption = 128,
    prefill_chunk: ChunkOption = 512,
    cache_format: CacheFormatOption = None,
    dtype: DtypeOption = None,
    weights: WeightsOption = None,
    lora: LoraOption = None,
    max_positions: MaxPositionsOption = None,
    tensor: TensorOption = 1,
    context: ContextOption = 1,
    coordinator: CoordinatorOption = None,
    processes: ProcessesOption = None,
    process: ProcessOption = None,
) -> None:
    """Continue one prompt, and print the text as it is generated."""
    if system is not None and not chat:
        raise typer.BadParameter("a system message needs --chat", param_hint="--system")
    policy = watched(policy, max_missed)
    with joined(coordinator, processes, process) as job:
        first = job is None or job.number == 0
        text = _prompt_text(prompt, file) if first else ""

        from kvjax.engine.sampling import Sampling
        from kvjax.serving.batch.setup import mesh_of
        from kvjax.text.messages import chat_ids
        from kvjax.text.tokenization import encode

        sampling = Sampling(max_new_tokens, temperature, top_k, top_p, seed, tuple(stop or ()))
        if job is not None:
            given = {"dtype": dtype, "weights": weights, "max_positions": max_positions, "tensor": tensor, "context": context}
            given |= {"policy": policy, "prefill": prefill, "pages": pages, "page_size": page_size, "prefill_chunk": prefill_chunk}
            with named_as_options():
                job.agree(given | {"cache_format": cache_format})
        devices = mesh_of(tensor, context)
        loaded, ids = load_model(model, dtype, max_positions, devices, weights, lora), []
        messages = [*([{"role": "system", "content": system}] if system is not None else []), {"role": "user", "content": text}]
        if first:
            _check_chat(chat, model, loaded)
            ids = list(chat_ids(messages, loaded.tokenizer, {})) if chat else encode(loaded.tokenizer, text)
        ids = ids if job is None else job.share(ids)
        sizes = pages, page_size, prefill_chunk, cache_format
        engine = _engine(loaded, policy, len(ids) + max_new_tokens, *sizes, prefill, devices)
        if stats:  # otherwise the rates would include compilation
            engine.warmup(tokens=len(ids) + sampling.max_new_tokens - 1)
        in_first(job, engine, lambda: _stream(engine, ids, sampling, stats))


def score_command(
    model: ModelOption,
    prompt: Annotated[str | None, typer.Argument(help="The prompt; '-' reads it from standard input.", show_default=False)] = None,
    continuation: Annotated[str | None, typer.Argument(help="The text to score.", show_default=False)] = None,
    prompt_file: Annotated[Path | None, typer.Option(help="Read the prompt from a text file.", show_default=False)] = None,
    continuation_file: Annotated[Path | None, typer.Option(help="Read the continuation from a text file.", show_default=False)] = None,
    policy: PolicyOption = None,
    pages: PagesOption = None,
    page_size: PageSizeOption = 128,
    prefill_chunk: ChunkOption = 512,
    cache_format: CacheFormatOption = None,
    dtype: DtypeOption = None,
    weights: WeightsOption = None,
    lora: LoraOption = None,
    max_positions: MaxPositionsOption = None,
) -> None:
    """Print the log-probability (natural log) of a continuation after a prompt, as one JSON object.

    With --prompt-file, the first argument is the continuation.
    """
    if prompt_file is not None and continuation is None and continuation_file is None:
        prompt, continuation = None, prompt
    before = _prompt_text(prompt, prompt_file, "PROMPT", "--prompt-file")
    after = _prompt_text(continuation, continuation_file, "CONTINUATION", "--continuation-file")

    import json

    import numpy as np

    from kvjax.scheduler.scoring import score
    from kvjax.text.tokenization import encode
    from pallas_kernels.core.files import finite

    loaded = load_model(model, dtype, max_positions, weights=weights, lora=lora)
    sizes = pages, page_size, prefill_chunk, cache_format
    engine = _engine(loaded, policy, len(encode(loaded.tokenizer, before + after)), *sizes)
    found = score(engine, before, after)
    tokens = len(found.token_ids)
    with np.errstate(over="ignore"):  # a perplexity beyond the largest number is infinite
        perplexity = float(np.exp(-np.float64(found.logprob) / tokens))
    figures = {"logprob": found.logprob, "tokens": tokens, "perplexity": perplexity, "is_greedy": found.is_greedy}
    figures |= {"token_ids": found.token_ids, "token_logprobs": found.token_logprobs}
    typer.echo(json.dumps(finite(figures), allow_nan=False))


def _stream(engine: Engine, ids: list[int], sampling: Any, stats: bool) -> None:
    """Generate from one prompt of token ids, and print text as it comes. Until then a terminal shows a bar, because long prompts take
    minutes."""
    import time

    from rich.console import Console

    from kvjax.generation import run
    from kvjax.scheduler.request import Request
    from kvjax.serving.progress import bar

    console = Console(stderr=True)
    progress = bar(console, redirect_stdout=False)
    task = progress.add_task("prefill", total=len(ids))
    started, times = time.monotonic(), []

    def show(request: Request, token: int, piece: str) -> None:
        progress.stop()
        times.append(time.monotonic())
        typer.echo(piece, nl=False)
        sys.stdout.flush()

    with progress:
        on_prefill = (lambda tokens: progress.advance(task, tokens)) if console.is_terminal else None
        ((_, completion),) = run(engine, [Request(tuple(ids), sampling)], slots=1, on_token=show, on_prefill=on_prefill)
    if completion.error is not None:
        raise completion.error
    typer.echo()
    if stats:
        rate = (len(times) - 1) / (times[-1] - times[0]) if len(times) > 1 else 0.0
        lines = (
            f"{completion.prompt_tokens:,} prompt tokens in {times[0] - started:.1f} s",
            f"{len(times):,} generated ({completion.finish_reason}) at {rate:.1f} tokens/s",
            f"{completion.blocks_per_step:,.1f} blocks and {completion.keys_per_step:,.0f} keys read per step",
            *([] if engine.last_choice is None else [f"{engine.policy} chose {engine.last_choice}"]),
        )
        typer.echo("\n".join(lines), err=True)
    if completion.missed is not None:
        typer.echo(f"attention missed: {completion.missed}", err=True)


def _engine(
    model: Model,
    policy: str | None,
    tokens: int,
    pages: int | None,
    page_size: int,
    prefill_chunk: int,
    cache_format: str | None,
    prefill: str | None = None,
    mesh: Mesh | None = None,
) -> Engine:
    """An engine for one sequence of up to `tokens` tokens."""
    from kvjax.engine.engine import Engine
    from kvjax.serving.batch.setup import plan_beside_weights

    if pages is None and page_size > 0:
        pages = max(1, -(-tokens // page_size))
        with named_as_options():
            plan = plan_beside_weights(model, policy, prefill, page_size, prefill_chunk, 1, mesh, cache_format)
        _check_fits(plan, tokens, pages)
    sizes = {"pages": pages, "page_size": page_size, "prefill_chunk": prefill_chunk, "cache_format": cache_format}
    with named_as_options():
        return Engine(model, policy, prefill=prefill, batch_buckets=(1,), mesh=mesh, **sizes)


def _check_fits(plan: MemoryPlan, tokens: int, pages: int) -> None:
    """ValueError if the pages of one sequence do not fit into memory."""
    if pages > plan.pages_that_fit:
        raise ValueError(
            f"{tokens:,} tokens take {pages:,} pages, but memory has room for {plan.pages_that_fit:,} beside the weights: "
            "shorten the prompt, choose a smaller --dtype, or give --pages to try anyway"
        )


def _prompt_text(given: str | None, file: Path | None, argument: str = "PROMPT", option: str = "--file") -> str:
    """Text from an argument, standard input ('-') or a file. Exactly one must be given, and not be empty."""
    if given is None and file is None:
        raise typer.BadParameter(f"there is no {argument.lower()}: give {argument}, or {option}", param_hint=argument)
    if given is not None and file is not None:
        raise typer.BadParameter(f"give either {argument} or {option}", param_hint=argument)
    text = read_text(file, option) if file is not None else sys.stdin.read() if given == "-" else given
    if not text:
        raise typer.BadParameter("is empty", param_hint=argument if file is None else option)
    return text


def _check_chat(chat: bool, name: str, model: Model) -> None:
    """Refuses --chat for a model that has no chat template."""
    if chat and model.tokenizer is not None and getattr(model.tokenizer, "chat_template", None) is None:
        remedy = "leave out --chat, or put a chat_template.jinja in the model's folder"
        raise typer.BadParameter(f"{name} has no chat template: {remedy}", param_hint="--chat")
