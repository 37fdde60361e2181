"""The host's time for a decode step, with JAX's part listed apart.

The model's layers do nothing (`PassingDecoder`), but have as many arrays as a real model's. Prompts are not computed,
but their lengths and pages are set, so the host does all of its work in a step. Between steps, outside of the timed
part, the host waits for the device, and then for the copy of the step's results. In a real job both take place while
the device computes the next step.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
import typer

from benchmarks.hollow import FakeEngine, passing_model
from benchmarks.run import main, run
from kvjax.engine.sampling import Sampling, SamplingRows
from kvjax.scheduler.request import Request
from kvjax.scheduler.scheduler import Scheduler
from kvjax.serving.bench.decode import PAGE_SIZE
from kvjax.serving.cli.options import JsonOption, parse_lengths, whole

CASES = ((64, 1024), (8, 8192))
"""Rows of a batch, and pages of each row."""

WARM = 8
"""Steps that run before the timed ones."""


def host_rows(
    cases: Sequence[tuple[int, int]], *, steps: int, layers: int, policy: str, say: Callable[[str], None] = lambda what: None
) -> Iterator[dict[str, Any]]:
    """Four rows for each case: `Engine.decode_and_sample` alone, `Scheduler.step`, the same with a listener for every
    token ("listening"), and with log-probabilities ("logprobs").

    All are medians. median_s: of a whole step. dispatch_s: JAX's call of the jitted step, and the scheduler's that
    starts the copy of its results. release_s: JAX's release of the arrays of pages that the step consumed. own_s: the
    rest of the step; own_mean_s and own_p95_s are its mean and 95th percentile. copy_s: between two steps, from the end
    of the device's work to the arrival of its results on the host, which is no part of the others.
    """
    for rows, pages in cases:
        say(f"{rows} rows of {pages:,} pages")
        length = pages * PAGE_SIZE - steps - WARM - 2
        if length < rows:
            raise ValueError(f"{pages} pages of {PAGE_SIZE} tokens leave no history before {steps} steps")
        pool = rows * pages + rows + 1
        model = passing_model(layers)
        engine = FakeEngine(model, policy, pages=pool, batch_buckets=(rows,), prefill_chunk=64 * PAGE_SIZE)
        for what, prepare in STEPS.items():
            say(f"{rows} rows of {pages:,} pages: {what}")
            # Rows begin a new page at different steps, as in a real batch.
            run, close = prepare(engine, [length - row % PAGE_SIZE for row in range(rows)], steps + WARM)
            for _ in range(WARM):
                run()
            own, whole, copied = [], [], []
            engine.dispatch_s.clear()
            engine.release_s.clear()
            for _ in range(steps):
                jax.block_until_ready(engine.last_reads)
                done = time.perf_counter()
                np.asarray(engine.packed)
                started = time.perf_counter()
                run()
                whole.append(time.perf_counter() - started)
                copied.append(started - done)
                own.append(whole[-1] - engine.dispatch_s[-1] - engine.release_s[-1])
            dispatched, released = list(engine.dispatch_s), list(engine.release_s)
            close()
            yield {
                "op": "host",
                "what": what,
                "rows": rows,
                "pages": pages,
                "layers": layers,
                "policy": policy,
                "steps": steps,
                "median_s": statistics.median(whole),
                "own_s": statistics.median(own),
                "own_p95_s": float(np.percentile(own, 95)),
                "own_mean_s": statistics.fmean(own),
                "dispatch_s": statistics.median(dispatched),
                "release_s": statistics.median(released),
                "copy_s": statistics.median(copied),
            }


Steps = tuple[Callable[[], object], Callable[[], object]]
"""Two functions: one runs a step, the other frees everything."""


def _engine_steps(engine: FakeEngine, lengths: Sequence[int], steps: int) -> Steps:
    sequences = [engine.new_sequence() for _ in lengths]
    for sequence, length in zip(sequences, lengths, strict=True):
        engine.reserve([sequence], length)
        sequence.length = length
    rows = jax.tree.map(jnp.asarray, SamplingRows.of([None] * len(lengths)))
    tokens = [jnp.zeros(len(lengths), jnp.int32)]

    def run() -> None:
        tokens[0] = engine.decode_and_sample(sequences, tokens[0], rows).tokens

    def close() -> None:
        for sequence in sequences:
            engine.free(sequence)

    return run, close


def _scheduler_steps(engine: FakeEngine, lengths: Sequence[int], steps: int, *, listening: bool = False, logprobs: bool = False) -> Steps:
    scheduler = Scheduler(engine, slots=len(lengths), on_token=_heard if listening else None)
    for length in lengths:
        scheduler.submit(Request([0] * length, Sampling(max_new_tokens=steps + 2, ignore_eos=True, logprobs=logprobs)))
    scheduler.step()
    return scheduler.step, scheduler.close


def _heard(request: Request, token: int, text: str) -> None:
    pass


STEPS: dict[str, Callable[[FakeEngine, Sequence[int], int], Steps]] = {
    "engine": _engine_steps,
    "scheduler": _scheduler_steps,
    "listening": functools.partial(_scheduler_steps, listening=True),
    "logprobs": functools.partial(_scheduler_steps, logprobs=True),
}
"""What is timed, by name: the function that prepares its steps."""


def host_command(
    rows: Annotated[str, typer.Option(help="Sequences decoded together; cases are separated by commas.")] = "64,8",
    pages: Annotated[str, typer.Option(help="Pages of each sequence, case by case.")] = "1024,8192",
    steps: Annotated[int, typer.Option(help="Timed steps.", **whole())] = 2000,
    layers: Annotated[
        int, typer.Option(help="Number of layers. They compute nothing, but a step is called with their arrays.", **whole())
    ] = 28,
    policy: Annotated[str, typer.Option(help="Decode policy; its indexes are among these arrays.")] = "top:32",
    json_out: JsonOption = None,
) -> None:
    """Time the host's part of a decode step, with JAX's share printed separately: Engine.decode_and_sample alone, and
    Scheduler.step.

    Scheduler.step is also timed with a listener for every token, and with log-probabilities.

    Layers compute nothing and prompts are not prefilled, so the device takes no time. The wait for it between steps is
    not timed.
    """
    cases = tuple(zip(parse_lengths(rows, "rows"), parse_lengths(pages, "pages"), strict=False))
    if len(cases) != rows.count(",") + 1 or len(cases) != pages.count(",") + 1:
        raise typer.BadParameter(f"{rows!r} and {pages!r} must have equally many entries", param_hint="--pages")
    run(json_out, "host", lambda say: host_rows(cases, steps=steps, layers=layers, policy=policy, say=say))


if __name__ == "__main__":
    main(host_command)
