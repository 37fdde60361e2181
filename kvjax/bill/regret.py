"""What choosing by the bill loses against the best choice, on cells that the bill has not seen."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from kvjax.bill.fitting import GROUPS, Cell, errors, forecasts, merged, solve
from kvjax.bill.step_bill import worthwhile


@dataclasses.dataclass(frozen=True)
class Regret:
    """One length and batch: what was chosen and what was fastest among the allowed, by name; their measured seconds and those of dense."""

    length: int
    batch: int
    chosen: str
    best: str
    seconds: float
    best_seconds: float
    dense_seconds: float

    @property
    def share(self) -> float:
        """Time lost, as a share of the best choice's; 0 where the choice was the best."""
        return self.seconds / self.best_seconds - 1

    @property
    def against_dense(self) -> float:
        """Time lost against dense, as a share of it; negative where the choice was faster."""
        return self.seconds / self.dense_seconds - 1


def regrets(cells: Sequence[Cell], allowed: Sequence[str], by: str = "cell", form: str = "fixed") -> list[Regret]:
    """The choice between dense and `allowed` policies at every measured length and batch, by a bill fitted without its group.

    by: "cell", "length" or "batch", as for `forecasts`; the error that a gain has to exceed comes from the other groups as well. allowed is
    what a fidelity level leaves: with one budget, the question is only whether it pays. Cells without a dense row or without an allowed
    policy are left out; ValueError if none is left, or for another `by`.
    """
    if by not in ("cell", "length", "batch"):
        raise ValueError(f"choices can be held out by cell, length or batch, not by {by!r}")
    cells = [cell for cell in merged(cells) if cell.policy == "dense" or cell.policy in allowed]
    group, found = GROUPS[by], []
    for key in dict.fromkeys(map(group, cells)):
        seen = [cell for cell in cells if group(cell) != key]
        held = [cell for cell in cells if group(cell) == key]
        by_place: dict[tuple[int, int], dict[str, Cell]] = {}
        for cell in held:
            by_place.setdefault((cell.length, cell.batch), {})[cell.policy] = cell
        places = {place: here for place, here in by_place.items() if "dense" in here and len(here) > 1}
        if not places:
            continue
        fitted, error = solve(seen, form), errors(forecasts(seen, "cell", form)).mean
        for (length, batch), here in places.items():
            chosen = worthwhile({name: fitted.seconds(cell) for name, cell in here.items()}, error)
            best = min(here, key=lambda name: here[name].seconds)
            times = (here[name].seconds for name in (chosen, best, "dense"))
            found.append(Regret(length, batch, chosen, best, *times))
    if not found:
        raise ValueError(f"no cell has a dense row and one of {', '.join(allowed)}: measure them together (kvjax bench decode --policies)")
    return found


def summary(found: Sequence[Regret]) -> dict[str, float]:
    """Mean and worst regret, the worst loss against dense, and what always choosing dense would lose on average, as shares; and how many
    cells."""
    shares = [each.share for each in found]
    worst = max(each.against_dense for each in found)
    dense = sum(each.dense_seconds / each.best_seconds - 1 for each in found) / len(found)
    return {
        "cells": len(found),
        "mean": sum(shares) / len(shares),
        "worst": max(shares),
        "worst_against_dense": worst,
        "always_dense": dense,
    }
