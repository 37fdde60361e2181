"""How far a batch job is: a bar with rates on a terminal, a line now and then in a log."""

from __future__ import annotations

import time

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
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
