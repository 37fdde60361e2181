"""`kvjax bill fit`: a bill from results of benchmarks. JAX is imported inside the functions."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvjax.serving.cli.options import JsonOption, read_json, read_text, whole

if TYPE_CHECKING:
    from kvjax.bill.fitting import Key

RunsArgument = Annotated[
    list[Path], typer.Argument(metavar="RESULT.json...", help="Results of kvjax bench decode and of kvjax bench tiers.")
]
FormOption = Annotated[
    str, typer.Option(help="Form of c1: none, fixed (a constant per policy) or scan (a constant, and seconds per byte of index).")
]
LaunchOption = Annotated[
    int,
    typer.Option(
        "--steps-per-launch",
        help="Take rows of one device with so many steps per launch; those of several devices have their own rule.",
        **whole(),
    ),
]
MarksOption = Annotated[
    str,
    typer.Option(
        help="With --into: what the names of the marks begin with, as packed for <!-- bill:packed-errors -->.", show_default=False
    ),
]


def fit_command(
    results: RunsArgument,
    form: FormOption = "scan",
    law: Annotated[
        str, typer.Option(help="How latency grows with the n devices of an exchange: log2, or ring (n - 1). The error of both is printed.")
    ] = "log2",
    steps_per_launch: LaunchOption = 1,
    json_out: JsonOption = None,
    into: Annotated[
        list[Path] | None, typer.Option(help="Document in which to replace the marked parts; may be given several times.")
    ] = None,
    marks: MarksOption = "",
) -> None:
    """Fit the bill to measured steps. Print its error on held-out cells, and the time lost by choosing with it.

    Bandwidth and c0 are fitted to dense rows only. There is one bill for each device, model, dtype, and format of packed weights and pages
    in the results. Its rows of one device have the steps per launch of --steps-per-launch; how many others are left out is printed. Rows of
    kvjax bench tiers, which are of one step per launch, give the terms of pages in host memory; those with everything on the device count
    as rows of kvjax bench decode. Rows of kvjax bench decode with several devices give the terms of exchanges.
    """
    from kvjax.bill.bus_fitting import fit_bus
    from kvjax.bill.fitting import FORMS, fit
    from kvjax.bill.mesh_fitting import fit_mesh, read_mesh_runs
    from kvjax.bill.mesh_report import mesh_checks
    from kvjax.bill.mesh_terms import LAWS
    from kvjax.bill.report import ALL_TABLES, checks, projections, rendered, tier_checks
    from kvjax.bill.step_bill import to_json
    from kvjax.serving.bench.decode import config_of
    from pallas_kernels.core.results import provenance, write_result
    from pallas_kernels.core.tables import show, table

    if form not in FORMS:
        raise typer.BadParameter(f"{form!r} is not one of {', '.join(FORMS)}", param_hint="--form")
    if law not in LAWS:
        raise typer.BadParameter(f"{law!r} is not one of {', '.join(LAWS)}", param_hint="--law")
    if marks and not into:
        raise typer.BadParameter("needs --into", param_hint="--marks")
    measured, meshes = cells_of(results, steps_per_launch=steps_per_launch), cells_of(results, read_mesh_runs)
    _check_rows(results, measured, meshes, steps_per_launch)
    for line in _left_out(results, steps_per_launch):
        typer.echo(line)
    figures: dict[str, Any] = {"form": form, "bills": [], "held_out": [], "held_out_tiers": [], "held_out_meshes": []}
    source = " ".join(map(in_repository, results))
    for key, (cells, tiered) in measured.items():
        shape, config = key.shape, config_of(key.shape, key.layers)
        kind = {"weights": key.weights, "cache_format": key.cache_format, "steps_per_launch": steps_per_launch}
        bill = fit(cells, config, device=key.device, model=shape, dtype=key.dtype, source=source, form=form, **kind)
        if tiered:
            bill = dataclasses.replace(bill, bus=fit_bus(cells, tiered, model=shape, source=source, form=form))
        on_mesh = meshes.get(key, [])
        if on_mesh:
            bill = dataclasses.replace(bill, mesh=fit_mesh(cells, on_mesh, model=shape, source=source, form=form, law=law))
        typer.echo(str(bill))
        figures["bills"].append(to_json(bill))
        figures["held_out"].append(checks(cells, form) | {"projections": projections(bill, config)})
        figures["held_out_tiers"].append(tier_checks(cells, tiered, form) if tiered else None)
        figures["held_out_meshes"].append(mesh_checks(cells, on_mesh, form, law) if on_mesh else None)
    shown = {name: make(figures) for name, make in ALL_TABLES.items()}
    show(*(table(*made, title=name, left=2) for name, made in shown.items() if made[1]))
    checked = (each for held_out in ("held_out", "held_out_tiers", "held_out_meshes") for each in figures[held_out] if each)
    for why in dict.fromkeys(why for each in checked for why in each["impossible"].values()):  # the tables have the beginning
        typer.echo(f"cannot be held out: {why}")
    if json_out is not None:
        write_result(json_out, figures)
    for document in into or ():
        text = rendered(read_text(document, "--into"), {"provenance": provenance(), **figures}, marks)
        document.write_text(text, encoding="utf-8")


def _check_rows(results: Sequence[Path], measured: Collection[Key], meshes: Collection[Key], steps_per_launch: int) -> None:
    """BadParameter if no row of one device is left, of all devices, models and formats or of one that has rows of several devices."""
    from kvjax.bill.fitting import launches_of

    if measured and set(meshes) <= set(measured):
        return
    named, launches = ", ".join(map(str, results)), launches_of(_opened(results))
    if launches and steps_per_launch not in launches:
        there, options = " and ".join(map(str, launches)), " or ".join(f"--steps-per-launch {each}" for each in launches)
        said = f"no row of one device in {named} has {steps_text(steps_per_launch)}: they have {there}; give {options}"
        raise typer.BadParameter(said, param_hint="--steps-per-launch")
    said = "of one device has a time to fit: measure --tensor 1 --context 1, too" if meshes else "has a time to fit"
    raise typer.BadParameter(f"no row of {named} {said}", param_hint="RESULT.json...")


def cells_of(files: Sequence[Path], read: Callable | None = None, **options: Any) -> dict[Key, Any]:
    """The cells of several results, by what a bill is fitted to, as `read` gives them; None: `read_runs`, cells with everything on
    the device, and with pages in host memory. options: of `read`."""
    from kvjax.bill.bus_fitting import read_runs
    from kvjax.serving.bench.decode import config_of

    runs = _opened(files)
    try:
        return (read or read_runs)(runs, config_of, **options)
    except (KeyError, TypeError, AttributeError) as error:
        said = f"{error} is missing from" if isinstance(error, KeyError) else f"a field is of another kind ({error}) in"
        names = ", ".join(map(str, files))
        raise typer.BadParameter(f"{said} a result of kvjax bench decode or tiers; look at {names}") from None


def _opened(files: Sequence[Path]) -> list[dict[str, Any]]:
    """The results of these files. BadParameter for one of another benchmark, and for launches of no number of steps."""
    from kvjax.bill.fitting import launch_of

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
    from kvjax.bill.fitting import launch_of
    from pallas_kernels.core.results import mesh_text, packed_text

    kinds: dict[str, None] = {}
    for run in _opened(files):
        for row in _rows(run):
            if "median_s" in row:
                kind = f"{row['shape']}, {row['layers']} layers, {run['provenance']['device']}, {row['dtype']}{packed_text(row)}"
                kinds[f"{kind}, {steps_text(launch_of(row))}{mesh_text(row)}"] = None
    return list(kinds) or ["no timed row"]


def _left_out(files: Sequence[Path], steps_per_launch: int) -> list[str]:
    """A line for each file and number of steps per launch whose rows of one device are not taken."""
    from kvjax.bill.fitting import launches_in

    lines = []
    for file, run in zip(files, _opened(files), strict=True):
        for steps, rows in sorted(launches_in(run).items()):
            if steps != steps_per_launch:
                some = f"{rows} row{'s' * (rows != 1)} of {steps_text(steps)} {'is' if rows == 1 else 'are'} left out"
                lines.append(f"{in_repository(file)}: {some}: --steps-per-launch {steps} takes {'it' if rows == 1 else 'these'}")
    return lines


def in_repository(file: Path) -> str:
    """A file's name in reports: its path from the current folder, or only its name."""
    path = file.resolve()
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else path.name
