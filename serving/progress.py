"""How far a job is: a bar on a terminal, a line now and then in a log."""

from __future__ import annotations

import time

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Column

from kvjax.serving.results import Result

LOG_SECONDS = 30.0
"""Between two lines where the console is no terminal."""


class JobProgress:
    """Counts records and tokens of a running job and shows them on `console`; a context manager.

    total: records of the job. done: those an earlier run finished.
    """

    def __init__(self, total: int, done: int, console: Console):
        self._total, self._done, self._errors, self._console = total, done, 0, console
        self._prompt_tokens = self._generated = 0
        self._started = self._logged = time.monotonic()
        # Only the bar gives way: rates and times must be readable on a terminal of 80 columns.
        columns = (
            BarColumn(None, table_column=Column(ratio=1)),
            MofNCompleteColumn(table_column=Column(no_wrap=True)),
            TextColumn("{task.description}", table_column=Column(no_wrap=True)),
            TimeRemainingColumn(table_column=Column(no_wrap=True)),
        )
        self._bar = Progress(*columns, console=console, disable=not console.is_terminal, transient=True, expand=True)
        self._task = self._bar.add_task("", total=total, completed=done)

    def __enter__(self) -> JobProgress:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def token(self, *_: object) -> None:
        """A token was generated."""
        self._generated += 1
        self._show()

    def prefill(self, tokens: int) -> None:
        """Tokens of a prompt were written to the cache."""
        self._prompt_tokens += tokens
        self._show()

    def result(self, result: Result) -> None:
        """A record is answered."""
        self._done += 1
        self._errors += result.failed
        self._show()

    @property
    def text(self) -> str:
        """The rates so far, in tokens per second of this run."""
        seconds = max(time.monotonic() - self._started, 1e-9)
        errors = f", {self._errors} errors" if self._errors else ""
        return f"{self._prompt_tokens / seconds:,.0f} prompt + {self._generated / seconds:,.1f} generated tokens/s{errors}"

    def _show(self) -> None:
        self._bar.update(self._task, completed=self._done, description=self.text)
        now = time.monotonic()
        if not self._console.is_terminal and now - self._logged > LOG_SECONDS:
            self._logged = now
            self._console.print(f"{self._done:,}/{self._total:,} records, {self.text}", highlight=False)


class WorkProgress:
    """How much of some work is done, what is being done, and the time left; a context manager.

    total: the work, in any unit. done: what an earlier run did of it.
    """

    def __init__(self, total: int, done: int, console: Console):
        self._total, self._done, self._earlier, self._console = total, done, done, console
        self._started = self._logged = time.monotonic()
        columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn(), TimeRemainingColumn())
        # Units differ in what a piece of their work takes, and the first is compiled: a long memory evens that out.
        self._bar = Progress(*columns, console=console, disable=not console.is_terminal, transient=True, speed_estimate_period=600)
        self._task = self._bar.add_task("", total=total, completed=done)
        self._what = ""

    def __enter__(self) -> WorkProgress:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def begin(self, what: str) -> None:
        """Something new is being done."""
        self._what = what
        self._show()

    def advance(self, work: int) -> None:
        """So much more is done."""
        self._done += work
        self._show()

    def reach(self, done: int) -> None:
        """So much is done in all: a unit is through, however its parts were counted."""
        self._done = done
        self._show()

    @property
    def seconds_left(self) -> float | None:
        """At this run's rate; None before there is one."""
        worked = self._done - self._earlier
        return (time.monotonic() - self._started) * (self._total - self._done) / worked if worked > 0 else None

    def _show(self) -> None:
        self._bar.update(self._task, completed=self._done, description=self._what)
        now = time.monotonic()
        if not self._console.is_terminal and now - self._logged > LOG_SECONDS:
            self._logged = now
            left = self.seconds_left
            rest = "" if left is None else f", about {max(left, 0) / 60:.1f} min left"
            self._console.print(f"{self._done / self._total:.0%} done{rest}: {self._what}", highlight=False)
