"""The bill: what a step costs in seconds, t = bytes / bandwidth + c0 + c1(policy), and more where pages lie in host memory.

Source: "Attention Pays Its Bill" (BRL-2026-07), section 9, equation 2. c0 is the time of a step besides its bytes, for every policy. c1 is
the time to select the blocks. Both belong to the device, the model and the engine that were measured. The paper's c1 is a constant. Here it
may have a second part, per byte of index scanned; `kvjax.bill.fitting` fits both forms. The terms of pages in host memory and of meshes of
devices are ours, too: `kvjax.bill.bus`, `kvjax.bill.mesh_terms`.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.resources
import itertools
import json
import math
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from kvjax.bill.bus import Bus, bus_from_json, check_hits
from kvjax.bill.exchanges import layers_that_choose, step_exchanges
from kvjax.bill.mesh_terms import ADVICE, MeshTerms, exchange_seconds, mesh_from_json, mesh_to_json
from kvjax.bill.volume import StepBytes, step_bytes
from kvjax.cache.formats import CacheFormat, parse_cache_format
from kvjax.cache.spanning import FrameCounts
from kvjax.model import ModelConfig, uniform_fields
from kvjax.packing import FormatOf
from kvjax.policies.decode.base import DecodePolicy
from kvjax.policies.decode.naming import name_of, parse, parse_recorded
from kvjax.policies.decode.top_blocks import TopBlocks
from pallas_kernels.core.results import launch_text, packed_text

SIZES = ("num_layers", "hidden_size", "intermediate_size", "num_heads", "num_kv_heads", "head_dim", "vocab_size", "tie_embeddings")
"""The sizes on which a step's cost depends, for a model whose layers are all alike."""


OWN = "the model's own"
"""Name of weights that a function describes: those of a checkpoint that was packed by others."""


class Price(NamedTuple):
    """c1 of a policy: seconds per step, and seconds per byte of index scanned, besides the byte's transfer (0 in the paper's form)."""

    fixed: float
    per_byte: float = 0.0


@dataclasses.dataclass(frozen=True)
class Prediction:
    """Seconds of one step and the bytes it reads. projection: the reasons why the seconds are not interpolated between measurements; empty
    if they are. bus_bytes: those of the bytes that come over the bus, from pages in host memory or from another tier. exchange_s: those of
    the seconds in which the devices of a mesh exchange something, or choose among what several found; the bytes are then those of one
    device."""

    seconds: float
    bytes: StepBytes
    projection: tuple[str, ...] = ()
    bus_bytes: float = 0.0
    exchange_s: float = 0.0


@dataclasses.dataclass(frozen=True)
class Bill:
    """A fitted bill. Static and hashable.

    device: as JAX names it. model, sizes: the name and the sizes (`sizes_of`) of the measured model. dtype: of weights and cache, but for
    those that were packed: weights, cache_format: how, by name; None: they were not. Both kinds of bytes count alike in `bytes_per_s`.
    bytes_per_s: bandwidth. c0: seconds per step. c1: the `Price` of selecting, by policy name. measured: (batch, shortest, longest),
    lengths in tokens, ascending. error: mean relative error of the speed-up of cells that were held out. source: files of the measurements.
    links: bytes per second at which keys and values come from other tiers, by tier. assumed: fields that were set by hand; every prediction
    is then a projection. bus: the terms of pages in host memory; None: not measured. mesh: those of a mesh of devices; None: not measured.
    steps_per_launch: of the measured launches. In launches of one step the host may take longer than the device, so times of longer ones
    are not times of those.
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
    bus: Bus | None = None
    mesh: MeshTerms | None = None
    weights: str | None = None
    cache_format: str | None = None
    steps_per_launch: int = 1

    def __post_init__(self):
        if not (0 < self.bytes_per_s < math.inf and 0 <= self.c0 < math.inf and 0 <= self.error < math.inf):
            raise ValueError(
                f"a bill needs finite bytes_per_s > 0, c0 >= 0 and error >= 0, got {self.bytes_per_s}, {self.c0} and {self.error}"
            )
        steps = self.steps_per_launch
        if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
            raise ValueError(f"a bill needs a whole number of at least one step per launch, got steps_per_launch {steps!r}")
        for name, price in self.c1:
            if not min(price) >= 0:
                raise ValueError(f"a bill needs prices c1 >= 0, got {price} for {name}")

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
        """Time and bytes of one step of `batch` sequences of `length` tokens. dtype: None is the measured one. weights, cache_format: as
        for `step_bytes`; None: not packed, whatever was measured.

        frames: those of an engine with pages in host memory, as for `step_bytes`. hits: the share of listed bytes of pages there that is
        found in the hot buffer; None: the measured default, or 0 without one. tensor, context: of a mesh of devices.

        For another model, the bytes are computed for it, and c0 and c1 are scaled by its number of layers. The result is a projection for
        another model, for a length or batch outside the measured ones, for another dtype, other packed weights or pages, for another tier,
        and for a mesh that was not measured. Raises ValueError for a policy without a price here, for a tier without a link, for frames
        without bus terms and without a link "host", and for a mesh without mesh terms; and what `step_bytes` and `step_exchanges` raise.
        """
        policy = parse(policy)
        dtype = self.dtype if dtype is None else str(dtype)
        sizes = {"dtype": dtype, "weights": weights, "cache_format": cache_format, "page_size": page_size}
        moved = step_bytes(config, policy, length, batch, **sizes, tier=tier, frames=frames, tensor=tensor, context=context)
        price, guessed = self.price(policy)
        layers = config.num_layers / self.sizes[0]
        # The price per byte is not scaled, because the bytes of index already grow with the layers.
        seconds = moved.from_device / self.bytes_per_s + (self.c0 + price.fixed) * layers + price.per_byte * moved.index
        reasons, measured, bus_bytes, exchange_s = [*self.assumed, *guessed], self.measured, 0.0, 0.0
        if tier != "device":
            seconds, bus_bytes = seconds + moved.kv / self._link(tier), float(moved.kv)
        if frames is not None:
            bus, share, why = self._bus_terms(moved, hits)
            seconds, bus_bytes, measured = seconds + bus.seconds(moved, share), moved.in_place + moved.copied(share), bus.measured
            reasons += why
            if (needed := batch * -(-length // page_size)) > frames.device + frames.host:
                reasons.append(f"the pool has {frames.device + frames.host:,} pages, and these sequences need {needed:,}")
        if tensor * context > 1:
            exchange_s, why, measured = self._mesh_terms(config, policy, batch, tensor, context, dtype, page_size)
            seconds, reasons = seconds + exchange_s, [*reasons, *why]
        if sizes_of(config) != self.sizes:
            reasons.append(f"measured on {self.model}, c0 and c1 scaled by layers ({layers:.3g})")
        reasons += self._packed_otherwise(dtype, weights, cache_format)
        if tier != "device":
            reasons.append(f"measured with keys and values on the device, not on {tier}")
        return Prediction(seconds, moved, (*reasons, *_outside(measured, length, batch)), bus_bytes, exchange_s)

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
                f"the bill of {self.device} has no c1 for {policy}; it has {', '.join(prices)}. "
                f"Measure it: {self.how_to_measure(name_of(policy))}"
            )
        return found, (f"c1 of {policy} is interpolated between measured budgets",)

    def how_to_measure(self, policies: str) -> str:
        """The commands that fit a bill of these formats and launches to policies besides dense, separated by commas."""
        packed = ((f" --{name}", value) for name, value in (("weights", self.weights), ("cache-format", self.cache_format)) if value)
        launches = "" if self.steps_per_launch == 1 else f" --steps-per-launch {self.steps_per_launch}"
        measured = "".join(f"{option} {value}" for option, value in packed) + launches
        return f"kvjax bench decode --policies dense,{policies}{measured} --json FILE, then kvjax bill fit FILE{launches}"

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

    def projected(self, why: str, **changes: Any) -> Bill:
        """This bill with fields set by hand (another chip's bytes_per_s, c0=0, links). Every prediction of it is a projection that says
        `why`."""
        return dataclasses.replace(self, **changes, assumed=(*self.assumed, why))

    def with_link(self, tier: str, gigabytes_per_s: float) -> Bill:
        """The projection to another rate from a tier ("host", "disk"), in GB/s. For "host" it takes the place of measured rates of the
        bus."""
        rate, changes = gigabytes_per_s * 1e9, {}
        if tier == "host" and self.bus is not None:
            changes["bus"] = dataclasses.replace(self.bus, in_place_per_s=rate, copied_per_s=rate)
        links = tuple(dict(self.links, **{tier: rate}).items())
        return self.projected(f"a {tier} link of {gigabytes_per_s:g} GB/s", links=links, **changes)

    def without_overhead(self) -> Bill:
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
        return (
            f"{self.device}, {self.model}, {self.formats}{launches}: "
            f"{self.bytes_per_s / 1e12:.3f} TB/s, c0 {self.c0 * 1e3:.3f} ms, {prices}; "
            f"measured at {places}"
            + "".join(f"; {each}{self._lent_by(each)}" for each in (self.bus, self.mesh) if each is not None)
            + "".join(f"; PROJECTION: {why}" for why in self.assumed)
        )

    def _lent_by(self, terms: Bus | MeshTerms) -> str:
        """What terms were measured on, if they are another bill's; "" for a bill's own, and for those set by hand."""
        return f", measured on {terms.model}" if terms.measured and terms.model != self.model else ""

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

    def _bus_terms(self, moved: StepBytes, hits: float | None) -> tuple[Bus, float, list[str]]:
        """The terms of pages in host memory, the share of hits, and why these are a projection."""
        bus, reasons = self.bus, []
        if bus is None:
            link = self._link("host")
            bus = Bus(self.model, link, link, 0.0, None, self.measured, self.error, self.source)
            reasons.append("the work of the hot buffer was not measured, and counts as none")
        if bus.model != self.model:
            reasons.append(f"the bus was measured on {bus.model}")
        if hits is None and bus.hits is None and moved.listed:
            reasons.append("no share of hits was measured, and none is assumed")
        return bus, check_hits((bus.hits or 0.0) if hits is None else hits), reasons

    def _mesh_terms(
        self, config: ModelConfig, policy: DecodePolicy, batch: int, tensor: int, context: int, dtype: str, page_size: int
    ) -> tuple[float, list[str], tuple[tuple[int, int, int], ...]]:
        """Seconds of exchanges, why these are a projection, and which batches and lengths were measured."""
        if self.mesh is None:
            raise ValueError(f"the bill of {self.device} has no terms for exchanges between devices; {ADVICE}")
        exchanges = step_exchanges(config, policy, batch, tensor=tensor, context=context, dtype=dtype, page_size=page_size)
        choosing = layers_that_choose(config, policy) if context > 1 else 0
        seconds = exchange_seconds(self.mesh, exchanges, choosing, tensor)
        known, ranges = sizes_of(config) == self.sizes and self.mesh.model == self.model, self.mesh.ranges(tensor, context)
        why = [*self.mesh.assumed, *(each for one in exchanges for each in self.mesh.why(one, tensor, known))]
        if name_of(policy) not in self.mesh.policies and not self.mesh.assumed:
            why.append(f"{policy} was not timed on a mesh")
        if not ranges:
            why.append(unmeasured(tensor, context))
        return seconds, list(dict.fromkeys(why)), ranges or self.measured

    def _link(self, tier: str) -> float:
        try:
            return dict(self.links)[tier]
        except KeyError:
            raise ValueError(
                f"the bill of {self.device} has no bandwidth for the tier {tier!r}; fit one to rows of kvjax bench tiers (host), or "
                f'put one in: --link 52, or in Python bill.projected("a {tier} link of 52 GB/s", links=(({tier!r}, 52e9),))'
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
"""The gain over dense that a projection must at least exceed, as a share. Every prediction must exceed the bill's own error."""


def worthwhile(seconds: Mapping[str, float], error: float, projected: Collection[str] = ()) -> str:
    """The name of the fastest policy whose gain over dense exceeds the bill's error, or "dense". A smaller gain may be no gain at all.

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


def to_json(bill: Bill) -> dict[str, Any]:
    """A bill as a JSON object, for `from_json`."""
    fields = dataclasses.asdict(bill)
    return fields | {
        "sizes": dict(zip(SIZES, bill.sizes, strict=True)) if len(bill.sizes) == len(SIZES) else list(bill.sizes),
        "c1": {name: price._asdict() for name, price in bill.c1},
        "links": dict(bill.links),
        "mesh": None if bill.mesh is None else mesh_to_json(bill.mesh),
    }


def from_json(fields: dict[str, Any]) -> Bill:
    """A bill from its JSON object. ValueError for missing or unknown fields, which it names; a file without `bus`, `mesh`, `weights`,
    `cache_format` or `steps_per_launch` is an older one."""
    fields = dict.fromkeys(("bus", "mesh", "weights", "cache_format")) | {"steps_per_launch": 1} | fields
    names = {field.name for field in dataclasses.fields(Bill)}
    if set(fields) != names:
        raise ValueError(f"a bill has the fields {', '.join(sorted(names))}; different here: {', '.join(sorted(names ^ set(fields)))}")
    given = fields["sizes"]
    sizes = tuple(given[name] for name in SIZES) if isinstance(given, dict) else tuple(given)
    pairs = {"c1": tuple((name, Price(**price)) for name, price in fields["c1"].items()), "links": tuple(fields["links"].items())}
    rest = {"sizes": sizes, "assumed": tuple(fields["assumed"]), "measured": tuple(map(tuple, fields["measured"]))}
    rest["bus"] = None if fields["bus"] is None else bus_from_json(fields["bus"])
    rest["mesh"] = None if fields["mesh"] is None else mesh_from_json(fields["mesh"])
    return Bill(**(fields | pairs | rest))


def load_bills(file: Path) -> tuple[Bill, ...]:
    """The bills of a file that `kvjax bill fit --json` wrote; ValueError for another file."""
    try:
        bills = tuple(map(from_json, json.loads(file.read_text(encoding="utf-8"))["bills"]))
    except (json.JSONDecodeError, UnicodeDecodeError, LookupError, TypeError, AttributeError) as error:
        raise ValueError(f"{file} holds no bills ({error}): give a file that kvjax bill fit --json wrote") from None
    if not bills or not all(bill.measured for bill in bills):
        raise ValueError(f"{file} holds no bills, or one without measured steps: give a file that kvjax bill fit --json wrote")
    return bills


@functools.cache
def known_bills() -> tuple[Bill, ...]:
    """The bills inside the package, fitted to committed measurements, which each bill's `source` names. Of a device, those of weights and
    pages that are not packed come first, because `closest` takes the first of equal ones."""
    files = [file for file in (importlib.resources.files(__package__) / "bills").iterdir() if file.name.endswith(".json")]
    return tuple(bill for file in sorted(files, key=lambda file: file.name.removesuffix(".json")) for bill in load_bills(file))


def known_bill(device: str, config: ModelConfig, dtype: str, weights: str | None = None, cache_format: str | None = None) -> Bill | None:
    """The built-in bill of a device for a model, dtype and formats (`closest`)."""
    return closest([bill for bill in known_bills() if bill.device == device], config, dtype, weights, cache_format)


def closest(
    bills: Sequence[Bill], config: ModelConfig, dtype: str, weights: str | None = None, cache_format: str | None = None
) -> Bill | None:
    """The bill of this model, dtype, weights and format of pages. If there is none, one that agrees in as many of these as possible, in
    this order; of equal ones the first. None without bills."""
    asked = sizes_of(config), dtype, weights, parse_cache_format(cache_format, dtype)

    def agrees(bill: Bill) -> tuple[bool, ...]:
        found = bill.sizes, bill.dtype, bill.weights, parse_cache_format(bill.cache_format, dtype)
        return tuple(one == other for one, other in zip(asked, found, strict=True))

    return max(bills, key=agrees, default=None)


def with_known_bus(bill: Bill) -> Bill:
    """The bill with the bus terms of a built-in bill of its device, if it has none of its own and there is one. The bus is the device's,
    not the model's; still, predictions by the terms of another model, or of other formats, are projections."""
    return _with_known(bill, "bus")


def with_known_mesh(bill: Bill) -> Bill:
    """The bill with the terms of a mesh of a built-in bill of its device, if it has none of its own and there is one. Predictions by them
    are projections, as those by `with_known_bus` are."""
    return _with_known(bill, "mesh")


def _with_known(bill: Bill, name: str) -> Bill:
    lenders = (each for each in known_bills() if each.device == bill.device and getattr(each, name) is not None)
    lender = next(lenders, None)
    if getattr(bill, name) is not None or lender is None:
        return bill
    return dataclasses.replace(bill, **{name: _lent(getattr(lender, name), lender, bill)})


def _lent(terms: Bus | MeshTerms, lender: Bill, bill: Bill) -> Bus | MeshTerms:
    """Terms of one bill for use in another. Of the same model in other formats their `model` names these, so that it differs from the
    bill's own, which makes a projection."""
    same = terms.model != bill.model or lender.formats == bill.formats
    return terms if same else dataclasses.replace(terms, model=f"{terms.model} in {lender.formats}")
