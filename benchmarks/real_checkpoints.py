"""Evaluation runs of released checkpoints, one after the other within a time limit.

Their results are shown in docs/measured/real-checkpoints.md.

    python tests/real_checkpoint.py checkpoints
    python -m benchmarks.real_checkpoints checkpoints --out out/real --json benchmarks/results/h200 --minutes 9

The same command goes on where it ended. A run that is finished is written to the folder of `--json` as real-RUN.json.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from kvjax.evaluation.run import EvaluationRun, Plan
from kvjax.serving.cli.evaluate import RECORDS, TEXT_HASH, OutOfTime, describe, run_units, write_report
from kvjax.serving.cli.options import Dtype, DtypeOption, load_model, read_texts
from pallas_kernels.core.results import write_result

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
from real_checkpoint import CHECKPOINTS

POLICIES = "window:640,window:64+1536,top:8,quest:64,cascade:8,cascade:8/all+cache"
"""The narrow window must fail; the wide one reads as many keys as 8 blocks. The oracle of 8 blocks says what the budget
allows."""

LARGER = "top:32,cascade:32,cascade:32/all+cache"
"""Policies that read all of 4K tokens."""

TASKS = ("wordings", "passage", "repeat")
STEPS, FREE_STEPS, BATCH, AGAIN = 256, 32, 100, 50


@dataclasses.dataclass(frozen=True)
class Run:
    """Tokens of a context, trials of each task, windows of forced text, and batch."""

    checkpoint: str
    length: int
    trials: int = 400
    windows: int = 5
    batch: int = BATCH

    @property
    def policies(self) -> str:
        """Decode policies beside dense, separated by commas."""
        return POLICIES if self.length <= 4096 else f"{POLICIES},{LARGER}"


RUNS = {
    "smollm2-2k": Run("smollm2", 2048),
    "smollm2-4k": Run("smollm2", 4096),
    "smollm2-8k": Run("smollm2", 8192),
    "gemma3-2k": Run("gemma3", 2048),
    "gemma3-4k": Run("gemma3", 4096),
    "gemma3-8k": Run("gemma3", 8192),
    "gemma3-16k": Run("gemma3", 16384, trials=200),
    "gemma3-32k": Run("gemma3", 32768, trials=200, windows=3, batch=50),
}


def measure(
    checkpoints: Annotated[Path, typer.Argument(help="Folder of `python tests/real_checkpoint.py FOLDER`.")],
    out: Annotated[Path, typer.Option(help="Folder for records, which a later run goes on with.")] = Path("out/real"),
    json_folder: Annotated[Path, typer.Option("--json", help="Folder for results of finished runs.")] = Path("out/real"),
    names: Annotated[str, typer.Option("--runs", help=f"Runs to make, in order, of {', '.join(RUNS)}.")] = ",".join(RUNS),
    policies: Annotated[str | None, typer.Option(help="Decode policies beside dense, separated by commas.")] = None,
    tasks: Annotated[str, typer.Option(help="Tasks, separated by commas.")] = ",".join(TASKS),
    trials: Annotated[int | None, typer.Option(help="Trials of each task at each length, instead of each run's own.")] = None,
    steps: Annotated[int, typer.Option(help="Forced steps.")] = STEPS,
    text: Annotated[list[Path] | None, typer.Option(help="Texts instead of Python's documentation.")] = None,
    dtype: DtypeOption = Dtype.bfloat16,
    name: Annotated[str, typer.Option(help="Begins the names of results; another draw needs another.")] = "real",
    seed: Annotated[int, typer.Option(help="Of the draw.")] = 0,
    minutes: Annotated[float, typer.Option(help="Begin no more work after so many minutes.")] = 9.0,
) -> None:
    """Make the runs, and write the results of those that are finished."""
    end, loaded, console = time.monotonic() + 60 * minutes, {}, Console(stderr=True)
    source, texts = read_texts(text)
    for label in names.split(","):
        run = RUNS[label]
        path, checkpoint = out / f"{name}-{label}", CHECKPOINTS[run.checkpoint]
        result = json_folder / f"{name}-{label}.json"
        if result.is_file():
            continue
        if run.checkpoint not in loaded:
            loaded = {run.checkpoint: load_model(str(checkpoints / checkpoint.file), dtype, None)}
        plan = Plan(
            policies=tuple((policies or run.policies).split(",")),
            lengths=(run.length,),
            tasks=tuple(tasks.split(",")),
            haystacks=("prose",),
            trials=trials or run.trials,
            windows=run.windows,
            steps=steps,
            free_steps=min(FREE_STEPS, steps),
            batch=run.batch,
            again=AGAIN,
            seed=seed,
            prefill_chunk=2048,
        )
        measured = EvaluationRun(loaded[run.checkpoint], source, plan)
        path.mkdir(parents=True, exist_ok=True)
        try:
            records = run_units(measured, path / RECORDS, job := describe(measured), console, end)
        except OutOfTime as error:
            console.print(f"{label}: {error}; the same command goes on")
            raise typer.Exit(1) from None
        settings = {"model": checkpoint.file.removesuffix(".gguf"), "model from": checkpoint.source, "fingerprint": job["model"]}
        write_report(measured, records, path, settings | {"dtype": job["dtype"], "text": texts, TEXT_HASH: job[TEXT_HASH]})
        write_result(result, json.loads((path / "evaluation.json").read_text(encoding="utf-8")))
        console.print(f"{label}: {result}")


if __name__ == "__main__":
    typer.run(measure)
