"""What a step costs in seconds: t = bytes / bandwidth + c0 + c1(policy), and one term each for the bus and for
exchanges between devices.

Source: "Attention Pays Its Bill" (BRL-2026-07), section 9, equation 2. c0 is the time of a step besides its bytes, for
every policy. c1 is the time to select the blocks: a constant, and here also seconds per byte of index scanned. All of
them belong to the device, the model and the engine that were measured. The terms of pages in host memory and of meshes
of devices are ours, too.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.resources
import itertools
import math
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from kvjax.cache.formats import CacheFormat, parse_cache_format
from kvjax.cache.host_pool import FrameCounts
from kvjax.cost_model.bytes import StepBytes, step_bytes
from kvjax.cost_model.exchanges import MEASURE_EXCHANGES, NO_EXCHANGES, Exchanges, ExchangeTerm, step_exchanges
from kvjax.cost_model.records import Count, Rate, check_record, from_json
from kvjax.model.config import DTYPES, ModelConfig, uniform_fields
from kvjax.model.weight_formats import FormatOf
from kvjax.policies.decode.base import DecodePolicy
from kvjax.policies.decode.naming import name_of, parse, parse_recorded
from kvjax.policies.decode.top_blocks import TopBlocks
from pallas_kernels.core.files import read_list
from pallas_kernels.core.messages import shown
from pallas_kernels.core.results import launch_text, packed_text

SIZES = ("num_layers", "hidden_size", "intermediate_size", "num_heads", "num_kv_heads", "head_dim", "vocab_size", "tie_embeddings")
"""The sizes on which a step's cost depends, for a model whose layers are all alike."""

OWN = "the model's own"
"""Name of weights that a function describes: those of a checkpoint that was packed by others."""

ASSUMABLE = {
    "bandwidth": ("TB/s", 1e12),
    "c0": ("ms", 1e-3),
    "bus": ("GB/s", 1e9),
    "hits": ("of what is listed", 1.0),
    "latency": ("us", 1e-6),
    "links": ("GB/s", 1e9),
}
"""What may be set by hand (`CostModel.assuming`), in which unit, and that in bytes and seconds."""


@dataclasses.dataclass(frozen=True)
class Price:
    """c1 of a policy: seconds per step, and seconds per byte of index scanned, besides the byte's transfer (0 in the
    paper's form)."""

    fixed: float
    per_byte: float = 0.0


FREE = Price(0.0)


@dataclasses.dataclass(frozen=True)
class BusTerm:
    """What pages in host memory cost: bytes over the bus / per_s + layers with a hot buffer * layer_s.

    model: the name of the measured model. per_s: bytes per second. layer_s: seconds in which a layer looks up its list
    and launches copies; None: not measured. hits: the share of listed bytes in host memory that the hot buffer holds;
    None: not measured. measured: (batch, shortest, longest), lengths in tokens. error: mean relative error of held-out
    steps.
    """

    model: str
    per_s: Rate
    layer_s: float | None = 0.0
    hits: float | None = None
    measured: tuple[tuple[Count, Count, Count], ...] = ()
    error: float = 0.0

    def __post_init__(self):
        check_record(self, "the bus")
        if self.hits is not None and self.hits > 1:
            raise ValueError(f"hits is the share of listed bytes that is found in the hot buffer, from 0 to 1, got {self.hits}")

    def __str__(self) -> str:
        hits = "hits not measured" if self.hits is None else f"hits {self.hits:.0%}"
        return f"bus: {self.per_s / 1e9:.1f} GB/s, {(self.layer_s or 0.0) * 1e6:.1f} us a layer, {hits}, error {self.error:.1%}"


@dataclasses.dataclass(frozen=True)
class Terms:
    """What a step costs. bytes_per_s: bandwidth. c0: seconds per step. c1: the `Price` of selecting, by policy name.
    bus, exchanges: terms of pages in host memory and of a mesh; None: not measured."""

    bytes_per_s: Rate
    c0: float
    c1: tuple[tuple[str, Price], ...]
    bus: BusTerm | None = None
    exchanges: ExchangeTerm | None = None

    def parts(
        self, moved: StepBytes, price: Price, exchanges: Exchanges = NO_EXCHANGES, hits: float = 0.0, layers: float = 1.0
    ) -> dict[str, float]:
        """Seconds of a step by their cause. hits: the share of listed bytes that the hot buffer holds. layers: of the
        model, over those of the measured one."""
        found = {"bytes": moved.from_device / self.bytes_per_s, "c0": self.c0 * layers}
        # The price per byte is not scaled, because the bytes of index already grow with the layers.
        found["c1"] = price.fixed * layers + price.per_byte * moved.index
        if self.bus is not None:
            found["bus"] = moved.over_bus(hits) / self.bus.per_s + (self.bus.layer_s or 0.0) * moved.hot_layers
        if exchanges.count and self.exchanges is not None:
            found["exchanges"] = self.exchanges.seconds(exchanges)
        return found

    def find_price(self, policy: DecodePolicy) -> Price | None:
        """c1 of a policy, measured or between two measured budgets; None if there is none."""
        prices = {"dense": FREE, **dict(self.c1)}
        return prices.get(name_of(policy)) or interpolated(policy, prices)

    def has_price(self, policy: str | DecodePolicy) -> bool:
        """Whether a policy has a c1."""
        return self.find_price(parse(policy)) is not None


@dataclasses.dataclass(frozen=True)
class Prediction:
    """Seconds of one step, and the bytes that one device reads.

    projection: the reasons why the seconds are not interpolated between measurements; empty if they are. bus_bytes:
    those of the bytes that come over the bus. parts: seconds by their cause, whose sum are the seconds.
    """

    seconds: float
    bytes: StepBytes
    projection: tuple[str, ...]
    bus_bytes: float
    parts: Mapping[str, float]


@dataclasses.dataclass(frozen=True, kw_only=True)
class CostModel(Terms):
    """A fitted cost model. Static and hashable.

    device: as JAX names it. model, sizes: the name and the sizes (`sizes_of`) of the measured model. dtype: of weights
    and cache, but for those that were packed: weights, cache_format: how, by name; None: they were not. measured:
    (batch, shortest, longest), lengths in tokens, ascending. error: mean relative error of the speed-up of steps that
    were held out. source: files of the measurements. assumed: what was set by hand; every prediction is then a
    projection. steps_per_launch: of the measured launches. In launches of one step the host may take longer than the
    device, so times of longer ones are not times of those.
    """

    device: str
    model: str
    sizes: tuple[int, ...]
    dtype: str
    measured: tuple[tuple[Count, Count, Count], ...]
    error: float
    source: str
    assumed: tuple[str, ...] = ()
    weights: str | None = None
    cache_format: str | None = None
    steps_per_launch: Count = 1

    def __post_init__(self):
        check_record(self, "a cost model")
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype of a cost model must be one of {', '.join(DTYPES)}, got {shown(self.dtype)}")
        parse_cache_format(self.cache_format, self.dtype)
        if not self.sizes or not self.sizes[0]:
            raise ValueError(f"sizes of a cost model must begin with a number of layers, got {shown(self.sizes)}")
        if not self.measured:
            raise ValueError("measured of a cost model is empty, so it is without measured steps")

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
        frames: FrameCounts | None = None,
        tensor: int = 1,
        context: int = 1,
    ) -> Prediction:
        """Time and bytes of one step of `batch` sequences of `length` tokens.

        Args:
            dtype: None is the measured one.
            weights, cache_format: as for `step_bytes`; None: not packed, whatever was measured.
            frames: those of an engine with pages in host memory, as for `step_bytes`.
            tensor, context: of a mesh of devices.

        For another model, the bytes are computed for it, and c0 and c1 are scaled by its number of layers. The result
        is a projection for another model, dtype, packed weights or pages, for a mesh that was not measured, and outside
        the measured lengths and batches. Raises ValueError for a policy without a price, frames without a term of the
        bus, and a mesh without a term of exchanges; and what `step_bytes` and `step_exchanges` raise.
        """
        policy = parse(policy)
        dtype = self.dtype if dtype is None else str(dtype)
        sizes, mesh = {"dtype": dtype, "page_size": page_size}, {"tensor": tensor, "context": context}
        moved = step_bytes(config, policy, length, batch, **sizes, **mesh, weights=weights, cache_format=cache_format, frames=frames)
        price, guessed = self.price(policy)
        reasons, measured, exchanges, hits = [*self.assumed, *guessed], self.measured, NO_EXCHANGES, 0.0
        if frames is not None:
            measured, hits, why = self._bus_of(moved)
            reasons += why
            if (needed := batch * -(-length // page_size)) > frames.device + frames.host:
                reasons.append(f"the pool has {frames.device + frames.host:,} pages, and these sequences need {needed:,}")
        if tensor * context > 1:
            exchanges = step_exchanges(config, policy, batch, **sizes, **mesh)
            measured, why = self._mesh_of(config, policy, tensor, context)
            reasons += why
        layers = config.num_layers / self.sizes[0]
        if sizes_of(config) != self.sizes:
            reasons.append(f"measured on {self.model}, c0 and c1 scaled by layers ({layers:.3g})")
        reasons += self._packed_otherwise(dtype, weights, cache_format)
        reasons += _outside(measured, length, batch)
        parts = self.parts(moved, price, exchanges, hits, layers)
        return Prediction(sum(parts.values()), moved, tuple(reasons), moved.over_bus(hits), parts)

    def speedup(self, config: ModelConfig, policy: str | DecodePolicy, length: int, batch: int = 1, **options: Any) -> float:
        """The predicted time of dense divided by that of the policy. options: as for `predict`."""
        dense, sparse = (self.predict(config, each, length, batch, **options).seconds for each in ("dense", policy))
        return dense / sparse

    def price(self, policy: str | DecodePolicy) -> tuple[Price, tuple[str, ...]]:
        """c1 of a policy, and why it is a projection (empty if it was measured). It may be interpolated between two
        measured budgets, but is never extrapolated. ValueError for a policy without a price."""
        policy, found = parse(policy), self.find_price(parse(policy))
        names = ("dense", *dict(self.c1))
        if found is None:
            raise ValueError(
                f"the cost model of {self.device} has no c1 for {policy}; it has {', '.join(names)}. "
                f"Measure it: {self.how_to_measure(name_of(policy))}"
            )
        return found, () if name_of(policy) in names else (f"c1 of {policy} is interpolated between measured budgets",)

    def how_to_measure(self, policies: str) -> str:
        """The commands that fit a cost model of these formats and launches to policies besides dense, separated by
        commas."""
        packed = ((f" --{name}", value) for name, value in (("weights", self.weights), ("cache-format", self.cache_format)) if value)
        launches = "" if self.steps_per_launch == 1 else f" --steps-per-launch {self.steps_per_launch}"
        measured = "".join(f"{option} {value}" for option, value in packed) + launches
        return f"kvjax bench decode --policies dense,{policies}{measured} --json FILE, then kvjax cost fit FILE{launches}"

    @property
    def formats(self) -> str:
        """dtype, and what is packed, in words."""
        return self.dtype + packed_text({"weights": self.weights, "cache_format": self.cache_format})

    def assuming(self, **given: float) -> CostModel:
        """The projection with values set by hand, of the names and in the units of `ASSUMABLE`: another chip's
        bandwidth, c0=0, the bus of another host. Every prediction of it says what was assumed. ValueError for other
        names, and where a term needs another one."""
        if unknown := [name for name in given if name not in ASSUMABLE]:
            known = ", ".join(f"{name} ({unit})" for name, (unit, _) in ASSUMABLE.items())
            raise ValueError(f"{unknown[0]!r} cannot be assumed; there are {known}")
        values = {name: value * ASSUMABLE[name][1] for name, value in given.items()}

        def named(**fields: str) -> dict[str, float]:
            return {field: values[name] for field, name in fields.items() if name in values}

        changes: dict[str, Any] = named(bytes_per_s="bandwidth", c0="c0")
        if bus := named(per_s="bus", hits="hits"):
            if self.bus is None and "per_s" not in bus:
                raise ValueError(f"the cost model of {self.device} has no term of the bus: assume its rate, too (bus=50)")
            changes["bus"] = BusTerm(self.model, layer_s=None, **bus) if self.bus is None else dataclasses.replace(self.bus, **bus)
        if exchanges := named(latency_s="latency", link_per_s="links"):
            if self.exchanges is None and len(exchanges) < 2:
                raise ValueError(f"the cost model of {self.device} has no term of exchanges: assume latency and links together")
            term = ExchangeTerm(self.model, 0.0, None, 0.0) if self.exchanges is None else self.exchanges
            changes["exchanges"] = dataclasses.replace(term, **exchanges)
        why = ", ".join(f"{name} {value:g} {ASSUMABLE[name][0]}" for name, value in given.items())
        return dataclasses.replace(self, **changes, assumed=(*self.assumed, f"assumed: {why}"))

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

    def _bus_of(self, moved: StepBytes) -> tuple[tuple[tuple[int, int, int], ...], float, list[str]]:
        """Which batches and lengths were measured over the bus, the share of hits, and why the term is a projection."""
        bus, reasons = self.bus, []
        if bus is None:
            raise ValueError(
                f"the cost model of {self.device} has no term of the bus; fit one to rows of benchmarks.tiers, or assume its rate: "
                "--assume bus=50, or in Python cost.assuming(bus=50)"
            )
        if bus.layer_s is None:
            reasons.append("the work of the hot buffer was not measured, and counts as none")
        if bus.model != self.model:
            reasons.append(f"the bus was measured on {bus.model}")
        if bus.hits is None and moved.listed:
            reasons.append("no share of hits was measured, and none is assumed")
        return bus.measured or self.measured, bus.hits or 0.0, reasons

    def _mesh_of(
        self, config: ModelConfig, policy: DecodePolicy, tensor: int, context: int
    ) -> tuple[tuple[tuple[int, int, int], ...], list[str]]:
        """Which batches and lengths were measured on a mesh, and why the term of exchanges is a projection."""
        term, reasons = self.exchanges, []
        if term is None:
            raise ValueError(f"the cost model of {self.device} has no term for exchanges between devices; {MEASURE_EXCHANGES}")
        if (sizes_of(config), term.model) != (self.sizes, self.model):
            reasons.append(f"exchanges were measured on {term.model}")
        if name_of(policy) not in term.policies:
            reasons.append(f"{policy} was not timed on a mesh")
        ranges = tuple(each[2:] for each in term.measured if each[:2] == (tensor, context))
        if not ranges:
            reasons.append(f"tensor {tensor} x context {context} was not measured")
        return ranges or self.measured, reasons


def _packed_as(name: object) -> str:
    return "as they are" if name is None else f"packed as {name}"


def _outside(measured: tuple[tuple[int, int, int], ...], length: int, batch: int) -> tuple[str, ...]:
    """The reason why a length and a batch lie outside the measured ones; empty if they do not."""
    below = max((row for row in measured if row[0] <= batch), default=None)
    above = min((row for row in measured if row[0] >= batch), default=None)
    if below is None or above is None:
        return (f"batch {batch:,} lies outside the measured {measured[0][0]:,} to {measured[-1][0]:,}",)
    beyond = [row for row in dict.fromkeys((below, above)) if not row[1] <= length <= row[2]]
    return tuple(f"length {length:,} lies outside the {first:,} to {last:,} measured at batch {size}" for size, first, last in beyond[:1])


def interpolated(policy: DecodePolicy, prices: Mapping[str, Price]) -> Price | None:
    """c1 of a block budget, interpolated in k between two measured budgets of the same kind of selection; None if it
    does not lie between two."""
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
    return Price(first.fixed + (last.fixed - first.fixed) * share, first.per_byte + (last.per_byte - first.per_byte) * share)


PROJECTED_GAIN = 0.1
"""The gain over dense that a projection must at least exceed, as a share. Every prediction must exceed the cost model's
own error."""


def worthwhile(seconds: Mapping[str, float], error: float, projected: Collection[str] = ()) -> str:
    """The name of the fastest policy whose gain over dense exceeds the error, or "dense". A smaller gain may be no gain
    at all.

    seconds: by policy name, "dense" included. projected: policies whose time is a projection; their gain must exceed
    PROJECTED_GAIN too.
    """
    asked = {name: max(error, PROJECTED_GAIN) if name in projected else error for name in seconds}
    worth = [name for name in seconds if seconds["dense"] / seconds[name] > 1 + asked[name]]
    return min(worth, key=seconds.__getitem__, default="dense")


def sizes_of(config: ModelConfig) -> tuple[int, ...]:
    """The sizes on which a step's cost depends: the `SIZES` of a model whose layers are all alike, or the sizes of
    every layer of another model."""
    fields = uniform_fields(config)
    if fields is not None and not fields["windows"]:
        return tuple(int(fields[name]) for name in SIZES)
    each = [(layer.mixer.window or 0, *map(math.prod, layer.shapes(config.hidden_size).values())) for layer in config.layers]
    return (len(each), config.hidden_size, config.vocab_size, int(config.tie_embeddings), *itertools.chain(*each))


# Files


def load_cost_models(file: Path) -> tuple[CostModel, ...]:
    """The cost models of a file that `kvjax cost fit --json` wrote; ValueError, with the file's name, for another
    file."""
    advice = "give a file that kvjax cost fit --json wrote"
    models = read_list(file, "cost_models", lambda given: from_json(CostModel, given, "a cost model"), advice)
    if not models:
        raise ValueError(f"{file} holds no cost models; {advice}")
    return models


@functools.cache
def known_cost_models() -> tuple[CostModel, ...]:
    """The cost models inside the package, fitted to committed measurements, which each one's `source` names. Of a
    device, those of weights and pages that are not packed come first, because `closest` takes the first of equal
    ones."""
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
    """The cost model of this model, dtype, weights and format of pages. If there is none, one that agrees in as many of
    these as possible, in this order; of equal ones the first. None without any."""
    asked = sizes_of(config), dtype, weights, parse_cache_format(cache_format, dtype)

    def agrees(cost: CostModel) -> tuple[bool, ...]:
        found = cost.sizes, cost.dtype, cost.weights, parse_cache_format(cost.cache_format, dtype)
        return tuple(one == other for one, other in zip(asked, found, strict=True))

    return max(models, key=agrees, default=None)


def with_known(cost: CostModel, *terms: str) -> CostModel:
    """The cost model with these terms ("bus", "exchanges") of a built-in one of its device, where it has none of its
    own and there is one.

    They are the device's more than the model's. Still, predictions by terms that another model or other formats lend
    are projections: the term's `model` then differs from the cost model's own."""
    for name in terms:
        lender = next((each for each in known_cost_models() if each.device == cost.device and getattr(each, name) is not None), None)
        if getattr(cost, name) is None and lender is not None:
            term = getattr(lender, name)
            if term.model == cost.model and lender.formats != cost.formats:
                term = dataclasses.replace(term, model=f"{term.model} in {lender.formats}")
            cost = dataclasses.replace(cost, **{name: term})
    return cost
