"""The loss curve of a training run: a file with one JSON line per record, and a picture."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from pallas_kernels.core import pictures
from pallas_kernels.core.tables import tokens_text
from train_needle.recipe import Recipe


class Curve:
    """Collects losses (device scalars, fetched only when a record is written) and appends records to curve.jsonl.

    done: steps that are already done. Later records in the folder of a resumed run are dropped, because those steps are
    repeated.
    """

    def __init__(self, folder: Path, recipe: Recipe, done: int, on_record: Callable[[dict], None] | None):
        self.path, self.picture = folder / "curve.jsonl", folder / "curve.png"
        self.recipe, self.on_record, self.losses = recipe, on_record, []
        self.records = [r for r in read_records(self.path) if r["step"] <= done]
        self.path.write_text("".join(json.dumps(r) + "\n" for r in self.records))
        self.start = time.perf_counter() - (self.records[-1]["seconds"] if self.records else 0.0)

    def add(self, loss: Any) -> None:
        """Note the loss of one step."""
        self.losses.append(loss)

    def write(self, step: int, extra: dict) -> None:
        """Write a record of the steps since the last record: their mean loss, and `extra`, the figures of an
        evaluation."""
        record = {
            "step": step,
            "length": self.recipe.stage(step - 1).length,
            "tokens": self.recipe.tokens(step),
            "loss": float(sum(map(float, self.losses)) / len(self.losses)),
            "seconds": time.perf_counter() - self.start,
            **extra,
        }
        record = {k: round(v, 5) if isinstance(v, float) else v for k, v in record.items()}
        self.losses = []
        self.records.append(record)
        with self.path.open("a") as lines:
            lines.write(json.dumps(record) + "\n")
        if self.on_record:
            self.on_record(record)

    def summary(self) -> str:
        """The latest figures, for the progress bar."""
        last = self.records[-1]
        found = next((r["exact_match"] for r in reversed(self.records) if "exact_match" in r), 0.0)
        return f"{last['length']} tokens  loss {last['loss']:.3f}  needles {found:.0%}"

    def plot(self) -> None:
        """Draw curve.png."""
        plot(self.records, self.recipe, self.picture)


def read_records(path: Path) -> list[dict]:
    """The records of a curve file. An incomplete line, which a killed run may leave at the end, is left out."""
    lines = path.read_text().splitlines() if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("}")]


def plot(records: Sequence[dict], recipe: Recipe, picture: Path) -> None:
    """Draw loss, held-out text loss and needles found over steps, as a PNG. Each stage is marked with its length in
    tokens."""
    with pictures.picture(picture, height=4.0) as (figure, grid):
        axes = grid[0, 0]
        found = axes.twinx()
        steps = [r["step"] for r in records]
        evaluated = [r for r in records if "exact_match" in r]
        at = [r["step"] for r in evaluated]
        lines = (
            (axes, steps, [r["loss"] for r in records], "training loss (weighted)", "#0072b2", "-"),
            (axes, at, [r["text_nats"] for r in evaluated], "held-out text", "#6b6b6b", "o-"),
            (found, at, [r["exact_match"] for r in evaluated], "needles found (right axis)", "#009e73", "s-"),
        )
        for axis, x, y, name, color, style in lines:
            axis.plot(x, y, style, color=color, markersize=3, label=name)
        axes.set(
            xlabel="step",
            ylabel="nats per token",
            title=f"{recipe.name}: {recipe.tokens(steps[-1]):,} tokens; at the top: tokens of a sample from the line on",
        )
        found.set(ylabel="exact match, held-out needles", ylim=(0, 1.15))
        axes.set_ylim(top=1.1 * axes.get_ylim()[1])
        start = 0
        for stage in recipe.stages:
            axes.axvline(start, color="0.85", linewidth=1, zorder=0)
            axes.annotate(f" {tokens_text(stage.length)}", (start, 0.985), xycoords=("data", "axes fraction"), va="top", color="0.35")
            start += stage.steps
        pictures.legend_below(figure, [axes, found], columns=3)
