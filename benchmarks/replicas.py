"""The same load on one engine and on several, with random weights."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator
from typing import Annotated, Any

import jax
import typer

from benchmarks.hollow import random_model, random_prompt
from benchmarks.run import BenchChunkOption, LayersOption, ShapeOption, config_of_shape, main, plan_of
from benchmarks.traffic import Say
from kvjax.engine.engine import Engine
from kvjax.engine.sampling import Sampling
from kvjax.generation import run
from kvjax.model.config import ModelConfig
from kvjax.scheduler.data_parallel import meshes_of, replicas
from kvjax.scheduler.launch_size import StepsPerLaunch
from kvjax.scheduler.request import Request
from kvjax.serving.bench.decode import PAGE_SIZE, pages_of
from kvjax.serving.cli.bench import BenchDtypeOption
from kvjax.serving.cli.options import ContextOption, JsonOption, StepsPerLaunchOption, TensorOption, parse_lengths, token_count, whole


@dataclasses.dataclass(frozen=True)
class Load:
    """`requests` of `prompt` + `answer` tokens for each replica, each with its own slot. data: numbers of replicas to
    measure, in order. tensor, context: of the mesh of each. chunk: tokens of a chunk of prefill. steps_per_launch: as
    in `kvjax.run`."""

    shape: str
    config: ModelConfig
    data: tuple[int, ...]
    tensor: int = 1
    context: int = 1
    requests: int = 16
    prompt: int = 8000
    answer: int = 129
    policy: str = "top:32"
    prefill: str = "dense"
    chunk: int = 512
    steps_per_launch: StepsPerLaunch = "auto"

    def __post_init__(self):
        meshes_of(max(self.data), self.tensor, self.context)


def replicas_rows(plan: Load, say: Say = lambda what: None) -> Iterator[dict[str, Any]]:
    """For each number of replicas, seconds from the start of `kvjax.run` to its last completion, threads included. One
    request of the same lengths for each replica runs before, so nothing is compiled then. of_first: tokens per second,
    in multiples of those of the first row."""
    fields = {field.name: getattr(plan, field.name) for field in dataclasses.fields(plan) if field.name not in ("config", "data")}
    model, first = random_model(plan.config), None
    sizes = {"pages": plan.requests * pages_of(plan.prompt + plan.answer), "page_size": PAGE_SIZE, "prefill_chunk": plan.chunk}
    sizes |= {"tensor": plan.tensor, "context": plan.context, "prefill": plan.prefill, "batch_buckets": (plan.requests,)}
    for data in plan.data:
        say(f"{data} replicas: compiling")
        engines = replicas(model, plan.policy, data=data, **sizes)
        _seconds(engines, plan, data)
        say(f"{data} replicas: {data * plan.requests} requests")
        seconds = _seconds(engines, plan, data * plan.requests)
        del engines
        rate = data * plan.requests * plan.answer / seconds
        first = first or rate
        yield fields | {
            "op": "replicas",
            "layers": plan.config.num_layers,
            "dtype": plan.config.compute_dtype,
            "device": jax.devices()[0].device_kind,
            "data": data,
            "seconds": seconds,
            "prompt_tokens_per_s": data * plan.requests * plan.prompt / seconds,
            "answer_tokens_per_s": rate,
            "of_first": rate / first,
        }


def _seconds(engines: list[Engine], plan: Load, count: int) -> float:
    """Seconds that `count` requests take."""
    sampling = Sampling(max_new_tokens=plan.answer, ignore_eos=True)
    requests = [Request(random_prompt(plan.config, plan.prompt, seed), sampling) for seed in range(count)]
    started = time.perf_counter()
    for _, completion in run(engines, requests, slots=plan.requests, steps_per_launch=plan.steps_per_launch):
        if completion.error is not None:
            raise completion.error
    return time.perf_counter() - started


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
    steps_per_launch: StepsPerLaunchOption = "auto",
    dtype: BenchDtypeOption = "bfloat16",
    layers: LayersOption = None,
    json_out: JsonOption = None,
) -> None:
    """Time the same load for each of one, two, or more data-parallel replicas, as a batch job runs them, with random
    weights."""
    counts = parse_lengths(data, "data")
    sizes = {"requests": requests, "prompt": prompt, "answer": answer, "policy": policy, "prefill": prefill, "chunk": chunk}
    sizes["steps_per_launch"] = steps_per_launch
    plan = plan_of(Load, shape, config_of_shape(shape, layers, dtype), counts, tensor, context, **sizes)
    run(json_out, "replicas", lambda say: replicas_rows(plan, say))


if __name__ == "__main__":
    main(replicas_command)
