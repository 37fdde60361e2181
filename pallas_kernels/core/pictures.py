"""How every picture of the project is drawn: as wide as a page, with readable text, and with one colour for each
policy."""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pallas_kernels.core.files import replacing
from pallas_kernels.core.optional import needs_extras
from pallas_kernels.core.tables import tokens_text

if TYPE_CHECKING:
    import numpy as np
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

PAGE_INCHES = 7.0
"""Width of every picture. A page shows it about 700 pixels wide, so text keeps about its size."""

DPI = 150
MIN_POINTS = 8.0
"""Size of the smallest text."""

STYLE = {
    "font.size": 9.0,
    "axes.titlesize": 9.0,
    "axes.labelsize": 9.0,
    "xtick.labelsize": MIN_POINTS,
    "ytick.labelsize": MIN_POINTS,
    "legend.fontsize": MIN_POINTS,
    "lines.linewidth": 1.3,
    "lines.markersize": 4.0,
    "axes.axisbelow": True,
    "grid.alpha": 0.3,
}

COLORS = {
    "dense": "#222222",
    "dense again": "#9a9a9a",
    "top:8": "#0072b2",
    "top:12": "#56b4e9",
    "top:16": "#4f6fd8",
    "top:24": "#e98b4f",
    "top:32": "#d55e00",
    "top:64": "#7b3fa0",
    "mean:8": "#cc79a7",
    "mean:16": "#a8447f",
    "mean:32": "#7a1f55",
    "cascade:8": "#00a6a6",
    "cascade:32": "#006d77",
    "quest:64": "#009e73",
    "quest:256": "#00573f",
    "window:640": "#e6b400",
    "window:128+512": "#e6b400",
    "window:4736": "#a67c00",
    "window:128+4608": "#a67c00",
    "window:64+4544": "#a67c00",
    "momo:32/8": "#17a2b8",
    "momo:64/8": "#0b7285",
    "momo:128/8": "#06404b",
    "momo:32/8+gamma4": "#8fbc3f",
    "momo:32/8+gamma1": "#3f6b00",
    "bounds:16": "#f28ca0",
    "bounds:32": "#c1121f",
    "delta:64+1024/16": "#8a6fb0",
    "window:64+1024": "#e6b400",
    "vertical-slash:64+8": "#b15928",
    "oracle:8": "#b0b0b0",
    "oracle:32": "#5e5e5e",
    "cudnn": "#7f7f7f",
    "torch-cudnn": "#e377c2",
    "torch-flash": "#8c564b",
    "torch-efficient": "#bcbd22",
}
"""Colours by name: of policies, and of other projects' dense kernels."""

OTHER_COLORS = ("#1b9e77", "#d95f02", "#7570b3", "#e7298a", "#66a61e", "#a6761d", "#3182bd", "#636363")
"""Colours for names that are not in `COLORS`."""


def color_of(name: str) -> str:
    """The colour of a policy in every picture, with +sparse or without. Without an entry in `COLORS`, it depends only
    on the name."""
    return COLORS.get(name.removesuffix("+sparse")) or OTHER_COLORS[zlib.crc32(name.encode()) % len(OTHER_COLORS)]


@contextlib.contextmanager
def picture(file: Path, rows: int = 1, columns: int = 1, *, height: float, **options: Any) -> Iterator[tuple[Figure, np.ndarray]]:
    """A figure of `PAGE_INCHES` and its axes `[rows, columns]` to draw on in the block. At the block's end it is
    written to `file` as PNG.

    height: inches of a row. options: of `Figure.subplots`.
    """
    needs_extras("a picture", "plots")
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(PAGE_INCHES, height * rows), layout="constrained")
        yield figure, figure.subplots(rows, columns, squeeze=False, **options)
        file.parent.mkdir(parents=True, exist_ok=True)
        with replacing(file) as partial:
            figure.savefig(partial, format="png", dpi=DPI)


def grid_of(panels: int, widest: int = 3) -> tuple[int, int]:
    """Rows and columns for this many panels: two rows or more if one row is too narrow for them."""
    columns = min(widest, panels)
    return -(-panels // columns), columns


def legend_below(figure: Figure, axes: Sequence[Axes], columns: int = 4) -> None:
    """One legend for all panels, below them. For each name it shows the first line."""
    found: dict[str, Any] = {}
    for axis in axes:
        for handle, name in zip(*axis.get_legend_handles_labels(), strict=True):
            found.setdefault(name, handle)
    figure.legend(found.values(), found.keys(), loc="outside lower center", ncols=columns, frameon=False)


def log_ticks(axis: Axis, least: int = 3, most: int = 6) -> None:
    """A logarithmic scale with at least `least` ticks, in plain numbers, within the visible range. Call it after
    everything is drawn."""
    from matplotlib.ticker import FixedLocator, MaxNLocator, NullLocator

    _log(axis)
    low, high = sorted(axis.get_view_interval())
    steps = ((1,), (1, 3), (1, 2, 5), (1, 1.5, 2, 3, 4, 5, 6, 8), tuple(range(10, 100)))
    ticks: list[float] = []
    for leads in steps:
        scale = 10.0 if leads[0] == 10 else 1.0
        ticks = [lead / scale * 10.0**power for power in range(-9, 13) for lead in leads if low <= lead / scale * 10.0**power <= high]
        if len(ticks) >= least:
            break
    else:
        ticks = [tick for tick in MaxNLocator(most).tick_values(low, high) if low <= tick <= high]
    ticks = ticks[:: -(-len(ticks) // most)] if len(ticks) >= 2 * most else ticks
    axis.set_major_locator(FixedLocator(ticks))
    axis.set_major_formatter(lambda value, _: f"{value:,.0f}" if value >= 1000 else f"{value:g}")
    axis.set_minor_locator(NullLocator())


def token_ticks(axis: Axis, values: Sequence[int], most: int = 5) -> None:
    """A logarithmic scale of counts from the least to the greatest of `values`, three ticks or more at powers of two:
    8K, 32K, 128K."""
    from matplotlib.ticker import FixedLocator, NullLocator

    _log(axis)
    powers = [power for power in range(63) if min(values) <= 2**power <= max(values)]
    # Every second, third, ... power: the first step with few enough ticks.
    kept = next(kept for step in range(1, 63) if len(kept := powers[::step]) <= most)
    ticks = [2**power for power in kept] or sorted(set(values))
    axis.set_major_locator(FixedLocator(ticks))
    axis.set_major_formatter(lambda value, _: tokens_text(round(value)))
    axis.set_minor_locator(NullLocator())


def _log(axis: Axis) -> None:
    (axis.axes.set_xscale if axis.axis_name == "x" else axis.axes.set_yscale)("log")
