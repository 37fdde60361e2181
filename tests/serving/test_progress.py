"""What progress says of the time left: it settles within a minute, whatever was compiled before and however records
differ in length."""

from __future__ import annotations

import dataclasses
import io
import re

import pytest
from rich.console import Console

from kvjax.serving import progress as progress_module
from kvjax.serving.batch.file_jobs import work_of
from kvjax.serving.batch.records import Record
from kvjax.serving.batch.results import Result
from kvjax.serving.progress import SETTLE_SECONDS, JobProgress, Work, WorkProgress


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


def test_work_that_is_not_needed_takes_no_time():
    clock = Clock()
    with WorkProgress(10_000, 0, Console(file=io.StringIO()), clock) as progress:
        for _ in range(100):
            clock.now += 1
            progress.advance(10)
        progress.drop(8_000)
        for _ in range(10):
            clock.now += 1
            progress.advance(10)
        assert progress.seconds_left == pytest.approx(90, abs=3)


def run_job(progress, clock, prompts, answers, *, prefill=0.001, step=0.05, compiling=45.0, chunk=500):
    """A job in 8 slots, round by round. prefill: seconds for each token. step: seconds. compiling: of prefill and
    decode each. Returns (time, time left) whenever it is asked, and the time of the end."""
    said = []
    for first in range(0, len(prompts), 8):
        lines = range(first, min(first + 8, len(prompts)))
        for line in lines:
            progress.prompt(line, prompts[line])
            for begin in range(0, prompts[line], chunk):
                tokens = min(chunk, prompts[line] - begin)
                clock.now += prefill * tokens + (compiling if line == begin == 0 else 0)
                progress.prefill(tokens)
                said.append((clock.now, progress.seconds_left))
        for number in range(answers):
            clock.now += step + (compiling if first == number == 0 else 0)
            for _ in lines:
                progress.token()
                said.append((clock.now, progress.seconds_left))
        for line in lines:
            progress.result(Result(line, {}, False, prompts[line], answers))
    return said, clock.now


def test_the_time_left_of_a_job_goes_by_tokens():
    """80 records in 8 slots, the longest first: the last take a tenth of the first."""
    clock, prompts = Clock(), [4000 - 45 * number for number in range(80)]
    progress = JobProgress({line: Work(tokens, 100) for line, tokens in enumerate(prompts)}, (), Console(file=io.StringIO()), clock)
    said, end = run_job(progress, clock, prompts, 100)
    assert progress.seconds_left == 0
    told = [(end - then, left) for then, left in said if left is not None]
    assert len(told) > 8000
    assert max(abs(left - truth) for truth, left in told) < 0.1 * told[0][0]


@pytest.mark.parametrize("characters", [0.25, 1, 4, 16])
def test_no_estimate_is_far_too_short(characters):
    """Not with tokens of single characters, nor with long ones; not when prompts are quick and steps are slow, nor
    after compiling."""
    clock, prompts = Clock(), [200] * 24
    work = {line: Work(tokens * characters / 4, 400) for line, tokens in enumerate(prompts)}
    progress = JobProgress(work, (), Console(file=io.StringIO()), clock)
    assert progress.seconds_left is None
    said, end = run_job(progress, clock, prompts, 400, prefill=1e-5, step=0.1)
    told = [(end - then, left) for then, left in said if left is not None]
    assert len(told) > 9000
    assert told[0][0] > 100, "it is told early"
    wrong = [(truth, left) for truth, left in told if not 0.8 * truth - 1 < left < 1.25 * truth + 1]
    assert not wrong


def test_compiling_is_said_until_the_first_tokens_come(monkeypatch):
    monkeypatch.setattr(progress_module, "LOG_SECONDS", -1.0)
    written, clock = io.StringIO(), Clock()
    with JobProgress({0: Work(10, 3), 1: Work(10, 3)}, (), Console(file=written), clock) as progress:
        assert "0/2 records, compiling the first programs\n" in written.getvalue()
        run_job(progress, clock, [10, 10], 3)
    log = written.getvalue().splitlines()
    assert log[1] == "0/2 records, compiling the first programs"  # the first prompt is prefilled, and steps are compiled
    assert "compiling" not in log[-1]
    assert log[-1].startswith("2/2 records, ")
    assert log[-1].endswith(", about 0 s left")
    again = io.StringIO()
    with JobProgress({0: Work(10, 3)}, (0,), Console(file=again), clock):
        pass
    assert "compiling" not in again.getvalue()


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
    work = {1: Work(50, 50), 2: Work(50, 50), 3: Work(100, 100)}
    progress = JobProgress(work, (1, 2), Console(file=io.StringIO()), clock)
    progress.prompt(3, 60)
    for _ in range(4):
        clock.now += 1
        progress.prefill(15)
    assert progress.seconds_left is None, "nothing is known of steps yet"
    for _ in range(21):
        clock.now += 2
        progress.token()
    assert progress.seconds_left == pytest.approx(79 * 2)


def test_answers_from_elsewhere_count_when_they_come():
    clock = Clock()
    progress = JobProgress({1: Work(50, 50), 2: Work(50, 50)}, (), Console(file=io.StringIO()), clock)
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
    with JobProgress({1: Work(1500, 500)}, (), Console(file=written), clock, **shown) as progress:
        clock.now += 10
        found += 900  # while the job runs
        progress.prompt(1, 1020)
        progress.prefill(1000)
        clock.now += 0.2
        progress.token()
        progress.prefill(20)
    assert "0/1 records, 10 prompt + 0.1 generated tokens/s, 900 found" in written.getvalue()
    assert written.getvalue().count("\ndisk: found 5900\n") == 3


def test_stores_are_shown_below_the_bar():
    written = io.StringIO()
    console = Console(file=written, force_terminal=True, width=100)
    with JobProgress({1: Work(5, 5)}, (), console, below=lambda: "host: 12 pages kept") as progress:
        progress.prefill(5)
    bar, _, below = written.getvalue().rpartition("host: 12 pages kept")
    assert "0/1" in bar
    assert "0/1" not in below


@pytest.mark.parametrize("wrong", [{"max_new_tokens": 10**12}, {"n": 10**9}, {"n": 0}, {"max_new_tokens": 101}, {"temperature": -1}])
def test_what_is_refused_is_no_work(wrong):
    assert work_of(Record(1, "a", prompt="x" * 40, sampling={"max_new_tokens": 8, **wrong}), 100) == Work(0, 0)
    assert work_of(Record(1, "a", error="the line is not JSON")) == Work(0, 0)


def test_work_is_at_most_what_the_model_takes():
    assert work_of(Record(1, "a", prompt="x" * 40, sampling={"max_new_tokens": 8, "n": 3}), 100) == Work(10, 24)
    assert work_of(Record(1, "a", prompt="x" * 4000, sampling={"max_new_tokens": 5000, "clip": True, "n": 2}), 100) == Work(100, 200)
