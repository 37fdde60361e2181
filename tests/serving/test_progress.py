"""What progress says of the time left: it settles within a minute, whatever was compiled before and however records differ in length."""

from __future__ import annotations

import dataclasses
import io
import re

import pytest
from rich.console import Console

from kvjax.serving import progress as progress_module
from kvjax.serving.batch.results import Result
from kvjax.serving.progress import SETTLE_SECONDS, JobProgress, WorkProgress


class Clock:
    """Seconds that pass when told to."""

    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


def test_a_long_compilation_is_forgotten_within_a_minute():
    clock = Clock()
    with WorkProgress(10_000, 0, Console(file=io.StringIO()), clock) as progress:
        progress.begin("forced text")
        assert progress.seconds_left is None
        clock.now += 240
        progress.advance(10)
        for second in range(1, 500):
            clock.now += 1
            progress.advance(10)
            if second > SETTLE_SECONDS:
                assert progress.seconds_left == pytest.approx((10_000 - 10 * (second + 1)) / 10, abs=3)
        progress.reach(10_000)
        assert progress.seconds_left == 0


def test_the_time_left_of_a_job_goes_by_tokens():
    """80 records in 8 slots, the longest first: records end eight at a time, and the last take a tenth of the first."""
    clock, prompts = Clock(), [4000 - 45 * number for number in range(80)]
    work = {line: tokens + 100 for line, tokens in enumerate(prompts)}
    progress = JobProgress(work, (), Console(file=io.StringIO()), clock)
    said = []
    clock.now += 90  # compiling
    for first in range(0, 80, 8):
        for line in range(first, first + 8):
            for _ in range(prompts[line] // 500):
                clock.now += 0.5
                progress.prefill(500)
        for _ in range(100):
            clock.now += 0.05
            for _ in range(8):
                progress.token()
            said.append((clock.now, progress.seconds_left))
        for line in range(first, first + 8):
            progress.result(Result(line, {}, False, prompts[line], 100))
    assert progress.seconds_left == 0
    settled = [(clock.now - then, left) for then, left in said if then > 1000 + 90 + SETTLE_SECONDS]
    assert len(settled) > 500
    assert max(abs(left - truth) for truth, left in settled) < 0.25 * max(truth for truth, _ in settled)


def test_a_log_says_what_was_done_and_the_time_left(monkeypatch):
    monkeypatch.setattr(progress_module, "LOG_SECONDS", -1.0)
    written, clock = io.StringIO(), Clock()
    with WorkProgress(200, 100, Console(file=written), clock) as progress:
        progress.begin("forced text")
        clock.now += 30
        progress.advance(25)
        clock.now += 30
        progress.advance(25)
    log = written.getvalue().splitlines()
    assert log[0] == "50% done: forced text"
    assert re.fullmatch(r"75% done, about 1\.0 min left: forced text", log[-1])


def test_a_job_that_goes_on_counts_what_was_done_before():
    clock = Clock()
    progress = JobProgress({1: 100, 2: 100, 3: 200}, (1, 2), Console(file=io.StringIO()), clock)
    for _ in range(3):
        clock.now += 1
        progress.prefill(20)
    assert progress.seconds_left == pytest.approx(140 / 20, abs=1)


def test_answers_from_elsewhere_count_when_they_come():
    clock = Clock()
    progress = JobProgress({1: 100, 2: 100}, (), Console(file=io.StringIO()), clock)
    clock.now += 10
    result = Result(1, {}, False, 80, 20, found_tokens=30)
    progress.elsewhere(result)
    progress.result(result)
    assert progress.text == "5 prompt + 2.0 generated tokens/s, 30 found"
    clock.now += 10
    progress.elsewhere(dataclasses.replace(result, line=2))
    progress.result(dataclasses.replace(result, line=2))
    assert progress.seconds_left == 0


def test_tokens_that_were_found_have_no_rate_and_stores_are_shown(monkeypatch):
    monkeypatch.setattr(progress_module, "LOG_SECONDS", -1.0)
    written, clock, found = io.StringIO(), Clock(), 5000
    shown = {"found": lambda: found, "below": lambda: f"disk: found {found}"}
    with JobProgress({1: 2000}, (), Console(file=written), clock, **shown) as progress:
        clock.now += 10
        found += 900  # while the job runs
        progress.prefill(1000)
        clock.now += 0.2
        progress.prefill(20)
    assert "0/1 records, 10 prompt + 0.0 generated tokens/s, 900 found" in written.getvalue()
    assert written.getvalue().count("\ndisk: found 5900\n") == 2


def test_stores_are_shown_below_the_bar():
    written = io.StringIO()
    console = Console(file=written, force_terminal=True, width=100)
    with JobProgress({1: 10}, (), console, below=lambda: "host: 12 pages kept") as progress:
        progress.prefill(5)
    bar, _, below = written.getvalue().rpartition("host: 12 pages kept")
    assert "0/1" in bar
    assert "0/1" not in below
