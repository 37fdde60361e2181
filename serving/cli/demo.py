"""`kvjax demo`: the embedded model answers 8K-token prompts, once reading the whole cache, then only a fixed number of
pages."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, TaskProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from kvjax.serving.progress import bar
from pallas_kernels.core.pictures import color_of, picture
from pallas_kernels.core.tables import table as terminal_table

if TYPE_CHECKING:
    from kvjax.evaluation.retrieval import NeedleResult

POLICIES = ("dense", "window:64+4544", "cascade:8", "top:8")
COLUMNS = ("policy", "blocks/step", "keys/step", "needles found", "seconds")


def run_demo(file: Path, *, prompts: int = 16, length: int = 8192, seed: int = 0) -> list[NeedleResult]:
    """Hide a five-digit number among 16 others in `prompts` pieces of Python's documentation and ask for it under each
    policy.

    Each prompt of `length` tokens is prefilled once and forked for every policy. The question is decoded through the
    policy. Prints a table and saves it as a picture (PNG). length counts haystack, question and answer, in tokens.
    """
    import kvjax
    from kvjax.evaluation.needle import documentation_text
    from kvjax.evaluation.retrieval import find_needles

    console = Console()
    model = kvjax.load("needle")
    print(f"{prompts} prompts of {length:,} tokens: Python's documentation, a five-digit needle and 16 distractors in each", flush=True)
    start = time.perf_counter()
    columns = TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn(), TimeRemainingColumn()
    with bar(console, *columns, transient=False) as progress:
        task = progress.add_task("prefill", total=prompts * length)
        results = find_needles(
            model,
            documentation_text(),
            POLICIES,
            length=length,
            trials=prompts,
            batch=prompts,
            seed=seed,
            on_tokens=lambda count: progress.advance(task, count),
        )
        progress.update(task, completed=prompts * length)
    console.print(table(results))
    save_picture(results, file, f"{prompts} needles, each in {length:,} tokens of Python's documentation")
    elapsed = time.perf_counter() - start
    decoding = sum(result.seconds for result in results)
    # Not through rich, which would wrap the line and read brackets in a path as markup.
    print(f"prefill and compilation {elapsed - decoding:.0f} s, questions and answers {decoding:.0f} s; picture of the table: {file}")
    return results


def rows(results: list[NeedleResult]) -> list[tuple[str, ...]]:
    """One row of text per policy, in the order of COLUMNS."""
    return [
        (
            result.policy,
            f"{result.blocks_per_step:,.1f}",
            f"{result.keys_per_step:,.0f}",
            f"{sum(answer.hit for answer in result.answers)} of {len(result.answers)}",
            f"{result.seconds:.1f}",
        )
        for result in results
    ]


def table(results: list[NeedleResult]) -> Table:
    """The results as a table for the terminal."""
    return terminal_table(COLUMNS, rows(results))


def save_picture(results: list[NeedleResult], path: Path, title: str) -> None:
    """Keys read and needles found per policy as bars, and the table below them."""
    names = [result.policy for result in results]
    colors = [color_of(name) for name in names]
    with picture(path, 2, 2, height=2.1, sharey="row", height_ratios=[3, 2]) as (figure, axes):
        keys, found = axes[0]
        keys.barh(names, [result.keys_per_step for result in results], color=colors)
        keys.set_xlabel("keys read per step and KV head")
        found.barh(names, [100 * result.exact_match for result in results], color=colors)
        found.set(xlabel="needles found (%)", xlim=(0, 100))
        keys.invert_yaxis()
        below = figure.add_subplot(axes[1, 0].get_gridspec()[1, :])
        for axis in (*axes[1], below):
            axis.axis("off")
        below.table(rows(results), colLabels=COLUMNS, loc="center").scale(1, 1.4)
        figure.suptitle(title)
