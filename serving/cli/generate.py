"""`kvjax generate` and `kvjax score`: one prompt, and the log-probability of a text. JAX is imported inside the
commands."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvjax.serving.cli.options import (
    ALONE,
    OUTPUT,
    DraftOption,
    DraftWeightsOption,
    EngineOptions,
    in_first,
    named_as_options,
    number,
    option,
    read_text,
    takes_engine,
    whole,
)

if TYPE_CHECKING:
    from kvjax.engine.engine import Engine
    from kvjax.model.protocols import Model
    from kvjax.scheduler.request import Completion


@takes_engine(first=("model", "policy", "file", "chat", "max_new_tokens"), without=("max_batch", "data"))
def generate_command(
    engine: EngineOptions,
    prompt: Annotated[str | None, typer.Argument(help="The prompt; '-' reads it from standard input.", show_default=False)] = None,
    file: Annotated[Path | None, option("Read the prompt from a text file.", "--file", "-f")] = None,
    chat: Annotated[bool, option("Give the prompt as a user's message, through the model's chat template.", "--chat")] = False,
    system: Annotated[str | None, option("System message; needs --chat.")] = None,
    max_new_tokens: Annotated[int, option("The most tokens to generate.", **whole())] = 128,
    temperature: Annotated[float, option("0 is greedy.", **number(least=0))] = 0.0,
    top_k: Annotated[int, option("Draw from this many best tokens; 0 or -1 is all.", **whole(-1))] = 0,
    top_p: Annotated[float, option("Draw from the most likely tokens with this probability together.", **number(least=0, most=1))] = 1.0,
    seed: Annotated[int, option("Seed of random draws, 64 bits.", **whole(-(2**63), 2**63 - 1))] = 0,
    stop: Annotated[list[str] | None, option("Text that ends the answer; may be given several times.")] = None,
    draft: DraftOption = None,
    draft_weights: DraftWeightsOption = None,
    stats: Annotated[
        bool, option("Print token counts, rates, and blocks and keys read per step to stderr.", "--stats", panel=OUTPUT)
    ] = False,
) -> None:
    """Continue one prompt, and print the text as it is generated."""
    if system is not None and not chat:
        raise typer.BadParameter("a system message needs --chat", param_hint="--system")
    with engine.joined() as job:
        first = job is None or job.number == 0
        text = _prompt_text(prompt, file) if first else ""
        with named_as_options():
            setup = engine.setup(slots=1, draft=draft, draft_weights=draft_weights)

        from kvjax.engine.sampling import Sampling
        from kvjax.text.messages import chat_ids
        from kvjax.text.tokenization import encode

        sampling = Sampling(max_new_tokens, temperature, top_k, top_p, seed, tuple(stop or ()))
        if job is not None:
            with named_as_options():
                setup.agree(job)
        loaded, ids = setup.load(), []
        messages = [*([{"role": "system", "content": system}] if system is not None else []), {"role": "user", "content": text}]
        if first:
            _check_chat(chat, engine.model, loaded)
            ids = list(chat_ids(messages, loaded.tokenizer, {})) if chat else encode(loaded.tokenizer, text)
        ids = ids if job is None else job.share(ids)
        with named_as_options():
            runs = setup.engine_for(loaded, len(ids) + max_new_tokens)
        if stats:  # otherwise the rates would include compilation
            runs.warmup(tokens=len(ids) + sampling.max_new_tokens - 1)
        try:
            in_first(job, runs, lambda: _stream(runs, ids, sampling, stats, draft))
        finally:
            runs.close()


@takes_engine(first=("model", "policy", "prompt_file", "continuation_file", "dtype"), without=("max_batch", "max_missed", *ALONE))
def score_command(
    engine: EngineOptions,
    prompt: Annotated[str | None, typer.Argument(help="The prompt; '-' reads it from standard input.", show_default=False)] = None,
    continuation: Annotated[str | None, typer.Argument(help="The text to score.", show_default=False)] = None,
    prompt_file: Annotated[Path | None, option("Read the prompt from a text file.")] = None,
    continuation_file: Annotated[Path | None, option("Read the continuation from a text file.")] = None,
) -> None:
    """Print the log-probability (natural log) of a continuation after a prompt, as one JSON object.

    With --prompt-file, the first argument is the continuation.
    """
    if prompt_file is not None and continuation is None and continuation_file is None:
        prompt, continuation = None, prompt
    before = _prompt_text(prompt, prompt_file, "PROMPT", "--prompt-file")
    after = _prompt_text(continuation, continuation_file, "CONTINUATION", "--continuation-file")
    setup = engine.setup(slots=1)

    import json

    import numpy as np

    from kvjax.scheduler.scoring import score
    from kvjax.text.tokenization import encode
    from pallas_kernels.core.files import finite

    loaded = setup.load()
    with named_as_options():
        runs = setup.engine_for(loaded, len(encode(loaded.tokenizer, before + after)))
    found = score(runs, before, after)
    runs.close()
    tokens = len(found.token_ids)
    with np.errstate(over="ignore"):  # a perplexity beyond the largest number is infinite
        perplexity = float(np.exp(-np.float64(found.logprob) / tokens))
    figures = {"logprob": found.logprob, "tokens": tokens, "perplexity": perplexity, "is_greedy": found.is_greedy}
    figures |= {"token_ids": found.token_ids, "token_logprobs": found.token_logprobs}
    typer.echo(json.dumps(finite(figures), allow_nan=False))


def _stream(engine: Engine, ids: list[int], sampling: Any, stats: bool, draft: str | None) -> None:
    """Generate from one prompt of token ids, and print text as it comes. Until then a terminal shows a bar, because
    long prompts take minutes."""
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
        ((_, completion),) = run(engine, [Request(tuple(ids), sampling)], slots=1, on_token=show, on_prefill=on_prefill, draft=draft)
    if completion.error is not None:
        raise completion.error
    typer.echo()
    if stats:
        rate = (len(times) - 1) / (times[-1] - times[0]) if len(times) > 1 else 0.0
        lines = (
            f"{completion.prompt_tokens:,} prompt tokens in {times[0] - started:.1f} s",
            f"{len(times):,} generated ({completion.finish_reason}) at {rate:.1f} tokens/s",
            f"{completion.blocks_per_step:,.1f} blocks and {completion.keys_per_step:,.0f} keys read per step",
            *([] if draft is None else [_drafted(completion)]),
            *([] if engine.last_choice is None else [f"{engine.policy} chose {engine.last_choice}"]),
        )
        typer.echo("\n".join(lines), err=True)
    if completion.missed is not None:
        typer.echo(f"attention missed: {completion.missed}", err=True)


def _drafted(completion: Completion) -> str:
    """What drafts came to, in a line."""
    if completion.rounds:
        return f"drafts: {completion.rounds}"
    return "no rounds of drafts: the answer ended before their program was compiled, or steps were faster"


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
