"""`kvjax bench overlap`: capture scores while a model decodes, and measure how much the top k of consecutive steps overlap."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import kvjax
from kvjax.fidelity.needle import encode_text
from kvjax.fidelity.score_overlap import AGES, capture_scores, overlap_rows
from kvjax.serving.cli.options import parse_lengths, read_texts
from pallas_kernels.bench.top_k.report import overlap_table, plot_overlap
from pallas_kernels.core.results import write_result
from pallas_kernels.core.tables import stages


def measure_overlap(
    model: str,
    length: str,
    steps: int,
    ks: str,
    *,
    kind: str,
    files: Sequence[Path],
    json_out: Path | None,
    plot: Path | None,
    save: Path | None,
) -> list[dict[str, Any]]:
    """Measure, write the requested files, print a table. Returns the rows. ValueError for what cannot be measured."""
    lengths, sizes = parse_lengths(length), parse_lengths(ks, "k")
    if len(lengths) != 1:
        raise ValueError(f"one length at a time, got {length!r}")
    (tokens,) = lengths
    if steps < 2:
        raise ValueError(f"steps must be at least 2, to compare two, got {steps}")
    if tokens <= steps:
        raise ValueError(f"--length {tokens} leaves no keys before {steps} decode steps: use a greater --length or fewer --steps")
    if max(sizes) > tokens - steps + 1:  # not only after minutes of prefill
        raise ValueError(f"k must be from 1 to {tokens - steps + 1}, the keys of the first step, got {ks!r}")
    prose, names = read_texts(files)
    loaded = kvjax.load(model)
    ids = encode_text(loaded.tokenizer, prose).tolist()
    if len(ids) < tokens:
        raise ValueError(f"the text has {len(ids):,} tokens, but {tokens:,} are needed: give more with --text")
    with stages() as say:
        done = 0

        def advance(more: int) -> None:
            nonlocal done
            done += more
            if more > 1 or not done % 16:  # in a log each is a line
                say(f"{done:,} of {tokens:,} tokens")

        captured = capture_scores(loaded, ids[:tokens], steps, kind=kind, on_tokens=advance)
    rows = overlap_rows(captured, sizes, [age for age in AGES if age < steps])
    if json_out is not None:
        settings = {"model": model, "tokens": tokens, "steps": steps, "kind": kind, "text": names}
        write_result(json_out, {"bench": "overlap", **settings, "rows": rows})
    if plot is not None:
        plot_overlap(rows, plot)
    if save is not None:
        captured.save(save)
    print(overlap_table(rows))
    return rows
