"""Where sparse decoding pays: the speed-up that a cost model predicts over length and batch (BRL-2026-07, section
9)."""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Bool, Float

from kvjax.cache.host_pool import FrameCounts
from kvjax.cost_model.predict import CostModel
from kvjax.engine.memory import memory_plan
from kvjax.model.config import ModelConfig
from kvjax.policies.decode.base import DecodePolicy
from kvjax.policies.decode.naming import name_of, parse
from pallas_kernels.core.pictures import MIN_POINTS, grid_of, log_ticks, picture, token_ticks
from pallas_kernels.core.results import packed_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes


@dataclasses.dataclass(frozen=True)
class RegimeMap:
    """The speed-up of a policy's step over dense, by batch and length (tokens).

    projected: whether a speed-up is not interpolated between measurements. fits: whether the cache fits in memory.
    model: the name of the model whose steps these are, and what of it is packed; the cost model may have been measured
    on another. frames: of an engine with pages in host memory; None: all lie on the device.
    """

    cost: CostModel
    model: str
    policy: str
    lengths: tuple[int, ...]
    batches: tuple[int, ...]
    speedup: Float[np.ndarray, "batches lengths"]
    projected: Bool[np.ndarray, "batches lengths"]
    fits: Bool[np.ndarray, "batches lengths"]
    frames: FrameCounts | None = None

    def figures(self) -> dict[str, Any]:
        """The map as a JSON object."""
        arrays = {name: getattr(self, name).tolist() for name in ("speedup", "projected", "fits")}
        return {
            "policy": self.policy,
            "model": self.model,
            "cost_model": str(self.cost),
            "lengths": self.lengths,
            "batches": self.batches,
            "frames": None if self.frames is None else dataclasses.asdict(self.frames),
        } | arrays


def regime_map(
    cost: CostModel,
    config: ModelConfig,
    policy: str | DecodePolicy,
    lengths: Sequence[int],
    batches: Sequence[int],
    *,
    memory_bytes: int | None = None,
    model: str | None = None,
    **options: Any,
) -> RegimeMap:
    """The speed-up of a policy at every length (tokens, ascending) and batch.

    memory_bytes: of the device (None: everything fits). model: the name of the model of `config` (None: that of the
    cost model's). options: as for `CostModel.predict`; with frames, what fits is what these hold.
    """
    policy, frames = parse(policy), options.get("frames")
    if frames is not None and memory_bytes is not None:
        raise ValueError(f"memory_bytes {memory_bytes:,} and frames {frames} both say what fits: leave one of them out")
    if not lengths or not batches:
        raise ValueError(f"a map needs lengths and batches, got {list(lengths)} and {list(batches)}")
    packed, page_size = {name: options.get(name) for name in ("weights", "cache_format")}, options.get("page_size", 128)
    computed = dataclasses.replace(config, compute_dtype=options.get("dtype") or cost.dtype)
    available = 2**63 if memory_bytes is None else memory_bytes
    plan = memory_plan(computed, page_size=page_size, indexes=policy.indexes(), available_bytes=available, **packed)
    room = plan.pages_that_fit if frames is None else frames.device + frames.host
    shape = len(batches), len(lengths)
    speedup, projected, fits = np.zeros(shape), np.zeros(shape, bool), np.zeros(shape, bool)
    for row, batch in enumerate(batches):
        for column, length in enumerate(lengths):
            dense, sparse = (cost.predict(config, each, length, batch, **options) for each in ("dense", policy))
            speedup[row, column] = dense.seconds / sparse.seconds
            projected[row, column] = bool(sparse.projection)
            fits[row, column] = batch * -(-length // page_size) <= room
    named = (model or cost.model) + packed_text(packed)
    return RegimeMap(cost, named, name_of(policy), tuple(lengths), tuple(batches), speedup, projected, fits, frames)


def crossover(
    cost: CostModel, config: ModelConfig, policy: str | DecodePolicy, batch: int, *, longest: int = 2**24, **options: Any
) -> int | None:
    """The length in tokens from which a policy is faster than dense at a batch; None if it is not faster at `longest`
    tokens."""

    def faster(length: int) -> bool:
        return cost.speedup(config, policy, length, batch, **options) > 1

    first = bisect.bisect_left(range(1, longest + 1), True, key=faster) + 1  # once faster, it stays so
    return first if first <= longest else None


CROSSINGS = ("policy", "batch", "faster than dense", "from")
"""Columns of `crossing`."""


def crossing(cost: CostModel, config: ModelConfig, policy: str, batch: int, **options: Any) -> tuple[str, str, str, str]:
    """The length from which a policy is faster than dense at a batch, and whether that was measured: the cells of
    `CROSSINGS`. options: as for `CostModel.predict`."""
    start = crossover(cost, config, policy, batch, **options)
    if start is None:
        return policy, f"{batch}", "never", "-"
    found = cost.predict(config, policy, start, batch, **options)
    beside = [max((size for size, *_ in cost.measured if size <= batch), default=0)]
    beside.append(min((size for size, *_ in cost.measured if size >= batch), default=0))
    known = "measurements at this batch" if beside[0] == batch else f"between batches {beside[0]} and {beside[1]}; this one not measured"
    return policy, f"{batch}", f"from {start:,} tokens", f"projection: {'; '.join(found.projection)}" if found.projection else known


MARKED = (1, 1.25, 1.5, 2, 3, 4, 6, 8, 12, 16, 24)
"""Speed-ups at which a map has a contour line."""


def draw(found: RegimeMap, axis: Axes) -> None:
    """Draw the map on a matplotlib axis: blue where sparse is faster than dense, red where it is slower, a thick line
    at 1. Projections are pale and beyond the dashed line. It is grey where the cache does not fit."""
    from matplotlib.colors import LogNorm

    shown = np.ma.array(found.speedup, mask=~found.fits)
    low, high = (float(shown.min()), float(shown.max())) if shown.count() else (1.0, 1.0)
    # White is 1, and a loss is as far from white as a gain of the same factor. The colour bar shows only the values of
    # the map.
    reach = max(2.0, high, 1 / low)
    projected = found.projected & found.fits
    alpha = np.where(projected, 0.45, 1.0)
    axis.set_facecolor("0.88")
    axis.pcolormesh(found.lengths, found.batches, np.where(found.fits, 1.0, 0.88), cmap="gray", vmin=0, vmax=1, shading="nearest")
    mesh = axis.pcolormesh(
        found.lengths, found.batches, shown, cmap="RdBu", norm=LogNorm(1 / reach, reach), shading="nearest", alpha=alpha, rasterized=True
    )
    bar = axis.figure.colorbar(mesh, ax=axis, label="speed-up over dense", orientation="horizontal")
    bar.solids.set_alpha(1.0)
    if high > low:
        bar.ax.set_xlim(low, high)
        log_ticks(bar.ax.xaxis)
    if min(shown.shape) > 1:
        if marked := [level for level in MARKED if low < level < high]:
            widths = [2 if level == 1 else 0.6 for level in marked]
            lines = axis.contour(found.lengths, found.batches, shown, levels=marked, colors="black", linewidths=widths)
            # Not inline: an inline label cuts a gap into the line, and hides a short line.
            for label in axis.clabel(lines, fmt=lambda level: f"{level:g}x", fontsize=MIN_POINTS, inline=False, colors="black"):
                label.set_bbox({"facecolor": "white", "edgecolor": "none", "alpha": 0.7, "pad": 0.5})
        border = np.ma.array(found.projected.astype(float), mask=~found.fits)
        if projected.any() and border.min() == 0:
            axis.contour(found.lengths, found.batches, border, levels=[0.5], colors="0.25", linestyles="dashed", linewidths=1)
    axis.set(xscale="log", yscale="log", xlabel="tokens in the cache", ylabel="sequences decoded together")
    token_ticks(axis.xaxis, found.lengths)
    token_ticks(axis.yaxis, found.batches, most=8)
    note = "" if not found.projected.any() else " (projection)" if found.projected.all() else " (pale: projection)"
    tiers = "" if found.frames is None else f", {found.frames.device:,} pages on the device"
    axis.set_title(f"{found.policy}{note}\n{found.cost.device}, {found.model}{tiers}")


def save(maps: Sequence[RegimeMap], file: Path) -> None:
    """Write the maps to one PNG, two in a row."""
    with picture(file, *grid_of(len(maps), 2), height=4.0) as (_, axes):
        for axis, found in zip(axes.flat, maps, strict=False):
            draw(found, axis)
        for axis in axes.flat[len(maps) :]:
            axis.remove()
