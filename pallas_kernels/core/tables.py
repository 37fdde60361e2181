"""How reports write tables and numbers."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from rich.console import Console
from rich.markdown import Markdown
from rich.table import Table

TEXT_WIDTH = 220
"""Width in characters of a table that goes to a file or a pipe."""


@contextlib.contextmanager
def stages(what: str = "") -> Iterator[Callable[[str], None]]:
    """Shows on standard error what runs now, and yields a function that says so. On a terminal it is one line that
    changes. In a log each is a line of its own, with the seconds since the start, so that the log of a run that was
    ended says how far it came."""
    console, began = Console(stderr=True), time.monotonic()
    if console.is_terminal:
        with console.status(what) as status:
            yield status.update
        return

    def say(what: str) -> None:
        console.print(f"{time.monotonic() - began:6.1f} s  {what}", highlight=False, markup=False, soft_wrap=True)

    if what:
        say(what)
    yield say


def table(columns: Sequence[str], rows: Iterable[Sequence[str]], *, title: str | None = None, left: int = 1) -> Table:
    """A table for the terminal; the first `left` columns align left, the others right. ValueError for a column without
    a name."""
    if not all(columns):
        raise ValueError(f"every column of a table needs a name, got {list(columns)}")
    made = Table(title=title, title_justify="left")
    for number, column in enumerate(columns):
        made.add_column(column, justify="left" if number < left else "right", no_wrap=not number)
    for row in rows:
        made.add_row(*row)
    return made


def show_markdown(text: str) -> None:
    """Print the Markdown tables of a report, without those that have no rows."""
    show(*(Markdown(each) for each in text.split("\n\n") if len(each.splitlines()) > 2))


def show(*tables: Table | Markdown) -> None:
    """Print tables as wide as the terminal; to a file or a pipe, `TEXT_WIDTH` wide."""
    console = Console(width=None if Console().is_terminal else TEXT_WIDTH)
    for each in tables:
        console.print(each)


def span(low: float, high: float, form: str = ".3f") -> str:
    """The two ends of an interval, without a dash, which looks like a minus sign: -0.031 to 0.110."""
    return f"{low:{form}} to {high:{form}}"


def estimate(figure: Mapping[str, float], form: str = "+.3f") -> str:
    """A figure with its interval, from its `value`, `low` and `high`: +0.010 [-0.031 to +0.110]."""
    return f"{figure['value']:{form}} [{span(figure['low'], figure['high'], form)}]"


def markdown(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table. The first column is aligned to the left, the others to the right."""
    lines = [columns, ["---"] + ["---:"] * (len(columns) - 1), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def tokens_text(n: int) -> str:
    """A number of tokens: 128K, 1M, 1,000."""
    return f"{n // 2**20}M" if n % 2**20 == 0 else f"{n // 2**10}K" if n % 2**10 == 0 else f"{n:,}"
