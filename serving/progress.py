"""Progress of a job: a bar on a terminal, a line now and then in a log."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

from rich.console import Console, RenderableType
from rich.progress import BarColumn, Progress, ProgressColumn, TaskProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Column
from rich.text import Text

from kvjax.serving.batch.results import Result

LOG_SECONDS = 30.0
"""Between two lines where the console is no terminal."""

SETTLE_SECONDS = 60.0
"""The time left is computed from this many seconds of the past, so that earlier compilation does not count."""

UPDATE_SECONDS = 0.1
"""At least so much between two updates of a bar. It works out the time left from its last 1,000 updates."""


class Bar(Progress):
    """A bar with text below it."""

    below = ""

    def get_renderables(self) -> Iterator[RenderableType]:
        """The bar, then the text."""
        yield from super().get_renderables()
        if self.below:
            yield Text(self.below)


def bar(
    console: Console, *columns: ProgressColumn, clock: Callable[[], float] = time.monotonic, transient: bool = True, **options: Any
) -> Bar:
    """A bar whose time left settles within `SETTLE_SECONDS`; shown on a terminal only. columns: rich's by default."""
    return Bar(
        *columns,
        console=console,
        disable=not console.is_terminal,
        transient=transient,
        speed_estimate_period=SETTLE_SECONDS,
        get_time=clock,
        **options,
    )


class _Job:
    """What both kinds of progress share: a bar over work done, and the time left by it."""

    def __init__(self, total: float, done: float, console: Console, clock: Callable[[], float], *columns: ProgressColumn, **options: Any):
        self._total, self._work, self._console, self._clock = total, done, console, clock
        self._started = self._logged = clock()
        self._updated = -UPDATE_SECONDS
        self._bar = bar(console, *columns, clock=clock, **options)
        self._task = self._bar.add_task("", total=total, completed=done)

    def __enter__(self):
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    @property
    def seconds_left(self) -> float | None:
        """At the rate of the last `SETTLE_SECONDS`; None before there is one."""
        return self._bar.tasks[0].time_remaining

    def _show(self, said: str, line: Callable[[str], str], *, now: bool = False) -> None:
        """Move the bar; line: (about how long it still takes) -> what a log says."""
        time_ = self._clock()
        if now or time_ - self._updated >= UPDATE_SECONDS:
            self._updated = time_
            self._bar.below = self._below() if self._console.is_terminal else ""  # it may wait for the device
            self._bar.update(self._task, completed=self._work, description=said)
        if not self._console.is_terminal and time_ - self._logged > LOG_SECONDS:
            self._logged = time_
            left = self.seconds_left
            lines = line("" if left is None else f", about {left / 60:.1f} min left"), self._below()
            self._console.print("\n".join(filter(None, lines)), highlight=False, soft_wrap=True)

    def _below(self) -> str:
        """What is shown below the bar, or after a log's line."""
        return ""


class JobProgress(_Job):
    """Counts records and tokens of a running job and shows them on `console`; a context manager.

    work: about how many tokens each record takes, prompt and answer, by its line: records differ in that, and the longest come first, so
    the time left goes by tokens. earlier: lines of the records that an earlier run finished. found: tells how many prompt tokens were found
    so far, and not computed. below: tells what to show below the bar.
    """

    def __init__(
        self,
        work: Mapping[int, int],
        earlier: Collection[int],
        console: Console,
        clock: Callable[[], float] = time.monotonic,
        *,
        found: Callable[[], int] = lambda: 0,
        below: Callable[[], str] = lambda: "",
    ):
        self._work_of, self._done, self._errors, self._below = work, len(earlier), 0, below
        self._look_up, self._found_before, self._found = found, found(), 0
        self._prompt_tokens = self._generated = self._running = 0
        self._finished = sum(work[line] for line in earlier)
        # Only the bar shrinks: rates and times must be readable on a terminal of 80 columns.
        columns = (
            BarColumn(None, table_column=Column(ratio=1)),
            TextColumn("{task.description}", table_column=Column(no_wrap=True)),
            TimeRemainingColumn(table_column=Column(no_wrap=True)),
        )
        super().__init__(sum(work.values()), self._finished, console, clock, *columns, expand=True)

    def token(self, *_: object) -> None:
        """A token was generated."""
        self._generated += 1
        self._advance(1)

    def prefill(self, tokens: int) -> None:
        """Tokens of a prompt were written to the cache."""
        self._prompt_tokens += tokens
        self._found = self._look_up() - self._found_before
        self._advance(tokens)

    def elsewhere(self, result: Result) -> None:
        """Another process answered a record: its tokens are counted now, all at once. `result` is called, too."""
        self._prompt_tokens += result.prompt_tokens
        self._found += result.found_tokens
        self._generated += result.generated_tokens

    def result(self, result: Result) -> None:
        """A record is answered."""
        self._done += 1
        self._errors += result.failed
        self._finished += self._work_of[result.line]
        self._advance(-min(result.prompt_tokens + result.generated_tokens, self._running), now=True)

    @property
    def text(self) -> str:
        """The rates so far, in tokens per second of this run. Tokens that were found are not computed, and have no rate."""
        seconds = max(self._clock() - self._started, 1e-9)
        errors = f", {self._errors} errors" if self._errors else ""
        found = f", {self._found:,} found" if self._found else ""
        computed = (self._prompt_tokens - self._found) / seconds
        return f"{computed:,.0f} prompt + {self._generated / seconds:,.1f} generated tokens/s{found}{errors}"

    def _advance(self, tokens: int, *, now: bool = False) -> None:
        """Tokens of records that still run, more or fewer."""
        self._running += tokens
        self._work = min(self._finished + self._running, self._total)
        records = f"{self._done:,}/{len(self._work_of):,}"
        self._show(f"{records} {self.text}", lambda left: f"{records} records, {self.text}{left}", now=now)


class WorkProgress(_Job):
    """How much of some work is done, what is being done, and the time left; a context manager.

    total: the work, in any unit. done: what an earlier run did of it.
    """

    def __init__(self, total: int, done: int, console: Console, clock: Callable[[], float] = time.monotonic):
        columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn(), TimeRemainingColumn())
        super().__init__(total, done, console, clock, *columns)
        self._what = ""

    def begin(self, what: str) -> None:
        """Name what is being done now."""
        self._what = what
        self._reached(self._work)

    def advance(self, work: int) -> None:
        """Add to what is done."""
        self._reached(self._work + work)

    def reach(self, done: int) -> None:
        """Set the total done: a unit is finished, however its parts were counted."""
        self._reached(done)

    def _reached(self, done: float) -> None:
        self._work = done
        self._show(self._what, lambda left: f"{self._work / self._total:.0%} done{left}: {self._what}", now=True)
