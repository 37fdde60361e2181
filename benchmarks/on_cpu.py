"""A prompt and the steps after it, by this engine with several formats of weights, by `transformers` in float32, and by
llama.cpp with weights of 8 and 4 bits, in one run, in turns, on the same processors.

llama.cpp rounds tokens to 8 bits before it multiplies them by such weights; this engine keeps 22 bits. `transformers`
and llama.cpp run in Pythons of their own (`transformers_process.py`, `llama_process.py`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import jax
import typer

from benchmarks import against_transformers as turns
from benchmarks.hollow import random_prompt
from benchmarks.run import main, run
from kvjax.models.loading import load
from kvjax.models.saving import save
from kvjax.serving.cli.options import JsonOption, token_count, whole

LLAMA_TYPES = ("Q8_0", "Q4_0")


@dataclasses.dataclass(frozen=True)
class CpuRun:
    """What all run: a prompt of `tokens`, then `steps` greedy steps, `rounds` times after one that does not count.

    model: a model folder, or what else `kvjax.load` takes. weights: formats of this engine's, "float32" among them.
    gguf: the file that llama.cpp takes and writes anew as `LLAMA_TYPES`; None: without llama.cpp. torch_python,
    llama_python: interpreters.
    """

    model: str
    tokens: int
    steps: int
    rounds: int
    chunk: int
    weights: tuple[str, ...]
    gguf: str | None
    torch_python: str
    llama_python: str


def cpu_rows(plan: CpuRun, say: Callable[[str], None] = lambda what: None) -> Iterator[dict[str, Any]]:
    """Rows as of `against_transformers.comparison_rows`, with `weights` and `tokens_per_s` (of the prompt, or one for
    each step).

    Errors and equal tokens are against `transformers` in float32. Raises RuntimeError if another side cannot run,
    ValueError if JAX does not run on the CPU.
    """
    if jax.default_backend() != "cpu":
        raise ValueError(f"this compares CPUs, and JAX uses {jax.default_backend()}: set JAX_PLATFORMS=cpu")
    say("weights")
    options = {"dtype": "float32", "tokenizer": False}
    models = {name: load(plan.model, weights=None if name == "float32" else name, **options) for name in plan.weights}
    plain = models.get("float32") or load(plan.model, **options)
    threads, needed = len(os.sched_getaffinity(0)), plan.tokens + plan.steps + turns.WARM + 2
    ours = turns.Comparison(plan.model, "float32", plan.tokens, ("dense",), plan.steps, plan.rounds, plan.chunk, plan.torch_python)
    prompt = random_prompt(plain.config, plan.tokens, 0)
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        save(plain, Path(folder) / "model")
        script = ("transformers_process.py", Path(folder) / "model", "float32", threads)
        sides = {("transformers", "float32"): stack.enter_context(turns.other_process(plan.torch_python, *script))}
        for kind in LLAMA_TYPES if plan.gguf else ():
            script = ("llama_process.py", plan.gguf, kind, folder, needed, threads)
            sides["llama.cpp", kind] = stack.enter_context(turns.other_process(plan.llama_python, *script))
        versions = {side: ask.versions for side, ask in sides.items()}
        asks = {side: lambda request, ask=ask: ask(request) for side, ask in sides.items()}
        for name, model in models.items():
            engine = turns.engine_of(model, ours)
            asks["kvjax", name] = lambda request, engine=engine: turns.one_round(engine, "dense", **request)
        done: dict[tuple[str, str], list[dict[str, Any]]] = {side: [] for side in asks}
        for number in range(plan.rounds + 1):
            for side, ask in asks.items():
                say(f"round {number} of {plan.rounds}: {' '.join(side)}")
                time.sleep(turns.PAUSE)
                done[side].append(ask({"prompt": prompt, "steps": plan.steps + turns.WARM}))
    named = {"model": Path(plan.model).name, "dtype": "float32", "tokens": plan.tokens, "threads": threads, "chunk": plan.chunk}
    for side, rounds in done.items():
        own = {"implementation": side[0], "weights": side[1], "policy": "dense", **versions.get(side, {})}
        for row in turns.rows_of(named | own, rounds, done["transformers", "float32"][0]):
            yield row | {"tokens_per_s": (plan.tokens if row["op"] == "prompt" else 1) / row["median_s"]}


def cpu_command(
    model: Annotated[str, typer.Option("--model", "-m", help="Model folder, or what else kvjax.load takes.")],
    gguf: Annotated[
        str, typer.Option(help="GGUF file of the same model for llama.cpp, which writes it anew as Q8_0 and Q4_0. [default: no llama.cpp]")
    ] = "",
    tokens: Annotated[int, typer.Option(help="Tokens of the prompt; they are random.", **token_count())] = 2048,
    weights: Annotated[str, typer.Option(help="Formats of kvjax's weights, separated by commas.")] = "float32,int8,int4",
    steps: Annotated[int, typer.Option(help="Timed steps after the prompt.", **whole())] = 32,
    rounds: Annotated[int, typer.Option(help="Timed rounds; in a round every side runs the prompt and the steps.", **whole())] = 3,
    chunk: Annotated[int, typer.Option(help="Tokens that kvjax prefills at a time, a multiple of 128.", **token_count())] = 512,
    torch_python: Annotated[str, typer.Option(help="The Python that has torch and transformers. [default: this one]")] = "",
    llama_python: Annotated[str, typer.Option(help="The Python that has llama-cpp-python. [default: this one]")] = "",
    json_out: JsonOption = None,
) -> None:
    """Time a prompt and the steps after it on the CPU: kvjax with several formats of weights, transformers and
    llama.cpp, in turns."""
    pythons = torch_python or sys.executable, llama_python or sys.executable
    plan = CpuRun(model, tokens, steps, rounds, chunk, tuple(weights.split(",")), gguf or None, *pythons)
    run(json_out, "cpu", lambda say: cpu_rows(plan, say))


if __name__ == "__main__":
    main(cpu_command)
