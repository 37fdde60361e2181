"""`kvjax cost ...`: what steps cost, predicted and fitted, and where sparse decoding is faster. JAX is imported inside the commands."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvjax.serving.cli.options import (
    CacheFormatOption,
    ChunkOption,
    ContextOption,
    DtypeOption,
    JsonOption,
    MaxPositionsOption,
    PageSizeOption,
    TensorOption,
    Weights,
    WeightsOption,
    WholeSentences,
    byte_count,
    check_context,
    gibibytes,
    load_model,
    named_as_options,
    number,
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
    from kvjax.cache.host_pool.mapped_memory import FrameCounts
    from kvjax.cost_model import CostModel
    from kvjax.cost_model.fitting import Cell, Key
    from kvjax.model.config import ModelConfig
    from kvjax.policies.decode import DecodePolicy


DevicesOption = Annotated[str | None, option("Rank all meshes of so many devices, the fastest first, as 8,16 or 8..64 (8, 16, 32 and 64).")]
MemoryOption = Annotated[
    float | None,
    option("With --devices: memory of each for weights and pages, in GiB or as 80GB; meshes that need more are refused.", **gibibytes()),
]
LatencyOption = Annotated[
    float | None,
    option(
        "Microseconds of an exchange between devices. Assumed, not measured; with --link-bandwidth.",
        "--exchange-latency-us",
        **number(least=0),
    ),
]
LinkBandwidthOption = Annotated[
    float | None, option("GB/s that a device receives from others. Assumed, not measured.", "--link-bandwidth", **number(above=0))
]
PrefillsOption = Annotated[
    str | None,
    option(
        "With --tensor and --context: what prompts of these lengths exchange by these prefill policies, separated by commas, in place "
        "of a step.",
        "--prefill",
    ),
]


def with_exchanges(cost: CostModel, latency: float | None, link: float | None) -> CostModel:
    """The cost model with a term of exchanges set by hand, where its options were given."""
    from kvjax.cost_model.exchanges import assumed_exchanges

    if latency is not None and link is None:
        raise typer.BadParameter("needs --link-bandwidth", param_hint="--exchange-latency-us")
    if latency is not None:
        return dataclasses.replace(cost, exchanges=assumed_exchanges(latency, link))
    if link is None:
        return cost
    if (term := cost.exchanges) is None:
        said = "needs --exchange-latency-us: this cost model has no latency of an exchange"
        raise typer.BadParameter(said, param_hint="--link-bandwidth")
    assumed = (*term.assumed, f"links of {link:g} GB/s")
    return dataclasses.replace(cost, exchanges=dataclasses.replace(term, link_per_s=link * 1e9, assumed=assumed))


def device_counts(text: str) -> tuple[int, ...]:
    """Counts of `--devices`: "8,16", or "8..64", which doubles. ValueError for anything else."""
    low, dots, high = text.partition("..")
    if dots and not (low.strip() and high.strip()):
        raise ValueError(f"devices {text!r} lack an end: write both, as 8..64")
    if not dots:
        if "-" in text:
            raise ValueError(f"devices {text!r} are no counts: write 8,16, or 8..64 for 8, 16, 32 and 64")
        return parse_lengths(text, "devices")
    (first,), (last,) = parse_lengths(low, "devices"), parse_lengths(high, "devices")
    if last < first:
        raise ValueError(f"devices {text!r} begin with more than they end with: write the smaller number first, as {last}..{first}")
    return tuple(first << power for power in range((last // first).bit_length()))


PREFILL_COLUMNS = ("tokens", "prefill", "exchange", "axis", "count", "GB received", "s")


def show_prefill(
    cost: CostModel, config: ModelConfig, policies: str, lengths: Sequence[int], chunk: int, *, tensor: int, context: int, page_size: int
) -> None:
    """Print what a prompt of each length exchanges on a mesh, and for how long by the term of steps. policies: names, separated by
    commas."""
    from kvjax.cost_model.exchanges import PREFILL_PARTS, prompt_exchanges
    from kvjax.serving.bench.prefill import policies_of
    from pallas_kernels.core.tables import show, table

    if tensor * context == 1:
        raise typer.BadParameter("needs --tensor or --context: one device exchanges nothing", param_hint="--prefill")
    if chunk % page_size:
        said = f"is {chunk}, and must be a multiple of the page size {page_size} (--page-size)"
        raise typer.BadParameter(said, param_hint="--prefill-chunk")
    rows = []
    for length, policy in itertools.product(lengths, policies_of(policies)):
        found = prompt_exchanges(config, policy, length, chunk, tensor=tensor, context=context, page_size=page_size)
        groups = {(PREFILL_PARTS[each.part], each.axis): [] for each in found} | {("all", ""): list(found)}
        for each in found:
            groups[PREFILL_PARTS[each.part], each.axis].append(each)
        for (name, axis), some in groups.items():
            seconds = "" if cost.exchanges is None else f"{cost.exchanges.seconds(some):.3f}"
            figures = f"{sum(each.count for each in some):,}", f"{sum(each.received for each in some) / 1e9:,.3f}", seconds
            rows.append((f"{length:,}", str(policy), name, axis, *figures))
    typer.echo(str(cost))
    show(table(PREFILL_COLUMNS, rows, left=4, title=f"exchanges of one device in chunks of {chunk:,} tokens"))
    typer.echo("not counted: what a device computes; exchanges beside which it goes on computing")
    typer.echo("projection: seconds are by the term of decode steps, whose exchanges are smaller, and may be much too long")


MESH_COLUMNS = (
    "devices", "tensor", "context", "tokens", "batch", "policy", "ms", "tokens/s", "of each", "ms exchanging", "GiB each", "from"
)  # fmt: skip
SHOWN = 4
"""Reasons that an error gives, where no mesh can be."""


def show_meshes(
    cost: CostModel,
    config: ModelConfig,
    named: Sequence[DecodePolicy],
    cells: Sequence[tuple[int, int]],
    counts: Sequence[int],
    memory: float | None,
    **options: Any,
) -> None:
    """Print all meshes of each number of devices, the fastest first, why others are refused, and why figures are projections. cells:
    (length, batch). memory: GiB. options: as for `rank_meshes`."""
    from kvjax.cost_model import rank_meshes
    from kvjax.policies.decode import name_of
    from pallas_kernels.core.tables import show, table

    limit = None if memory is None else int(memory * 2**30)
    rows, reasons, refused = [], {}, {}
    for count, (length, batch), policy in itertools.product(counts, cells, named):
        for each in rank_meshes(cost, config, policy, length, batch, count, memory_bytes=limit, **options):
            if each.found is None:
                refused[f"tensor {each.tensor} x context {each.context}: {each.refused}"] = None
                continue
            seconds, exchanging = each.found.seconds, dict(each.found.parts).get("exchanges", 0.0)
            reasons |= dict.fromkeys(each.found.projection)
            place = str(count), str(each.tensor), str(each.context), f"{length:,}", str(batch), name_of(policy)
            rates = f"{seconds * 1e3:.3f}", f"{batch / seconds:,.0f}", f"{batch / seconds / count:,.1f}", f"{exchanging * 1e3:.3f}"
            known = "projection" if each.found.projection else "measurements"
            rows.append((*place, *rates, f"{each.device_bytes / 2**30:.1f}", known))
    if not rows:
        why = "; ".join(list(refused)[:SHOWN]) + (f"; and {len(refused) - SHOWN} more" if len(refused) > SHOWN else "")
        below = max(1, max(counts)).bit_length() - 1
        more = "" if memory is None else ", more of them, or a greater --memory"
        said = f"no mesh of {' or '.join(map(str, counts))} devices can run this ({why}): give powers of two, as {1 << below},{2 << below}"
        raise typer.BadParameter(said + more, param_hint="--devices")
    typer.echo(str(cost))
    show(table(MESH_COLUMNS, rows, left=6))
    if limit is None:
        typer.echo("memory of the devices was not looked at: --memory")
    for mesh in refused:
        typer.echo(f"refused: {mesh}")
    for reason in reasons:
        typer.echo(f"projection: {reason}")


ResultsArgument = Annotated[
    list[Path] | None,
    typer.Argument(metavar="[RESULT.json...]", help="Results of kvjax bench decode, benchmarks.tiers or benchmarks.prefill_ops."),
]
LaunchOption = Annotated[
    int,
    option(
        "Take rows of one device with so many steps per launch; those of several devices have their own rule.",
        "--steps-per-launch",
        **whole(),
    ),
]
NoResultsModel = Annotated[str | None, option("Without results: time this model's own steps on this device, in seconds.", "--model", "-m")]


def fit_command(
    results: ResultsArgument = None,
    steps_per_launch: LaunchOption = 1,
    model: NoResultsModel = None,
    policies: Annotated[str, option("With --model: policies to time besides dense, separated by commas.")] = "top:8,top:32",
    seconds: Annotated[float, option("With --model: how long it may take.", **number(above=0))] = 20.0,
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
        Path, option("The table: kvjax/cost_model/evidence.json or prefill_evidence.json in a checkout, or new.", dir_okay=False)
    ],
    model: Annotated[str | None, option("The model that was run, for results without its fingerprint.", "--model", "-m")] = None,
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
    opened = [(in_repository(file), read_json(file, "the JSON of kvjax evaluate, recall or needle")) for file in results]
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
BandwidthOption = Annotated[
    float | None, option("Memory bandwidth of another chip, TB/s. Every figure is then a projection.", **number(above=0))
]
NoOverheadOption = Annotated[bool, option("Leave out c0, a step's fixed time. Every figure is then a projection.", "--no-overhead")]

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
HitsOption = Annotated[
    float | None,
    option(
        "Share, 0 to 1, of what steps list in host memory that the hot buffer holds. [default: the cost model's, which was measured]",
        **number(least=0, most=1),
    ),
]
PackedWeightsOption = Annotated[Weights | None, option("How weights are packed. [default: not packed]", "--weights", **one_of(Weights))]
PoliciesOption = Annotated[
    str | None, option("Decode policies, separated by commas. [default: dense, and top:8 and top:32 if they were measured]")
]
PanelsOption = Annotated[
    str | None, option("Policies, separated by commas; a panel each. [default: top:8 and top:32, if they were measured]")
]
USUAL = ("top:8", "top:32")
"""Budgets that are shown unless others are named."""
OF_STEPS = ("policies", "batches", "devices", "tier", "hits", "device_memory", "host_memory", "bandwidth", "no_overhead")
"""Parameters of `kvjax cost predict` that do not change what prompts exchange."""
NOT_PACKED: dict[str, str | None] = {"weights": None, "cache_format": None}
BATCHES = (1, 2, 4, 8, 16, 32, 64)
"""Batches at which `kvjax cost regimes` prints where a policy becomes faster."""
LinkOption = Annotated[float | None, option("GB/s from host or disk; every figure is then a projection.", **number(above=0))]


@cost_app.command("predict")
def predict_command(
    ctx: typer.Context,
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
    tier: Annotated[str, option("Where keys and values are: device, host or disk.")] = "device",
    link: LinkOption = None,
    device_memory: DeviceShareOption = None,
    host_memory: HostShareOption = None,
    hits: HitsOption = None,
    bandwidth: BandwidthOption = None,
    no_overhead: NoOverheadOption = False,
    tensor: TensorOption = 1,
    context: ContextOption = 1,
    devices: DevicesOption = None,
    memory: MemoryOption = None,
    exchange_latency: LatencyOption = None,
    link_bandwidth: LinkBandwidthOption = None,
    prefill: PrefillsOption = None,
    prefill_chunk: ChunkOption = 512,
) -> None:
    """Print bytes and seconds of a step. Figures outside the measurements are marked as projections, with the reasons below.

    With --tensor and --context, of one device of a mesh. With --devices, which mesh is best. With --prefill, what the devices of a mesh
    exchange while they read a prompt.
    """
    from kvjax.cost_model.bytes import TIERS
    from kvjax.serving.bench.decode import config_of

    check_context(context)
    if tier not in TIERS:
        raise typer.BadParameter(f"{tier!r} is not one of {', '.join(TIERS)}", param_hint="--tier")
    if prefill is None:
        refuse_given(ctx, "needs --prefill", "prefill_chunk")
    else:
        refuse_given(ctx, "is about steps, and --prefill about prompts: leave one of them out", *OF_STEPS)
    packed, shape = _packed(weights, cache_format), _shape_of(fit) if shape is None else shape
    cost = _cost_model(fit, device, shape, bandwidth, no_overhead, packed)
    if tier != "device" and link is None:
        raise typer.BadParameter(f"keys and values on {tier!r} need --link, the GB/s from there", param_hint="--tier")
    config, named = config_of(shape), _priced(cost, ("dense", *USUAL), policies)
    computed = dataclasses.replace(config, compute_dtype=dtype or cost.dtype)
    frames = _frames(computed, named, page_size, device_memory, host_memory, hits, cache_format=cache_format)
    if frames is not None and tier != "device":
        raise typer.BadParameter(f"{tier!r} puts all keys and values there: leave out --device-memory", param_hint="--tier")
    if link is not None:
        if frames is None and tier == "device":
            raise typer.BadParameter("needs --tier host or disk, or --device-memory and --host-memory", param_hint="--link")
        cost = cost.with_link("host" if frames is not None else tier, link)
    cost = with_exchanges(cost, exchange_latency, link_bandwidth)
    cells = [(length, batch) for length in parse_lengths(lengths) for batch in parse_lengths(batches, "batches")]
    if (devices is not None or tensor * context > 1) and (frames is not None or tier != "device"):
        said = "puts pages elsewhere, and those of a mesh are on its devices alone"
        raise typer.BadParameter(said, param_hint="--device-memory or --tier")
    if packed != NOT_PACKED and (devices is not None or prefill is not None):
        said = "count nothing that is packed: leave out --weights and --cache-format"
        raise typer.BadParameter(said, param_hint="--devices and --prefill")
    if devices is not None:
        if tensor * context > 1:
            raise typer.BadParameter("ranks all meshes: leave out --tensor and --context", param_hint="--devices")
        return show_meshes(cost, config, named, cells, device_counts(devices), memory, dtype=dtype, page_size=page_size)
    if memory is not None:
        raise typer.BadParameter("needs --devices", param_hint="--memory")
    mesh = {"tensor": tensor, "context": context, "page_size": page_size}
    if prefill is not None:
        return show_prefill(cost, computed, prefill, parse_lengths(lengths), prefill_chunk, **mesh)
    _show_steps(cost, config, named, cells, **packed, **mesh, dtype=dtype, tier=tier, frames=frames, hits=hits)


STEP_COLUMNS = ("tokens", "batch", "policy", "GB weights", "GB K and V", "GB index", "GB over the bus", "ms exchanging", "ms", "x dense")


def _show_steps(
    cost: CostModel, config: ModelConfig, named: Sequence[DecodePolicy], cells: Sequence[tuple[int, int]], **options: Any
) -> None:
    """Print bytes and seconds of steps, and why they are projections. cells: (length, batch). options: as for `CostModel.predict`."""
    from kvjax.policies.decode import name_of
    from pallas_kernels.core.tables import show, table

    rows: list[tuple[str, ...]] = []
    reasons: dict[str, None] = {}
    for length, batch in cells:
        dense = cost.predict(config, "dense", length, batch, **options)
        for policy in named:
            found = cost.predict(config, policy, length, batch, **options)
            reasons |= dict.fromkeys(found.projection)
            counts = found.bytes.weights, found.bytes.kv, found.bytes.index, found.bus_bytes
            gigabytes = (f"{count / 1e9:.3f}" for count in counts)
            exchanging = f"{dict(found.parts).get('exchanges', 0.0) * 1e3:.3f}"
            known = "projection" if found.projection else "measurements"
            figures = exchanging, f"{found.seconds * 1e3:.3f}", f"{dense.seconds / found.seconds:.2f}", known
            rows.append((f"{length:,}", str(batch), name_of(policy), *gigabytes, *figures))
    typer.echo(str(cost))
    show(table((*STEP_COLUMNS, "from"), rows, left=3))
    for reason in reasons:
        typer.echo(f"projection: {reason}")


@cost_app.command("regimes")
def regimes_command(
    shape: ShapeOption = None,
    policies: PanelsOption = None,
    lengths: Annotated[str, option("Shortest and longest, in tokens.")] = "4k,1m",
    batches: Annotated[str, option("Smallest and largest.")] = "1,64",
    fit: FitOption = None,
    device: DeviceOption = "NVIDIA H200",
    memory: Annotated[
        float | None, option("For weights and cache, in GiB or as 80GB; cells that need more are grey.", **gibibytes())
    ] = None,
    measured: Annotated[
        list[Path] | None, option("Results of kvjax bench decode, whose cells are marked; may be given several times.")
    ] = None,
    device_memory: DeviceShareOption = None,
    host_memory: HostShareOption = None,
    hits: HitsOption = None,
    link: LinkOption = None,
    bandwidth: BandwidthOption = None,
    no_overhead: NoOverheadOption = False,
    weights: PackedWeightsOption = None,
    cache_format: CacheFormatOption = None,
    out: Annotated[Path, option("File for the picture (PNG).", "--out", "-o", **png())] = Path("regime-map.png"),
    json_out: JsonOption = None,
) -> None:
    """Draw where sparse decoding is faster than dense, over length and batch, by a fitted cost model. Projections are pale.

    With --device-memory and --host-memory, steps read pages in host memory where the device has no room for them.
    """
    needs_extras("kvjax cost regimes", "plots")
    import numpy as np

    from kvjax.cost_model.regimes import CROSSINGS, crossing, regime_map, save
    from kvjax.serving.bench.decode import config_of
    from pallas_kernels.core.results import write_result
    from pallas_kernels.core.tables import show, table

    ends, sizes = parse_lengths(lengths), parse_lengths(batches, "batches")
    for typed, pair, given, example in (("--lengths", ends, lengths, "4k,1m"), ("--batches", sizes, batches, "1,64")):
        if len(pair) != 2 or not 1 <= pair[0] < pair[1]:
            raise typer.BadParameter(f"needs the smallest and the largest, as {example}; got {given}", param_hint=typed)
    packed, shape = _packed(weights, cache_format), _shape_of(fit) if shape is None else shape
    cost, config = _cost_model(fit, device, shape, bandwidth, no_overhead, packed), config_of(shape)
    grid, sizes_drawn = ([int(n) for n in dict.fromkeys(np.geomspace(*pair, 65).round().astype(int))] for pair in (ends, sizes))
    held, named = None if memory is None else int(memory * 2**30), _priced(cost, USUAL, policies)
    computed = dataclasses.replace(config, compute_dtype=cost.dtype)
    frames = _frames(computed, named, 128, device_memory, host_memory, hits, cache_format=cache_format)
    if memory is not None and frames is not None:
        raise typer.BadParameter("says what fits on the device, as --device-memory does: leave one of them out", param_hint="--memory")
    if link is not None and frames is None:
        raise typer.BadParameter("needs --device-memory and --host-memory", param_hint="--link")
    if link is not None:
        cost = cost.with_link("host", link)
    dots = _dots(measured or [], cost, config, Path(shape).name, packed)
    tiers = packed | {"frames": frames, "hits": hits}
    maps = [regime_map(cost, config, policy, grid, sizes_drawn, memory_bytes=held, model=Path(shape).name, **tiers) for policy in named]
    if frames is not None and not any(found.fits.any() for found in maps):
        said = f"{frames.device + frames.host:,} pages do not hold a sequence of {ends[0]:,} tokens"
        raise typer.BadParameter(said, param_hint="--host-memory")
    if not any(found.fits.any() for found in maps):
        raise typer.BadParameter(f"{memory:g} GiB do not hold the weights and one sequence of {ends[0]:,} tokens", param_hint="--memory")
    save(maps, out, sorted(dots))
    typer.echo(str(cost))
    rows = [crossing(cost, config, found.policy, batch, **tiers) for found in maps for batch in BATCHES if sizes[0] <= batch <= sizes[1]]
    show(table(CROSSINGS, rows, left=4))
    if json_out is not None:
        write_result(json_out, {"maps": [found.figures() for found in maps]})
    typer.echo("written: " + ", ".join(map(str, filter(None, (out, json_out)))))


def _dots(files: Sequence[Path], cost: CostModel, config: ModelConfig, named: str, packed: dict[str, str | None]) -> set[tuple[int, int]]:
    """(length, batch) of measured steps as a map has them: of its model, formats, and one device of its kind, in launches as long as the
    cost model's. BadParameter if files have none. named: the model."""
    from kvjax.cost_model.predict import sizes_of
    from kvjax.serving.bench.decode import config_of
    from pallas_kernels.core.results import packed_text

    dots: set[tuple[int, int]] = set()
    for key, cells in cells_of(files, cost.steps_per_launch).items():
        here = key.device, key.dtype, key.weights, key.cache_format, sizes_of(config_of(key.shape, key.layers))
        if here == (cost.device, cost.dtype, *packed.values(), sizes_of(config)):
            dots |= {(cell.length, cell.batch) for cell in cells if cell.tensor * cell.context == 1}
    if files and not dots:
        own = f"{named}, {config.num_layers} layers, {cost.device}, {cost.dtype}{packed_text(packed)}, {steps_text(cost.steps_per_launch)}"
        said = f"{', '.join(map(str, files))}: no row is of the map's steps ({own}, one device); they have {'; '.join(kinds_of(files))}"
        raise typer.BadParameter(said, param_hint="--measured")
    return dots


@cost_app.command("choose")
def choose_command(
    ctx: typer.Context,
    model: Annotated[str, option("Model folder, GGUF file, Hugging Face hub id, or 'needle'.", "--model", "-m")],
    level: Annotated[str, option("How close to dense: assured, fast, or numbers as kl=0.02,loss=0.05.")] = "assured",
    lengths: Annotated[str, option("Tokens in the cache, separated by commas.")] = "8k,16k,32k",
    batches: Annotated[str, option("Sequences decoded together, separated by commas.")] = "1,8",
    prefill: Annotated[bool, option("Show prefill instead: the chunks in which prompts of these lengths end.", "--prefill")] = False,
    prefill_chunk: ChunkOption = 512,
    device: Annotated[str | None, option("With --prefill: another device, as JAX names it. [default: this one]")] = None,
    dtype: DtypeOption = None,
    weights: WeightsOption = None,
    max_positions: MaxPositionsOption = None,
    device_memory: DeviceShareOption = None,
    host_memory: HostShareOption = None,
) -> None:
    """Print which policy `auto` would run on this device, and why. For decoding, a device without a built-in cost model is calibrated.

    With --device-memory and --host-memory, it is the choice of an engine of these sizes. Packed weights have cost models and evidence of
    their own.
    """

    from kvjax.cost_model import Auto, AutoPrefill

    if device is not None and not prefill:
        raise typer.BadParameter("needs --prefill: decoding is calibrated on this device", param_hint="--device")
    if prefill and (device_memory or host_memory):
        raise typer.BadParameter("is about decoding, and --prefill is not", param_hint="--device-memory")
    if prefill:
        refuse_given(ctx, "is about decoding, and --prefill is not", "batches")
    elif device_memory is None:
        refuse_given(ctx, "needs --prefill, or --device-memory and --host-memory", "prefill_chunk")
    cells = [(length, batch) for length in parse_lengths(lengths) for batch in parse_lengths(batches, "batches")]
    auto = AutoPrefill(level) if prefill else Auto(level)
    loaded = load_model(model, dtype, max_positions, weights=weights)
    sizes = {"page_size": 128, "dtype": loaded.config.compute_dtype}
    if prefill:
        auto = auto.bind(loaded, **sizes, device=device)
        typer.echo(auto.describe())
        for length in parse_lengths(lengths):
            start = (length - 1) // prefill_chunk * prefill_chunk
            typer.echo(f"tokens {start:,} to {start + prefill_chunk:,}: {auto.choose(start, start + prefill_chunk)}")
        return
    auto = auto.bind(loaded, **sizes)
    typer.echo(auto.describe())
    frames = _frames(loaded.config, (auto,), 128, device_memory, host_memory, chunk=prefill_chunk)
    for length, batch in cells:
        typer.echo(f"{length:,} tokens, batch {batch}: {auto.choose([length] * batch, frames)}")


cost_app.command("fit")(fit_command)
cost_app.command("evidence")(evidence_command)


def _frames(
    config: ModelConfig,
    policies: Sequence[DecodePolicy],
    page_size: int,
    device_memory: int | None,
    host_memory: int | None,
    hits: float | None = None,
    chunk: int = 512,
    cache_format: str | None = None,
) -> FrameCounts | None:
    """The frames of an engine of these sizes that declares dense and these policies; None without sizes."""
    from kvjax.engine.capacity_plan import memory_plan, pool_frames

    if (device_memory is None) != (host_memory is None):
        raise typer.BadParameter("go together: give both, or neither", param_hint="--device-memory and --host-memory")
    if device_memory is None:
        if hits is not None:
            raise typer.BadParameter("needs --device-memory and --host-memory", param_hint="--hits")
        return None
    indexes = tuple(dict.fromkeys(spec for policy in policies for spec in policy.indexes()))
    sizes = {"page_size": page_size, "indexes": indexes, "cache_format": cache_format, "prefill_chunk": chunk}
    plan = memory_plan(config, **sizes, weights_bytes=0, available_bytes=0)
    with named_as_options():
        return pool_frames(plan, device_memory, host_memory, prefill_chunk=chunk, hot=bool(indexes))


def _named(policies: str) -> tuple[DecodePolicy, ...]:
    """The policies of `--policies`. BadParameter for one that chooses among others, whose cost depends on what it chooses."""
    from kvjax.policies.choice import ChoosesDecode
    from kvjax.serving.bench.decode import policies_of

    named = policies_of(policies)
    if auto := [policy for policy in named if isinstance(policy, ChoosesDecode)]:
        raise typer.BadParameter(f"{str(auto[0])!r} chooses among policies: name those", param_hint="--policies")
    return named


def _priced(cost: CostModel, usual: Sequence[str], policies: str | None) -> tuple[DecodePolicy, ...]:
    """The policies of `--policies`; without it, those of `usual` that the cost model has, or all of them where it has only dense: the
    error then says what to measure."""
    if policies is not None:
        return _named(policies)
    known = [name for name in usual if cost.has_price(name)]
    return _named(",".join(known if set(known) - {"dense"} else usual))


def _packed(weights: Weights | None, cache_format: str | None) -> dict[str, str | None]:
    """How weights and pages are packed, for `CostModel.predict`."""
    from kvjax.cache.formats import parse_cache_format

    with named_as_options():
        parse_cache_format(cache_format, "bfloat16")
    return {"weights": None if weights is None else weights.value, "cache_format": cache_format}


def _shape_of(fit: Path | None) -> str:
    """The model without --shape: the one of all cost models of a file, if its sizes are known by its name."""
    from kvjax.cost_model.predict import load_cost_models, sizes_of
    from kvjax.serving.bench.decode import SHAPES

    models = set() if fit is None else {(cost.model, cost.sizes) for cost in load_cost_models(fit)}
    name, sizes = models.pop() if len(models) == 1 else ("", ())
    return name if name in SHAPES and sizes_of(SHAPES[name]) == sizes else "qwen2.5-7b"


def _cost_model(
    fit: Path | None, device: str, shape: str, bandwidth: float | None, no_overhead: bool, packed: dict[str, str | None]
) -> CostModel:
    """The cost model of a file or a device, with the options' changes: that of these formats, if there is one. A built-in one without a
    term of the bus or of exchanges takes that of another one of its device."""
    from kvjax.cost_model.predict import closest, known_cost_model, known_cost_models, load_cost_models, with_known
    from kvjax.serving.bench.decode import config_of

    known = (config_of(shape), "bfloat16")
    cost = known_cost_model(device, *known, **packed) if fit is None else closest(load_cost_models(fit), *known, **packed)
    if cost is None:
        there = ", ".join(sorted({each.device for each in known_cost_models()}))
        raise typer.BadParameter(f"there is no built-in cost model of {device!r}, only of {there}; give --fit", param_hint="--device")
    if fit is None:
        cost = with_known(cost, "bus", "exchanges")
    if bandwidth is not None:
        cost = cost.projected(f"bandwidth set to {bandwidth:g} TB/s", bytes_per_s=bandwidth * 1e12)
    return cost.without_overhead() if no_overhead else cost
