"""Batch jobs on a local Ray cluster: the output is that of `run_file`, whatever dies meanwhile."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import os
import random
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from types import SimpleNamespace

import numpy as np
import psutil
import pyarrow.parquet
import pytest
import ray

from kvjax.serving.batch import ray as on_ray
from kvjax.serving.batch.file_jobs import FileJob
from kvjax.serving.batch.files import Reading, numbered
from kvjax.serving.batch.job import run_file
from kvjax.serving.batch.partial import Partial
from kvjax.serving.batch.records import Defaults
from kvjax.serving.batch.results import Result
from kvjax.serving.batch.setup import Setup

pytestmark = pytest.mark.bits

DEFAULTS = Defaults(max_new_tokens=12)
START = [sys.executable, "-c", "from kvjax.serving.cli import main; main()", "batch"]
KILLS = 30


def records(count):
    """Plain records and OpenAI requests, greedy and drawn. Some are wrong: unknown fields, which this process sees, or
    too long, which a worker sees."""
    made = []
    for number in range(count):
        record = {"id": f"r{number}", "prompt": "amber basil coral " * (number % 4 + 1), "max_new_tokens": 3 + number % 20}
        if number % 5 == 1:
            record |= {"temperature": 0.9, "top_k": 30, "logprobs": True}
        if number % 5 == 2:
            record = {"custom_id": f"o{number}", "body": {"messages": [{"role": "user", "content": f"delta {number}"}], "max_tokens": 9}}
        if number % 11 == 3:
            record["unknown"] = number
        if number % 11 == 8:
            record = {"id": number, "prompt": "amber " * 600}  # longer than the model's positions
        made.append(record)
    return made


def write(path, made):
    path.write_text("\n".join([*map(json.dumps, made), "", "this is not JSON", ""]))
    return path


def without_times(text):
    return json.loads(text, object_hook=lambda fields: {key: value for key, value in fields.items() if key != "created"})


def answers(path):
    """The output's lines, without the times in OpenAI answers."""
    if path.suffix == ".parquet":
        return [without_times(row["answer"]) for _, _, row in numbered(path)]
    return [without_times(line) for line in path.read_text().splitlines()]


MADE = [{"id": f"r{number}", "prompt": "amber", "max_new_tokens": 2} for number in range(6)]


def put(source, made):
    """An input with these records, JSONL or Parquet."""
    if source.suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(made), source, row_group_size=2)
    else:
        source.write_text("".join(json.dumps(each) + "\n" for each in made))
    return source


@pytest.fixture
def setup(model_folder):
    return Setup(str(model_folder), policy="window:8+24", slots=3, page_size=16, prefill_chunk=64)


def run_here(setup, source, out):
    model = setup.load()
    sized = setup.sized(model, Reading(source).records(DEFAULTS))
    return run_file(source, out, sized.engines(model), slots=setup.slots, defaults=DEFAULTS)


@pytest.fixture(scope="module")
def ray_apart():
    """Whatever Ray writes goes to a folder of its own, not to the user's. The path is short, because Ray makes sockets
    below it."""
    folder = tempfile.mkdtemp(prefix="ray-")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_TMPDIR", folder)
        patch.setenv("RAY_AUTH_TOKEN", secrets.token_hex(32))
        patch.delenv("RAY_ADDRESS", raising=False)
        yield
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module")
def cluster(ray_apart):
    """A Ray cluster with two CPUs, for all jobs of this module. None of its processes is left at the end."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    started = psutil.Process().children(recursive=True)
    yield
    ray.shutdown()
    _, alive = psutil.wait_procs(started, timeout=20)
    assert not [process for process in alive if "ray" in " ".join(process.cmdline())]


def replicas_at_work():
    """The worker processes of this module's cluster that answer a block just now."""
    found = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            title = " ".join(process.cmdline())
            if "Replica" in title and ".submit" in title:
                found.append(process)
    return found


def kill_one(draw=random):
    """Kill a worker while it runs a block; returns how many were killed. Between two blocks there is none to kill."""
    working = replicas_at_work()
    if working:
        os.kill(draw.choice(working).pid, signal.SIGKILL)
    return min(1, len(working))


def on_results(monkeypatch, do):
    """Call `do` with the number of results in the partial file, after each."""
    append, count = Partial.append, itertools.count(1)

    def counted(self, result):
        append(self, result)
        do(next(count))

    monkeypatch.setattr(Partial, "append", counted)


@pytest.mark.long
@pytest.mark.timeout(900)  # on a busy machine, the processes of a cluster take minutes to start
def test_a_small_job_on_a_cluster(cluster, setup, tmp_path):
    """A worker answers what this process would, in the order of the input, and a record that is wrong is an error of
    its own."""
    source = write(tmp_path / "in.jsonl", records(4))
    setup = dataclasses.replace(setup, slots=2)
    summary = on_ray.run_on_ray(source, tmp_path / "out.jsonl", setup, defaults=DEFAULTS)
    here = run_here(setup, source, tmp_path / "here.jsonl")
    assert answers(tmp_path / "out.jsonl") == answers(tmp_path / "here.jsonl")
    assert (summary.records, summary.errors) == (here.records, here.errors) == (5, 2)


@pytest.mark.long
def test_a_dead_process_and_a_dead_worker_lose_and_double_no_record(cluster, setup, tmp_path, monkeypatch):
    """A job that was begun in this process is interrupted, and continued on Ray. There a worker is killed when some of
    its block's answers have come."""
    made = [{**record, "id": str(record["id"])} for record in records(40) if "custom_id" not in record and "unknown" not in record]
    rows, names = [*made, {"id": "bad"}], ("id", "prompt", "max_new_tokens", "temperature", "top_k", "logprobs")
    columns = {name: [row.get(name) for row in rows] for name in names}
    pyarrow.parquet.write_table(pyarrow.table(columns), tmp_path / "in.parquet", row_group_size=7)
    source, out, kills = tmp_path / "in.parquet", tmp_path / "out.parquet", 0

    def die(count):
        if count == 5:
            raise KeyboardInterrupt

    def disturb(count):
        nonlocal kills
        if count >= 3 and not kills:
            kills = kill_one()

    with monkeypatch.context() as patch:
        on_results(patch, die)
        with pytest.raises(KeyboardInterrupt):
            run_here(setup, source, out)
    with monkeypatch.context() as patch:
        patch.setattr(on_ray, "BLOCKS_PER_REPLICA", 1)
        on_results(patch, disturb)
        summary = on_ray.run_on_ray(source, out, setup, defaults=DEFAULTS)
    assert kills == 1
    here = run_here(setup, source, tmp_path / "here.jsonl")
    assert [row["id"] for _, _, row in numbered(out)] == [*(record["id"] for record in made), "bad"]
    assert answers(out) == answers(tmp_path / "here.jsonl")
    assert summary.earlier == 5
    assert (summary.records, summary.errors, summary.generated_tokens) == (here.records, here.errors, here.generated_tokens)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["here.jsonl", "in.parquet", "out.parquet"]


@pytest.mark.long
def test_what_is_wrong_in_a_worker_is_said_as_it_is_here(cluster, setup, tmp_path):
    wrong = dataclasses.replace(setup, page_size=24)
    with pytest.raises(ValueError, match=r"^prefill_chunk 64") as here:
        wrong.engines(wrong.load())
    with pytest.raises(ValueError, match=r"^prefill_chunk 64") as there:
        on_ray.run_on_ray(write(tmp_path / "in.jsonl", records(3)), tmp_path / "out.jsonl", wrong)
    assert str(there.value) == str(here.value)
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]


@pytest.mark.long
@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_an_input_that_changes_is_refused_on_a_cluster_as_it_is_here(cluster, setup, tmp_path, monkeypatch, suffix):
    source, answers_of = put(tmp_path / f"in.{suffix}", MADE), on_ray._answers

    def changed(*given):
        put(source, MADE[::-1])
        return answers_of(*given)

    monkeypatch.setattr(on_ray, "_answers", changed)
    with pytest.raises(ValueError, match=rf"^{source}, line 1, has changed since the job read it"):
        on_ray.run_on_ray(source, tmp_path / "out.jsonl", setup, defaults=DEFAULTS)
    assert not (tmp_path / "out.jsonl").exists()


# Without a cluster


class Here(on_ray.Replica):
    """A replica in this process. begun: how often each block and record were begun before."""

    def __init__(self, setup, source, begun):
        super().__init__(setup, on_ray.Place(source, DEFAULTS, source.parent / "none", 0.0), None)
        self.attempts = on_ray.Attempts()
        for what, times in begun.items():
            for _ in range(times):
                self.attempts.begin(what)

    def _begun(self, kind, line):
        return self.attempts.begin((kind, line))

    def answers(self, block):
        outputs = self({"offset": [block["offset"]], **{name: [np.array(block[name])] for name in ("lines", "digests")}})
        return {result.line: result for result in (on_ray._result(row["result"][0]) for row in outputs)}


def outline_of(source):
    return on_ray.Outline.of(FileJob(source, source.with_name("out.jsonl"), DEFAULTS))


OTHERS = {
    "order": ([*MADE[:3], MADE[4], MADE[3], MADE[5]], 4),
    "content": ([*MADE[:5], MADE[5] | {"prompt": "basil"}], 6),
    "shorter": (MADE[:4], 5),
    "earlier": ([{"id": "new", "prompt": "amber amber", "max_new_tokens": 2}, *MADE], 1),
}


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
@pytest.mark.parametrize(("made", "line"), OTHERS.values(), ids=OTHERS)
def test_an_input_that_changes_while_a_job_runs_is_refused_and_no_wrong_answer_is_kept(setup, tmp_path, monkeypatch, suffix, made, line):
    """Each of two blocks reads the input by itself. Another input comes before the first block, or between the two."""
    source, setup = put(tmp_path / f"in.{suffix}", MADE), dataclasses.replace(setup, slots=3)

    def answers_of(left, sized, place, replicas, _):
        replica = Here(sized, source, {})
        for number, block in enumerate(on_ray._blocks(left, setup.slots, replicas)):
            if number == changed:
                put(source, made)
            yield from replica.answers(block).values()

    without_cluster(monkeypatch, answers_of)
    for changed in (0, 1):
        put(source, MADE)
        out = tmp_path / f"out-{changed}.jsonl"
        with pytest.raises(ValueError, match=rf"in\.{suffix}, line \d, has changed since the job read it: give the file as it was") as said:
            on_ray.run_on_ray(source, out, setup, defaults=DEFAULTS)
        assert f"line {line if changed == 0 or line > 3 else 4}," in str(said.value)
        assert not out.exists()
        kept = [json.loads(text) for text in (tmp_path / f"out-{changed}.jsonl.partial").read_text().splitlines()[1:]]
        assert all(entry["output"]["id"] == f"r{entry['line'] - 1}" for entry in kept)
        put(source, MADE)
        changed = None
        summary = on_ray.run_on_ray(source, out, setup, defaults=DEFAULTS)
        assert (summary.records, summary.earlier, summary.errors) == (6, len(kept), 0)
        assert [answer["id"] for answer in answers(out)] == [f"r{number}" for number in range(6)]


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_an_input_that_changes_before_its_pool_is_sized_is_refused(setup, tmp_path, suffix):
    place = on_ray.Place(put(tmp_path / f"in.{suffix}", MADE), DEFAULTS, tmp_path / "none", 0.0)
    job = FileJob(place.source, tmp_path / "out.jsonl", DEFAULTS)
    on_ray.Outline.of(job)
    described = job.reading.described()
    assert len(list(on_ray._same_records(place, described))) == 6
    if suffix == "jsonl":
        put(place.source, [*MADE, {"id": "behind", "prompt": "amber"}])
        assert len(list(on_ray._same_records(place, described))) == 7, "lines behind those that the job read change none of them"
    put(place.source, MADE[::-1])
    with pytest.raises(ValueError, match=rf"in\.{suffix} has changed since this job read it: run again when it is complete"):
        on_ray._scout(setup, place, described)


def test_an_input_that_is_gone_is_named(setup, tmp_path):
    source = put(tmp_path / "in.jsonl", MADE)
    (block,) = on_ray._blocks(outline_of(source).spots, 6, 1)
    replica = Here(dataclasses.replace(setup, pages=20), source, {})
    source.unlink()
    with pytest.raises(ValueError, match=r"No such file or directory: '.*in\.jsonl'"):
        replica.answers(block)


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_a_replica_reads_its_own_lines_wherever_they_begin(setup, tmp_path, suffix):
    made = [{"id": f"r{number}", "prompt": "amber " * (number + 1), "max_new_tokens": 2} for number in range(12)]
    source = tmp_path / f"in.{suffix}"
    if suffix == "jsonl":
        source.write_text("\n\n".join(map(json.dumps, made)))  # a blank line after each record
    else:
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(made), source, row_group_size=5)
    outline = outline_of(source)
    assert list(outline.spots) == (list(range(1, 24, 2)) if suffix == "jsonl" else list(range(1, 13)))
    left = {line: spot for place, (line, spot) in enumerate(outline.spots.items()) if place not in (4, 7)}
    replica = Here(dataclasses.replace(setup, pages=20), source, {})
    found = [replica.answers(block) for block in on_ray._blocks(left, 3, 1)]
    assert [len(block) for block in found] == [3, 3, 3, 1]
    assert [result.output["id"] for block in found for _, result in sorted(block.items())] == [
        f"r{number}" for number in range(12) if number not in (4, 7)
    ]


def test_a_record_that_kills_its_worker_is_an_error_of_its_own(setup, tmp_path):
    source = write(tmp_path / "in.jsonl", [{"id": n, "prompt": "amber", "max_new_tokens": 2} for n in range(1, 4)])
    replica = Here(dataclasses.replace(setup, pages=20), source, {("block", 1): on_ray.DEATHS, ("record", 2): on_ray.DEATHS})
    (block,) = on_ray._blocks(outline_of(source).spots, 3, 1)
    found = replica.answers(block)
    assert found[2].output["error"] == "the worker process died 3 times while it ran this record by itself"
    assert [found[line].failed for line in (1, 2, 3)] == [False, True, False]
    assert replica.attempts.begin(("record", 1)) == 2, "the others ran by themselves, too"


def without_cluster(monkeypatch, answers_of):
    """What a job asks a cluster for is done in this process."""
    monkeypatch.setattr(on_ray, "_answers", answers_of)
    monkeypatch.setattr(on_ray, "_cluster", lambda *_: contextlib.nullcontext({"num_cpus": 1, "num_gpus": 0}))
    monkeypatch.setattr(ray, "remote", lambda **_: lambda scout: SimpleNamespace(remote=scout))
    monkeypatch.setattr(ray, "get", lambda found: found)


def test_answers_that_come_twice_or_not_at_all(setup, tmp_path, monkeypatch):
    """As when a worker dies whose second run gives its answers in another order than the first."""
    source, rounds = write(tmp_path / "in.jsonl", [{"id": f"r{n}", "prompt": "amber"} for n in range(4)]), []

    def answers_of(left, *_):
        rounds.append(list(left))
        coming = ([1, 2, 2, 1], [3], [])[len(rounds) - 1]
        return iter([Result(line, {"id": line}, failed=False) for line in coming])

    without_cluster(monkeypatch, answers_of)
    with pytest.raises(RuntimeError, match="no answer to any of 1 records"):
        on_ray.run_on_ray(source, tmp_path / "out.jsonl", setup)
    assert rounds == [[1, 2, 3, 4], [3, 4], [4]]
    kept = [json.loads(line) for line in (tmp_path / "out.jsonl.partial").read_text().splitlines()[1:]]
    assert [entry["line"] for entry in kept] == [5 + 1, 1, 2, 3], "the line that is not JSON, then each answer once"


def test_a_job_that_may_not_go_on_is_refused_before_a_worker_starts(setup, tmp_path, monkeypatch):
    source = write(tmp_path / "in.jsonl", records(4))
    with monkeypatch.context() as patch:
        patch.setattr(Partial, "append", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            run_here(setup, source, tmp_path / "out.jsonl")
    monkeypatch.setattr(on_ray, "_cluster", lambda *_: pytest.fail("a cluster was asked for"))
    with pytest.raises(ValueError, match=r"was begun with --policy window:8\+24, and this run has --policy top:8"):
        on_ray.run_on_ray(source, tmp_path / "out.jsonl", dataclasses.replace(setup, policy="top:8"), defaults=DEFAULTS)
    write(source, [*records(4), {"id": "r0", "prompt": "other"}])
    with pytest.raises(ValueError, match="the id 'r0' is given on line 1 and, with other content, on line 5"):
        on_ray.run_on_ray(source, tmp_path / "new.jsonl", setup, defaults=DEFAULTS)


def test_a_small_job_is_that_of_this_process(setup, tmp_path, monkeypatch):
    """A replica answers what this process would, block by block; the output has the order of the input, and a record
    that is wrong is an error of its own. `test_a_small_job_on_a_cluster` does it with processes of Ray."""
    source, setup = write(tmp_path / "in.jsonl", records(4)), dataclasses.replace(setup, slots=2)

    def answers_of(left, sized, place, replicas, _):
        replica = Here(sized, source, {})
        blocks = on_ray._blocks(left, setup.slots, replicas)
        assert len(blocks) > 1
        return (result for block in reversed(blocks) for result in replica.answers(block).values())

    without_cluster(monkeypatch, answers_of)
    summary = on_ray.run_on_ray(source, tmp_path / "out.jsonl", setup, defaults=DEFAULTS)
    here = run_here(setup, source, tmp_path / "here.jsonl")
    assert answers(tmp_path / "out.jsonl") == answers(tmp_path / "here.jsonl")
    assert (summary.records, summary.errors) == (here.records, here.errors) == (5, 2)


@pytest.mark.parametrize(
    ("left", "slots", "replicas", "sizes"), [(7, 3, 2, [3, 3, 1]), (100, 2, 1, [13] * 7 + [9]), (300, 1, 1, [32] * 9 + [12])]
)
def test_blocks_are_no_smaller_than_the_slots_and_no_larger_than_32_rounds(left, slots, replicas, sizes):
    blocks = on_ray._blocks({line: on_ray.Spot(10 * line, bytes([line % 256])) for line in range(1, left + 1)}, slots, replicas)
    assert [len(block["lines"]) for block in blocks] == sizes
    assert all(block["offset"] == 10 * block["lines"][0] for block in blocks)
    assert all(block["digests"] == [f"{line % 256:02x}" for line in block["lines"]] for block in blocks)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--replicas", 2), "is for a job on a Ray cluster: give --ray, too"),
        (("--ray", "--gpus-per-replica", 1.5), "--gpus-per-replica must be a fraction from 0 to 1 or a whole number, got 1.5"),
        (("--ray", "--disk", "pages", "--disk-size", "1GB"), "is for one engine: leave it out with --ray"),
        (("--ray", "--data", 2), "is for engines of one process: with --ray give --replicas"),
        (("--ray", "--reuse", "--progress"), "is for one engine: leave it out with --ray"),
    ],
)
def test_options_that_do_not_go_together(kvjax, model_folder, tmp_path, options, said):
    source = write(tmp_path / "in.jsonl", records(1))
    status, _, err = kvjax("batch", source, "--out", tmp_path / "out.jsonl", "--model", model_folder, *options)
    assert status == 2
    assert said in " ".join(err.split())


# Long


@pytest.mark.long
def test_thirty_killed_workers_change_nothing(cluster, setup, tmp_path, monkeypatch, capsys):
    source, draw, kills = write(tmp_path / "in.jsonl", records(90)), random.Random(3), 0
    run_here(setup, source, tmp_path / "here.jsonl")
    expected = answers(tmp_path / "here.jsonl")
    monkeypatch.setattr(on_ray, "BLOCKS_PER_REPLICA", 4)

    def disturb(count):
        nonlocal kills
        if kills < KILLS and draw.random() < 0.2:
            kills += kill_one(draw)

    on_results(monkeypatch, disturb)
    jobs = 0
    while kills < KILLS:
        out, jobs = tmp_path / f"out-{jobs}.jsonl", jobs + 1
        on_ray.run_on_ray(source, out, setup, replicas=2, defaults=DEFAULTS)
        assert answers(out) == expected
    with capsys.disabled():
        print(f"\n{kills} killed workers, {jobs} jobs of {len(expected)} records, 0 answers that differ")


@pytest.mark.long
def test_a_killed_command_leaves_no_process_and_goes_on(ray_apart, setup, model_folder, tmp_path):
    source, out = write(tmp_path / "in.jsonl", records(90)), tmp_path / "out.jsonl"
    run_here(setup, source, tmp_path / "here.jsonl")
    options = ["--model", model_folder, "--policy", "window:8+24", "--max-batch", 3, "--page-size", 16, "--prefill-chunk", 64]
    command = [*START, source, "--out", out, *options, "--max-new-tokens", 12, "--ray", "--cpus-per-replica", 0.5, "--replicas", 2]
    partial = tmp_path / "out.jsonl.partial"
    with subprocess.Popen(list(map(str, command)), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as job:
        while job.poll() is None and not (partial.exists() and partial.read_bytes().count(b"\n") > 20):
            time.sleep(0.02)
        children = psutil.Process(job.pid).children(recursive=True)
        job.kill()
        job.communicate()
    assert len(children) > 3
    assert not psutil.wait_procs(children, timeout=240)[1], "Ray's agents take a minute or two to notice"
    assert not out.exists()
    again = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False)
    assert again.returncode == 0, again.stderr
    assert "from an earlier run)" in again.stdout
    assert answers(out) == answers(tmp_path / "here.jsonl")
    crowd = subprocess.run([*map(str, command), "--overwrite", "--cpus-per-replica", "4000"], capture_output=True, text=True, check=False)
    assert crowd.returncode == 2
    assert "--replicas 2 with 4000 CPU each do not fit on this machine" in crowd.stderr
