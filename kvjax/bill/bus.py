"""What a step costs more where pages lie in host memory (docs/tiers.md): bytes over the bus, and the work of the hot buffer.

    seconds = bytes read in place / rate + bytes copied / rate + layers with a hot buffer * seconds of a layer

`kvjax.bill.bus_fitting` fits the values to rows of `kvjax bench tiers`. How much is copied depends on how much of what a list names is
found in the buffer. That share is an input of a prediction. Its default was measured with recorded lists.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from kvjax.bill.volume import StepBytes


@dataclasses.dataclass(frozen=True)
class Bus:
    """Fitted terms. Static and hashable.

    model: the name of the measured model. in_place_per_s: bytes per second that attention reads in host memory. copied_per_s: bytes per
    second that are copied from there to the hot buffer. layer_s: seconds that a layer takes to look up its list and to launch the copies.
    hits: the default share of listed bytes of pages in host memory that is found in the buffer; None: not measured. measured: (batch,
    shortest, longest), lengths in tokens, ascending. error: mean relative error of held-out cells. source: files of the measurements.
    """

    model: str
    in_place_per_s: float
    copied_per_s: float
    layer_s: float
    hits: float | None
    measured: tuple[tuple[int, int, int], ...]
    error: float
    source: str

    def __post_init__(self):
        if not (self.in_place_per_s > 0 and self.copied_per_s > 0 and self.layer_s >= 0 and self.error >= 0):
            raise ValueError(
                "bus terms need rates > 0, layer_s >= 0 and error >= 0, got "
                f"{self.in_place_per_s}, {self.copied_per_s}, {self.layer_s} and {self.error}"
            )
        if self.hits is not None:
            check_hits(self.hits)

    def seconds(self, moved: StepBytes, hits: float) -> float:
        """Seconds of a step for its bytes over the bus and for the hot buffer. hits: as in the class."""
        return moved.in_place / self.in_place_per_s + moved.copied(hits) / self.copied_per_s + self.layer_s * moved.hot_layers

    def __str__(self) -> str:
        hits = "hits not measured" if self.hits is None else f"hits {self.hits:.0%}"
        rates = f"{self.in_place_per_s / 1e9:.1f} GB/s in place, {self.copied_per_s / 1e9:.1f} GB/s copied"
        return f"bus: {rates}, {self.layer_s * 1e6:.1f} us a layer, {hits}, error {self.error:.1%}"


def bus_from_json(fields: dict[str, Any]) -> Bus:
    """Bus terms from their JSON object, which `dataclasses.asdict` makes. ValueError for missing or unknown fields, which it names."""
    names = {field.name for field in dataclasses.fields(Bus)}
    if set(fields) != names:
        raise ValueError(f"bus terms have the fields {', '.join(sorted(names))}; different here: {', '.join(sorted(names ^ set(fields)))}")
    return Bus(**(fields | {"measured": tuple(map(tuple, fields["measured"]))}))


def check_hits(hits: float) -> float:
    """Returns `hits`; ValueError unless it is a share."""
    if not 0 <= hits <= 1:
        raise ValueError(f"hits is the share of listed bytes that is found in the hot buffer, from 0 to 1, got {hits}")
    return hits
