"""Where sparse decoding pays: the speed-up that a bill predicts over length and batch (BRL-2026-07, section 9)."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float
from scipy.optimize import brentq

from kvjax.memory import memory_plan
from kvjax.model import ModelConfig
from kvjax.policies.base import DecodePolicy
from kvjax.policies.naming import name_of, parse
from kvjax.traffic.bill import Bill

if TYPE_CHECKING:
    from matplotlib.axes import Axes


@dataclasses.dataclass(frozen=True)
class RegimeMap:
    """speedup: of a step over dense, by batch and length (tokens). projected: not an interpolation of measurements. fits: in memory."""

    bill: Bill
    policy: str
    lengths: tuple[int, ...]
    batches: tuple[int, ...]
    speedup: Float[np.ndarray, "batches lengths"]
    projected: Bool[np.ndarray, "batches lengths"]
    fits: Bool[np.ndarray, "batches lengths"]

    def figures(self) -> dict[str, Any]:
        """For JSON."""
        arrays = {name: getattr(self, name).tolist() for name in ("speedup", "projected", "fits")}
        return {"policy": self.policy, "bill": str(self.bill), "lengths": self.lengths, "batches": self.batches} | arrays


def regime_map(
    bill: Bill,
    config: ModelConfig,
    policy: str | DecodePolicy,
    lengths: Sequence[int],
    batches: Sequence[int],
    *,
    dtype: str | None = None,
    page_size: int = 128,
    memory_bytes: int | None = None,
) -> RegimeMap:
    """The speed-up of a policy at every length (tokens, ascending) and batch. memory_bytes: of the device (None: everything fits)."""
    policy = parse(policy)
    dtype = bill.dtype if dtype is None else dtype
    if not lengths or not batches:
        raise ValueError(f"a map needs lengths and batches, got {list(lengths)} and {list(batches)}")
    available = 2**63 if memory_bytes is None else memory_bytes
    plan = memory_plan(config, dtype=jnp.dtype(dtype), page_size=page_size, indexes=policy.indexes(), available_bytes=available)
    shape = len(batches), len(lengths)
    speedup, projected, fits = np.zeros(shape), np.zeros(shape, bool), np.zeros(shape, bool)
    for row, batch in enumerate(batches):
        for column, length in enumerate(lengths):
            dense, sparse = (bill.predict(config, each, length, batch, dtype=dtype, page_size=page_size) for each in ("dense", policy))
            speedup[row, column] = dense.seconds / sparse.seconds
            projected[row, column] = bool(sparse.projection)
            fits[row, column] = batch * -(-length // page_size) <= plan.pages_that_fit
    return RegimeMap(bill, name_of(policy), tuple(lengths), tuple(batches), speedup, projected, fits)


def crossover(
    bill: Bill, config: ModelConfig, policy: str | DecodePolicy, batch: int, *, longest: int = 2**24, **options: Any
) -> int | None:
    """The length in tokens from which sparse is faster than dense at a batch; None if it is not up to `longest`."""

    def gain(log_length: float) -> float:
        return np.log(bill.speedup(config, policy, round(2**log_length), batch, **options))

    # Lists that hold the whole sequence read what dense does, so where the price is negative sparse pays from the first token on.
    last = np.log2(longest)
    if gain(0.0) > 0:
        return 1
    return None if gain(last) <= 0 else round(2 ** brentq(gain, 0.0, last, xtol=1e-4))


def draw(found: RegimeMap, axis: Axes, measured: Sequence[tuple[int, int]] = ()) -> None:
    """The map on a matplotlib axis: blue where sparse pays, red where it loses, a line at 1; dots at measured (length, batch), hatched
    where it is a projection, blank where the cache does not fit."""
    from matplotlib.colors import TwoSlopeNorm

    shown = np.ma.array(found.speedup, mask=~found.fits)
    # A loss of a few percent should look like one, so the colours reach at least from 0.5 to 2.
    high, low = (max(2.0, float(shown.max())), min(0.5, float(shown.min()))) if shown.count() else (2.0, 0.5)
    mesh = axis.pcolormesh(found.lengths, found.batches, shown, cmap="RdBu", norm=TwoSlopeNorm(1.0, low, high), shading="nearest")
    axis.figure.colorbar(mesh, ax=axis, label="speed-up over dense")
    if min(shown.shape) > 1:
        marked = [level for level in (1, 1.25, 1.5, 2, 3, 4, 6, 8, 12, 16, 24) if low < level < high]
        if marked:
            widths = [2 if level == 1 else 0.6 for level in marked]
            lines = axis.contour(found.lengths, found.batches, shown, levels=marked, colors="black", linewidths=widths)
            axis.clabel(lines, fmt=lambda level: f"{level:g}x", fontsize="small")
        if (found.projected & found.fits).any():
            edges = (found.projected & found.fits).astype(float)
            axis.contourf(found.lengths, found.batches, edges, levels=[0.5, 1.5], colors="none", hatches=["/"], zorder=1)
    if measured:
        axis.plot(*zip(*measured, strict=True), "o", color="black", markersize=4)
    axis.set(xscale="log", yscale="log", xlabel="tokens in the cache", ylabel="sequences decoded together")
    axis.set_xticks(*_ticks(found.lengths))
    axis.set_yticks(*_ticks(found.batches))
    axis.minorticks_off()
    note = "" if not found.projected.any() else " (projection)" if found.projected.all() else " (hatched: projection)"
    axis.set_title(f"{found.policy}, {found.bill.device}, {found.bill.model}{note}", fontsize="medium")


def save(maps: Sequence[RegimeMap], file: Path, measured: Sequence[tuple[int, int]] = ()) -> None:
    """Maps side by side as one PNG."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.2 * len(maps), 4.6), layout="constrained")
    for axis, found in zip(figure.subplots(1, len(maps), squeeze=False)[0], maps, strict=True):
        draw(found, axis, measured)
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=120, format="png")


def _ticks(values: Sequence[int]) -> tuple[list[int], list[str]]:
    """Powers of two within the values, in K and M."""
    powers = [2**power for power in range(63) if min(values) <= 2**power <= max(values)] or list(values)
    names = [f"{n >> 20}M" if n % 2**20 == 0 else f"{n >> 10}K" if n % 2**10 == 0 else f"{n}" for n in powers]
    return powers, names
