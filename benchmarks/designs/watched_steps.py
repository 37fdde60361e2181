"""What it costs to watch a decode policy: steps of a job that measures, of one that may alarm, and of one whose heads
all read every key.

    python -m benchmarks.designs.watched_steps --json designs-watched-programs.json

Random weights and pages, one sequence, each job by a `kvjax.Scheduler` from its first token on. Steps between two that
are measured run the program of the unwatched policy, unless a head has an alarm (`kvjax.engine.watching`). `of_plain`:
the time of a step, divided by that of the unwatched job with as many steps per launch. `same_bits`: whether tokens and
log-probabilities are those of the unwatched policy, in steps of both programs. Before, one program tested a flag in
each layer of each step (`designs-watched-steps.json`).
"""

from __future__ import annotations

import dataclasses
import itertools
import statistics
import time
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.hollow import FakeEngine, random_model
from kvjax import Request, Sampling, Scheduler
from kvjax.engine.sampling import SamplingRows
from kvjax.policies.decode.watched import EVERY
from kvjax.serving.bench.decode import PAGE_SIZE, config_of
from pallas_kernels.core.results import write_result

WATCHED = ("", "+missed1", "+missed0.9999", "+missed0.02")
"""What is added to the policy's name. A list of random keys misses more than 2% and less than 99.99%, so the third may
alarm and never does, and the last alarms in the first step."""


def main(
    json_out: Annotated[Path, typer.Option("--json", help="Write the figures here.")],
    shape: Annotated[str, typer.Option(help="As of `kvjax bench decode`.")] = "qwen2.5-7b",
    layers: Annotated[int | None, typer.Option(help="None: as the shape has.")] = None,
    policy: Annotated[str, typer.Option(help="The policy that is watched.")] = "top:8",
    tokens: Annotated[int, typer.Option(help="Of the sequence, when its last step ends.")] = 131072,
    steps: Annotated[int, typer.Option(help=f"Timed steps of a job, a multiple of {EVERY}.")] = 8 * EVERY,
    launches: Annotated[list[int] | None, typer.Option("--steps-per-launch", help="1 and 8, if not given.")] = None,
    rounds: int = 3,
) -> None:
    """Time all jobs in turn, so many rounds after one that compiles."""
    jobs = list(itertools.product(launches or [1, 8], [f"{policy}{each}" for each in WATCHED]))
    sizes = {"pages": -(-tokens // PAGE_SIZE) + 4, "page_size": PAGE_SIZE, "prefill_chunk": 64 * PAGE_SIZE, "batch_buckets": (1,)}
    engine = FakeEngine(random_model(config_of(shape, layers)), policy, policies=[name for _, name in jobs], **sizes)
    engine.fill_pages()
    same = same_bits(engine, [name for _, name in jobs], tokens - steps)
    found: dict[tuple[int, str], list[float]] = {job: [] for job in jobs}
    missed = {}
    for number, job in itertools.product(range(rounds + 1), jobs):
        seconds, missed[job] = run(engine, job, tokens - steps, steps)
        found[job] += [seconds / steps] * (number > 0)
        typer.echo(f"round {number}: {job[1]}, {job[0]} steps per launch: {1000 * seconds / steps:.3f} ms", err=True)
    middle = {job: statistics.median(seconds) for job, seconds in found.items()}
    rows = [
        {
            "policy": name,
            "steps_per_launch": launch,
            "median_s": middle[launch, name],
            "of_plain": middle[launch, name] / middle[launch, policy],
            "rounds_s": found[launch, name],
            "same_bits": same[name],
            "missed": missed[launch, name],
        }
        for launch, name in jobs
    ]
    said = {"shape": shape, "layers": engine.config.num_layers, "tokens": tokens, "steps": steps, "every": EVERY}
    write_result(json_out, {"bench": "watched-steps", **said, "rows": rows})


def same_bits(engine: FakeEngine, policies: list[str], tokens: int) -> dict[str, bool]:
    """Whether each policy samples with the log-probabilities of the first, over two periods of given tokens after the
    same prompt."""
    parent, rows, found = engine.hollow_sequence(tokens), SamplingRows.of([None]), {}
    for policy in dict.fromkeys(policies):
        child = engine.fork(parent)
        steps = [engine.decode_and_sample([child], [token], rows, policy) for token in range(2 * EVERY)]
        found[policy] = [(int(each.tokens[0]), float(each.logprobs[0])) for each in steps]
        engine.free(child)
    engine.free(parent)
    return {policy: steps == found[policies[0]] for policy, steps in found.items()}


def run(engine: FakeEngine, job: tuple[int, str], tokens: int, steps: int) -> tuple[float, dict | None]:
    """Seconds of a job's decode steps, after a prompt that is not computed, and what it missed."""
    launch, policy = job
    passed: list[int] = []
    scheduler = Scheduler(engine, slots=1, policy=policy, steps_per_launch=launch, texts=False, on_prefill=passed.append)
    handle = scheduler.submit(Request([0] * tokens, Sampling(steps + 1, ignore_eos=True)))
    while sum(passed) < tokens:
        scheduler.step()
    started = time.perf_counter()
    while handle.completion is None:
        scheduler.step()
    seconds = time.perf_counter() - started
    scheduler.close()
    if handle.completion.error is not None:
        raise handle.completion.error
    return seconds, None if handle.completion.missed is None else dataclasses.asdict(handle.completion.missed)


if __name__ == "__main__":
    typer.run(main)
