"""Requests through the scheduler, with random weights."""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Callable
from typing import Annotated, Any

import numpy as np
import typer

from benchmarks.hollow import FakeEngine, random_model, random_prompt
from benchmarks.run import BenchChunkOption, LayersOption, ShapeOption, config_of_shape, main, plan_of, run
from kvjax.engine.engine import Engine
from kvjax.engine.sampling import Sampling
from kvjax.engine.step_plan import Chunk, StepPlan
from kvjax.model.config import ModelConfig
from kvjax.scheduler.request import Request
from kvjax.scheduler.scheduler import Handle, Scheduler
from kvjax.serving.bench.decode import PAGE_SIZE, pages_of
from kvjax.serving.cli.bench import BenchDtypeOption
from kvjax.serving.cli.options import JsonOption, number, token_count, whole

Say = Callable[[str], None]
"""A function that is called with a text about what is running."""


@dataclasses.dataclass(frozen=True)
class Traffic:
    """Requests of `prompt` + `answer` tokens, all submitted at once, each with its own slot. chunk: tokens of a chunk
    of prefill."""

    shape: str
    config: ModelConfig
    requests: int = 64
    prompt: int = 8000
    answer: int = 129
    prefill: str = "dense"
    chunk: int = 512

    def __post_init__(self):
        if min(self.requests, self.prompt) < 1 or self.answer < 2:
            found = f"{self.requests} requests of {self.prompt} + {self.answer} tokens"
            raise ValueError(f"throughput needs at least 1 request of 1 + 2 tokens, got {found}")


def throughput_row(plan: Traffic, policy: str, say: Say = lambda what: None) -> dict[str, Any]:
    """Seconds from the first submit to the last completion. One request of the same lengths runs before, so nothing is
    compiled then.

    prefill_s: seconds until every request has its first token. decode_s: the rest, in which all slots decode. Rates are
    of these parts.
    """
    say(f"{policy}: weights and pages")
    pages = plan.requests * pages_of(plan.prompt + plan.answer)
    sizes = {"pages": pages, "page_size": PAGE_SIZE, "prefill_chunk": plan.chunk, "prefill": plan.prefill}
    engine = Engine(random_model(plan.config), policy, batch_buckets=(plan.requests,), **sizes)
    sampling = Sampling(max_new_tokens=plan.answer, ignore_eos=True)

    def run(count: int) -> tuple[float, float]:
        prompts = [random_prompt(plan.config, plan.prompt, seed) for seed in range(count)]
        scheduler = Scheduler(engine, slots=plan.requests)
        started = time.perf_counter()
        handles = [scheduler.submit(Request(ids, sampling)) for ids in prompts]
        scheduler.step()  # prefills all prompts, and decodes the first step
        prefilled = time.perf_counter()
        while not scheduler.idle:
            scheduler.step()
        ended = time.perf_counter()
        _check(handles)
        return prefilled - started, ended - started

    say(f"{policy}: compiling")
    run(1)
    say(f"{policy}: {plan.requests} requests")
    prefill_s, seconds = run(plan.requests)
    named = {"op": "throughput", "shape": plan.shape, "layers": plan.config.num_layers, "dtype": plan.config.compute_dtype}
    sizes = {name: getattr(plan, name) for name in ("requests", "prompt", "answer", "prefill", "chunk")}
    times = {"seconds": seconds, "prefill_s": prefill_s, "decode_s": seconds - prefill_s}
    rates = {
        "prefill_tokens_per_s": plan.requests * plan.prompt / prefill_s,
        "decode_tokens_per_s": plan.requests * (plan.answer - 1) / (seconds - prefill_s),
    }
    return named | sizes | {"policy": policy} | times | rates


LEARNING = 3
"""Number of computed chunks whose gaps are not counted, because the scheduler is still learning how long a slice
takes."""


@dataclasses.dataclass(frozen=True)
class Gaps:
    """A prompt that is prefilled while other sequences, the neighbours, decode. max_gap_ms: the scheduler's option.

    computed: tokens at the end of the prompt that are computed; these take longest. neighbours: their number. history:
    tokens of a neighbour's prompt. policy: of their decode steps. seconds: time limit for each part of the measurement.
    """

    shape: str
    config: ModelConfig
    max_gap_ms: float
    prefill: str
    policy: str = "top:32"
    prompt: int = 2**19
    computed: int = 2**16
    neighbours: int = 7
    history: int = 2**13
    chunk: int = 2048
    seconds: float = 60.0

    MAX_STEP_TOKENS = 2**14
    """The longest answer of a neighbour, for which pages are allocated."""

    def __post_init__(self):
        for name in ("prompt", "computed"):
            if (value := getattr(self, name)) < 1 or value % self.chunk:
                raise ValueError(f"{name} must be a positive multiple of the chunk of {self.chunk} tokens, got {value}")
        if not (LEARNING + 2) * self.chunk <= self.computed <= self.prompt:
            few = f"got {self.computed:,} with a prompt of {self.prompt:,} and chunks of {self.chunk:,}"
            raise ValueError(f"computed must be at least {LEARNING + 2} chunks, and no more than the prompt, {few}")
        if min(self.neighbours, self.history) < 1:
            raise ValueError(f"gaps need at least 1 neighbour with a history of 1 token, got {self.neighbours} of {self.history}")


def gaps_row(plan: Gaps, say: Say = lambda what: None) -> dict[str, Any]:
    """Gaps between tokens of the neighbours while the prompt is prefilled; the prompt's speed beside them, and alone
    without max_gap_ms.

    A gap is the time between two steps that returned a token of the first neighbour; every step has all neighbours.
    Gaps of the first LEARNING computed chunks do not count: skipped chunks take no time, so the scheduler learns the
    time of a slice only in these. quiet_s: the median gap while nothing is prefilled. Pages of tokens that are not
    computed hold random numbers. RuntimeError if fewer than two chunks more were computed within `seconds`.
    """
    say("weights and pages")
    slots = plan.neighbours + 1
    pages = pages_of(plan.prompt) + plan.neighbours * pages_of(plan.history + plan.MAX_STEP_TOKENS) + slots
    sizes = {"pages": pages, "page_size": PAGE_SIZE, "prefill_chunk": plan.chunk, "prefill": plan.prefill}
    engine = FakeEngine(random_model(plan.config), plan.policy, batch_buckets=(slots,), **sizes)
    engine.fill_pages()
    prompt = random_prompt(plan.config, plan.prompt, 0)
    alone = _alone(engine, plan, prompt, say)
    gaps, quiet, beside = _beside(engine, plan, prompt, say)
    fields = {field.name: getattr(plan, field.name) for field in dataclasses.fields(plan) if field.name != "config"}
    return fields | {
        "op": "gaps",
        "layers": plan.config.num_layers,
        "dtype": plan.config.compute_dtype,
        "note": f"the first {plan.prompt - plan.computed:,} tokens of the prompt, and the neighbours' histories, are random pages; "
        f"gaps of the first {LEARNING} computed chunks are not counted",
        "gaps": len(gaps),
        **{f"p{point}_s": float(np.percentile(gaps, point)) for point in (50, 95, 99)},
        "largest_s": max(gaps),
        "quiet_s": float(np.median(quiet)),
        "prefill_tokens_per_s": beside,
        "alone_tokens_per_s": alone,
    }


def _alone(engine: FakeEngine, plan: Gaps, prompt: list[int], say: Say) -> float:
    """Tokens per second of the prompt's computed chunks, except the first, which compiles. The host launches one chunk
    ahead."""
    engine.hollow = plan.prompt - plan.computed
    sequence = engine.new_sequence()
    engine.reserve([sequence], plan.prompt)
    done, started, before = 0, 0.0, None
    while sequence.length < plan.prompt:
        at = sequence.length
        (chunk,) = engine.step(StepPlan(chunks=(Chunk(sequence, prompt[at : at + plan.chunk + 1]),))).chunks
        if chunk is None:  # the hollow beginning
            continue
        if before is None:
            chunk.wait()
            started = time.perf_counter()
        else:
            before.wait()
            done += 1
        before = chunk
        say(f"alone: {done + 1} of {plan.computed // plan.chunk} chunks")
        if done > 1 and time.perf_counter() - started > plan.seconds:
            break
    before.wait()
    seconds = time.perf_counter() - started
    engine.free(sequence)
    return done * plan.chunk / seconds


def _beside(engine: FakeEngine, plan: Gaps, prompt: list[int], say: Say) -> tuple[list[float], list[float], float]:
    """Gaps while the prompt is prefilled, gaps while nothing is prefilled, and the prompt's tokens per second."""
    clock: list[float] = []
    scheduler = Scheduler(
        engine,
        slots=plan.neighbours + 1,
        max_gap_ms=plan.max_gap_ms,
        on_token=lambda request, token, piece: clock.append(time.perf_counter()) if request.id == 0 else None,
    )
    long_answer = Sampling(max_new_tokens=plan.MAX_STEP_TOKENS, ignore_eos=True)
    engine.hollow = None
    handles = [scheduler.submit(Request([0] * plan.history, long_answer, id=number)) for number in range(plan.neighbours)]
    try:
        while scheduler.running < plan.neighbours or scheduler.waiting:
            scheduler.step()
        settled = len(clock) + 8
        while len(clock) < settled + 32:
            scheduler.step()
        quiet = [later - earlier for earlier, later in itertools.pairwise(clock[settled:])]
        engine.hollow = plan.prompt - plan.computed
        engine.chunk_clock.clear()
        handles.append(scheduler.submit(Request(prompt, Sampling(max_new_tokens=1), id="prompt")))
        started = time.perf_counter()
        while handles[-1].completion is None and time.perf_counter() - started < plan.seconds:
            scheduler.step()
            say(f"beside neighbours: {len(engine.chunk_clock)} of {plan.computed // plan.chunk} chunks")
    finally:
        scheduler.close()
    _check(handles)
    chunks = engine.chunk_clock
    if len(chunks) < LEARNING + 2:
        raise RuntimeError(
            f"only {len(chunks)} chunks of {plan.chunk:,} tokens were computed in {plan.seconds:g} s: give more time, or smaller chunks"
        )
    chunks = chunks[LEARNING - 1 :]
    counted = [each for each in clock if chunks[0] <= each <= chunks[-1]]
    gaps = [later - earlier for earlier, later in itertools.pairwise(counted)]
    return gaps, quiet, (len(chunks) - 1) * plan.chunk / (chunks[-1] - chunks[0])


def _check(handles: list[Handle]) -> None:
    for handle in handles:
        if handle.completion is not None and handle.completion.error is not None:
            raise handle.completion.error


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
    """Time requests through the scheduler, from the first submit to the last completion, with random weights and no
    bound on gaps."""
    config = config_of_shape(shape, layers, dtype)
    plan = plan_of(Traffic, shape, config, requests=requests, prompt=prompt, answer=answer, prefill=prefill, chunk=chunk)
    run(json_out, "throughput", lambda say: (throughput_row(plan, policy, say) for policy in policies.split(",")))


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
    """Measure gaps between tokens of sequences that decode while a long prompt is prefilled, and what the bound on them
    costs the prompt.

    First part: the prompt alone, without a bound. Second part: with its neighbours and the bound. Weights are random.
    """
    config = config_of_shape(shape, layers, dtype)
    sizes = {"prompt": prompt, "computed": computed, "neighbours": neighbours, "history": history, "chunk": chunk, "seconds": seconds}
    plan = plan_of(Gaps, shape, config, max_gap_ms=max_gap_ms, prefill=prefill, policy=policy, **sizes)
    run(json_out, "gaps", lambda say: [gaps_row(plan, say)])


if __name__ == "__main__":
    main(throughput=throughput_command, gaps=gaps_command)
