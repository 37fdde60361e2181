"""What a step costs more on a mesh of devices: its exchanges, and the choice among what several devices found.

    seconds = sum over exchanges of (launch + hop * hops(devices)) + bytes received / link + layers that choose * seconds of a layer

Launch and hop belong to a kind of exchange (`kvjax.bill.exchanges`). `hops` is the law by which latency grows with the devices of an axis.
`kvjax.bill.mesh_fitting` fits the values to rows of `kvjax bench decode --tensor --context`. The bytes from a device's memory, and what its
launches cost, are those of the bill itself, for the part of the model that a device has.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from kvjax.axes import TENSOR
from kvjax.bill.exchanges import KINDS, Exchange

LAWS: dict[str, Callable[[int], float]] = {"log2": math.log2, "ring": lambda devices: devices - 1}
"""How often the latency of two devices counts among more of them: log2 for trees, one less than the devices for rings."""


class Latency(NamedTuple):
    """Of a kind of exchange: seconds that any takes, seconds of a hop, and the sizes of axes that were measured, ascending."""

    launch: float
    hop: float
    sizes: tuple[int, ...]


class MeshRange(NamedTuple):
    """A mesh and a batch that were measured, with the shortest and the longest sequences in tokens."""

    tensor: int
    context: int
    batch: int
    shortest: int
    longest: int


@dataclasses.dataclass(frozen=True)
class MeshTerms:
    """Fitted terms, or terms set by hand. Static and hashable.

    model: the name of the measured model. law: in `LAWS`. latency: by kind of exchange; a kind that is missing was not measured.
    link_per_s: bytes per second that a device receives; None: what bytes take could not be told from nothing. choose_s: seconds of a layer
    that chooses the best of several devices; None: not measured. policies: those that were timed on a mesh. measured: meshes. error: mean
    relative error of held-out cells. source: files of the measurements. assumed: what was set by hand. host_devices: devices of one host.
    network_s, network_per_s: seconds of a hop between hosts, and bytes per second that a device receives from another host; None: as within
    one.
    """

    model: str
    law: str
    latency: tuple[tuple[str, Latency], ...]
    link_per_s: float | None
    choose_s: float | None
    policies: tuple[str, ...]
    measured: tuple[MeshRange, ...]
    error: float
    source: str
    assumed: tuple[str, ...] = ()
    host_devices: int = 8
    network_s: float | None = None
    network_per_s: float | None = None

    def __post_init__(self):
        if self.law not in LAWS:
            raise ValueError(f"the law of latency is one of {', '.join(LAWS)}, not {self.law!r}")
        if unknown := sorted(set(dict(self.latency)) - set(KINDS)):
            raise ValueError(f"exchanges are of the kinds {', '.join(KINDS)}, not {unknown[0]!r}")
        rates = [rate for rate in (self.link_per_s, self.network_per_s) if rate is not None]
        times = [self.choose_s or 0.0, self.error, self.network_s or 0.0, *(each for _, found in self.latency for each in found[:2])]
        if not (all(rate > 0 for rate in rates) and all(each >= 0 for each in times) and self.host_devices >= 1):
            raise ValueError(f"terms of a mesh need rates > 0, times >= 0, and at least one device in a host, got {self}")

    def seconds_of(self, exchange: Exchange, tensor: int) -> float:
        """Seconds of all exchanges of one line. tensor: of the mesh, whose devices along it are neighbours. ValueError for a kind that was
        not measured."""
        found = dict(self.latency).get(exchange.kind)
        if found is None:
            raise ValueError(f"exchanges of kind {exchange.kind} were not measured on {self.model}; {ADVICE}")
        hosts, hops, rates = self.hosts(exchange, tensor), LAWS[self.law], [self.link_per_s]
        latency = found.launch + found.hop * hops(exchange.size)
        if hosts > 1 and self.network_s is not None:
            latency = found.launch + found.hop * hops(-(-exchange.size // hosts)) + self.network_s * hops(hosts)
        if hosts > 1:
            rates.append(self.network_per_s)
        rate = min((each for each in rates if each is not None), default=math.inf)
        return exchange.count * latency + exchange.received / rate

    def seconds_of_choice(self, layers: int) -> float:
        """Seconds of so many layers that choose over devices. ValueError if that was not measured."""
        if layers and self.choose_s is None:
            raise ValueError(f"the choice over the devices of context was not measured on {self.model}; {ADVICE}")
        return layers * (self.choose_s or 0.0)

    def hosts(self, exchange: Exchange, tensor: int) -> int:
        """Over how many hosts an exchange goes, if each has `host_devices`."""
        apart = 1 if exchange.axis == TENSOR else tensor
        return -(-exchange.size // max(1, min(exchange.size, self.host_devices // apart)))

    def assumes(self, exchange: Exchange, tensor: int) -> bool:
        """Whether seconds of an exchange rest on values set by hand."""
        by_hand = self.network_s is not None or self.network_per_s is not None
        return bool(self.assumed) or (by_hand and self.hosts(exchange, tensor) > 1)

    def why(self, exchange: Exchange, tensor: int, model_known: bool) -> tuple[str, ...]:
        """Why seconds of an exchange are extrapolated or assumed, besides `assumed`; () if axes of this size were measured. model_known:
        whether on this model."""
        found, reasons = dict(self.latency)[exchange.kind], []
        if found.sizes and exchange.size not in found.sizes:
            known = ", ".join(map(str, found.sizes))
            reasons.append(f"{exchange.kind} of {exchange.size} devices, measured with {known}")
        if self.measured and not model_known:
            reasons.append(f"exchanges were measured on {self.model}")
        if self.link_per_s is None:
            reasons.append("bytes of exchanges took no time that could be told, and count as none: --link-bandwidth")
        if self.hosts(exchange, tensor) > 1:
            hop = "as within one" if self.network_s is None else f"{self.network_s * 1e6:g} us a hop, assumed"
            rate = "as within one" if self.network_per_s is None else f"{self.network_per_s / 1e9:g} GB/s, assumed"
            options = "(--network-latency-us, --network-bandwidth)"
            reasons.append(f"exchanges between hosts of {self.host_devices} devices: latency {hop}; bandwidth {rate} {options}")
        return tuple(reasons)

    def ranges(self, tensor: int, context: int) -> tuple[tuple[int, int, int], ...]:
        """(batch, shortest, longest) of a mesh, as `Bill.measured` has them; () if it was not measured."""
        return tuple(each[2:] for each in self.measured if each[:2] == (tensor, context))

    def __str__(self) -> str:
        kinds = ", ".join(
            f"{kind} {each.launch * 1e6:.1f} + {each.hop * 1e6:.1f} us * {self.law}(n), n {', '.join(map(str, each.sizes)) or 'any'}"
            for kind, each in self.latency
        )
        link = "bytes not told from nothing" if self.link_per_s is None else f"{self.link_per_s / 1e9:.1f} GB/s"
        how = "".join(f"; ASSUMED: {each}" for each in self.assumed) or f", error {self.error:.1%}"
        choice = "choice not measured" if self.choose_s is None else f"{self.choose_s * 1e6:.1f} us a layer that chooses"
        return f"mesh: {kinds}, {link}, {choice}{how}"


ADVICE = (
    "measure them: kvjax bench decode --tensor 1,2,4 --context 1,2,4 --steps-per-launch 1,8 --json FILE, "
    "then kvjax bill fit FILE; or assume them: "
    "--exchange-latency-us and --link-bandwidth"
)


def assumed_terms(latency_us: float, link_gigabytes: float) -> MeshTerms:
    """Terms set by hand: microseconds of an exchange of two devices, by the law log2, and GB/s that a device receives."""
    said = f"{latency_us:g} us an exchange of two devices, {link_gigabytes:g} GB/s, nothing for the choice over devices"
    latency = tuple((kind, Latency(0.0, latency_us * 1e-6, ())) for kind in KINDS)
    return MeshTerms("no model", "log2", latency, link_gigabytes * 1e9, 0.0, (), (), 0.0, "by hand", (said,))


def exchange_seconds(terms: MeshTerms, exchanges: Iterable[Exchange], choosing: int, tensor: int) -> float:
    """Seconds of a step's exchanges, and of its layers that choose over devices (`choosing` of them)."""
    return sum(terms.seconds_of(each, tensor) for each in exchanges) + terms.seconds_of_choice(choosing)


def mesh_from_json(fields: dict[str, Any]) -> MeshTerms:
    """Terms from their JSON object, which `mesh_to_json` makes. ValueError for missing or unknown fields, which it names."""
    names = {field.name for field in dataclasses.fields(MeshTerms)}
    if set(fields) != names:
        different = ", ".join(sorted(names ^ set(fields)))
        raise ValueError(f"terms of a mesh have the fields {', '.join(sorted(names))}; different here: {different}")
    latency = tuple((kind, Latency(**(each | {"sizes": tuple(each["sizes"])}))) for kind, each in fields["latency"].items())
    given = {"latency": latency, "measured": tuple(MeshRange(*each) for each in fields["measured"])}
    given |= {name: tuple(fields[name]) for name in ("policies", "assumed")}
    return MeshTerms(**(fields | given))


def mesh_to_json(terms: MeshTerms) -> dict[str, Any]:
    """Terms as a JSON object."""
    return dataclasses.asdict(terms) | {"latency": {kind: each._asdict() for kind, each in terms.latency}}
