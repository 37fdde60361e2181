"""A prompt and the steps after it, by this engine and by `transformers`, in one run and with the same weights.

Both take turns, so that neither has a quieter machine, with a pause before each turn. `transformers` runs in a Python
of its own (`transformers_process.py`), with as many threads as the machine has processors.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
import typer

from benchmarks.hollow import random_model, random_prompt
from benchmarks.run import main, run
from kvjax.engine.engine import Engine
from kvjax.engine.sampling import Sampling, SamplingRows
from kvjax.model.protocols import Model
from kvjax.models.loading import load
from kvjax.models.saving import save
from kvjax.policies.decode import parse
from kvjax.serving.bench.decode import PAGE_SIZE, SHAPES, config_of, pages_of
from kvjax.serving.cli.bench import BenchDtypeOption, check_dtype
from kvjax.serving.cli.options import JsonOption, token_count, whole

PAUSE = 1.0
"""Seconds before a turn. OpenMP's threads use a processor for 0.2 s after their last work."""

WARM = 2
"""Steps of a round before those that count."""


@dataclasses.dataclass(frozen=True)
class Comparison:
    """What both run: a prompt of `tokens`, then `steps` greedy steps, `rounds` times after one that does not count.

    model: 'needle', a model folder or hub id, or a shape of `SHAPES`, which gets random weights. dtype: of weights and
    cache. policies: decode policies of ours; dense among them is what `transformers` does. python: the interpreter that
    has torch and transformers.
    """

    model: str
    dtype: str
    tokens: int
    policies: tuple[str, ...]
    steps: int
    rounds: int
    chunk: int
    python: str


def comparison_rows(plan: Comparison, say: Callable[[str], None] = lambda what: None) -> Iterator[dict[str, Any]]:
    """A row for the prompt and a row for a step, of `transformers` and of this engine, by policy. Medians in seconds.

    error: L2 distance of the logits after the prompt from those of `transformers`, relative to their norm. same_tokens:
    how many of the tokens after the prompt are equal up to the first that differs; of `steps + WARM + 1`. Raises
    RuntimeError if `transformers` cannot run, and ValueError if JAX does not run on the CPU.
    """
    if jax.default_backend() != "cpu":
        raise ValueError(f"transformers runs on the CPU here, and JAX uses {jax.default_backend()}: set JAX_PLATFORMS=cpu to compare them")
    say("weights")
    model = random_model(config_of(plan.model, None, plan.dtype)) if plan.model in SHAPES else load(plan.model, dtype=plan.dtype)
    prompt, threads = random_prompt(model.config, plan.tokens, 0), os.cpu_count()
    with tempfile.TemporaryDirectory() as folder:
        save(model, Path(folder) / "model")
        with _other(plan.python, Path(folder) / "model", plan.dtype, threads) as ask:
            theirs, ours = [], {policy: [] for policy in plan.policies}
            engine = engine_of(model, plan)
            for number in range(plan.rounds + 1):
                say(f"round {number} of {plan.rounds}: transformers")
                time.sleep(PAUSE)
                theirs.append(ask({"prompt": prompt, "steps": plan.steps + WARM}))
                for policy, done in ours.items():
                    say(f"round {number} of {plan.rounds}: {policy}")
                    time.sleep(PAUSE)
                    done.append(one_round(engine, policy, prompt, plan.steps + WARM))
            versions = ask.versions
    named = {"model": plan.model, "dtype": plan.dtype, "tokens": plan.tokens, "threads": threads, "chunk": plan.chunk}
    of_theirs = {"implementation": "transformers", "policy": "dense", **versions}
    yield from rows_of(named | of_theirs, theirs, theirs[0])
    for policy, done in ours.items():
        yield from rows_of(named | {"implementation": "kvjax", "policy": policy}, done, theirs[0])


def rows_of(named: dict[str, Any], rounds: list[dict[str, Any]], truth: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """A row of the prompt and one of a step, with `named` in both. The first round does not count. truth: a round of
    the other side."""
    right, logits = (np.asarray(each["logits"], np.float64) for each in (truth, rounds[-1]))
    equal = np.cumprod(np.equal(truth["tokens"], rounds[-1]["tokens"]))
    checked = {"error": float(np.linalg.norm(logits - right) / np.linalg.norm(right)), "same_tokens": int(equal.sum())}
    steps = [seconds for each in rounds[1:] for seconds in each["step_s"][WARM:]]
    for op, seconds in (("prompt", [each["prefill_s"] for each in rounds[1:]]), ("step", steps)):
        yield {"op": op} | named | {"median_s": statistics.median(seconds), "samples": len(seconds), "tokens_after": len(equal)} | checked


def engine_of(model: Model, plan: Comparison) -> Engine:
    """An engine that holds the prompt of the plan and its steps."""
    pages = pages_of(plan.tokens + plan.steps + WARM + 1) + 1
    return Engine(model, policies=plan.policies, pages=pages, page_size=PAGE_SIZE, prefill_chunk=plan.chunk, batch_buckets=(1,))


def one_round(engine: Engine, policy: str, prompt: list[int], steps: int) -> dict[str, Any]:
    """As `transformers_process.run`."""
    started = time.perf_counter()
    (sequence,) = engine.prefill([prompt], reserve=steps + 1)
    token = int(sequence.logits.argmax())
    prefill_s, logits = time.perf_counter() - started, np.asarray(sequence.logits)
    rows, tokens, seconds = jax.tree.map(jnp.asarray, SamplingRows.of([Sampling()])), [token], []
    given = jnp.asarray([token], jnp.int32)
    for _ in range(steps):
        started = time.perf_counter()
        given = engine.decode_and_sample([sequence], given, rows, parse(policy)).tokens
        tokens.append(int(given[0]))
        seconds.append(time.perf_counter() - started)
    engine.free(sequence)
    return {"prefill_s": prefill_s, "step_s": seconds, "tokens": tokens, "logits": logits}


class _Asked:
    """A process that runs the model: called with a request, returns its answer."""

    def __init__(self, process: subprocess.Popen[str]):
        self._process = process
        self.versions = self._answer()

    def __call__(self, request: dict[str, Any]) -> dict[str, Any]:
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self._process.args[1]} ended with status {self._process.wait()}; see above for what it printed")
        answer = json.loads(line)
        if "failed" in answer:
            raise RuntimeError(f"{Path(self._process.args[1]).stem.split('_')[0]} could not run: {answer['failed']}")
        return answer


def _other(python: str, folder: Path, dtype: str, threads: int) -> contextlib.AbstractContextManager[_Asked]:
    return other_process(python, "transformers_process.py", folder, dtype, threads)


@contextlib.contextmanager
def other_process(python: str, script: str, *arguments: Any) -> Iterator[_Asked]:
    """A process of a file beside this one, by another Python. It answers a line of JSON with versions, and one to each
    line."""
    command = [python, str(Path(__file__).with_name(script)), *map(str, arguments)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield _Asked(process)
        finally:
            process.kill()


def transformers_command(
    model: Annotated[
        str, typer.Option("--model", "-m", help="Model folder, hub id or 'needle'; or a shape with random weights, such as qwen2.5-0.5b.")
    ] = "needle",
    tokens: Annotated[int, typer.Option(help="Tokens of the prompt; they are random.", **token_count())] = 8128,
    policies: Annotated[str, typer.Option(help="Decode policies of kvjax, separated by commas.")] = "dense,cascade:8",
    steps: Annotated[int, typer.Option(help="Timed steps after the prompt.", **whole())] = 32,
    rounds: Annotated[int, typer.Option(help="Timed rounds; in a round every side runs the prompt and the steps.", **whole())] = 3,
    chunk: Annotated[int, typer.Option(help="Tokens that kvjax prefills at a time, a multiple of 128.", **token_count())] = 512,
    dtype: BenchDtypeOption = "bfloat16",
    python: Annotated[
        str,
        typer.Option(
            help="The Python that runs transformers; torch and transformers must be installed there. [default: this one]",
            show_default=False,
        ),
    ] = "",
    json_out: JsonOption = None,
) -> None:
    """Time a prompt and the steps after it on the CPU, by kvjax and by transformers, with the same weights and in
    turns.

    transformers runs in a process of its own: PyTorch is not installed with kvjax.
    """
    check_dtype(dtype)
    sizes = {"tokens": tokens, "steps": steps, "rounds": rounds, "chunk": chunk}
    plan = Comparison(model, dtype, policies=tuple(policies.split(",")), python=python or sys.executable, **sizes)
    run(json_out, "transformers", lambda say: comparison_rows(plan, say))


if __name__ == "__main__":
    main(transformers_command)
