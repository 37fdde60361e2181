"""Progress of a job: a bar on a terminal, a line now and then in a log."""

from __future__ import annotations

import dataclasses
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, Self

from rich.console import Console, RenderableType
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TaskProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Column
from rich.text import Text

from kvjax.serving.batch.results import Result

LOG_SECONDS = 30.0
"""Between two lines where the console is no terminal."""

SETTLE_SECONDS = 60.0
"""The time left is computed from this many seconds of the past, so that earlier compilation does not count."""

STEP_SECONDS = 0.001
"""Tokens that come within so long are those of one step."""

STALL_SECONDS = 1.0
"""A step of up to so long is a step, and nothing else."""

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
            said = "" if left is None else f", about {left / 60:.1f} min left" if left > 59 else f", about {left:.0f} s left"
            lines = line(said), self._below()
            self._console.print("\n".join(filter(None, lines)), highlight=False, soft_wrap=True)

    def _below(self) -> str:
        """What is shown below the bar, or after a log's line."""
        return ""


class _Rate:
    """Seconds for each token of one kind, over about the last `SETTLE_SECONDS` in which there were any."""

    def __init__(self):
        self._parts: deque[tuple[float, int]] = deque()
        self._seconds, self._tokens = 0.0, 0
        self._step: tuple[float, int] | None = None
        self._begun = False

    def took(self, seconds: float, tokens: int) -> None:
        """Tokens that came so long after what came before.

        The first ones waited for programs to be compiled, and do not count. Later ones may wait, too: what takes far
        longer than others counts as ten of them. Tokens of one step come at once, and count when the next comes.
        """
        if seconds < STEP_SECONDS and self._begun:
            if self._step is not None:
                self._step = self._step[0] + seconds, self._step[1] + tokens
            return
        if self._step is not None:
            self.add(*self._step)
        usual = self._seconds / len(self._parts) if self._parts else seconds
        self._step = (min(seconds, max(STALL_SECONDS, 10 * usual)), tokens) if self._begun else None
        self._begun = True

    def add(self, seconds: float, tokens: int) -> None:
        """Tokens that took so long."""
        self._parts.append((seconds, tokens))
        self._seconds, self._tokens = self._seconds + seconds, self._tokens + tokens
        while len(self._parts) > 1 and self._seconds - self._parts[0][0] > SETTLE_SECONDS:
            seconds, tokens = self._parts.popleft()
            self._seconds, self._tokens = self._seconds - seconds, self._tokens - tokens

    @property
    def seconds_per_token(self) -> float | None:
        """None before there is a token."""
        return self._seconds / self._tokens if self._tokens else None


@dataclasses.dataclass(frozen=True, slots=True)
class Work:
    """What a record takes, in tokens. prompt: about how many, by its characters. answer: at most, in all samples."""

    prompt: float
    answer: int


class _TimeLeft(ProgressColumn):
    """The time left as its job works it out."""

    def __init__(self, job: JobProgress):
        super().__init__(table_column=Column(no_wrap=True))
        self._job = job

    def render(self, task: Task) -> Text:
        """As rich's own column shows it."""
        left = self._job.seconds_left
        minutes, seconds = divmod(0 if left is None else round(left), 60)
        hours, minutes = divmod(minutes, 60)
        return Text("-:--:--" if left is None else f"{hours:d}:{minutes:02d}:{seconds:02d}", style="progress.remaining")


class JobProgress(_Job):
    """Counts records and tokens of a running job and shows them on `console`; a context manager.

    Prompt tokens and generated tokens take different times, and records differ in both, the longest first. So the time
    left goes by two rates, each over the time in which there were such tokens. It is told when there is a rate for all
    kinds of tokens that are left. Compiling is said while there is none.

    Args:
        work: what each record takes, by its line.
        earlier: lines of the records that an earlier run finished.
        found: tells how many prompt tokens were found so far, and not computed.
        below: tells what to show below the bar.
    """

    def __init__(
        self,
        work: Mapping[int, Work],
        earlier: Collection[int],
        console: Console,
        clock: Callable[[], float] = time.monotonic,
        *,
        found: Callable[[], int] = lambda: 0,
        below: Callable[[], str] = lambda: "",
    ):
        self._work_of, self._done, self._errors, self._below = work, len(earlier), 0, below
        self._look_up, self._found_before, self._found = found, found(), 0
        self._prompt_tokens = self._generated = 0
        left = [each for line, each in work.items() if line not in earlier]
        # Of records that have not begun, prompts are estimated, in units of which those that have begun tell how many
        # tokens they are.
        self._prompts_left, self._answers_left = sum(each.prompt for each in left), sum(each.answer for each in left)
        self._known: dict[int, int] = {}
        self._begun_estimates, self._begun_tokens = 0.0, 0
        self._open_prompts, self._open_answers = 0, 0
        self._prefill, self._decode = _Rate(), _Rate()
        self._compiling, self._last = True, clock()
        # Only the bar shrinks: rates and times must be readable on a terminal of 80 columns.
        columns = (
            BarColumn(None, table_column=Column(ratio=1)),
            TextColumn("{task.description}", table_column=Column(no_wrap=True)),
            _TimeLeft(self),
        )
        finished = sum(each.prompt + each.answer for line, each in work.items() if line in earlier)
        super().__init__(sum(each.prompt + each.answer for each in work.values()), finished, console, clock, *columns, expand=True)

    def __enter__(self) -> Self:
        super().__enter__()
        if self._done < len(self._work_of):
            self._say(now=True)
            if not self._console.is_terminal:
                self._console.print(f"{self._records} records, compiling the first programs", highlight=False, soft_wrap=True)
        return self

    def prompt(self, line: int, tokens: int) -> None:
        """A record is about to run, whose prompt has so many tokens."""
        self._begin(line, tokens)

    def token(self, *_: object) -> None:
        """A token was generated."""
        self._generated += 1
        self._open_answers -= 1
        self._took(self._decode, 1)

    def prefill(self, tokens: int) -> None:
        """Tokens of a prompt were written to the cache."""
        self._prompt_tokens += tokens
        self._open_prompts -= tokens
        self._found = self._look_up() - self._found_before
        self._took(self._prefill, tokens)

    def elsewhere(self, result: Result) -> None:
        """Another process answered a record: its tokens are counted now, all at once. `result` is called, too."""
        self._begin(result.line, result.prompt_tokens)
        self._prompt_tokens += result.prompt_tokens
        self._found += result.found_tokens
        self._generated += result.generated_tokens
        self._open_prompts -= result.prompt_tokens
        self._open_answers -= result.generated_tokens
        seconds, self._last = self._clock() - self._last, self._clock()
        for rate, tokens in ((self._prefill, result.prompt_tokens), (self._decode, result.generated_tokens)):
            rate.add(seconds * tokens / max(1, result.prompt_tokens + result.generated_tokens), tokens)

    def result(self, result: Result) -> None:
        """A record is answered."""
        self._done += 1
        self._errors += result.failed
        work = self._work_of[result.line]
        if result.line not in self._known:  # it was wrong before it could run
            self._prompts_left -= work.prompt
            self._answers_left -= work.answer
        else:  # an answer may end early, and a record that failed may have done a part only
            prompt = self._known.pop(result.line)
            self._open_prompts -= prompt - result.prompt_tokens
            self._open_answers -= work.answer - result.generated_tokens
        if self._done == len(self._work_of):
            self._open_prompts = self._open_answers = 0
        self._compiling = self._compiling and result.failed
        self._say(now=True)

    @property
    def seconds_left(self) -> float | None:
        """By the rates of prompt tokens and of generated ones; None while one that is needed is not known."""
        scale = self._begun_tokens / self._begun_estimates if self._begun_estimates else 1.0
        left = (self._open_prompts + scale * self._prompts_left, self._open_answers + self._answers_left)
        total = 0.0
        for tokens, rate in zip(left, (self._prefill, self._decode), strict=True):
            if tokens > 0.5:
                if rate.seconds_per_token is None:
                    return None
                total += tokens * rate.seconds_per_token
        return total

    @property
    def text(self) -> str:
        """The rates so far, in tokens per second of this run. Tokens that were found are not computed, and have no
        rate."""
        if self._compiling:
            return "compiling the first programs"
        seconds = max(self._clock() - self._started, 1e-9)
        errors = f", {self._errors} errors" if self._errors else ""
        found = f", {self._found:,} found" if self._found else ""
        computed = (self._prompt_tokens - self._found) / seconds
        return f"{computed:,.0f} prompt + {self._generated / seconds:,.1f} generated tokens/s{found}{errors}"

    @property
    def _records(self) -> str:
        return f"{self._done:,}/{len(self._work_of):,}"

    def _begin(self, line: int, tokens: int) -> None:
        """What a record takes is known now: its prompt is no estimate any more."""
        work = self._work_of[line]
        self._known[line] = tokens
        self._prompts_left -= work.prompt
        self._answers_left -= work.answer
        self._begun_estimates += work.prompt
        self._begun_tokens += tokens
        self._open_prompts += tokens
        self._open_answers += work.answer

    def _took(self, rate: _Rate, tokens: int) -> None:
        """Tokens of one kind came; the time since the latest tokens is theirs, unless programs were compiled in it."""
        now = self._clock()
        rate.took(now - self._last, tokens)
        self._last = now
        self._compiling = self._compiling and rate is self._prefill
        self._say()

    def _say(self, *, now: bool = False) -> None:
        done = self._total - self._prompts_left - self._answers_left
        self._work = max(0, done - max(0, self._open_answers) - max(0, self._open_prompts))
        self._show(f"{self._records} {self.text}", lambda left: f"{self._records} records, {self.text}{left}", now=now)


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

    def drop(self, work: int) -> None:
        """Take work off the total: it is not needed."""
        self._total -= work
        self._bar.update(self._task, total=self._total)

    def _reached(self, done: float) -> None:
        self._work = done
        self._show(self._what, lambda left: f"{self._work / self._total:.0%} done{left}: {self._what}", now=True)
