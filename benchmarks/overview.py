"""The picture of the README: the time of a decode step as the context grows, dense and sparse, beside other projects'
dense kernels."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pallas_kernels.core import pictures
from pallas_kernels.core.results import devices_of, packed_text

SHAPE = "qwen2.5-7b"
LINES = {
    "torch-flash": "FlashAttention (PyTorch), dense",
    "torch-cudnn": "cuDNN (PyTorch), dense",
    "dense": "kvjax, dense",
    "top:32": "kvjax, top:32",
    "top:8": "kvjax, top:8",
}
"""The lines that are drawn, and their names in the legend."""


def plot(op_rows: Sequence[dict[str, Any]], step_rows: Sequence[dict[str, Any]], file: Path) -> None:
    """Attention of one layer at batch 1, in microseconds, and whole steps at batch 1 and 8, in milliseconds, over
    tokens in the cache.

    Args:
        op_rows: rows of `pallas_kernels.bench`.
        step_rows: rows of `kvjax bench decode`.
        file: a PNG.

    Raises:
        ValueError: no row of `SHAPE` at these batches has a time.
    """
    panels = (
        ("attention of one layer, batch 1", "us", 1e6, _timed([row for row in op_rows if row["op"] in ("dense", "sparse", "baseline")], 1)),
        ("whole step, batch 1", "ms", 1e3, _timed(step_rows, 1)),
        ("whole step, batch 8", "ms", 1e3, _timed(step_rows, 8)),
    )
    drawn = [panel for panel in panels if panel[-1]]
    if not drawn:
        raise ValueError(f"no row of {SHAPE} at batch 1 or 8 has a time to draw")
    with pictures.picture(file, 1, len(drawn), height=2.9) as (figure, axes):
        for axis, (title, unit, scale, rows) in zip(axes.flat, drawn, strict=True):
            for name, label in LINES.items():
                line = sorted((row["tokens"], row["median_s"] * scale) for row in rows if row["policy"] == name)
                if line:
                    style = ":" if name.startswith("torch") else "-"
                    axis.plot(*zip(*line, strict=True), style, marker="o", label=label, color=pictures.color_of(name))
            axis.set(title=title, xlabel="tokens in the cache", ylabel=unit)
            pictures.token_ticks(axis.xaxis, [row["tokens"] for row in rows])
            pictures.log_ticks(axis.yaxis)
            axis.grid()
        pictures.legend_below(figure, axes.flat, columns=3)


def _timed(rows: Sequence[dict[str, Any]], batch: int) -> list[dict[str, Any]]:
    """Rows of one device, nothing packed."""
    plain = [row for row in rows if devices_of(row) == 1 and not packed_text(row)]
    return [row for row in plain if "median_s" in row and (row["shape"], row["batch"]) == (SHAPE, batch) and row["policy"] in LINES]
