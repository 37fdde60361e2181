"""`kvjax cost ...`: what steps cost, predicted and fitted, and where sparse decoding is faster. JAX is imported inside the commands."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvjax.serving.cli.cost_fit import cells_of, evidence_command, fit_command, kinds_of, steps_text
from kvjax.serving.cli.cost_mesh import (
    DevicesOption,
    LatencyOption,
    LinkBandwidthOption,
    MemoryOption,
    PrefillsOption,
    device_counts,
    show_meshes,
    show_prefill,
    with_exchanges,
)
from kvjax.serving.cli.help_pages import WholeSentences
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
    byte_count,
    check_context,
    gibibytes,
    load_model,
    named_as_options,
    number,
    one_of,
    parse_lengths,
    png,
    refuse_given,
)
from pallas_kernels.core.optional import needs_extras

if TYPE_CHECKING:
    from kvjax.cache.host_pool.mapped_memory import FrameCounts
    from kvjax.cost_model import CostModel
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
    typer.Option(
        help="qwen2.5-7b, llama-3.1-8b, llama-3.1-70b, qwen2.5-0.5b, tiny, or a model folder or hub id (only its config.json is read). "
        "[default: that of --fit, if it is one of these names and the only one there; otherwise qwen2.5-7b]",
        show_default=False,
    ),
]
FitOption = Annotated[
    Path | None,
    typer.Option("--fit", help="Cost models that kvjax cost fit wrote. [default: the built-in one of --device]", show_default=False),
]
DeviceOption = Annotated[str, typer.Option(help="Device whose built-in cost model is used, as JAX names it.")]
BandwidthOption = Annotated[
    float | None,
    typer.Option(help="Memory bandwidth of another chip, TB/s. Every figure is then a projection.", show_default=False, **number(above=0)),
]
NoOverheadOption = Annotated[
    bool, typer.Option("--no-overhead", help="Leave out c0, a step's fixed time. Every figure is then a projection.")
]

DeviceShareOption = Annotated[
    int | None,
    typer.Option(
        "--device-memory",
        help="What an engine's cache takes on the device, as 8GB, with --host-memory for pages that it has no room for.",
        show_default=False,
        **byte_count(),
    ),
]
HostShareOption = Annotated[
    int | None,
    typer.Option(
        "--host-memory", help="Host memory for pages of an engine, as 56GB, with --device-memory.", show_default=False, **byte_count()
    ),
]
HitsOption = Annotated[
    float | None,
    typer.Option(
        help="Share, 0 to 1, of what steps list in host memory that the hot buffer holds. [default: the cost model's, which was measured]",
        show_default=False,
        **number(least=0, most=1),
    ),
]
PackedWeightsOption = Annotated[
    Weights | None,
    typer.Option("--weights", help="How weights are packed. [default: not packed]", show_default=False, **one_of(Weights)),
]
PoliciesOption = Annotated[
    str | None,
    typer.Option(
        help="Decode policies, separated by commas. [default: dense, and top:8 and top:32 if they were measured]", show_default=False
    ),
]
PanelsOption = Annotated[
    str | None,
    typer.Option(
        help="Policies, separated by commas; a panel each. [default: top:8 and top:32, if they were measured]", show_default=False
    ),
]
USUAL = ("top:8", "top:32")
"""Budgets that are shown unless others are named."""
OF_STEPS = ("policies", "batches", "devices", "tier", "hits", "device_memory", "host_memory", "bandwidth", "no_overhead")
"""Parameters of `kvjax cost predict` that do not change what prompts exchange."""
NOT_PACKED: dict[str, str | None] = {"weights": None, "cache_format": None}
BATCHES = (1, 2, 4, 8, 16, 32, 64)
"""Batches at which `kvjax cost regimes` prints where a policy becomes faster."""
LinkOption = Annotated[
    float | None,
    typer.Option(help="GB/s from host or disk; every figure is then a projection.", show_default=False, **number(above=0)),
]


@cost_app.command("predict")
def predict_command(
    ctx: typer.Context,
    shape: ShapeOption = None,
    lengths: Annotated[str, typer.Option(help="Tokens in the cache, separated by commas.")] = "8k,32k,128k,512k,1m",
    batches: Annotated[str, typer.Option(help="Sequences decoded together, separated by commas.")] = "1,8",
    policies: PoliciesOption = None,
    fit: FitOption = None,
    device: DeviceOption = "NVIDIA H200",
    dtype: Annotated[str | None, typer.Option(help="Type of weights and cache. [default: the measured one]", show_default=False)] = None,
    weights: PackedWeightsOption = None,
    cache_format: CacheFormatOption = None,
    page_size: PageSizeOption = 128,
    tier: Annotated[str, typer.Option(help="Where keys and values are: device, host or disk.")] = "device",
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
    lengths: Annotated[str, typer.Option(help="Shortest and longest, in tokens.")] = "4k,1m",
    batches: Annotated[str, typer.Option(help="Smallest and largest.")] = "1,64",
    fit: FitOption = None,
    device: DeviceOption = "NVIDIA H200",
    memory: Annotated[
        float | None,
        typer.Option(help="For weights and cache, in GiB or as 80GB; cells that need more are grey.", show_default=False, **gibibytes()),
    ] = None,
    measured: Annotated[
        list[Path] | None, typer.Option(help="Results of kvjax bench decode, whose cells are marked; may be given several times.")
    ] = None,
    device_memory: DeviceShareOption = None,
    host_memory: HostShareOption = None,
    hits: HitsOption = None,
    link: LinkOption = None,
    bandwidth: BandwidthOption = None,
    no_overhead: NoOverheadOption = False,
    weights: PackedWeightsOption = None,
    cache_format: CacheFormatOption = None,
    out: Annotated[Path, typer.Option("--out", "-o", help="File for the picture (PNG).", **png())] = Path("regime-map.png"),
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
    for option, pair, given, example in (("--lengths", ends, lengths, "4k,1m"), ("--batches", sizes, batches, "1,64")):
        if len(pair) != 2 or not 1 <= pair[0] < pair[1]:
            raise typer.BadParameter(f"needs the smallest and the largest, as {example}; got {given}", param_hint=option)
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
    model: Annotated[str, typer.Option("--model", "-m", help="Model folder, GGUF file, Hugging Face hub id, or 'needle'.")],
    level: Annotated[str, typer.Option(help="How close to dense: assured, fast, or numbers as kl=0.02,loss=0.05.")] = "assured",
    lengths: Annotated[str, typer.Option(help="Tokens in the cache, separated by commas.")] = "8k,16k,32k",
    batches: Annotated[str, typer.Option(help="Sequences decoded together, separated by commas.")] = "1,8",
    prefill: Annotated[
        bool, typer.Option("--prefill", help="Show prefill instead: the chunks in which prompts of these lengths end.")
    ] = False,
    prefill_chunk: ChunkOption = 512,
    device: Annotated[
        str | None, typer.Option(help="With --prefill: another device, as JAX names it. [default: this one]", show_default=False)
    ] = None,
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
