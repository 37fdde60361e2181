"""`kvjax evaluate`: how well decode policies agree with dense. JAX is imported inside the command."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvjax.serving.batch.journal import Journal
from kvjax.serving.cli.options import (
    MAX_BATCH,
    MEMORY,
    MODEL,
    NOT_MEASURED,
    EngineOptions,
    SeedOption,
    TextOption,
    Weights,
    one_of,
    option,
    parse_lengths,
    read_texts,
    several_policies,
    takes_engine,
    whole,
)
from pallas_kernels.core.optional import needs_extras

if TYPE_CHECKING:
    from rich.console import Console

    from kvjax.evaluation.run import EvaluationRun, Plan, Unit

RECORDS = "records.jsonl"
TEXT_HASH = "text with SHA-256"
USUAL = {"steps": 1024, "free_steps": 128}
POLICIES = ("dense", "window:640", "window:4736", "cascade:8", "cascade:32", "top:8", "top:32", "quest:64")


class Records(Journal):
    """The finished units of a run, each with its record."""

    FORMAT = "kvjax fidelity 3"  # the command's name when this format was made
    WHAT = "the records of a kvjax evaluate run"
    KEYS = frozenset(("unit", "record"))

    def __init__(self, path: Path, job: dict[str, Any]):
        self.done: dict[str, dict[str, Any]] = {}
        super().__init__(path, job)

    def append(self, unit: str, record: dict[str, Any]) -> None:
        """Write a unit's record to disk."""
        self._append({"unit": unit, "record": record})

    def _check(self, found: Mapping[str, Any], header: Mapping[str, Any]) -> dict[str, Any]:
        return super()._check({"sequential": False} | dict(found), header)  # files of earlier versions do not say it

    def _keep(self, entry: dict[str, Any], offset: int, *, earlier: bool) -> None:
        self.done[entry["unit"]] = entry["record"]


BASELINES_TOO = " 'baselines': ways to choose 4 blocks, by bounds, means, keys in few bits, a share of attention, and the oracle."
FormatsOption = Annotated[
    list[str] | None,
    option(
        "Run every policy also over packed pages, beside dense over unpacked ones, as int8 or k=int8,v=int4; may be given several times.",
        panel=MEMORY,
    ),
]
SchemesOption = Annotated[
    list[Weights] | None,
    option(
        "Run every policy also with weights packed so, beside dense with the weights as they are stored; may be given several times.",
        panel=MODEL,
        **one_of(Weights),
    ),
]


@takes_engine(
    first=("model", "policy", "lengths", "text", "out"),
    without=("prefill", "max_batch", *NOT_MEASURED),
    model="needle",
    policy=several_policies(", ".join(POLICIES), BASELINES_TOO),
    cache_format=FormatsOption,
    weights=SchemesOption,
)
def evaluate_command(
    engine: EngineOptions,
    lengths: Annotated[str, option("Tokens of whole contexts, separated by commas.")] = "8k",
    tasks: Annotated[
        str, option("Tasks to run, separated by commas: needle, multi-needle, multi-query, tracking, wordings, passage, repeat.")
    ] = "needle",
    haystacks: Annotated[
        str,
        option(
            "Haystacks, separated by commas: loop (one paragraph over and over), prose (the text), codes (the text with facts of the same "
            "form), near-miss (the text with facts that differ little from the one asked for)."
        ),
    ] = "codes",
    text: TextOption = None,
    out: Annotated[
        Path, option("Folder for evaluation.json, evaluation.csv, pictures and records.", "--out", "-o", file_okay=False)
    ] = Path("evaluation"),
    trials: Annotated[
        int, option("Trials of each task in each haystack at each length; with --record at most so many.", **whole(2, MAX_BATCH))
    ] = 200,
    distractors: Annotated[int, option("Additional facts in haystacks 'codes' and 'near-miss'.", **whole(0, MAX_BATCH))] = 16,
    windows: Annotated[int, option("Disjoint pieces of the text for teacher forcing.", **whole(2, MAX_BATCH))] = 5,
    steps: Annotated[
        int | None, option("Forced tokens of each window, within its length. [default: 1024, with --record 256]", **whole())
    ] = None,
    free_steps: Annotated[
        int | None,
        option("Tokens generated freely, to measure the length of the exact prefix. [default: 128, with --record 32]", **whole()),
    ] = None,
    max_batch: Annotated[int, option("Contexts held and decoded together.", panel=MEMORY, **whole(2, MAX_BATCH))] = 32,
    again: Annotated[
        int, option("Of these, decoded together in the noise floor, dense again; 1 takes longest.", **whole(1, MAX_BATCH))
    ] = 1,
    record: Annotated[
        bool,
        option(
            "Keep the result on this machine (~/.cache/kvjax/evidence), so that policy 'auto' chooses by it for this model. Trials end "
            "where they have decided about every policy.",
            "--record",
        ),
    ] = False,
    minutes: Annotated[int | None, option("Begin no more work after so many minutes; the same command goes on.", **whole())] = None,
    seed: SeedOption = 0,
) -> None:
    """Compare decode policies with dense: facts found, agreement, KL and perplexity on forced text, speed, keys read.

    All policies run in one engine on the same prefilled contexts. Dense runs twice, which gives the noise floor.
    Records are kept in OUT/records.jsonl. To continue a killed run, run the same command again. A finished run only
    draws its pictures again.
    """
    end = None if minutes is None else time.monotonic() + 60 * minutes
    needs_extras("kvjax evaluate", "eval")
    from rich.console import Console

    from kvjax.cost_model.evidence import MIN_STEPS
    from kvjax.evaluation.run import BASELINES, EvaluationRun, Plan

    sequential = _is_sequential(out / RECORDS, record)
    usual = USUAL | ({"steps": MIN_STEPS, "free_steps": 32} if sequential else {})
    given = {"steps": steps, "free_steps": free_steps}
    named = [BASELINES if name == "baselines" else (name,) for name in engine.policy or POLICIES]
    plan = Plan(
        policies=tuple(itertools.chain.from_iterable(named)),
        lengths=parse_lengths(lengths),
        tasks=_listed(tasks),
        haystacks=_listed(haystacks),
        trials=trials,
        distractors=distractors,
        windows=windows,
        batch=max_batch,
        again=again,
        seed=seed,
        page_size=engine.page_size,
        prefill_chunk=engine.prefill_chunk,
        cache_formats=tuple(engine.cache_format or ()),
        weights=tuple(each.value for each in engine.weights or ()),
        sequential=sequential,
        **usual | {name: value for name, value in given.items() if value is not None},
    )
    if record:
        _check_recordable(plan)
    source, names = read_texts(text)
    stored = dataclasses.replace(engine, weights=None)
    loaded = stored.load()
    run = EvaluationRun(loaded, source, plan, lambda name: stored.load(Weights(name)))
    out.mkdir(parents=True, exist_ok=True)
    try:
        records = run_units(run, out / RECORDS, describe(run), Console(stderr=True), end)
    except KeyboardInterrupt:
        typer.echo(f"interrupted; the records so far are in {out / RECORDS}: run the same command again to continue", err=True)
        raise
    except OutOfTime as error:
        typer.echo(f"{error}; the records so far are in {out / RECORDS}: run the same command again to continue", err=True)
        raise typer.Exit(1) from None
    job = describe(run)
    source = {"model": loaded.name, "fingerprint": job["model"], "dtype": job["dtype"], "text": names, TEXT_HASH: job[TEXT_HASH]}
    figures = write_report(run, records, out, source)
    if record:
        _record(figures, out)


class OutOfTime(RuntimeError):
    """Work is left, and the time for it is over."""


def run_units(run: EvaluationRun, path: Path, job: dict[str, Any], console: Console, end: float | None = None) -> list[dict[str, Any]]:
    """Records of all units of a run: those in the file, and the others, which are measured now and appended to it.

    end: the reading of `time.monotonic` after which no unit is begun; then OutOfTime says how many are left.
    """
    from kvjax.serving.progress import WorkProgress

    units = run.units()
    journal = Records(path, job)
    try:
        done = [unit for unit in units if unit.key in journal.done]
        finished = sum(unit.work for unit in done)
        if job.get("sequential"):
            console.print(_at_most(job, units, {unit: journal.done[unit.key]["took"] for unit in done}), highlight=False, soft_wrap=True)
        with WorkProgress(sum(unit.work for unit in units), finished, console) as progress:
            for number, unit in enumerate(units):
                if unit.key in journal.done:
                    continue
                if not run.is_needed(unit, journal.done.values()):
                    progress.drop(unit.work)
                    continue
                if end is not None and time.monotonic() > end:
                    left = sum(each.key not in journal.done for each in units[number:])
                    raise OutOfTime(f"out of time with {left} of {len(units)} pieces of work left")
                progress.begin(_named(unit) + (", may end early" if unit.task and job.get("sequential") else ""))
                journal.append(unit.key, run.measure(unit, progress.advance))
                finished += unit.work
                progress.reach(finished)
        return [journal.done[unit.key] for unit in units if unit.key in journal.done]
    finally:
        journal.close()
        run.release()


def _named(unit: Unit) -> str:
    return f"{unit.length:,} tokens, {f'{unit.task} in {unit.haystack}' if unit.task else 'forced text'}"


def _at_most(job: Mapping[str, Any], units: Iterable[Unit], took: Mapping[Unit, float]) -> str:
    """What a sequential run may take. took: seconds of the finished units."""
    said = f"at most {job['trials']} trials of each task; they end where they have decided about every policy"
    if not took:
        return said
    rate = sum(took.values()) / sum(unit.work for unit in took)
    left = rate * sum(unit.work for unit in units if unit not in took)
    return f"{said}. Left, at the pace so far: at most about {left / 60:.0f} min"


def _is_sequential(records: Path, record: bool) -> bool:
    """Whether a run's trials end where they have decided: with --record. A run that goes on does so as it was
    begun."""
    if not records.is_file():
        return record
    with open(records, "rb") as file:
        header = next((entry for entry, *_ in Records.entries(file, records)), None)
    return record if header is None else header.get("sequential", False)


def describe(run: EvaluationRun) -> dict[str, Any]:
    """Everything that a run's records depend on. It must be equal to continue an earlier run."""
    import jax

    from kvjax.model.identity import fingerprint
    from kvjax.policies.decode import identity, parse
    from pallas_kernels.core.results import versions

    job = {
        "model": fingerprint(run.model),
        "dtype": run.model.config.compute_dtype,
        "device": jax.local_devices()[0].device_kind,
        "versions": versions(),
        TEXT_HASH: hashlib.sha256(run.text_ids.tobytes()).hexdigest(),
        "each policy": [identity(parse(name)) for name in run.plan.policies],
    }
    return json.loads(json.dumps(job | dataclasses.asdict(run.plan)))


def write_report(run: EvaluationRun, records: Iterable[dict[str, Any]], out: Path, source: dict[str, Any]) -> dict[str, Any]:
    """Summarize records, write evaluation.json, evaluation.csv and the pictures to `out`, and print tables and remarks.
    Returns what evaluation.json holds."""
    from kvjax.evaluation.plots import draw
    from kvjax.evaluation.report import frame, remarks, summarize, tables
    from pallas_kernels.core.files import replacing
    from pallas_kernels.core.results import write_result
    from pallas_kernels.core.tables import show

    figures = summarize(run.plan, records)
    report = {"settings": source | dataclasses.asdict(run.plan), **figures}
    write_result(out / "evaluation.json", report)
    with replacing(out / "evaluation.csv") as partial:
        frame(figures).to_csv(partial, index=False)
    pictures = draw(figures, out)
    show(*tables(figures))
    for line in remarks(figures):
        typer.echo(line)
    typer.echo("written: " + ", ".join(str(path) for path in (out / "evaluation.json", out / "evaluation.csv", *pictures)))
    return report


def _check_recordable(plan: Plan) -> None:
    """BadParameter for a run that is no evidence, before it begins."""
    from kvjax.cost_model.evidence import MIN_STEPS, MIN_WINDOWS, check_can_record, name_to_record

    if plan.cache_formats or plan.weights:
        raise typer.BadParameter("keeps runs of one packing: leave out --cache-format and --weights", param_hint="--record")
    if plan.windows < MIN_WINDOWS or plan.steps < MIN_STEPS:
        said = f"needs at least {MIN_WINDOWS} --windows of {MIN_STEPS} --steps, got {plan.windows} of {plan.steps}"
        raise typer.BadParameter(said, param_hint="--record")
    try:
        for name in plan.policies:
            name_to_record(name)
        check_can_record()
    except (ValueError, OSError, RuntimeError) as error:
        raise typer.BadParameter(str(error), param_hint="--record") from None


def _record(report: dict[str, Any], out: Path) -> None:
    """Keep a run as evidence, and say what `auto` may choose by it."""
    from kvjax.cost_model.evidence import LEVELS, known_evidence, qualified, record_evaluation

    file = record_evaluation(report, str(out.resolve() / "evaluation.json"))
    rows = known_evidence(report["settings"]["fingerprint"])
    for (name, level), length in itertools.product(LEVELS.items(), report["settings"]["lengths"]):
        typer.echo(f"auto ({name}), up to {length:,} tokens: {', '.join(qualified(rows, level, length)) or 'dense, nothing qualifies'}")
    typer.echo(f"recorded: {file}")


def _listed(text: str) -> tuple[str, ...]:
    """Words separated by commas."""
    return tuple(word.strip() for word in text.split(",") if word.strip())
