"""Engines over the devices of several processes: one result, and an end when a process is lost."""

import contextlib
import gc
import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from process_job import alike, answers, auto, brief, engine_of, reuse
from safetensors.numpy import load_file, save_file

import kvjax
from kvjax import axes
from kvjax.engine.step_plan import Chunk, StepPlan
from kvjax.scheduler.lockstep import Follower
from kvjax.scheduler.processes import Processes, start_processes

JOB = Path(__file__).parents[2] / "process_job.py"
SECONDS = 200
"""After which a job counts as hanging."""


def free_port():
    with socket.socket() as listening:
        listening.bind(("localhost", 0))
        return listening.getsockname()[1]


def run_job(scenario, count, devices, folder):
    """Run the processes of a job of `process_job.py`."""
    arguments = [scenario, free_port(), count]
    return run_all([[sys.executable, JOB, *map(str, (*arguments, number, devices, folder))] for number in range(count)])


def run_all(commands, **options):
    """Run commands at the same time. Returns the exit status, output and errors of each."""
    flags = " ".join(each for each in os.environ["XLA_FLAGS"].split() if "device_count" not in each)
    options |= {"env": os.environ | {"XLA_FLAGS": flags}, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    processes = [subprocess.Popen(command, **options) for command in commands]
    try:
        outputs = [each.communicate(timeout=SECONDS) for each in processes]
    finally:
        for each in processes:
            each.kill()
    return [(each.returncode, *output) for each, output in zip(processes, outputs, strict=True)]


def found_by(result):
    """What a process found."""
    status, output, errors = result
    assert status == 0, errors[-3000:]
    return json.loads(output.splitlines()[-1])


def check_same(found, expected):
    """Equal tokens, and log-probabilities of one process within rounding."""
    assert len(found) == len(expected)
    for (tokens, logprobs), (others, values) in zip(found, expected, strict=True):
        assert tokens == list(others)
        np.testing.assert_allclose(logprobs, values, rtol=0, atol=2e-5)


def check_alike(results, one):
    """What every process did by itself, and what one process with as many devices finds."""
    for result in results:
        assert result["shared"] == "from 0"
        assert result["alike"]["fingerprint"] == one["fingerprint"]
        assert result["alike"]["restored"]
        assert "max_gap_ms is kept by the clock" in result["alike"]["gap"]
        assert result["alike"]["logits"] == results[0]["alike"]["logits"]
    np.testing.assert_allclose(results[0]["alike"]["logits"], one["logits"], rtol=0, atol=1e-5 * np.abs(one["logits"]).max())


@pytest.mark.long
@pytest.mark.parametrize("count", [2, 4])
def test_several_processes_answer_as_one(count, tmp_path):
    results = [found_by(each) for each in run_job("brief", count, 1, tmp_path)]
    assert [each["shared"] for each in results] == ["from 0"] * count
    check_same(results[0]["answers"], brief(engine_of(count, "dense"))["answers"])


@pytest.mark.long
@pytest.mark.parametrize("sizes", [(2, 1), (2, 2)], ids=lambda sizes: f"{sizes[0]} processes of {sizes[1]}")
def test_pages_that_are_kept_are_found_by_all_processes_alike(sizes, tmp_path):
    """Prompts are suspended, and stores are full: all processes give the same pages up."""
    count, devices = sizes
    first, second = (found_by(each) for each in run_job("reuse", count, devices, tmp_path))
    expected = reuse(engine_of(count * devices, "dense", stores=True))
    assert first["counts"] == expected["counts"]
    assert all(first["counts"])
    assert len(first["rounds"]) == 3
    for found in first["rounds"]:
        assert found == first["rounds"][0]  # bit for bit
        check_same(found, expected["rounds"][0])
    assert second["shared"] == "from 0"


@pytest.mark.long
def test_auto_chooses_the_same_in_all_processes(tmp_path):
    """The first one's choice, which the others compare with theirs; the policy is sent to them after it chose."""
    first, second = (found_by(each) for each in run_job("auto", 2, 1, tmp_path))
    expected = auto(engine_of(2, "auto"))
    assert first["chosen"] == expected["chosen"] == ["quest:0", "dense"]
    check_same(first["answers"], expected["answers"])
    assert second["shared"] == "from 0"


@pytest.mark.long
@pytest.mark.parametrize("sizes", [(2, 1), (4, 1), (2, 2)], ids=lambda sizes: f"{sizes[0]} processes of {sizes[1]}")
def test_the_first_process_schedules_for_all(sizes, tmp_path):
    """Prompts are suspended, forked, cancelled and interrupted on the way."""
    count, devices = sizes
    results = [found_by(each) for each in run_job("job", count, devices, tmp_path)]
    engine = engine_of(count * devices)
    expected = answers(engine)
    check_alike(results, alike(engine, tmp_path))
    first = results[0]
    check_same(first["answers"], expected["answers"])
    check_same(first["again"]["answers"], expected["answers"])
    assert first["suspended"] == expected["suspended"] > 0
    assert "would run in the first one alone" in first["alone"]
    assert "1000000" in first["bad token"]
    assert first["several"] == 1
    assert (first["interrupted after"], first["everywhere"], first["same"]) == (1, "no list today", True)
    assert set(first["used"].values()) == {0}


def test_processes_answer_as_one_until_one_is_lost_which_ends_the_job(tmp_path):
    """It was killed between two steps, or in one."""
    first, lost = run_job("lost", 2, 1, tmp_path)
    assert (first[0], lost[0]) == (1, -9), first[2]
    lines = ([json.loads(line) for line in output.splitlines() if line.startswith("{")] for _, output, _ in (first, lost))
    (found,), (other,) = lines
    assert other["shared"] == "from 0"
    check_same(found["answers"], brief(engine_of(2, "dense"))["answers"])
    assert "process 1 of 2 was lost: its connection broke; start all 2 processes again" in first[2]


@pytest.mark.long
def test_a_failure_of_one_process_ends_the_job(tmp_path):
    """The first one waits in a program for it, and ends when it would have failed itself by then."""
    first, second = run_job("fails", 2, 1, tmp_path)
    assert first[0] == 1
    assert second[0]
    assert "process 1 of 2 failed: ArithmeticError: no list today" in first[2]


def test_a_mesh_takes_all_processes_or_one(monkeypatch):
    """Else those that are left out would wait for nothing, and no file would be written."""
    mesh = kvjax.mesh(tensor=2)
    monkeypatch.setattr(axes, "several_processes", lambda mesh: True)
    monkeypatch.setattr(axes.jax, "process_count", lambda: 2)
    with pytest.raises(ValueError, match="none of process 1"):
        axes.check_mesh(mesh, {})
    monkeypatch.setattr(axes.jax, "process_count", lambda: 1)
    with pytest.raises(NotImplementedError, match=r"do not go to a disk, and pages was given: .* Leave out disk and disk_bytes"):
        axes.check_mesh(mesh, {"reuse": True, "host_bytes": 1000, "disk": "pages"})
    axes.check_mesh(mesh, {"reuse": True, "host_bytes": 1000, "disk": None})


def test_arguments_are_checked():
    with pytest.raises(ValueError, match="host:1234"):
        start_processes("localhost", 2, 0)
    with pytest.raises(ValueError, match="the 2 processes have the numbers 0 to 1"):
        start_processes("localhost:1234", 2, 2)
    with pytest.raises(ValueError, match="count and number"):
        start_processes("localhost:1234")
    with pytest.raises(ValueError, match="count and number"):
        start_processes(count=2)


def test_one_process_is_a_job_too():
    engine = engine_of(2)
    expected = kvjax.generate(engine, [[1, 2, 3]], max_new_tokens=5, details=True)[0].token_ids
    with Processes() as processes:
        assert processes.share(3) == 3
        with processes.lead(engine):
            assert kvjax.generate(engine, [[1, 2, 3]], max_new_tokens=5, details=True)[0].token_ids == expected
            with pytest.raises(RuntimeError, match="alone"):
                engine.prefill([[1]])
            with pytest.raises(ValueError, match="one at a time"), processes.lead(engine):
                pass
            kept, gone = kvjax.Scheduler(engine), kvjax.Scheduler(engine)
            leader, last = engine.guard.together, kvjax.Scheduler(engine)
            del gone
            gc.collect()
            newest = kvjax.Scheduler(engine)
            assert len({leader._numbers[each] for each in (kept, last, newest)}) == 3
        kept.close()
        with pytest.raises(RuntimeError, match="ended"):
            kept.submit(kvjax.Request([1]))
        with pytest.raises(ValueError, match="process 0 calls lead"):
            processes.follow(engine)
        with pytest.raises(TypeError, match="cannot be sent"):
            processes.share(lambda: 0)
    assert engine.prefill([[1, 2]])


@pytest.mark.long
def test_a_batch_job_of_two_processes(tmp_path):
    """The first one reads and writes; what it refuses, the other says, too."""
    (tmp_path / "in.jsonl").write_text('{"id": "a", "prompt": "Once upon a time", "max_new_tokens": 4}\n{"id": "b", "prompt": 5}\n')
    start = [sys.executable, "-c", "from kvjax.serving.cli import main; main()", "batch", "in.jsonl", "--out", "out.jsonl"]
    start += ["--model", "needle", "--tensor", "2", "--processes", "2", "--host-memory", "20MB"]

    def run():
        job = [*start, "--coordinator", f"localhost:{free_port()}"]
        return run_all([[*job, "--process", str(number)] for number in range(2)], cwd=tmp_path)

    first, second = run()
    assert (first[0], second[0]) == (0, 0), first[2] + second[2]
    assert "waiting for all 2 processes of the job" in first[2]
    assert "prompt tokens were found and not computed" in first[2]
    written = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [(line["id"], line["error"]) for line in written] == [("a", None), ("b", "prompt must be text, got 5")]
    first, second = run()
    assert (first[0], "out.jsonl exists" in first[2]) == (2, True)
    assert (second[0], "process 0 of 2 failed: ValueError: out.jsonl exists" in second[2]) == (1, True)


@pytest.mark.long
@pytest.mark.parametrize(
    ("second", "said"),
    [
        (["--policy", "dense"], "process 1 was given policy dense, and process 0 policy top:8: give all processes the same"),
        (["--policy", "top:8", "--dtype", "float16"], "process 1 was given dtype float16, and process 0 dtype None"),
        (["--policy", "top:8", "--cache-format", "int8"], "process 1 was given --cache-format int8, and process 0 --cache-format None"),
        (["--policy", "top:8", "--model", "other"], "process 1 has another checkpoint than process 0"),
    ],
    ids=["policy", "dtype", "format", "checkpoint"],
)
def test_processes_that_were_started_unlike_are_refused(second, said, tmp_path):
    """Also if files of one host are older: the weights would fit, and the answers would be of neither model."""
    model = kvjax.load("needle", dtype="float32")
    model.save(tmp_path / "model")
    shutil.copytree(tmp_path / "model", tmp_path / "other")
    stored = load_file(tmp_path / "other" / "model.safetensors")
    save_file({name: 0 * x if "o_proj" in name else x for name, x in stored.items()}, tmp_path / "other" / "model.safetensors")
    (tmp_path / "in.jsonl").write_text('{"id": "a", "prompt": "Once", "max_new_tokens": 2}\n')
    start = [sys.executable, "-c", "from kvjax.serving.cli import main; main()", "batch", "in.jsonl", "--out", "out.jsonl"]
    start += ["--tensor", "2", "--processes", "2", "--coordinator", f"localhost:{free_port()}"]
    options = ["--model", "model", "--policy", "top:8"], ["--model", "model", *second]
    results = run_all([[*start, "--process", str(number), *given] for number, given in enumerate(options)], cwd=tmp_path)
    for status, _, errors in results:
        assert status == 2, errors
        assert said in errors
    assert not (tmp_path / "out.jsonl").exists()


def test_a_plan_that_differs_is_noticed():
    """And a call that failed in one of two processes alone."""
    engine = engine_of(2)
    (sequence,) = engine.prefill([[1, 2, 3]])
    plan = StepPlan(chunks=(Chunk(sequence, [4], None),))

    class Wire:
        """What the first process sends."""

        number, messages, told = 1, [], []

        def receive(self, kind=None):
            message = self.messages.pop(0)
            return message if kind is None else message[1:]

        def tell(self, *failure):
            self.told.append(failure)

        noticing = contextlib.nullcontext

    follower = Follower(wire := Wire(), engine)
    wire.messages += [("value", ((), ((3, 1, None),))), ("value", ((), ((3, 2, None),)))]
    follower.compare(plan)
    with pytest.raises(RuntimeError, match="process 1 plans"):
        follower.compare(plan)
    wire.messages += [("call", False, 0, "step"), ("end", False)]
    with pytest.raises(RuntimeError, match="process 1 failed: 0; the processes no longer agree"):
        follower.run()
    assert [(number, call) for number, call, _ in wire.told] == [(0, 1)]
    wire.messages += [("call", True, 0, "add", {}, False)]
    with pytest.raises(RuntimeError, match="process 1 did not fail, and the first one did"):
        Follower(wire, engine).run()
