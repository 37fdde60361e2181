"""What a user gets without options: requests through `kvjax.run` by the clock, with random weights and computed
prompts."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, Any

import typer

from benchmarks.hollow import random_model, random_prompt
from benchmarks.run import BenchFormatOption, LayersOption, PackedOption, ShapeOption, config_of_shape, main, run
from kvjax.axes import mesh
from kvjax.engine.engine import Engine
from kvjax.engine.sampling import Sampling
from kvjax.generation import run as run_requests
from kvjax.model.config import ModelConfig
from kvjax.policies.decode import parse
from kvjax.scheduler.launch_size import StepsPerLaunch
from kvjax.scheduler.request import Request
from kvjax.serving.bench.decode import PAGE_SIZE, pages_of
from kvjax.serving.cli.bench import BenchDtypeOption
from kvjax.serving.cli.options import JsonOption, TensorOption, token_count, whole

SKIPPED = 32
"""Tokens of an answer that are not timed: the number of steps in a launch settles."""


def token_rows(
    shape: str,
    config: ModelConfig,
    *,
    length: int,
    policies: Sequence[str],
    launches: Sequence[StepsPerLaunch],
    weights: str | None,
    cache_format: str | None,
    slots: int,
    answer: int,
    rounds: int,
    tensor: int = 1,
    say: Callable[[str], None] = lambda what: None,
) -> Iterator[dict[str, Any]]:
    """For each policy, and each of `launches` (`steps_per_launch`), seconds of a token of one request.

    Every policy has its own prompt, which is computed once, in a request that warms up, and found later, unless a
    policy learns from prompts. A row has the median of `rounds` requests, each with the mean of its tokens behind the
    first `SKIPPED`. The settings take turns. tensor: devices over which the model is split.
    """
    say("weights")
    pages = len(policies) * pages_of(length) + slots + 2
    reuse = None if any(parse(each).learns for each in policies) else "any"
    sizes = {"pages": pages, "batch_buckets": (slots,), "cache_format": cache_format, "reuse": reuse}
    sizes |= {} if tensor == 1 else {"mesh": mesh(tensor=tensor)}
    engine = Engine(random_model(config, weights), policies[0], policies=policies[1:], **sizes)
    sampling = Sampling(max_new_tokens=answer, ignore_eos=True)
    prompts = [random_prompt(config, length - answer, seed) for seed in range(len(policies))]
    requests = {policy: Request(prompt, sampling, policy=policy) for policy, prompt in zip(policies, prompts, strict=True)}
    cells = [(policy, steps) for policy in policies for steps in launches]
    seconds: dict[tuple[str, StepsPerLaunch], list[float]] = {cell: [] for cell in cells}
    for number in range(rounds + 1):
        for policy, steps in cells:
            say(f"{f'round {number} of {rounds}' if number else 'warm-up'}: {policy}, {steps} steps per launch")
            options = {} if steps == "auto" else {"steps_per_launch": steps}
            one = _seconds_per_token(engine, requests[policy], slots, options)
            if number:
                seconds[policy, steps].append(one)
    for policy, steps in cells:
        found = seconds[policy, steps]
        yield {
            "op": "default-tokens",
            "shape": shape,
            "layers": config.num_layers,
            "tensor": tensor,
            "weights": weights,
            "cache_format": cache_format,
            "policy": policy,
            "tokens": length,
            "slots": slots,
            "answer": answer,
            "steps_per_launch": steps,
            "median_s": statistics.median(found),
            "least_s": min(found),
            "most_s": max(found),
        }


def _seconds_per_token(engine: Engine, request: Request, slots: int, options: dict[str, Any]) -> float:
    times: list[float] = []
    for _, completion in run_requests(engine, [request], slots=slots, on_token=lambda *_: times.append(time.perf_counter()), **options):
        if completion.error is not None:
            raise completion.error
    return (times[-1] - times[SKIPPED]) / (len(times) - 1 - SKIPPED)


def job_row(
    shape: str, config: ModelConfig, *, requests: int, prompt: int, answer: int, policy: str, weights: str | None, cache_format: str | None
) -> dict[str, Any]:
    """Seconds of a job in a process that has compiled nothing, and of another one of the same sizes right after it. All
    options are `kvjax.run`'s own."""
    sampling = Sampling(max_new_tokens=answer, ignore_eos=True)
    engine = Engine(random_model(config, weights), policy, cache_format=cache_format, page_size=PAGE_SIZE)

    def timed(first: int) -> float:
        given = [Request(random_prompt(config, prompt, seed), sampling) for seed in range(first, first + requests)]
        started = time.perf_counter()
        for _, completion in run_requests(engine, given):
            if completion.error is not None:
                raise completion.error
        return time.perf_counter() - started

    sizes = {"requests": requests, "prompt": prompt, "answer": answer, "policy": policy, "weights": weights, "cache_format": cache_format}
    first = timed(0)
    return {"op": "default-job", "shape": shape, "layers": config.num_layers} | sizes | {"cold_s": first, "warm_s": timed(requests)}


def _packing(weights: str) -> str | None:
    return None if weights == "none" else weights


def tokens_command(
    shape: ShapeOption = "qwen2.5-7b",
    length: Annotated[int, typer.Option(help="Tokens of the sequence at its end.", **token_count())] = 2**17,
    policies: Annotated[str, typer.Option(help="Decode policies, separated by commas.")] = "top:32,dense",
    launches: Annotated[
        str, typer.Option(help="Values of steps_per_launch, separated by commas; auto is what a user gets without the option.")
    ] = "auto,1,8",
    weights: PackedOption = "none",
    cache_format: BenchFormatOption = None,
    slots: Annotated[int, typer.Option(help="Slots; one is in use.", **whole())] = 1,
    answer: Annotated[int, typer.Option(help="Tokens of each answer.", **whole(SKIPPED + 2))] = 288,
    rounds: Annotated[int, typer.Option(help="Timed requests of every kind.", **whole())] = 5,
    tensor: TensorOption = 1,
    dtype: BenchDtypeOption = "bfloat16",
    layers: LayersOption = None,
    json_out: JsonOption = None,
) -> None:
    """Time the tokens of one request through kvjax.run, as a user gets them."""
    counts = tuple("auto" if each == "auto" else int(each) for each in launches.split(","))
    sizes = {"length": length, "policies": tuple(policies.split(",")), "launches": counts, "slots": slots, "answer": answer}
    sizes |= {"rounds": rounds, "weights": _packing(weights), "cache_format": cache_format, "tensor": tensor}
    config = config_of_shape(shape, layers, dtype)
    run(json_out, "default-tokens", lambda say: token_rows(shape, config, **sizes, say=say))


def job_command(
    shape: ShapeOption = "qwen2.5-7b",
    requests: Annotated[int, typer.Option(help="Requests of a job.", **whole())] = 24,
    prompt: Annotated[int, typer.Option(help="Tokens of each prompt.", **token_count())] = 8000,
    answer: Annotated[int, typer.Option(help="Tokens of each answer.", **whole())] = 256,
    policy: Annotated[str, typer.Option(help="Decode policy.")] = "top:32",
    weights: PackedOption = "none",
    cache_format: BenchFormatOption = None,
    dtype: BenchDtypeOption = "bfloat16",
    layers: LayersOption = None,
    json_out: JsonOption = None,
) -> None:
    """Time a job in a process that has compiled nothing, and the same job again."""
    sizes = {"requests": requests, "prompt": prompt, "answer": answer, "policy": policy, "cache_format": cache_format}
    config = config_of_shape(shape, layers, dtype)
    run(json_out, "default-job", lambda say: [job_row(shape, config, weights=_packing(weights), **sizes)])


if __name__ == "__main__":
    main(tokens=tokens_command, job=job_command)
