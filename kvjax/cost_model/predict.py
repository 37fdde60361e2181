"""What a step costs in seconds: t = bytes / bandwidth + c0 + c1(policy), and one term each for the bus and for exchanges between devices.

Source: "Attention Pays Its Bill" (BRL-2026-07), section 9, equation 2. c0 is the time of a step besides its bytes, for every policy. c1 is
the time to select the blocks: a constant, and here also seconds per byte of index scanned. All of them belong to the device, the model and
the engine that were measured. The terms of pages in host memory and of meshes of devices are ours, too.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.resources
import itertools
import math
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from kvjax.cache.formats import CacheFormat, parse_cache_format
from kvjax.cache.host_pool.mapped_memory import FrameCounts
from kvjax.checks import check_amount, check_fields, check_rows, check_text, whole_number
from kvjax.cost_model.bytes import StepBytes, step_bytes
from kvjax.cost_model.exchanges import MEASURE_EXCHANGES, ExchangeTerm, layers_that_choose, step_exchanges
from kvjax.engine.capacity_plan import memory_plan
from kvjax.model.config import DTYPES, ModelConfig, uniform_fields
from kvjax.model.weight_formats import FormatOf, weights_bytes
from kvjax.policies.decode.base import DecodePolicy, chooses_over_devices
from kvjax.policies.decode.naming import name_of, parse, parse_recorded
from kvjax.policies.decode.top_blocks import TopBlocks
from pallas_kernels.core.files import read_list
from pallas_kernels.core.messages import shown
from pallas_kernels.core.results import launch_text, packed_text

SIZES = ("num_layers", "hidden_size", "intermediate_size", "num_heads", "num_kv_heads", "head_dim", "vocab_size", "tie_embeddings")
"""The sizes on which a step's cost depends, for a model whose layers are all alike."""

OWN = "the model's own"
"""Name of weights that a function describes: those of a checkpoint that was packed by others."""

MAX_DEVICES = 4096
"""The most devices of a mesh that is predicted."""


class Price(NamedTuple):
    """c1 of a policy: seconds per step, and seconds per byte of index scanned, besides the byte's transfer (0 in the paper's form)."""

    fixed: float
    per_byte: float = 0.0


@dataclasses.dataclass(frozen=True)
class BusTerm:
    """What pages in host memory cost: bytes over the bus / per_s + layers with a hot buffer * layer_s.

    model: the name of the measured model. per_s: bytes per second. layer_s: seconds in which a layer looks up its list and launches copies.
    hits: the default share of listed bytes in host memory that the hot buffer holds; None: not measured. measured: (batch, shortest,
    longest), lengths in tokens. error: mean relative error of held-out steps.
    """

    model: str
    per_s: float
    layer_s: float = 0.0
    hits: float | None = None
    measured: tuple[tuple[int, int, int], ...] = ()
    error: float = 0.0

    def __post_init__(self):
        check_text("model of the bus", self.model)
        for name in ("per_s", "layer_s", "error"):
            check_amount(f"{name} of the bus", getattr(self, name), above_zero=name == "per_s")
        check_rows("measured of the bus", self.measured, 3)
        if self.hits is not None:
            check_amount("hits of the bus", self.hits)
            check_hits(self.hits)

    def seconds(self, moved: StepBytes, hits: float) -> float:
        """Seconds of a step's bytes over the bus, if a share of `hits` of the listed ones is found in the hot buffer."""
        return (moved.in_place + moved.copied(hits)) / self.per_s + self.layer_s * moved.hot_layers

    def __str__(self) -> str:
        hits = "hits not measured" if self.hits is None else f"hits {self.hits:.0%}"
        return f"bus: {self.per_s / 1e9:.1f} GB/s, {self.layer_s * 1e6:.1f} us a layer, {hits}, error {self.error:.1%}"


def check_hits(hits: float) -> float:
    """Returns `hits`; ValueError unless it is a share."""
    if not 0 <= hits <= 1:
        raise ValueError(f"hits is the share of listed bytes that is found in the hot buffer, from 0 to 1, got {hits}")
    return hits


@dataclasses.dataclass(frozen=True)
class Prediction:
    """Seconds of one step, and the bytes that one device reads.

    projection: the reasons why the seconds are not interpolated between measurements; empty if they are. bus_bytes: those of the bytes that
    come over the bus, or from another tier. parts: (name, seconds), whose sum are the seconds.
    """

    seconds: float
    bytes: StepBytes
    projection: tuple[str, ...] = ()
    bus_bytes: float = 0.0
    parts: tuple[tuple[str, float], ...] = ()


@dataclasses.dataclass(frozen=True)
class CostModel:
    """A fitted cost model. Static and hashable.

    device: as JAX names it. model, sizes: the name and the sizes (`sizes_of`) of the measured model. dtype: of weights and cache, but for
    those that were packed: weights, cache_format: how, by name; None: they were not. bytes_per_s: bandwidth. c0: seconds per step. c1: the
    `Price` of selecting, by policy name. measured: (batch, shortest, longest), lengths in tokens, ascending. error: mean relative error of
    the speed-up of steps that were held out. source: files of the measurements. links: bytes per second at which keys and values come from
    other tiers, by tier. assumed: fields that were set by hand; every prediction is then a projection. bus, exchanges: terms of pages in
    host memory and of a mesh; None: not measured. steps_per_launch: of the measured launches. In launches of one step the host may take
    longer than the device, so times of longer ones are not times of those.
    """

    device: str
    model: str
    sizes: tuple[int, ...]
    dtype: str
    bytes_per_s: float
    c0: float
    c1: tuple[tuple[str, Price], ...]
    measured: tuple[tuple[int, int, int], ...]
    error: float
    source: str
    links: tuple[tuple[str, float], ...] = ()
    assumed: tuple[str, ...] = ()
    bus: BusTerm | None = None
    exchanges: ExchangeTerm | None = None
    weights: str | None = None
    cache_format: str | None = None
    steps_per_launch: int = 1

    def __post_init__(self):
        for name in ("device", "model", "dtype", "source") if self.weights is None else ("device", "model", "dtype", "source", "weights"):
            check_text(f"{name} of a cost model", getattr(self, name))
        for why in self.assumed:
            check_text("each of assumed of a cost model", why)
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype of a cost model must be one of {', '.join(DTYPES)}, got {shown(self.dtype)}")
        parse_cache_format(self.cache_format, self.dtype)
        for name in ("bytes_per_s", "c0", "error"):
            check_amount(f"{name} of a cost model", getattr(self, name), above_zero=name == "bytes_per_s")
        whole_number("steps_per_launch of a cost model", self.steps_per_launch, 1)
        whole_number("the number of layers in sizes of a cost model", next(iter(self.sizes), None), 1)
        for size in self.sizes:
            whole_number("each of sizes of a cost model", size, 0, 2**63)
        for policy, price in self.c1:
            check_text("the policy of a price in c1", policy)
            for name, amount in price._asdict().items():
                check_amount(f"{name} of {policy} in c1", amount)
        for tier, rate in self.links:
            check_text("the tier of a link", tier)
            check_amount(f"links of a cost model, {tier},", rate, above_zero=True)
        check_rows("measured of a cost model", self.measured, 3)

    def predict(
        self,
        config: ModelConfig,
        policy: str | DecodePolicy,
        length: int,
        batch: int = 1,
        *,
        dtype: Any = None,
        weights: str | FormatOf | None = None,
        cache_format: str | CacheFormat | None = None,
        page_size: int = 128,
        tier: str = "device",
        frames: FrameCounts | None = None,
        hits: float | None = None,
        tensor: int = 1,
        context: int = 1,
    ) -> Prediction:
        """Time and bytes of one step of `batch` sequences of `length` tokens.

        Args:
            dtype: None is the measured one.
            weights, cache_format: as for `step_bytes`; None: not packed, whatever was measured.
            frames: those of an engine with pages in host memory, as for `step_bytes`.
            hits: the share of listed bytes of pages there that the hot buffer holds; None: the measured default, or 0 without one.
            tensor, context: of a mesh of devices.

        For another model, the bytes are computed for it, and c0 and c1 are scaled by its number of layers. The result is a projection for
        another model, dtype, packed weights, pages or tier, for a mesh that was not measured, and outside the measured lengths and batches.
        Raises ValueError for a policy without a price, a tier without a link, frames without a term of the bus, and a mesh without a term
        of exchanges; and what `step_bytes` and `step_exchanges` raise.
        """
        policy = parse(policy)
        dtype = self.dtype if dtype is None else str(dtype)
        sizes = {"dtype": dtype, "weights": weights, "cache_format": cache_format, "page_size": page_size}
        moved = step_bytes(config, policy, length, batch, **sizes, tier=tier, frames=frames, tensor=tensor, context=context)
        price, guessed = self.price(policy)
        layers = config.num_layers / self.sizes[0]
        # The price per byte is not scaled, because the bytes of index already grow with the layers.
        selecting = price.fixed * layers + price.per_byte * moved.index
        parts = [("bytes", moved.from_device / self.bytes_per_s), ("c0", self.c0 * layers), ("c1", selecting)]
        reasons, measured, bus_bytes = [*self.assumed, *guessed], self.measured, 0.0
        if tier != "device":
            bus_bytes = float(moved.kv)
            parts.append((tier, moved.kv / self._link(tier)))
        if frames is not None:
            bus, share, why = self._bus_of(moved, hits)
            parts.append(("bus", bus.seconds(moved, share)))
            bus_bytes, measured, reasons = moved.in_place + moved.copied(share), bus.measured, reasons + why
            if (needed := batch * -(-length // page_size)) > frames.device + frames.host:
                reasons.append(f"the pool has {frames.device + frames.host:,} pages, and these sequences need {needed:,}")
        if tensor * context > 1:
            seconds, measured, why = self._exchange(config, policy, batch, tensor, context, dtype, page_size)
            parts.append(("exchanges", seconds))
            reasons += why
        if sizes_of(config) != self.sizes:
            reasons.append(f"measured on {self.model}, c0 and c1 scaled by layers ({layers:.3g})")
        reasons += self._packed_otherwise(dtype, weights, cache_format)
        if tier != "device":
            reasons.append(f"measured with keys and values on the device, not on {tier}")
        reasons += _outside(measured, length, batch)
        return Prediction(sum(each for _, each in parts), moved, tuple(reasons), bus_bytes, tuple(parts))

    def speedup(self, config: ModelConfig, policy: str | DecodePolicy, length: int, batch: int = 1, **options: Any) -> float:
        """The predicted time of dense divided by that of the policy. options: as for `predict`."""
        dense, sparse = (self.predict(config, each, length, batch, **options).seconds for each in ("dense", policy))
        return dense / sparse

    def price(self, policy: str | DecodePolicy) -> tuple[Price, tuple[str, ...]]:
        """c1 of a policy, and why it is a projection (empty if it was measured). It may be interpolated between two measured budgets, but
        is never extrapolated. ValueError for a policy without a price."""
        policy = parse(policy)
        prices = {"dense": Price(0.0), **dict(self.c1)}
        if name_of(policy) in prices:
            return prices[name_of(policy)], ()
        found = interpolated(policy, prices)
        if found is None:
            raise ValueError(
                f"the cost model of {self.device} has no c1 for {policy}; it has {', '.join(prices)}. "
                f"Measure it: {self.how_to_measure(name_of(policy))}"
            )
        return found, (f"c1 of {policy} is interpolated between measured budgets",)

    def how_to_measure(self, policies: str) -> str:
        """The commands that fit a cost model of these formats and launches to policies besides dense, separated by commas."""
        packed = ((f" --{name}", value) for name, value in (("weights", self.weights), ("cache-format", self.cache_format)) if value)
        launches = "" if self.steps_per_launch == 1 else f" --steps-per-launch {self.steps_per_launch}"
        measured = "".join(f"{option} {value}" for option, value in packed) + launches
        return f"kvjax bench decode --policies dense,{policies}{measured} --json FILE, then kvjax cost fit FILE{launches}"

    def has_price(self, policy: str | DecodePolicy) -> bool:
        """Whether `price` has a price for a policy."""
        policy, prices = parse(policy), {"dense": Price(0.0), **dict(self.c1)}
        return name_of(policy) in prices or interpolated(policy, prices) is not None

    @property
    def formats(self) -> str:
        """dtype, and what is packed, in words."""
        return self.dtype + packed_text({"weights": self.weights, "cache_format": self.cache_format})

    @property
    def knows_bus(self) -> bool:
        """Whether `predict` can price pages in host memory."""
        return self.bus is not None or "host" in dict(self.links)

    def projected(self, why: str, **changes: Any) -> CostModel:
        """This model with fields set by hand (another chip's bytes_per_s, c0=0, links). Every prediction of it is a projection that says
        `why`."""
        return dataclasses.replace(self, **changes, assumed=(*self.assumed, why))

    def with_link(self, tier: str, gigabytes_per_s: float) -> CostModel:
        """The projection to another rate from a tier ("host", "disk"), in GB/s. For "host" it takes the place of the measured rate of the
        bus."""
        rate, changes = gigabytes_per_s * 1e9, {}
        if tier == "host" and self.bus is not None:
            changes["bus"] = dataclasses.replace(self.bus, per_s=rate)
        links = tuple(dict(self.links, **{tier: rate}).items())
        return self.projected(f"a {tier} link of {gigabytes_per_s:g} GB/s", links=links, **changes)

    def without_overhead(self) -> CostModel:
        """The projection to a runtime without overhead, whose steps take time only for bytes and selecting: c0 = 0 (BRL-2026-07, section
        9)."""
        return self.projected("c0 set to 0", c0=0.0)

    def __str__(self) -> str:
        prices = ", ".join(
            f"c1({name}) {price.fixed * 1e3:.3f} ms" + (f" + {price.per_byte * 1e12:.3f} ms/GB of index" if price.per_byte else "")
            for name, price in self.c1
        )
        launches = launch_text({"steps_per_launch": self.steps_per_launch})
        places = ", ".join(f"batch {batch} from {shortest:,} to {longest:,} tokens" for batch, shortest, longest in self.measured)
        terms = [(each, each.model) for each in (self.bus, self.exchanges) if each is not None]
        return (
            f"{self.device}, {self.model}, {self.formats}{launches}: "
            f"{self.bytes_per_s / 1e12:.3f} TB/s, c0 {self.c0 * 1e3:.3f} ms, {prices}; "
            f"measured at {places}"
            + "".join(f"; {each}" + f", measured on {model}" * (bool(each.measured) and model != self.model) for each, model in terms)
            + "".join(f"; PROJECTION: {why}" for why in self.assumed)
        )

    def _packed_otherwise(self, dtype: str, weights: str | FormatOf | None, cache_format: str | CacheFormat | None) -> list[str]:
        """Why a step in these formats is a projection; empty if they were measured."""
        reasons = [] if dtype == self.dtype else [f"measured in {self.dtype}, not in {dtype}"]
        asked = OWN if callable(weights) else weights, parse_cache_format(cache_format, dtype)
        for what, here, there in zip(
            ("weights", "pages"), asked, (self.weights, parse_cache_format(self.cache_format, dtype)), strict=True
        ):
            if here != there:
                slower = "; kernels that unpack read at a lower rate, so such a step takes longer" if there is None else ""
                reasons.append(f"measured with {what} {_packed_as(there)}, not with those {_packed_as(here)}{slower}")
        return reasons

    def _bus_of(self, moved: StepBytes, hits: float | None) -> tuple[BusTerm, float, list[str]]:
        """The term of pages in host memory, the share of hits, and why these are a projection."""
        bus, reasons = self.bus, []
        if bus is None:
            bus = BusTerm(self.model, self._link("host"), measured=self.measured)
            reasons.append("the work of the hot buffer was not measured, and counts as none")
        if bus.model != self.model:
            reasons.append(f"the bus was measured on {bus.model}")
        if hits is None and bus.hits is None and moved.listed:
            reasons.append("no share of hits was measured, and none is assumed")
        return bus, check_hits((bus.hits or 0.0) if hits is None else hits), reasons

    def _exchange(
        self, config: ModelConfig, policy: DecodePolicy, batch: int, tensor: int, context: int, dtype: str, page_size: int
    ) -> tuple[float, tuple[tuple[int, int, int], ...], list[str]]:
        """Seconds of exchanges, which batches and lengths were measured, and why the seconds are a projection."""
        term = self.exchanges
        if term is None:
            raise ValueError(f"the cost model of {self.device} has no term for exchanges between devices; {MEASURE_EXCHANGES}")
        exchanges = step_exchanges(config, policy, batch, tensor=tensor, context=context, dtype=dtype, page_size=page_size)
        seconds = term.seconds(exchanges, layers_that_choose(config, policy) if context > 1 else 0)
        ranges, reasons = tuple(each[2:] for each in term.measured if each[:2] == (tensor, context)), [*term.assumed]
        if not term.assumed and (sizes_of(config), term.model) != (self.sizes, self.model):
            reasons.append(f"exchanges were measured on {term.model}")
        if not term.assumed and name_of(policy) not in term.policies:
            reasons.append(f"{policy} was not timed on a mesh")
        if not ranges:
            reasons.append(unmeasured(tensor, context))
        return seconds, ranges or self.measured, reasons

    def _link(self, tier: str) -> float:
        try:
            return dict(self.links)[tier]
        except KeyError:
            raise ValueError(
                f"the cost model of {self.device} has no bandwidth for the tier {tier!r}; fit one to rows of benchmarks.tiers (host), or "
                f'put one in: --link 52, or in Python model.projected("a {tier} link of 52 GB/s", links=(({tier!r}, 52e9),))'
            ) from None


def _packed_as(name: object) -> str:
    return "as they are" if name is None else f"packed as {name}"


def unmeasured(tensor: int, context: int) -> str:
    """The reason why a step on a mesh is a projection, if it was not measured."""
    return f"tensor {tensor} x context {context} was not measured"


def _outside(measured: tuple[tuple[int, int, int], ...], length: int, batch: int) -> tuple[str, ...]:
    """The reason why a length and a batch lie outside the measured ones; empty if they do not."""
    below = max((row for row in measured if row[0] <= batch), default=None)
    above = min((row for row in measured if row[0] >= batch), default=None)
    if below is None or above is None:
        return (f"batch {batch:,} lies outside the measured {measured[0][0]:,} to {measured[-1][0]:,}",)
    beyond = [row for row in dict.fromkeys((below, above)) if not row[1] <= length <= row[2]]
    return tuple(f"length {length:,} lies outside the {first:,} to {last:,} measured at batch {size}" for size, first, last in beyond[:1])


def interpolated(policy: DecodePolicy, prices: Mapping[str, Price]) -> Price | None:
    """c1 of a block budget, interpolated in k between two measured budgets of the same kind of selection; None if it does not lie between
    two."""
    if not isinstance(policy, TopBlocks):
        return None
    kind = dataclasses.replace(policy, k=0)
    measured = [(parse_recorded(name), price) for name, price in prices.items()]
    others = [(each.k, price) for each, price in measured if isinstance(each, TopBlocks) and dataclasses.replace(each, k=0) == kind]
    below = max((point for point in others if point[0] <= policy.k), default=None)
    above = min((point for point in others if point[0] >= policy.k), default=None)
    if below is None or above is None:
        return None
    (low, first), (high, last) = below, above
    share = 0.0 if low == high else (policy.k - low) / (high - low)
    return Price(*(one + (other - one) * share for one, other in zip(first, last, strict=True)))


PROJECTED_GAIN = 0.1
"""The gain over dense that a projection must at least exceed, as a share. Every prediction must exceed the cost model's own error."""


def worthwhile(seconds: Mapping[str, float], error: float, projected: Collection[str] = ()) -> str:
    """The name of the fastest policy whose gain over dense exceeds the error, or "dense". A smaller gain may be no gain at all.

    seconds: by policy name, "dense" included. projected: policies whose time is a projection; their gain must exceed PROJECTED_GAIN too.
    """
    asked = {name: max(error, PROJECTED_GAIN) if name in projected else error for name in seconds}
    worth = [name for name in seconds if seconds["dense"] / seconds[name] > 1 + asked[name]]
    return min(worth, key=seconds.__getitem__, default="dense")


def sizes_of(config: ModelConfig) -> tuple[int, ...]:
    """The sizes on which a step's cost depends: the `SIZES` of a model whose layers are all alike, or the sizes of every layer of another
    model."""
    fields = uniform_fields(config)
    if fields is not None and not fields["windows"]:
        return tuple(int(fields[name]) for name in SIZES)
    each = [(layer.mixer.window or 0, *map(math.prod, layer.shapes(config.hidden_size).values())) for layer in config.layers]
    return (len(each), config.hidden_size, config.vocab_size, int(config.tie_embeddings), *itertools.chain(*each))


# Meshes


@dataclasses.dataclass(frozen=True)
class MeshChoice:
    """A mesh for a step. found: None if the mesh was refused. device_bytes: weights and pages of one device. refused: why it cannot be; ""
    if it can."""

    tensor: int
    context: int
    found: Prediction | None
    device_bytes: int
    refused: str = ""


def rank_meshes(
    cost: CostModel,
    config: ModelConfig,
    policy: str | DecodePolicy,
    length: int,
    batch: int,
    devices: int,
    *,
    memory_bytes: int | None = None,
    dtype: str | None = None,
    page_size: int = 128,
) -> list[MeshChoice]:
    """All meshes of so many devices, the fastest first, and those that cannot be at the end, with the reason.

    memory_bytes: of one device, for weights and pages; None: not looked at. What a step and prefill need besides is not counted. Raises
    ValueError as `CostModel.predict` does, for what has nothing to do with the mesh's form, and for more than `MAX_DEVICES`.
    """
    if not 1 <= devices <= MAX_DEVICES:
        raise ValueError(f"devices must be from 1 to {MAX_DEVICES:,}, got {devices:,}")
    policy, found, refused = parse(policy), [], []
    stored = dataclasses.replace(config, compute_dtype=dtype or cost.dtype)
    pages = batch * -(-length // page_size)
    for tensor in [each for each in range(1, devices + 1) if devices % each == 0]:
        context, size = devices // tensor, 0
        why = _impossible(stored, policy, tensor, context)
        if not why:
            options = {"page_size": page_size, "indexes": policy.indexes(), "available_bytes": 0, "sequences": batch}
            plan = memory_plan(stored, **options, tensor=tensor, context=context)
            size = plan.weights_bytes + plan.pool_bytes(-(-pages // context) * context)
            if memory_bytes is not None and size > memory_bytes:
                why = f"weights and pages need {size / 2**30:.1f} GiB on each device, and there are {memory_bytes / 2**30:.1f}"
        if why:
            refused.append(MeshChoice(tensor, context, None, size, why))
        else:
            step = cost.predict(config, policy, length, batch, dtype=dtype, page_size=page_size, tensor=tensor, context=context)
            found.append(MeshChoice(tensor, context, step, size))
    return sorted(found, key=lambda each: each.found.seconds) + refused


def _impossible(config: ModelConfig, policy: DecodePolicy, tensor: int, context: int) -> str:
    """Why an engine refuses a mesh; "" if it does not."""
    if context & (context - 1):
        return f"context {context} is no power of two"
    if context > 1 and not chooses_over_devices(policy):
        return f"policy {policy} does not choose over devices"
    try:
        weights_bytes(config, tensor=tensor)
    except ValueError as error:
        return str(error)
    return ""


# Files


def to_json(cost: CostModel) -> dict[str, Any]:
    """A cost model as a JSON object, for `from_json`."""
    fields = dataclasses.asdict(cost)
    sizes = dict(zip(SIZES, cost.sizes, strict=True)) if len(cost.sizes) == len(SIZES) else list(cost.sizes)
    fields |= {"sizes": sizes, "c1": {name: price._asdict() for name, price in cost.c1}, "links": dict(cost.links)}
    if cost.exchanges is not None and math.isinf(cost.exchanges.link_per_s):
        fields["exchanges"]["link_per_s"] = None  # JSON has no infinity
    return fields


def from_json(fields: dict[str, Any]) -> CostModel:
    """A cost model from its JSON object. ValueError for missing or unknown fields, which it names."""
    given = dict(check_fields("a cost model", _names(CostModel), fields))
    sizes = given["sizes"]
    if isinstance(sizes, dict):
        check_fields("sizes", SIZES, sizes)
        given["sizes"] = tuple(whole_number(f"{name} of sizes", sizes[name], int(name != "tie_embeddings")) for name in SIZES)
    else:
        given["sizes"] = _list("sizes", sizes)
    prices = _object("c1", given["c1"]).items()
    given["c1"] = tuple((name, Price(**check_fields(f"the price of {name} in c1", Price._fields, price))) for name, price in prices)
    given |= {"links": tuple(_object("links", given["links"]).items()), "assumed": _list("assumed", given["assumed"])}
    given["measured"] = _rows("measured", given["measured"])
    if given["bus"] is not None:
        bus = check_fields("bus", _names(BusTerm), given["bus"])
        given["bus"] = BusTerm(**(bus | {"measured": _rows("measured of bus", bus["measured"])}))
    if given["exchanges"] is not None:
        term = check_fields("exchanges", _names(ExchangeTerm), given["exchanges"])
        tuples = {name: _list(f"{name} of exchanges", term[name]) for name in ("policies", "assumed")}
        tuples["measured"] = tuple(map(_tuple, _list("measured of exchanges", term["measured"])))
        link = math.inf if term["link_per_s"] is None else term["link_per_s"]
        given["exchanges"] = ExchangeTerm(**(term | tuples | {"link_per_s": link}))
    return CostModel(**given)


def _names(kind: type) -> list[str]:
    return [field.name for field in dataclasses.fields(kind)]


def _object(name: str, given: object) -> dict[str, Any]:
    if not isinstance(given, dict):
        raise ValueError(f"{name} must be an object, got {shown(given)}")
    return given


def _list(name: str, given: object) -> tuple[Any, ...]:
    if not isinstance(given, list | tuple):
        raise ValueError(f"{name} must be a list, got {shown(given)}")
    return tuple(given)


def _tuple(row: object) -> object:
    return tuple(row) if isinstance(row, list) else row


def _rows(name: str, given: object) -> tuple[Any, ...]:
    """The rows of what was measured. ValueError without any: what nothing was measured for has no file."""
    if not (rows := tuple(map(_tuple, _list(name, given)))):
        raise ValueError(f"{name} is empty, so it is without measured steps")
    return rows


def load_cost_models(file: Path) -> tuple[CostModel, ...]:
    """The cost models of a file that `kvjax cost fit --json` wrote; ValueError, with the file's name, for another file."""
    advice = "give a file that kvjax cost fit --json wrote"
    models = read_list(file, "cost_models", from_json, advice)
    if not models:
        raise ValueError(f"{file} holds no cost models; {advice}")
    return models


@functools.cache
def known_cost_models() -> tuple[CostModel, ...]:
    """The cost models inside the package, fitted to committed measurements, which each one's `source` names. Of a device, those of weights
    and pages that are not packed come first, because `closest` takes the first of equal ones."""
    files = [file for file in (importlib.resources.files(__package__) / "fitted").iterdir() if file.name.endswith(".json")]
    return tuple(cost for file in sorted(files, key=lambda file: file.name.removesuffix(".json")) for cost in load_cost_models(file))


def known_cost_model(
    device: str, config: ModelConfig, dtype: str, weights: str | None = None, cache_format: str | None = None
) -> CostModel | None:
    """The built-in cost model of a device for a model, dtype and formats (`closest`)."""
    return closest([cost for cost in known_cost_models() if cost.device == device], config, dtype, weights, cache_format)


def closest(
    models: Sequence[CostModel], config: ModelConfig, dtype: str, weights: str | None = None, cache_format: str | None = None
) -> CostModel | None:
    """The cost model of this model, dtype, weights and format of pages. If there is none, one that agrees in as many of these as possible,
    in this order; of equal ones the first. None without any."""
    asked = sizes_of(config), dtype, weights, parse_cache_format(cache_format, dtype)

    def agrees(cost: CostModel) -> tuple[bool, ...]:
        found = cost.sizes, cost.dtype, cost.weights, parse_cache_format(cost.cache_format, dtype)
        return tuple(one == other for one, other in zip(asked, found, strict=True))

    return max(models, key=agrees, default=None)


def with_known(cost: CostModel, *terms: str) -> CostModel:
    """The cost model with these terms ("bus", "exchanges") of a built-in one of its device, where it has none of its own and there is one.

    They are the device's more than the model's. Still, predictions by terms that another model or other formats lend are projections: the
    term's `model` then differs from the cost model's own."""
    for name in terms:
        lender = next((each for each in known_cost_models() if each.device == cost.device and getattr(each, name) is not None), None)
        if getattr(cost, name) is None and lender is not None:
            term = getattr(lender, name)
            if term.model == cost.model and lender.formats != cost.formats:
                term = dataclasses.replace(term, model=f"{term.model} in {lender.formats}")
            cost = dataclasses.replace(cost, **{name: term})
    return cost
