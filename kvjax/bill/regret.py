"""How much time a choice by the bill loses against the best choice, on cells that were left out of the fit."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from kvjax.bill.fitting import GROUPS, Cell, errors, forecasts, merged, solve
from kvjax.bill.step_bill import worthwhile


@dataclasses.dataclass(frozen=True)
class Regret:
    """The choice at one length and batch. chosen, best: the policy that the bill chooses, and the fastest one, of dense and the allowed
    policies. seconds, best_seconds, dense_seconds: measured times of a step."""

    length: int
    batch: int
    chosen: str
    best: str
    seconds: float
    best_seconds: float
    dense_seconds: float

    @property
    def share(self) -> float:
        """Time lost, as a share of the best policy's time; 0 where the choice was the best."""
        return self.seconds / self.best_seconds - 1

    @property
    def against_dense(self) -> float:
        """Time lost against dense, as a share of dense's time; negative where the choice was faster."""
        return self.seconds / self.dense_seconds - 1


def regrets(cells: Sequence[Cell], allowed: Sequence[str], by: str = "cell", form: str = "fixed") -> list[Regret]:
    """The choice between dense and `allowed` policies at every measured length and batch, by a bill fitted without its group.

    by: "cell", "length" or "batch", as for `forecasts`. The error that a gain has to exceed comes from the other groups too. allowed: for
    example the policies that meet a fidelity level; with one policy, the choice is whether to use it or dense. Places without a dense row
    or without an allowed policy are left out. ValueError if none is left, or for another `by`.
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
    """Mean and worst regret, the worst loss against dense, and the mean loss if dense were always chosen, all as shares; and the number of
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
