"""Batch jobs that are killed at any moment: run again until they end, they leave the output that an undisturbed job
leaves."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import time

import pytest

pytestmark = pytest.mark.bits

SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT)
KILLS = 45
RECORDS = 40


def write_records(path):
    """Plain records and OpenAI requests, greedy and drawn, short and long, some of them wrong."""
    lines = []
    for number in range(RECORDS):
        record = {"id": f"r{number}", "prompt": "amber basil coral " * (number % 7 + 1), "max_new_tokens": 5 + number % 30}
        if number % 5 == 1:
            record |= {"temperature": 0.9, "top_k": 30, "logprobs": True}
        if number % 5 == 2:
            record = {"custom_id": f"o{number}", "body": {"messages": [{"role": "user", "content": f"delta {number}"}], "max_tokens": 9}}
        if number % 11 == 3:
            record["unknown"] = number
        lines.append(json.dumps(record))
    path.write_text("\n".join([*lines, "this is not JSON", ""]))
    return path


def start(folder, source, out):
    options = ["--model", str(folder), "--out", str(out), "--policy", "window:8+24", "--max-batch", "3"]
    command = [sys.executable, "-c", "from kvjax.serving.cli import main; main()", "batch", str(source), *options]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def answers(path):
    """The output's lines, without the times in OpenAI answers."""
    return [
        json.loads(line, object_hook=lambda o: {k: v for k, v in o.items() if k != "created"}) for line in path.read_text().splitlines()
    ]


@pytest.mark.long
def test_killed_jobs_end_with_the_output_of_one_that_was_not(model_folder, tmp_path, capsys):
    source = write_records(tmp_path / "in.jsonl")
    began = time.monotonic()
    undisturbed = start(model_folder, source, tmp_path / "whole.jsonl")
    said, _ = undisturbed.communicate(timeout=600)
    assert undisturbed.returncode == 0, said
    seconds = time.monotonic() - began
    expected = answers(tmp_path / "whole.jsonl")
    assert len(expected) == RECORDS + 1
    draw, kills, jobs, lost = random.Random(5), 0, 0, 0
    while kills < KILLS:
        out = tmp_path / f"job-{jobs}.jsonl"
        jobs += 1
        disturbed = False
        while not out.exists():
            began = time.monotonic()
            job = start(model_folder, source, out)
            # Most of a job is starting; most kills should come when answers are being written.
            delay = draw.uniform(0.5, 1.05) * seconds if kills < KILLS else 600
            try:
                said, _ = job.communicate(timeout=delay)
                assert job.returncode == 0, said
                if not disturbed:  # the machine may be faster now than it was
                    seconds = min(seconds, time.monotonic() - began)
            except subprocess.TimeoutExpired:
                job.send_signal(draw.choice(SIGNALS))
                said, _ = job.communicate(timeout=60)
                kills, disturbed = kills + 1, True
            # An interrupt that arrives in JAX's own callback of the garbage collector is printed there and lost; the
            # job goes on.
            assert "Traceback" not in said or "_xla_gc_callback" in said, said
        found = answers(out)
        lost += RECORDS + 1 - len(found)
        assert found == expected
        assert sorted(path.name for path in tmp_path.glob(f"job-{jobs - 1}*")) == [out.name]
    with capsys.disabled():
        print(f"\n{kills} kills, {jobs} jobs of {RECORDS + 1} records, {lost} records lost, 0 answers that differ")
