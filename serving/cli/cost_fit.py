"""`kvjax cost fit` and `kvjax cost evidence`: what people measured, as `auto` and predictions use it. JAX is imported inside."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvjax.serving.cli.options import DtypeOption, JsonOption, MaxPositionsOption, load_model, number, read_json, whole

if TYPE_CHECKING:
    from kvjax.cost_model.fitting import Cell, Key

ResultsArgument = Annotated[
    list[Path] | None,
    typer.Argument(metavar="[RESULT.json...]", help="Results of kvjax bench decode, benchmarks.tiers or benchmarks.prefill_ops."),
]
LaunchOption = Annotated[
    int,
    typer.Option(
        "--steps-per-launch",
        help="Take rows of one device with so many steps per launch; those of several devices have their own rule.",
        **whole(),
    ),
]
NoResultsModel = Annotated[
    str | None,
    typer.Option("--model", "-m", help="Without results: time this model's own steps on this device, in seconds.", show_default=False),
]


def fit_command(
    results: ResultsArgument = None,
    steps_per_launch: LaunchOption = 1,
    model: NoResultsModel = None,
    policies: Annotated[str, typer.Option(help="With --model: policies to time besides dense, separated by commas.")] = "top:8,top:32",
    seconds: Annotated[float, typer.Option(help="With --model: how long it may take.", **number(above=0))] = 20.0,
    json_out: JsonOption = None,
) -> None:
    """Fit cost models to measured steps, and print their error on steps that they have not seen.

    There is one for each device, model, dtype, and format of packed weights and pages in the results. Bandwidth and c0 are fitted to dense
    rows of one device, of --steps-per-launch; how many others are left out is printed. Rows of benchmarks.tiers give the term of the bus,
    and rows of several devices that of exchanges. Results of benchmarks.prefill_ops give times of prefill. With --model, steps are timed
    here: auto does this itself where there is no built-in cost model.
    """
    from pallas_kernels.core.results import write_result

    if bool(results) == (model is not None):
        raise typer.BadParameter("give results, or --model to time steps here", param_hint="RESULT.json...")
    if model is not None:
        figures = _calibrated(model, policies, seconds)
    else:
        runs = [read_json(file, "a result of kvjax bench") for file in results]
        of_prefill = [run.get("bench") in ("prefill-ops", "prefill-layers") for run in runs]
        figures = _fit_prefill(results, runs) if all(of_prefill) else _fit_steps(results, steps_per_launch)
    if json_out is not None:
        write_result(json_out, figures)


def _calibrated(model: str, policies: str, seconds: float) -> dict[str, Any]:
    from kvjax.cost_model.auto import calibrate
    from kvjax.cost_model.predict import to_json

    cost = calibrate(load_model(model, None, None), policies.split(","), seconds=seconds)
    typer.echo(f"{cost}; mean held-out error {cost.error:.1%}")
    return {"cost_models": [to_json(cost)]}


def _fit_prefill(results: Sequence[Path], runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    from kvjax.cost_model.prefill_times import fit_prefill, to_json

    tables = fit_prefill([(in_repository(file), run) for file, run in zip(results, runs, strict=True)])
    for times in tables:
        typer.echo(f"{times.device}, {times.shape}, {times.sizes}; times within {times.error:.1%}")
        for name, points in times.seconds:
            typer.echo(f"  {name}: " + ", ".join(f"{tokens:,} tokens {seconds * 1e3:.3f} ms" for tokens, seconds in points))
    return {"prefill_times": [to_json(times) for times in tables]}


def _fit_steps(results: Sequence[Path], steps_per_launch: int) -> dict[str, Any]:
    from kvjax.cost_model.fitting import checks, error_table, fit, launches_in, term_table
    from kvjax.cost_model.predict import to_json
    from kvjax.serving.bench.decode import config_of
    from pallas_kernels.core.tables import show, table

    groups = cells_of(results, steps_per_launch)
    one_device = {key for key, cells in groups.items() if any(cell.kind == "device" for cell in cells)}
    launches = {file: launches_in(run) for file, run in zip(results, _opened(results), strict=True)}
    if not groups or set(groups) - one_device:
        there, named = sorted(set().union(*launches.values())), ", ".join(map(str, results))
        if there and steps_per_launch not in there:
            options = " or ".join(f"--steps-per-launch {each}" for each in there)
            found = f"they have {' and '.join(map(str, there))}; give {options}"
            said = f"no row of one device in {named} has {steps_text(steps_per_launch)}: {found}"
            raise typer.BadParameter(said, param_hint="--steps-per-launch")
        said = "of one device has a time to fit: measure --tensor 1 --context 1, too" if groups else "has a time to fit"
        raise typer.BadParameter(f"no row of {named} {said}", param_hint="RESULT.json...")
    for file, counts in launches.items():
        for steps, rows in sorted(counts.items()):
            if steps != steps_per_launch:
                some = f"{rows} row{'s' * (rows != 1)} of {steps_text(steps)} {'is' if rows == 1 else 'are'} left out"
                takes = f"--steps-per-launch {steps} takes {'it' if rows == 1 else 'these'}"
                typer.echo(f"{in_repository(file)}: {some}: {takes}")
    figures: dict[str, Any] = {"cost_models": [], "held_out": []}
    source = " ".join(map(in_repository, results))
    for key, cells in groups.items():
        cost, checked = fit(cells, config_of(key.shape, key.layers), key, source=source), checks(cells)
        typer.echo(str(cost))
        if checked["regret"]:
            typer.echo(
                "choosing by it loses {mean:.2%} against the best choice, always dense {always dense:.1%}".format(**checked["regret"])
            )
        figures["cost_models"].append(to_json(cost))
        figures["held_out"].append(checked)
    show(*(table(*make(figures), title=name, left=3) for name, make in (("terms", term_table), ("errors", error_table))))
    sentences = (both for each in figures["held_out"] for by in each["errors"].values() for both in by.values() if isinstance(both, str))
    for why in dict.fromkeys(sentences):  # the tables have the beginning
        typer.echo(f"cannot be held out: {why}")
    return figures


def cells_of(files: Sequence[Path], steps_per_launch: int) -> dict[Key, list[Cell]]:
    """The cells of several results, by what a cost model is fitted to (`read_cells`)."""
    from kvjax.cost_model.fitting import read_cells
    from kvjax.serving.bench.decode import config_of

    runs = _opened(files)
    try:
        return read_cells(runs, config_of, steps_per_launch)
    except (KeyError, TypeError, AttributeError) as error:
        said = f"{error} is missing from" if isinstance(error, KeyError) else f"a field is of another kind ({error}) in"
        names = ", ".join(map(str, files))
        raise typer.BadParameter(f"{said} a result of kvjax bench decode or tiers; look at {names}") from None


def _opened(files: Sequence[Path]) -> list[dict[str, Any]]:
    """The results of these files. BadParameter for one of another benchmark, and for launches of no number of steps."""
    from kvjax.cost_model.fitting import launch_of

    runs = [read_json(file, "a result of kvjax bench decode or tiers") for file in files]
    for file, run in zip(files, runs, strict=True):
        if "bench" in run and run["bench"] not in ("decode", "tiers"):
            raise typer.BadParameter(f"{file} is of kvjax bench {run['bench']}; give results of kvjax bench decode or tiers")
        for place, row in enumerate(_rows(run), 1):
            try:
                launch_of(row)
            except ValueError as error:
                raise typer.BadParameter(f"{file}, row {place}: {error}") from None
    return runs


def _rows(run: dict[str, Any]) -> list[dict[str, Any]]:
    """The rows of a result, as far as they are some: what reads them says what is wrong with others."""
    rows = run.get("rows")
    return [row for row in rows if isinstance(row, dict)] if isinstance(rows, list) else []


def steps_text(steps: int) -> str:
    """A number of steps per launch, in words."""
    return f"{steps} step{'s' * (steps != 1)} per launch"


def kinds_of(files: Sequence[Path]) -> list[str]:
    """What timed rows of these results are of: model, device, formats, launches and mesh, each kind once."""
    from kvjax.cost_model.fitting import launch_of
    from pallas_kernels.core.results import mesh_text, packed_text

    kinds: dict[str, None] = {}
    for run in _opened(files):
        for row in _rows(run):
            if "median_s" in row:
                kind = f"{row['shape']}, {row['layers']} layers, {run['provenance']['device']}, {row['dtype']}{packed_text(row)}"
                kinds[f"{kind}, {steps_text(launch_of(row))}{mesh_text(row)}"] = None
    return list(kinds) or ["no timed row"]


def in_repository(file: Path) -> str:
    """A file's name in reports: its path from the current folder, or only its name."""
    path = file.resolve()
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else path.name


def evidence_command(
    results: Annotated[
        list[Path],
        typer.Argument(
            metavar="RESULT.json...", help="The evaluation.json of kvjax evaluate; or, of prefill, JSON of kvjax recall and needle."
        ),
    ],
    into: Annotated[
        Path,
        typer.Option(dir_okay=False, help="The table: kvjax/cost_model/evidence.json or prefill_evidence.json in a checkout, or new."),
    ],
    model: Annotated[
        str | None, typer.Option("--model", "-m", help="The model that was run, for results without its fingerprint.", show_default=False)
    ] = None,
    dtype: DtypeOption = None,
    max_positions: MaxPositionsOption = None,
) -> None:
    """Record how well policies agree with dense on a model, for `auto`. Replaces rows of the same model, policy, length and task."""
    from kvjax.cost_model.evidence import Evidence, PrefillEvidence, read_evidence, with_evaluation, with_results, write_evidence

    ran = None
    if model is not None:
        from kvjax.model.identity import fingerprint

        loaded = load_model(model, dtype, max_positions)
        ran = fingerprint(loaded), loaded.config.compute_dtype
    opened = [(in_repository(file), read_json(file, "the JSON of kvjax evaluate, echo or needle")) for file in results]
    runs = ["forced" in run or "retrieval" in run for _, run in opened]
    if any(runs) and not all(runs):
        raise typer.BadParameter("are of decoding and of prefill: record them in two tables", param_hint="RESULT.json...")
    rows = read_evidence(into, Evidence if all(runs) else PrefillEvidence) if into.is_file() else ()
    if all(runs):
        for source, run in opened:
            rows = with_evaluation(rows, run, source, None if ran is None else ran[0])
    else:
        rows = with_results(rows, opened, ran)
    write_evidence(rows, into)
    typer.echo(f"{into}: {len(rows)} rows of {len({row.fingerprint for row in rows})} models")
