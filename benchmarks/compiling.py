"""Which programs are compiled, and how long that takes without a compilation cache."""

from __future__ import annotations

import collections
import contextlib
import time
from collections.abc import Iterator, Sequence
from typing import Annotated, Any

import jax
import typer

from benchmarks.hollow import FakeEngine, random_model, random_prompt
from benchmarks.run import BenchChunkOption, BenchFormatOption, LayersOption, PackedOption, ShapeOption, config_of_shape, main, run
from kvjax.engine.engine import Engine
from kvjax.engine.sampling import Sampling
from kvjax.model.config import ModelConfig
from kvjax.scheduler.request import OnToken, Request
from kvjax.scheduler.scheduler import Scheduler
from kvjax.serving.bench.decode import PAGE_SIZE, pages_of
from kvjax.serving.cli.bench import BenchDtypeOption
from kvjax.serving.cli.options import JsonOption, parse_lengths, token_count

PARTS = {
    "/jax/core/compile/jaxpr_trace_duration": "trace",
    "/jax/core/compile/jaxpr_to_mlir_module_duration": "lower",
    "/jax/core/compile/backend_compile_duration": "compile",
}
"""JAX's events, and their names in our rows."""


class Compiled:
    """What was compiled while `listening`. seconds: of each part in `PARTS`. programs: number of programs of each
    function. compile_s: seconds that the compiler took for each function."""

    def __init__(self):
        self.seconds = dict.fromkeys(PARTS.values(), 0.0)
        self.programs: collections.Counter[str] = collections.Counter()
        self.compile_s: collections.defaultdict[str, float] = collections.defaultdict(float)
        self._on = True

    @property
    def count(self) -> int:
        """Programs so far."""
        return sum(self.programs.values())

    def hear(self, event: str, duration: float, **named: Any) -> None:
        """Count one event; a listener of `jax.monitoring`."""
        part = PARTS.get(event)
        if part is None or not self._on:
            return
        self.seconds[part] += duration
        if part == "compile":
            name = str(named.get("fun_name", "?")).removeprefix("jit(").removesuffix(")")
            self.programs[name] += 1
            self.compile_s[name] += duration

    def figures(self) -> dict[str, Any]:
        """The figures as fields of a row."""
        return {
            "programs": self.count,
            "by_name": dict(self.programs.most_common()),
            "compile_s": dict(sorted(self.compile_s.items(), key=lambda item: -item[1])),
            "seconds": self.seconds,
            "compiling_s": sum(self.seconds.values()),
        }


@contextlib.contextmanager
def listening(*, cached: bool = False) -> Iterator[Compiled]:
    """Count what is compiled in the `with` block. Programs compiled before are dropped, and the compilation cache is
    off in the block, unless `cached`."""
    heard, before = Compiled(), jax.config.jax_enable_compilation_cache
    jax.config.update("jax_enable_compilation_cache", cached)
    jax.clear_caches()
    jax.monitoring.register_event_duration_secs_listener(heard.hear)
    try:
        yield heard
    finally:
        heard._on = False
        jax.config.update("jax_enable_compilation_cache", before)


def cold_row(
    shape: str,
    config: ModelConfig,
    *,
    prompt: int,
    computed: int,
    chunk: int,
    prefill: str,
    policy: str,
    answer: int = 2,
    weights: str | None = None,
    cache_format: str | None = None,
    cached: bool = False,
) -> dict[str, Any]:
    """A row of a process's first request, `prompt` tokens and `answer` tokens after it: seconds of tracing, lowering
    and compiling.

    wall_s, warm_s: seconds of the request, and of the same request again. The difference is how long the request waited
    for programs; some are compiled in another thread, while the device computes. first_s, warm_first_s: until its first
    token. computed: tokens at the end of the
    prompt that are computed. The tokens before are skipped, because they would run the same programs. cached: whether
    programs are read from and written to the compilation cache. ValueError if the number of skipped tokens is negative
    or no multiple of the chunk.
    """
    hollow = prompt - computed
    if hollow < 0:
        raise ValueError(f"computed is {computed:,} tokens, and the prompt has only {prompt:,}")
    if hollow % chunk:
        raise ValueError(f"prompt - computed, {hollow:,} tokens that are skipped, must be a multiple of the chunk of {chunk:,}")
    jax.config.update("jax_enable_compilation_cache", cached)
    model = random_model(config, weights)
    sizes = {"pages": pages_of(prompt + answer) + 1, "page_size": PAGE_SIZE, "prefill_chunk": chunk, "prefill": prefill}
    sizes["cache_format"] = cache_format
    engine = FakeEngine(model, policy, hollow=hollow, batch_buckets=(1,), **sizes)
    named = {"op": "cold", "shape": shape, "layers": config.num_layers, "policy": policy, "prefill": prefill, "prompt": prompt}
    named |= {"weights": weights, "cache_format": cache_format, "cached": cached}
    ids = random_prompt(config, prompt, 0)

    def timed() -> tuple[float, float]:
        heard, started = [], time.perf_counter()
        request = Request(ids, Sampling(max_new_tokens=answer, ignore_eos=True))
        _run(engine, [request], slots=1, on_token=lambda *_: heard.append(time.perf_counter()))
        return time.perf_counter() - started, heard[0] - started

    with listening(cached=cached) as heard:
        cold = timed()
    walls = dict(zip(("wall_s", "first_s", "warm_s", "warm_first_s"), (*cold, *timed()), strict=True))
    return named | {"computed": computed, "chunk": chunk, "answer": answer} | walls | heard.figures()


def programs_row(
    shape: str, config: ModelConfig, *, lengths: Sequence[int], policies: Sequence[str], chunk: int, prefill: str, slots: int = 4
) -> dict[str, Any]:
    """A row of what is compiled for a mixed job through one scheduler: a prompt of every length, with every policy,
    greedy and sampled."""
    answer = 4
    pages = (slots + 1) * (pages_of(max(lengths) + answer) + 1)
    sizes = {"pages": pages, "page_size": PAGE_SIZE, "prefill_chunk": chunk, "prefill": prefill}
    engine = Engine(random_model(config), policies[0], policies=policies[1:], batch_buckets=(slots,), **sizes)
    requests = [
        Request(random_prompt(config, length, seed), Sampling(max_new_tokens=answer, temperature=heat, ignore_eos=True), policy=policy)
        for seed, length in enumerate(lengths)
        for policy in policies
        for heat in (0.0, 0.8)
    ]
    with listening() as heard:
        started = time.perf_counter()
        _run(engine, requests, slots=slots)
        seconds = time.perf_counter() - started
    named = {"op": "programs", "shape": shape, "layers": config.num_layers, "policies": list(policies), "prefill": prefill}
    return named | {"lengths": list(lengths), "chunk": chunk, "requests": len(requests), "wall_s": seconds} | heard.figures()


def _run(engine: Engine, requests: Sequence[Request], *, slots: int, on_token: OnToken | None = None) -> None:
    scheduler = Scheduler(engine, slots=slots, on_token=on_token)
    handles = [scheduler.submit(request) for request in requests]
    while not scheduler.idle:
        scheduler.step()
    for handle in handles:
        if handle.completion.error is not None:
            raise handle.completion.error


def cold_command(
    shape: ShapeOption = "qwen2.5-7b",
    prompt: Annotated[int, typer.Option(help="Tokens of the prompt.", **token_count())] = 2**19,
    computed: Annotated[
        int,
        typer.Option(help="Tokens at its end that are computed; the others would run the same programs, and are skipped.", **token_count()),
    ] = 2**14,
    prefill: Annotated[str, typer.Option(help="Prefill policy.")] = "dense",
    policy: Annotated[str, typer.Option(help="Decode policy of the two tokens after the prompt.")] = "top:32",
    chunk: BenchChunkOption = 8192,
    weights: PackedOption = "none",
    cache_format: BenchFormatOption = None,
    cached: Annotated[bool, typer.Option("--cached", help="Use the compilation cache, as a process does that starts again.")] = False,
    dtype: BenchDtypeOption = "bfloat16",
    layers: LayersOption = None,
    json_out: JsonOption = None,
) -> None:
    """Measure the time that a first prompt spends on tracing, lowering and compiling without a compilation cache, and
    count the programs."""
    config = config_of_shape(shape, layers, dtype)
    sizes = {"prompt": prompt, "computed": computed, "chunk": chunk, "prefill": prefill, "policy": policy}
    sizes |= {"weights": None if weights == "none" else weights, "cache_format": cache_format, "cached": cached}
    run(json_out, "cold", lambda say: [cold_row(shape, config, **sizes)])


def programs_command(
    shape: ShapeOption = "tiny",
    lengths: Annotated[str, typer.Option(help="Tokens of the prompts, separated by commas.")] = "100,1k,3k,9k",
    policies: Annotated[str, typer.Option(help="Decode policies; each has every length, greedy and sampled.")] = "dense,cascade:8",
    prefill: Annotated[str, typer.Option(help="Prefill policy.")] = "dense",
    chunk: BenchChunkOption = 512,
    dtype: BenchDtypeOption = "bfloat16",
    layers: LayersOption = None,
    json_out: JsonOption = None,
) -> None:
    """Count the programs that a mixed job compiles: several lengths and policies, greedy and sampled, in four slots."""
    config, known = config_of_shape(shape, layers, dtype), parse_lengths(lengths)
    sizes = {"lengths": known, "policies": tuple(policies.split(",")), "chunk": chunk, "prefill": prefill}
    run(json_out, "programs", lambda say: [programs_row(shape, config, **sizes)])


if __name__ == "__main__":
    main(cold=cold_command, programs=programs_command)
