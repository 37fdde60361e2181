"""`kvjax cost ...`: what steps cost, predicted and fitted, and where sparse decoding is faster. JAX is imported inside
the commands."""

from __future__ import annotations

import collections
import dataclasses
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvjax.engine import PREFILL_CHUNK
from kvjax.serving.cli.options import (
    CacheFormatOption,
    ChunkOption,
    DtypeOption,
    JsonOption,
    MaxPositionsOption,
    PageSizeOption,
    Weights,
    WeightsOption,
    WholeSentences,
    byte_count,
    check_context,
    gibibytes,
    load_model,
    named_as_options,
    one_of,
    option,
    parse_lengths,
    png,
    read_json,
    refuse_given,
    whole,
)
from pallas_kernels.core.optional import needs_extras

if TYPE_CHECKING:
    from kvjax.cache.host_pool import FrameCounts
    from kvjax.cost_model import CostModel
    from kvjax.cost_model.fitting import Cell, Key
    from kvjax.model.config import ModelConfig
    from kvjax.policies.decode import DecodePolicy

cost_app = typer.Typer(
    cls=WholeSentences,
    help="The cost of decode steps and prefill: predict it, fit it, and see what auto would choose.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

ShapeOption = Annotated[
    str | None,
    option(
        "qwen2.5-7b, llama-3.1-8b, llama-3.1-70b, qwen2.5-0.5b, tiny, or a model folder or hub id (only its config.json is read). "
        "[default: that of --fit, if it is one of these names and the only one there; otherwise qwen2.5-7b]"
    ),
]
FitOption = Annotated[Path | None, option("Cost models that kvjax cost fit wrote. [default: the built-in one of --device]", "--fit")]
DeviceOption = Annotated[str, option("Device whose built-in cost model is used, as JAX names it.")]
AssumeOption = Annotated[
    str | None,
    option(
        "Values set by hand, as bandwidth=3.05,c0=0: bandwidth (TB/s), c0 (ms), bus (GB/s), hits (the share of listed bytes that the hot "
        "buffer holds), latency (us of an exchange) and links (GB/s that a device receives). Every figure is then a projection.",
        "--assume",
    ),
]
DeviceShareOption = Annotated[
    int | None,
    option(
        "What an engine's cache takes on the device, as 8GB, with --host-memory for pages that it has no room for.",
        "--device-memory",
        **byte_count(),
    ),
]
HostShareOption = Annotated[
    int | None, option("Host memory for pages of an engine, as 56GB, with --device-memory.", "--host-memory", **byte_count())
]
PackedWeightsOption = Annotated[Weights | None, option("How weights are packed. [default: not packed]", "--weights", **one_of(Weights))]
PoliciesOption = Annotated[
    str | None, option("Decode policies, separated by commas. [default: top:8 and top:32, if they were measured; and dense in predict]")
]
USUAL = ("top:8", "top:32")
"""Budgets that are shown unless others are named."""
BATCHES = (1, 2, 4, 8, 16, 32, 64)
"""Batches at which `kvjax cost regimes` prints where a policy becomes faster."""
STEP_COLUMNS = (
    "tensor", "context", "tokens", "batch", "policy", "GB weights", "GB K and V", "GB index", "GB over the bus", "ms exchanging", "ms",
    "x dense", "from",
)  # fmt: skip


@cost_app.command("predict")
def predict_command(
    shape: ShapeOption = None,
    lengths: Annotated[str, option("Tokens in the cache, separated by commas.")] = "8k,32k,128k,512k,1m",
    batches: Annotated[str, option("Sequences decoded together, separated by commas.")] = "1,8",
    policies: PoliciesOption = None,
    fit: FitOption = None,
    device: DeviceOption = "NVIDIA H200",
    dtype: Annotated[str | None, option("Type of weights and cache. [default: the measured one]")] = None,
    weights: PackedWeightsOption = None,
    cache_format: CacheFormatOption = None,
    page_size: PageSizeOption = 128,
    device_memory: DeviceShareOption = None,
    host_memory: HostShareOption = None,
    tensor: Annotated[str, option("Devices over which weights and heads are split, separated by commas.")] = "1",
    context: Annotated[str, option("Devices over which pages are spread, separated by commas: powers of two.")] = "1",
    assume: AssumeOption = None,
) -> None:
    """Print bytes and seconds of a step, of one device of each mesh. Figures outside the measurements are marked as
    projections, with the reasons below."""
    from kvjax.policies.decode import name_of
    from pallas_kernels.core.tables import show, table

    meshes = list(itertools.product(parse_lengths(tensor, "tensor"), parse_lengths(context, "context")))
    for _, devices in meshes:
        check_context(devices)
    cost, config, shape, packed = _cost_model(fit, device, shape, weights, cache_format, assume)
    named = _priced(cost, ("dense", *USUAL), policies)
    computed = dataclasses.replace(config, compute_dtype=dtype or cost.dtype)
    frames = _frames(computed, named, page_size, device_memory, host_memory, cache_format=cache_format)
    options = packed | {"dtype": dtype, "page_size": page_size, "frames": frames}
    rows, reasons, refused = [], {}, {}
    cells = list(itertools.product(meshes, parse_lengths(lengths), parse_lengths(batches, "batches")))
    for (split, spread), length, batch in cells:
        sizes = options | {"tensor": split, "context": spread}
        try:
            found = {policy: cost.predict(config, policy, length, batch, **sizes) for policy in ("dense", *named)}
        except ValueError as error:
            if len(meshes) == 1:
                raise
            refused[f"tensor {split} x context {spread}: {error}"] = None
            continue
        for policy in named:
            each, place = found[policy], (str(split), str(spread), f"{length:,}", str(batch), name_of(policy))
            reasons |= dict.fromkeys(each.projection)
            gigabytes = (f"{count / 1e9:.3f}" for count in (each.bytes.weights, each.bytes.kv, each.bytes.index, each.bus_bytes))
            times = f"{each.parts.get('exchanges', 0.0) * 1e3:.3f}", f"{each.seconds * 1e3:.3f}"
            gain, known = f"{found['dense'].seconds / each.seconds:.2f}", "projection" if each.projection else "measurements"
            rows.append((*place, *gigabytes, *times, gain, known))
    if not rows:
        raise typer.BadParameter(f"no mesh of these can run this: {'; '.join(refused)}", param_hint="--tensor and --context")
    typer.echo(str(cost))
    show(table(STEP_COLUMNS, rows, left=5))
    for line in (*(f"refused: {each}" for each in refused), *(f"projection: {each}" for each in reasons)):
        typer.echo(line)


@cost_app.command("fit")
def fit_command(
    results: Annotated[
        list[Path],
        typer.Argument(metavar="RESULT.json...", help="Results of kvjax bench decode, benchmarks.tiers or benchmarks.prefill_ops."),
    ],
    steps_per_launch: Annotated[
        int,
        option(
            "Take rows of one device with so many steps per launch; those of several devices have their own rule.",
            "--steps-per-launch",
            **whole(),
        ),
    ] = 1,
    json_out: JsonOption = None,
) -> None:
    """Fit cost models to measured steps, and print their error on steps that they have not seen.

    There is one for each device, model, dtype, and format of packed weights and pages in the results. Bandwidth and c0
    are fitted to dense rows of one device, of --steps-per-launch; how many others are left out is printed. Rows of
    benchmarks.tiers give the term of the bus, and rows of several devices that of exchanges. Results of
    benchmarks.prefill_ops give times of prefill.
    """
    from pallas_kernels.core.results import write_result

    runs = {file: read_json(file, "a result of kvjax bench") for file in results}
    of_prefill = all(run.get("bench") in ("prefill-ops", "prefill-layers") for run in runs.values())
    figures = _fit_prefill(runs) if of_prefill else _fit_steps(runs, steps_per_launch)
    if json_out is not None:
        write_result(json_out, figures)


def _fit_prefill(runs: dict[Path, dict[str, Any]]) -> dict[str, Any]:
    from kvjax.cost_model.prefill_times import fit_prefill
    from kvjax.cost_model.records import to_json

    tables = fit_prefill([(_in_repository(file), run) for file, run in runs.items()])
    for times in tables:
        typer.echo(f"{times.device}, {times.shape}, {times.sizes}; times within {times.error:.1%}")
        for name, points in times.seconds:
            typer.echo(f"  {name}: " + ", ".join(f"{tokens:,} tokens {seconds * 1e3:.3f} ms" for tokens, seconds in points))
    return {"prefill_times": [to_json(times) for times in tables]}


def _fit_steps(runs: dict[Path, dict[str, Any]], steps_per_launch: int) -> dict[str, Any]:
    from kvjax.cost_model.fitting import checks, error_table, fit
    from kvjax.cost_model.records import to_json
    from kvjax.serving.bench.decode import config_of
    from pallas_kernels.core.results import devices_of
    from pallas_kernels.core.tables import show, table

    groups = _cells_of(runs, steps_per_launch)
    timed = [row for run in runs.values() for row in run["rows"] if "median_s" in row and devices_of(row) == 1]
    launches = sorted(collections.Counter(row.get("steps_per_launch", 1) for row in timed).items())
    others = ", ".join(f"{rows} of {steps} (--steps-per-launch {steps})" for steps, rows in launches if steps != steps_per_launch)
    if not groups:
        said = f"no row of {', '.join(map(str, runs))} has a time to fit, of {steps_per_launch} steps per launch"
        raise typer.BadParameter(said + (f": they have {others}" if others else ""), param_hint="RESULT.json...")
    if others:
        typer.echo(f"rows of one device with other steps per launch are left out: {others}")
    source, figures = " ".join(map(_in_repository, runs)), {"cost_models": [], "held_out": []}
    for key, cells in groups.items():
        cost, checked = fit(cells, config_of(key.shape, key.layers), key, source=source), checks(cells)
        typer.echo(str(cost))
        if checked["regret"] is not None:
            typer.echo(f"choosing by it loses {checked['regret']:.2%} against the best choice")
        figures["cost_models"].append(to_json(cost))
        figures["held_out"].append(checked)
    show(table(*error_table(figures), left=3, title="errors on steps that the fit has not seen"))
    return figures


def _cells_of(runs: dict[Path, dict[str, Any]], steps_per_launch: int) -> dict[Key, list[Cell]]:
    """The cells of several results, by what a cost model is fitted to (`read_cells`). BadParameter names the file that
    cannot be read."""
    from kvjax.cost_model.fitting import merged, read_cells
    from kvjax.serving.bench.decode import config_of

    groups: dict[Key, list[Cell]] = {}
    for file, run in sorted(runs.items(), key=lambda pair: _date(pair[1])):
        try:
            for key, cells in read_cells([run], config_of, steps_per_launch).items():
                groups.setdefault(key, []).extend(cells)
        except ValueError as error:
            raise typer.BadParameter(f"{file}: {error}") from None
        except (KeyError, TypeError, AttributeError) as error:
            said = f"{error} is missing" if isinstance(error, KeyError) else f"a field is of another kind ({error})"
            raise typer.BadParameter(f"{file}: {said}, so it is no result of kvjax bench decode or tiers") from None
    return {key: merged(cells) for key, cells in groups.items()}


def _date(run: dict[str, Any]) -> str:
    """When a result was measured, as it says; "" if it does not."""
    provenance = run.get("provenance")
    return str(provenance.get("date", "")) if isinstance(provenance, dict) else ""


def _in_repository(file: Path) -> str:
    """A file's name in reports: its path from the current folder, or only its name."""
    path = file.resolve()
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else path.name


@cost_app.command("evidence")
def evidence_command(
    results: Annotated[
        list[Path],
        typer.Argument(
            metavar="RESULT.json...", help="The evaluation.json of kvjax evaluate; or, of prefill, JSON of kvjax recall and needle."
        ),
    ],
    into: Annotated[
        Path, option("The table: kvjax/cost_model/evidence.json or prefill_evidence.json in a checkout, or new.", dir_okay=False)
    ],
    model: Annotated[str | None, option("The model that was run, for results without its fingerprint.", "--model", "-m")] = None,
    dtype: DtypeOption = None,
    max_positions: MaxPositionsOption = None,
) -> None:
    """Record how well policies agree with dense on a model, for `auto`. Replaces rows of the same model, policy, length
    and task."""
    from kvjax.cost_model.evidence import Evidence, PrefillEvidence, read_evidence, with_evaluation, with_results, write_evidence

    ran = None
    if model is not None:
        from kvjax.model.identity import fingerprint

        loaded = load_model(model, dtype, max_positions)
        ran = fingerprint(loaded), loaded.config.compute_dtype
    opened = [(_in_repository(file), read_json(file, "the JSON of kvjax evaluate, recall or needle")) for file in results]
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


@cost_app.command("regimes")
def regimes_command(
    shape: ShapeOption = None,
    policies: PoliciesOption = None,
    lengths: Annotated[str, option("Shortest and longest, in tokens.")] = "4k,1m",
    batches: Annotated[str, option("Smallest and largest.")] = "1,64",
    fit: FitOption = None,
    device: DeviceOption = "NVIDIA H200",
    memory: Annotated[
        float | None, option("For weights and cache, in GiB or as 80GB; cells that need more are grey.", **gibibytes())
    ] = None,
    device_memory: DeviceShareOption = None,
    host_memory: HostShareOption = None,
    weights: PackedWeightsOption = None,
    cache_format: CacheFormatOption = None,
    assume: AssumeOption = None,
    out: Annotated[Path, option("File for the picture (PNG).", "--out", "-o", **png())] = Path("regime-map.png"),
    json_out: JsonOption = None,
) -> None:
    """Draw where sparse decoding is faster than dense, over length and batch, by a fitted cost model. Projections are
    pale.

    With --device-memory and --host-memory, steps read pages in host memory where the device has no room for them.
    """
    needs_extras("kvjax cost regimes", "plots")
    import numpy as np

    from kvjax.cost_model.regimes import CROSSINGS, crossing, regime_map, save
    from pallas_kernels.core.results import write_result
    from pallas_kernels.core.tables import show, table

    ends, sizes = parse_lengths(lengths), parse_lengths(batches, "batches")
    for typed, pair, given, example in (("--lengths", ends, lengths, "4k,1m"), ("--batches", sizes, batches, "1,64")):
        if len(pair) != 2 or not 1 <= pair[0] < pair[1]:
            raise typer.BadParameter(f"needs the smallest and the largest, as {example}; got {given}", param_hint=typed)
    cost, config, shape, packed = _cost_model(fit, device, shape, weights, cache_format, assume)
    grid, drawn = ([int(n) for n in dict.fromkeys(np.geomspace(*pair, 65).round().astype(int))] for pair in (ends, sizes))
    held, named = None if memory is None else int(memory * 2**30), _priced(cost, USUAL, policies)
    computed = dataclasses.replace(config, compute_dtype=cost.dtype)
    frames = _frames(computed, named, 128, device_memory, host_memory, cache_format=cache_format)
    if memory is not None and frames is not None:
        raise typer.BadParameter("says what fits on the device, as --device-memory does: leave one of them out", param_hint="--memory")
    options = packed | {"frames": frames}
    maps = [regime_map(cost, config, policy, grid, drawn, memory_bytes=held, model=shape, **options) for policy in named]
    if not any(found.fits.any() for found in maps):
        there = f"{memory:g} GiB" if frames is None else f"{frames.device + frames.host:,} pages"
        hint = "--memory" if frames is None else "--host-memory"
        raise typer.BadParameter(f"{there} do not hold the weights and one sequence of {ends[0]:,} tokens", param_hint=hint)
    save(maps, out)
    typer.echo(str(cost))
    rows = [crossing(cost, config, found.policy, batch, **options) for found in maps for batch in BATCHES if sizes[0] <= batch <= sizes[1]]
    show(table(CROSSINGS, rows, left=4))
    if json_out is not None:
        write_result(json_out, {"maps": [found.figures() for found in maps]})
    typer.echo("written: " + ", ".join(map(str, filter(None, (out, json_out)))))


@cost_app.command("choose")
def choose_command(
    ctx: typer.Context,
    model: Annotated[str, option("Model folder, GGUF file, Hugging Face hub id, or 'needle'.", "--model", "-m")],
    level: Annotated[str, option("How close to dense: assured, fast, or numbers as kl=0.02,loss=0.05.")] = "assured",
    lengths: Annotated[str, option("Tokens in the cache, separated by commas.")] = "8k,16k,32k",
    batches: Annotated[str, option("Sequences decoded together, separated by commas.")] = "1,8",
    prefill: Annotated[bool, option("Show prefill instead: the chunks in which prompts of these lengths end.", "--prefill")] = False,
    prefill_chunk: ChunkOption = PREFILL_CHUNK,
    device: Annotated[str | None, option("With --prefill: another device, as JAX names it. [default: this one]")] = None,
    dtype: DtypeOption = None,
    weights: WeightsOption = None,
    max_positions: MaxPositionsOption = None,
    device_memory: DeviceShareOption = None,
    host_memory: HostShareOption = None,
) -> None:
    """Print which policy `auto` would run on this device, and why. For decoding, a device without a built-in cost model
    is calibrated.

    With --device-memory and --host-memory, it is the choice of an engine of these sizes. Packed weights have cost
    models and evidence of their own.
    """
    from kvjax.cost_model import Auto, AutoPrefill

    if prefill:
        refuse_given(ctx, "is about decoding, and --prefill is not", "batches", "device_memory", "host_memory")
    else:
        refuse_given(ctx, "needs --prefill: decoding is calibrated on this device", "device")
        if device_memory is None:
            refuse_given(ctx, "needs --prefill, or --device-memory and --host-memory", "prefill_chunk")
    cells = list(itertools.product(parse_lengths(lengths), parse_lengths(batches, "batches")))
    auto = AutoPrefill(level) if prefill else Auto(level)
    loaded = load_model(model, dtype, max_positions, weights=weights)
    sizes = {"page_size": 128, "dtype": loaded.config.compute_dtype}
    auto = auto.bind(loaded, **sizes, device=device) if prefill else auto.bind(loaded, **sizes)
    typer.echo(auto.describe())
    if prefill:
        for length in dict.fromkeys(length for length, _ in cells):
            start = (length - 1) // prefill_chunk * prefill_chunk
            typer.echo(f"tokens {start:,} to {start + prefill_chunk:,}: {auto.choose(start, start + prefill_chunk)}")
        return
    frames = _frames(loaded.config, (auto,), 128, device_memory, host_memory, chunk=prefill_chunk)
    for length, batch in cells:
        typer.echo(f"{length:,} tokens, batch {batch}: {auto.choose([length] * batch, frames)}")


def _frames(
    config: ModelConfig,
    policies: Sequence[DecodePolicy],
    page_size: int,
    device_memory: int | None,
    host_memory: int | None,
    chunk: int = PREFILL_CHUNK,
    cache_format: str | None = None,
) -> FrameCounts | None:
    """The frames of an engine of these sizes that declares dense and these policies; None without sizes."""
    from kvjax.engine.memory import memory_plan, pool_frames

    if (device_memory is None) != (host_memory is None):
        raise typer.BadParameter("go together: give both, or neither", param_hint="--device-memory and --host-memory")
    if device_memory is None:
        return None
    indexes = tuple(dict.fromkeys(spec for policy in policies for spec in policy.indexes()))
    sizes = {"page_size": page_size, "indexes": indexes, "cache_format": cache_format, "prefill_chunk": chunk}
    plan = memory_plan(config, **sizes, weights_bytes=0, available_bytes=0)
    with named_as_options():
        return pool_frames(plan, device_memory, host_memory, prefill_chunk=chunk, hot=bool(indexes))


def _priced(cost: CostModel, usual: Sequence[str], policies: str | None) -> tuple[DecodePolicy, ...]:
    """The policies of `--policies`; without it, those of `usual` that the cost model has, or all of them where it has
    only dense: the error then says what to measure. BadParameter for one that chooses among others, whose cost depends
    on what it chooses."""
    from kvjax.policies.choice import ChoosesDecode
    from kvjax.serving.bench.decode import policies_of

    if policies is None:
        known = [name for name in usual if cost.has_price(name)]
        policies = ",".join(known if set(known) - {"dense"} else usual)
    named = policies_of(policies)
    if auto := [policy for policy in named if isinstance(policy, ChoosesDecode)]:
        raise typer.BadParameter(f"{str(auto[0])!r} chooses among policies: name those", param_hint="--policies")
    return named


def _cost_model(
    fit: Path | None, device: str, shape: str | None, weights: Weights | None, cache_format: str | None, assume: str | None
) -> tuple[CostModel, ModelConfig, str, dict[str, str | None]]:
    """The cost model of a file or a device for a shape and formats, with what is assumed; the shape's sizes and name;
    and the formats.

    Without --shape it is the model of the whole file, if its sizes are known by its name. A built-in cost model without
    a term of the bus or of exchanges takes that of another one of its device.
    """
    from kvjax.cost_model.predict import closest, known_cost_models, load_cost_models, sizes_of, with_known
    from kvjax.serving.bench.decode import SHAPES, config_of

    if fit is None:
        models = [with_known(cost, "bus", "exchanges") for cost in known_cost_models() if cost.device == device]
    else:
        models = list(load_cost_models(fit))
    if not models:
        there = ", ".join(sorted({each.device for each in known_cost_models()}))
        raise typer.BadParameter(f"there is no built-in cost model of {device!r}, only of {there}; give --fit", param_hint="--device")
    if shape is None:
        names = {cost.model for cost in models if cost.model in SHAPES and sizes_of(SHAPES[cost.model]) == cost.sizes}
        shape = names.pop() if len(names) == len({(cost.model, cost.sizes) for cost in models}) == 1 else "qwen2.5-7b"
    packed = {"weights": None if weights is None else weights.value, "cache_format": cache_format}
    config = config_of(shape)
    cost = closest(models, config, "bfloat16", **packed)
    if assume is not None:
        try:
            cost = cost.assuming(**{name.strip(): float(value) for name, value in (part.split("=") for part in assume.split(","))})
        except ValueError as error:
            raise typer.BadParameter(f"{assume!r}: {error}; write it as bandwidth=3.05,c0=0", param_hint="--assume") from None
    return cost, config, Path(shape).name, packed
