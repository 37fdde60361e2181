"""`python -m benchmarks.top_k`: time `top_k` and other selections on the same rows.

All programs are compiled first, several at a time, while rows are made: one program for all rows and hints of the same
sizes. Then places are measured one after another, a few under each trace of the profiler. A program runs an op on each
of a place's inputs, and reads twice the L2 before each of them, which is not counted. So each op reads its input from
memory, whatever ran before it.
"""

from __future__ import annotations

import dataclasses
import gc
import itertools
import os
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
import typer

from benchmarks.run import exit_if_failed
from benchmarks.top_k import cases as top_k_cases
from benchmarks.top_k import earlier as top_k_earlier
from benchmarks.top_k import score_rows, torch_top_k
from benchmarks.top_k.cases import Captured, Case, Place
from benchmarks.top_k.programs import compiled, flush_words, hinted, key_of, on_gpu, op_of, ops_of
from pallas_kernels.bench import inputs, timing
from pallas_kernels.bench.checks import same_bits
from pallas_kernels.bench.measure import copy_rate
from pallas_kernels.bench.timing import Kernel, Timing
from pallas_kernels.core import dispatch
from pallas_kernels.core.options import JsonOption
from pallas_kernels.core.results import write_result
from pallas_kernels.core.tables import stages

CALLS = 10
"""Timed calls of a program, each with an op per input."""

TRACED_CASES, TRACED_SCORES = 40, 2**23
"""Most cases, and most scores (of one input per case), in one trace, unless a single place has more."""

COUNTS = ("passes", "candidates", "steps")
PHASES = ("guess", "verify", "collect", "refine")
"""Phases between the time stamps that a kernel may add to its counts after `COUNTS`, in clock cycles since the stamp
before."""


# Measuring


@dataclasses.dataclass(frozen=True)
class Made:
    """The inputs of a place, each (scores, hints by name), and for each the sets that a stable sort finds, `[B, k]`."""

    inputs: list[tuple[np.ndarray, dict[str, np.ndarray | None]]]
    answers: list[np.ndarray]


def made_for(place: Place, cases: Sequence[Case], files: dict[str, Captured]) -> Made:
    """The inputs of a place's cases."""
    made = top_k_cases.make_inputs(place, list(dict.fromkeys(case.hint for case in cases)), files)

    def answer(scores: np.ndarray) -> np.ndarray:
        return score_rows.by_row(lambda row: np.sort(np.argsort(-scores[row], kind="stable")[: place.k]), place.batch)

    return Made(made, [answer(scores) for scores, _ in made])


def measure_places(
    cases: Sequence[Case], made: dict[Place, Made], programs: dict[tuple, Any], words: jax.Array, implementation: str | None
) -> dict[Case, dict[str, Any]]:
    """Figures of the cases of some places, all timed in one trace."""
    rows: dict[Case, dict[str, Any]] = {case: {} for case in cases}
    runs: dict[Case, tuple[Callable, tuple]] = {}
    on_device = {place: [jnp.asarray(scores) for scores, _ in made[place].inputs] for place in {case.place for case in cases}}
    for case in cases:
        key = key_of(case, implementation)
        if isinstance(programs[key], Exception):
            rows[case] |= _why(programs[key])
            continue
        (program, counting), here, scores = programs[key], made[case.place], on_device[case.place]
        rows[case]["reads_hint"] = hinted(case, implementation)
        hints = [jnp.asarray(hint[case.hint]) if rows[case]["reads_hint"] else None for _, hint in here.inputs]
        own = tuple((scores[i % len(scores)], hints[i % len(scores)]) for i in range(ops_of(case.place)))
        try:
            first, _ = jax.block_until_ready(program(words, own))
            rows[case] |= _checked(first, here.answers) | _counted(counting, own[: len(scores)])
            rows[case] |= {"path": _path(case, implementation, own[0]), "same_bits": same_bits(first, program(words, own)[0])}
            runs[case] = program, own
        except Exception as problem:
            rows[case] |= _why(problem)
    for case, found in _timings(runs, words).items():
        rows[case] |= found
    return rows


def together(places: Iterable[tuple[Place, list[Case]]]) -> list[list[tuple[Place, list[Case]]]]:
    """Places in order, neighbours together until they fill a trace with cases or scores: a trace takes a second to
    start and to read."""
    found: list[list[tuple[Place, list[Case]]]] = []
    for place, cases in places:
        there = found[-1] if found else []
        scores = sum(before.batch * before.n for before, _ in (*there, (place, cases)))
        if there and scores <= TRACED_SCORES and sum(len(more) for _, more in there) + len(cases) <= TRACED_CASES:
            there.append((place, cases))
        else:
            found.append([(place, cases)])
    return found


def _timings(runs: dict[Case, tuple[Callable, tuple]], words: jax.Array) -> dict[Case, dict[str, Any]]:
    """Figures of every case, from one trace for all of them; on a CPU by the wall clock."""
    if not runs:
        return {}
    if not on_gpu():
        found = {case: timing.device_time(run, [(words, own)], calls=3, chain=len(own)) for case, (run, own) in runs.items()}
        return {case: each.figures() for case, each in found.items()}

    def run_all():
        for program, own in runs.values():
            for _ in range(CALLS):
                jax.block_until_ready(program(words, own))
                time.sleep(timing.PAUSE)

    try:
        calls = timing.split_calls(timing.record(run_all), CALLS * len(runs), alike=False)
    except RuntimeError as problem:
        return {case: _why(problem) for case in runs}
    return {case: _figures(mine, len(own)) for (case, (_, own)), mine in zip(runs.items(), itertools.batched(calls, CALLS), strict=True)}


def _figures(calls: Sequence[list[Kernel]], ops: int) -> dict[str, Any]:
    """Figures from the kernels of a case's calls: the timing of the ops, each of which ran between two reads of the
    cache's size."""
    found: list[list[Kernel]] = []
    for call in calls:
        starts = [i for i, kernel in enumerate(call) if kernel.name.startswith("flush")]
        if len(starts) != ops:
            return {"failed": f"{len(starts)} reads between {ops} ops: {', '.join(sorted({kernel.name for kernel in call}))}"}
        found += [call[a + 1 : b] for a, b in itertools.pairwise([*starts, len(call)])]
    if not all(found):
        return {"failed": "an op ran no kernel of its own"}
    return timing.ops_timing(found).figures()


def _checked(results: Sequence, answers: Sequence[np.ndarray]) -> dict[str, Any]:
    """Whether the indices of every op are the set of a stable sort; if not, the share of them that is."""
    shares = []
    for i, result in enumerate(results):
        for found, answer in zip(np.asarray(result[1]), answers[i % len(answers)], strict=True):
            shares.append(score_rows.overlap(answer, found) if np.unique(found).size == found.size else 0.0)
    return {"exact": min(shares) == 1.0, "recall": float(np.mean(shares))}


def _hint_overlap(case: Case, made: Made) -> float | None:
    """Share of the answer that the hint has, on average."""
    if case.hint == "none":
        return None
    pairs = [
        pair for answer, (_, hints) in zip(made.answers, made.inputs, strict=True) for pair in zip(answer, hints[case.hint], strict=True)
    ]
    return float(np.mean([score_rows.overlap(*pair) for pair in pairs]))


def _path(case: Case, implementation: str | None, own: tuple) -> str:
    """The implementation of the op that runs; for other selections, their name."""
    if not case.ours:
        return case.implementation
    with dispatch.listening() as path:
        jax.eval_shape(op_of(case, implementation), *own)
    return path["top_k"]


def _counted(counting: Callable | None, own: Sequence[tuple]) -> dict[str, Any]:
    """Means and maxima of the op's counts over all inputs and rows, and of its stamps, if there are any."""
    if counting is None:
        return {}
    found = np.concatenate([np.asarray(counting(scores, hint)) for scores, hint in own]).astype(np.float64)
    counts = {name: {"mean": float(found[:, i].mean()), "most": int(found[:, i].max())} for i, name in enumerate(COUNTS)}
    return {"counts": counts} | phases_of(found)


def phases_of(counts: np.ndarray) -> dict[str, Any]:
    """Clock cycles of each phase, averaged over rows, from counts `[rows, 3 + phases]`; nothing if there are no
    phases."""
    cycles = counts[:, len(COUNTS) :]
    return {"phases": dict(zip(PHASES, cycles.mean(0).tolist(), strict=True))} if cycles.shape[1] else {}


def measure_torch(cases: Sequence[Case], made: dict[Place, Made]) -> dict[Case, dict[str, Any]]:
    """Figures of torch.topk at every place, from one process. Its answers are checked like any others."""
    with tempfile.TemporaryDirectory() as folder:
        files = {place: f"{folder}/rows{number}.npy" for number, place in enumerate(dict.fromkeys(case.place for case in cases))}
        for place, file in files.items():
            np.save(file, np.stack([scores for scores, _ in made[place].inputs]))
        shared = {"flush_bytes": max(16, 2 * inputs.cache_bytes()), "calls": CALLS}
        requests = [
            shared
            | {"name": case.name, "rows": files[case.place], "k": case.place.k, "sorted": case.implementation == "torch-sorted"}
            | {"answers": f"{folder}/{number}.npy"}
            for number, case in enumerate(cases)
        ]
        try:
            said = torch_top_k.ask(requests)
        except RuntimeError as problem:
            return {case: _why(problem) for case in cases}
        return {case: _torch_figures(said[case.name], request, made[case.place]) for case, request in zip(cases, requests, strict=True)}


def _torch_figures(answer: dict[str, Any], request: dict[str, Any], made: Made) -> dict[str, Any]:
    if "skipped" in answer:
        return {"skipped": answer["skipped"]}
    figures: Timing = timing.ops_timing([[Kernel(*kernel) for kernel in op] for op in answer["ops"]])
    checked = _checked([(None, indices) for indices in np.load(request["answers"])], made.answers)
    return checked | {"path": f"torch {answer['torch']}"} | figures.figures()


def _row(case: Case, made: Made, figures: dict[str, Any], bytes_per_s: float) -> dict[str, Any]:
    """A row, with the bytes that must move: scores once, the hint if it is read, values and indices."""
    place = case.place
    row = case.fields() | {"overlap": _hint_overlap(case, made), "copies": len(made.inputs)}
    if "median_s" not in figures:
        return row | {name: figures[name] for name in ("skipped", "failed") if name in figures}
    moved = {"scores": 4 * place.batch * place.n, "hint": 4 * place.batch * place.k * figures.get("reads_hint", False)}
    moved["result"] = 8 * place.batch * place.k
    rate = sum(moved.values()) / figures["median_s"]
    return row | {"same_bits": None} | figures | {"bytes": moved, "bytes_per_s": rate, "fraction_of_copy": rate / bytes_per_s}


def add_ratios(rows: Sequence[dict[str, Any]]) -> None:
    """Add to each row of the op how many times as long every other selection takes at the same place."""
    key = ("rows", "n", "batch", "k")
    timed: dict[bool, list[dict[str, Any]]] = {True: [], False: []}
    for row in rows:
        if "median_s" in row:
            timed[row["implementation"].partition(":")[0] == "top_k"].append(row)
    for row in timed[True]:
        here = [other for other in timed[False] if all(other[name] == row[name] for name in key)]
        row["times"] = {other["implementation"]: other["median_s"] / row["median_s"] for other in here}


def _why(problem: Exception) -> dict[str, str]:
    kind = "skipped" if isinstance(problem, NotImplementedError) else "failed"
    text = " ".join(str(problem).split())[:600]
    return {kind: text if kind == "skipped" else f"{type(problem).__name__}: {text}"}


def run(
    cases: Sequence[Case],
    implementation: str | None,
    files: dict[str, Captured],
    *,
    json_out: Path | None,
    say: Callable,
    jobs: int,
    earlier: dict[str, Any] | None = None,
) -> list[dict[str, Any]]:
    """Measure all cases, place by place. Returns their rows, and writes them as they come.

    earlier: a run to continue. Its rows come first and are not measured again.
    """
    say("copy bandwidth")
    copy, rows, earlier_runs = copy_rate(), list((earlier or {}).get("rows", ())), top_k_earlier.continued(earlier)
    started = time.perf_counter()
    with_torch = [case for case in cases if case.implementation.startswith("torch")]
    others = [case for case in cases if case not in with_torch]
    words = flush_words()
    say(f"compiling for {len(others)} cases; rows, hints, and their sets by a stable sort")
    with ThreadPoolExecutor(1) as aside, ThreadPoolExecutor(4) as makers:
        programs_to_be = aside.submit(compiled, others, words, implementation, jobs)
        by_place = _by_place(cases)
        made = dict(zip(by_place, makers.map(lambda place: made_for(place, by_place[place], files), by_place), strict=True))
        took = {"until_made_s": time.perf_counter() - started}
        programs = programs_to_be.result()
    took["until_compiled_s"] = time.perf_counter() - started
    say("torch.topk")
    figures = measure_torch(with_torch, made) if with_torch else {}
    took["until_torch_s"] = time.perf_counter() - started
    for group in together(by_place.items()):
        say(", ".join(place.name for place, _ in group))
        gc.collect()
        here = [case for _, of_place in group for case in of_place]
        ours = [case for case in here if case not in with_torch]
        figures |= measure_places(ours, made, programs, words, implementation)
        rows += [_row(case, made[case.place], figures[case], copy["bytes_per_s"]) for case in here]
        add_ratios(rows)
        took["all_s"] = time.perf_counter() - started
        if json_out is not None:
            figures_of_all = {"bench": "top-k", "copy": copy, "implementation": implementation, "took": took, "continues": earlier_runs}
            write_result(json_out, figures_of_all | {"rows": rows})
    return rows


def _by_place(cases: Iterable[Case]) -> dict[Place, list[Case]]:
    found: dict[Place, list[Case]] = {}
    for case in cases:
        found.setdefault(case.place, []).append(case)
    return found


HELP = """Time top_k and other selections on the same rows: device time, L2 cold, sets compared with a stable sort's.

CASES are globs over names `rows/scores/batch/k/hint/implementation`, as in 'normal/128k/b1/k2048/*' or '*/b8/*/top_k'; without any, all
but the tiny ones. With --rows, captured rows (python -m benchmarks.overlap --save) are cases too, FILE.LAYER/...

Tables and plots: python -m benchmarks.report --help
"""


def bench(
    cases: Annotated[list[str] | None, typer.Argument(help="Globs over the names of cases.", show_default=False)] = None,
    list_cases: Annotated[bool, typer.Option("--list", help="Print the names and stop.")] = False,
    rows: Annotated[list[Path] | None, typer.Option(help="Captured rows, .npz; may be given several times.")] = None,
    json_out: JsonOption = None,
    implementation: Annotated[str | None, typer.Option(help="Of the op: xla, mosaic_gpu, ... [default: what dispatch picks]")] = None,
    jobs: Annotated[int, typer.Option(help="Programs compiled at a time.", min=1)] = 12,
    only_missing: Annotated[
        Path | None,
        typer.Option(
            help="JSON of a run of the same code that was cut: its rows are kept, what it lacks is measured.", exists=True, dir_okay=False
        ),
    ] = None,
) -> None:
    """See HELP."""
    # By default JAX allocates most of the memory at its start, and PyTorch's process needs some.
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    try:
        files = {file.stem: top_k_cases.load_captured(file) for file in rows or ()}
        everything = top_k_cases.in_order([*top_k_cases.all_cases(), *top_k_cases.captured_cases(files)])
        chosen = top_k_cases.matching(everything, cases or ())
        earlier = None if only_missing is None else top_k_earlier.load_run(only_missing)
        if earlier is not None and not list_cases:
            chosen = top_k_earlier.missing(chosen, earlier, jax.local_devices()[0].device_kind, implementation)
            if not chosen:
                raise ValueError(f"{only_missing} lacks none of the cases that were asked for")
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    if list_cases:
        typer.echo("\n".join(case.name for case in (chosen if cases else everything)))
        return
    from benchmarks.top_k import report as top_k_report

    with stages() as say:
        found = run(chosen, implementation, files, json_out=json_out, say=say, jobs=jobs, earlier=earlier)
    print(top_k_report.main_table(found))
    if on_gpu():
        print("", top_k_report.target_table(found), sep="\n")
    exit_if_failed(found)
