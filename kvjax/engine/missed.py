"""What decode steps were measured to miss of dense's attention, and what the alarm did. `kvjax.policies.decode.Watched`
measures it."""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Iterable


@dataclasses.dataclass(frozen=True)
class Missed:
    """Of one answer, or of several (`+`). Shares are of attention, 0 to 1.

    samples: measured shares, one for each measured step, layer and KV head: the mean over its query heads. mean: their
    mean. largest: the largest share of a query head; layer and head: where: the number of the layer among those that
    attend to pages, and its KV head. Shares are of what a step would have read, before the alarm acted. alarms: times
    that a share was too large. wide_heads, dense_heads: heads that read a larger budget, or every key, at the end.
    steps: steps of such heads, each head counted for itself. keys: how many more these read.
    """

    samples: int = 0
    mean: float = 0.0
    largest: float = 0.0
    layer: int | None = None
    head: int | None = None
    alarms: int = 0
    wide_heads: int = 0
    dense_heads: int = 0
    steps: int = 0
    keys: int = 0

    def __add__(self, other: Missed) -> Missed:
        most = self if self.largest >= other.largest else other
        samples = self.samples + other.samples
        mean = (self.samples * self.mean + other.samples * other.mean) / max(samples, 1)
        names = ("alarms", "wide_heads", "dense_heads", "steps", "keys")
        counts = {name: getattr(self, name) + getattr(other, name) for name in names}
        return Missed(samples, mean, most.largest, most.layer, most.head, **counts)

    def __str__(self) -> str:
        """For reports: one line."""
        if not self.samples:
            return "nothing measured: no step read a list"
        where = f" (layer {self.layer}, KV head {self.head})"
        said = f"{self.mean:.2%} on average of {self.samples:,} samples, {self.largest:.2%} at most{where}"
        if not self.alarms:
            return f"{said}; no alarms"
        read = f"{self.steps:,} steps of a head read {self.keys:,} keys more"
        return f"{said}; {self.alarms:,} alarms: {self.wide_heads:,} heads read a larger budget, {self.dense_heads:,} every key; {read}"


def all_of(found: Iterable[Missed | None]) -> Missed | None:
    """The sum of what was measured; None where nothing was watched."""
    return functools.reduce(operator.add, watched) if (watched := [each for each in found if each is not None]) else None
