"""`kvjax evaluate`: a whole run on a tiny model, one that is really killed, and what is refused."""

from __future__ import annotations

import csv
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console
from rich.table import Table

from kvjax.cost_model import evidence
from kvjax.serving.cli import app as cli
from kvjax.serving.cli import evaluate

pytestmark = pytest.mark.bits

START = [sys.executable, "-c", "from kvjax.serving.cli import main; main()"]
SIZES = ("--lengths", "256,320", "--trials", "4", "--distractors", "2", "--windows", "2", "--steps", "24", "--free-steps", "6")
PAGES = ("--max-batch", "4", "--again", "2", "--page-size", "16", "--prefill-chunk", "64")
POLICIES = ("-p", "dense", "-p", "window:140")
UNITS = 2 * (1 + 2)


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "story.txt"
    path.write_text("The lantern by the harbor went out, and nobody on the island knew why. " * 80)
    return path


@pytest.fixture(scope="module")
def arguments(model_folder, text):
    """Of a run, all but --out."""
    haystacks = ("--haystacks", "codes,loop")
    return ["evaluate", "--model", str(model_folder), "--text", str(text), *SIZES, *PAGES, *POLICIES, *haystacks]


def call(arguments, monkeypatch, capsys):
    """Exit status, stdout and stderr of a command run in this process."""
    monkeypatch.setattr(sys, "argv", ["kvjax", *map(str, arguments)])
    capsys.readouterr()
    with pytest.raises(SystemExit) as exit_:
        cli.main()
    out, err = capsys.readouterr()
    return exit_.value.code or 0, out, err


@pytest.fixture
def kvjax(monkeypatch, capsys):
    return lambda *given: call(given, monkeypatch, capsys)


@pytest.fixture(scope="module")
def whole(arguments, tmp_path_factory):
    """A run that ran to its end: its folder and what it printed."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["kvjax", *arguments, "--out", str(folder)])
        printed = []
        patch.setattr("rich.console.Console.print", lambda self, *things, **_: printed.extend(things))
        with pytest.raises(SystemExit) as exit_:
            cli.main()
    assert not exit_.value.code
    return folder, printed


def records(folder):
    header, *entries = map(json.loads, (folder / "records.jsonl").read_text().splitlines())
    return header, {entry["unit"]: entry["record"] | {"seconds": None, "took": None} for entry in entries}


def test_a_run_from_end_to_end(whole):
    folder, printed = whole
    names = {"records.jsonl", "evaluation.json", "evaluation.csv", "recall.png", "kl.png", "disagreements.png"}
    assert {path.name for path in folder.iterdir()} == names
    figures = json.loads((folder / "evaluation.json").read_text())
    assert figures["provenance"]["versions"]["jax"]
    assert figures["settings"]["lengths"] == [256, 320]
    assert figures["settings"]["text"] == ["story.txt"]
    assert len(figures["retrieval"]) == 2 * 2 * 3
    assert [row["policy"] for row in figures["forced"][:3]] == ["dense", "window:140", "dense again"]
    forced = {(row["length"], row["policy"]): row for row in figures["forced"]}
    for length in (256, 320):
        floor, narrow = (forced[length, name]["kl"]["value"] for name in ("dense again", "window:140"))
        assert floor < 1e-6 < 1e-3 < narrow
        assert forced[length, "window:140"]["keys_per_step"] == 140
        assert forced[length, "dense"]["keys_per_step"] == pytest.approx(length - 12, abs=1)
    assert {row["policy"] for row in figures["speed"]} == {"dense", "window:140", "dense again"}
    with open(folder / "evaluation.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == len(figures["retrieval"])
    assert rows[1]["describe"].startswith("window:128+12 (140 keys")
    assert [table.title.split(":")[0] for table in printed if isinstance(table, Table)][:2] == ["256 tokens", "320 tokens"]


def test_a_run_is_kept_for_auto(whole, arguments, kvjax, monkeypatch, tmp_path):
    """Of a finished run nothing is measured again."""
    folder = tmp_path / "run"
    shutil.copytree(whole[0], folder)
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    monkeypatch.setattr(evidence, "MIN_WINDOWS", 2)
    monkeypatch.setattr(evidence, "MIN_STEPS", 24)
    status, out, err = kvjax(*arguments, "--out", folder, "--record")
    assert status == 0, err
    (file,) = (tmp_path / evidence.EVIDENCE_FOLDER).glob("*.json")
    assert out.splitlines()[-1] == f"recorded: {file}"
    assert "auto (assured), up to 256 tokens: dense, nothing qualifies" in out
    rows = evidence.read_evidence(file)
    assert {(row.policy, row.length) for row in rows} == {("window:128+12", 256), ("window:128+12", 320)}
    assert {row.source for row in rows} == {str(folder / "evaluation.json")}


def test_a_run_that_could_not_be_kept_is_refused_before_it_begins(arguments, kvjax, monkeypatch, tmp_path):
    monkeypatch.setattr(Path, "home", lambda: Path("/dev/null"))
    monkeypatch.setattr(evidence, "MIN_WINDOWS", 2)
    monkeypatch.setattr(evidence, "MIN_STEPS", 24)
    status, _, err = kvjax(*arguments, "--out", tmp_path / "run", "--record")
    assert (status, "Invalid value for --record" in err, "/dev/null/.cache" in " ".join(err.split())) == (2, True, True), err
    assert not (tmp_path / "run").exists()


@pytest.mark.long
def test_every_policy_runs_over_each_cache_format_and_with_packed_weights_too(kvjax, model_folder, text, tmp_path):
    sizes = ("--lengths", 192, *SIZES[2:], *PAGES, "--policy", "window:64+12", "--haystacks", "codes")
    formats = ("--cache-format", "int8", "--cache-format", "k=int4:channel,v=int8:page")
    packed = ("--weights", "int8", "--weights", "fp8")
    status, _, err = kvjax("evaluate", "--model", model_folder, "--text", text, *sizes, *formats, *packed, "--out", tmp_path / "run")
    assert status == 0, err
    figures = json.loads((tmp_path / "run" / "evaluation.json").read_text())
    variants = (*formats[1::2], "weights int8", "weights fp8")
    arms = [f"{policy} @ {each}" for each in variants for policy in ("dense", "window:64+12")]
    forced = {row["policy"]: row for row in figures["forced"]}
    assert list(forced) == ["dense", "window:64+12", *arms, "dense again"]
    assert [row["policy"] for row in figures["retrieval"]] == list(forced)
    assert {row["policy"] for row in figures["speed"]} == set(forced)
    floor, fine, coarse = (forced[name]["kl"]["value"] for name in ("dense again", arms[0], arms[2]))
    assert floor < fine / 10 < fine < coarse
    of_int8, of_fp8 = (forced[name]["kl"]["value"] for name in (arms[4], arms[6]))
    assert floor < of_int8 / 10 < of_int8 < of_fp8
    assert all(forced[arms[n]]["keys_per_step"] == forced["window:64+12"]["keys_per_step"] == 76 for n in (3, 5, 7))
    assert figures["settings"]["cache_formats"] == list(formats[1::2])
    assert figures["settings"]["weights"] == ["int8", "fp8"]
    assert {row["describe"].partition(" (")[0] for row in figures["policies"]} == {"dense", "window:64+12"}


@pytest.mark.long
def test_a_finished_run_is_only_drawn_again(whole, arguments, kvjax, monkeypatch):
    folder, _ = whole
    before = (folder / "records.jsonl").read_bytes()
    (folder / "kl.png").unlink()
    monkeypatch.setattr("kvjax.evaluation.run.EvaluationRun.measure", lambda *_: pytest.fail("measured again"))
    status, out, _ = kvjax(*arguments, "--out", folder)
    assert status == 0
    assert (folder / "kl.png").exists()
    assert (folder / "records.jsonl").read_bytes() == before
    # Keys stand beside every name, the noise floor below.
    assert re.search(r"window:140 \(140\)", out)
    assert re.search(r"dense again \(noise\)", out)
    assert "of confident steps agree" in out


@pytest.mark.long
def test_a_killed_run_goes_on_and_says_the_same(whole, arguments, kvjax, monkeypatch, tmp_path):
    """Killed with SIGKILL after its second unit; the third is torn. Sums of records are those of a run that was not."""
    from kvjax.evaluation.run import EvaluationRun

    folder, done = tmp_path / "run", tmp_path / "run" / "records.jsonl"
    job = subprocess.Popen([*START, *arguments, "--out", str(folder)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 120
        while not (done.exists() and done.read_bytes().count(b"\n") >= 3):
            assert job.poll() is None, "the job ended before it could be killed"
            assert time.monotonic() < deadline
            time.sleep(0.05)
    finally:
        os.kill(job.pid, signal.SIGKILL)
        job.wait()
    kept = done.read_bytes().count(b"\n") - 1
    with open(done, "ab") as file:
        file.write(b'{"unit": "retrieval/256/need')
    measured = []
    measure = EvaluationRun.measure
    monkeypatch.setattr(EvaluationRun, "measure", lambda self, unit, advance: measured.append(unit.key) or measure(self, unit, advance))
    status, _, err = kvjax(*arguments, "--out", folder)
    assert status == 0, err
    assert 2 <= kept < UNITS
    assert len(measured) == UNITS - kept
    assert records(folder) == records(whole[0])


def test_an_interrupted_run_says_how_to_go_on(arguments, kvjax, monkeypatch, tmp_path):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("kvjax.evaluation.run.EvaluationRun.measure", interrupt)
    status, _, err = kvjax(*arguments, "--out", tmp_path / "run")
    assert status == 130
    assert "run the same command again to continue" in err


@pytest.mark.long
def test_another_run_does_not_go_on_with_the_records_of_this_one(whole, arguments, kvjax):
    status, _, err = kvjax(*arguments, "--seed", "1", "--out", whole[0])
    assert status == 2
    assert "was begun with seed 0, and this run has 1: run it as it was begun, or delete the file" in err


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (["-p", "window:100"], "leaves no window"),
        (["-p", " "], "policy ' ' is not understood"),
        (["--policies", "dense"], "--policies: is now -p or --policy, given once for each policy"),
        (["-p", "baselines", "-p", "top:4"], "each once, got dense, window:140, dense, window:640, top:4, mean:4, cascade:4/all+1bit"),
        (["--lengths", "1k"], "1,024 tokens is more than the model's 512 positions"),
        (["--tasks", "haiku"], "'haiku' is not known"),
        (["--haystacks", "hay"], "'hay' is not known"),
        (["--windows", "90"], "pass a longer text, or use fewer or shorter windows"),
        (["--steps", "300"], "use fewer steps"),
        (["--trials", "1"], "Invalid value for '--trials': must be a whole number from 2 to 65536, got 1"),
        (["--record"], "Invalid value for --record: needs at least 5 --windows of 256 --steps, got 2 of 24"),
        (["--record", "--cache-format", "int8"], "leave out --cache-format and --weights"),
    ],
)
def test_bad_input_is_one_line_that_names_it(arguments, kvjax, tmp_path, change, said):
    """More of it is in tests/serving/test_bad_command_lines.py."""
    status, _, err = kvjax(*arguments, "--out", tmp_path / "run", *change)
    assert status == 2
    assert said in " ".join(err.split())
    assert "Traceback" not in err
    assert not (tmp_path / "run").exists()


def test_a_batch_that_memory_does_not_hold_is_refused_before_it_begins(arguments, kvjax, monkeypatch, tmp_path):
    monkeypatch.setattr("kvjax.engine.memory.free_bytes", lambda device: 100_000)
    status, _, err = kvjax(*arguments, "--out", tmp_path / "run")
    assert status == 2
    assert re.search(r"4 contexts of 320 tokens take \d+ pages, and memory has room for \d+: use a smaller batch", err)


def test_help_names_every_task_and_haystack(kvjax):
    status, out, _ = kvjax("evaluate", "--help")
    assert status == 0
    for value in (*words_of_evaluation(), "records.jsonl"):
        assert value in re.sub(r"-\s+", "-", out)


def words_of_evaluation():
    from kvjax.evaluation.tasks import HAYSTACKS, TASKS

    return (*TASKS, *HAYSTACKS)


def test_records_of_something_else_are_left_alone(tmp_path):
    (tmp_path / "records.jsonl").write_text('{"format": "kvjax batch 1"}\n')
    with pytest.raises(ValueError, match="is not the records of a kvjax evaluate run"):
        evaluate.Records(tmp_path / "records.jsonl", {})


def test_records_of_kvjax_fidelity_go_on(tmp_path):
    """The former command's format, with a setting that there is no more."""
    before = evaluate.Records(tmp_path / "records.jsonl", {"seed": 0, "certified_steps": 32})
    before.append("unit 0", {"kind": "forced"})
    before.close()
    assert (tmp_path / "records.jsonl").read_text().startswith('{"format": "kvjax fidelity 3", "seed": 0, "certified_steps": 32, "crc": ')
    now = evaluate.Records(tmp_path / "records.jsonl", {"seed": 0})
    assert now.done == {"unit 0": {"kind": "forced"}}
    now.close()


def test_no_work_is_begun_after_the_given_time(tmp_path):
    """What is done is kept, and the next run goes on with it."""
    made, later = [], time.monotonic() + 3600
    units = [SimpleNamespace(key=f"unit {n}", work=1, length=256, task="", haystack="") for n in range(3)]

    def measure(unit, advance):
        made.append(unit.key)
        return {"kind": "forced"}

    run = SimpleNamespace(units=lambda: units, measure=measure, is_needed=lambda *_: True, release=lambda: None)
    path, console = tmp_path / "records.jsonl", Console(quiet=True)
    with pytest.raises(evaluate.OutOfTime, match="out of time with 3 of 3 pieces of work left"):
        evaluate.run_units(run, path, {}, console, time.monotonic() - 1)
    assert made == []
    assert len(evaluate.run_units(run, path, {}, console, later)) == 3
    assert len(evaluate.run_units(run, path, {}, console, time.monotonic() - 1)) == 3
    assert made == ["unit 0", "unit 1", "unit 2"]


RECORDED = ("--trials", "32", "--windows", "2", "--steps", "24", "--free-steps", "6", "--haystacks", "codes,loop", "--record")


@pytest.fixture(scope="module")
def recorded(model_folder, text, tmp_path_factory):
    """Runs `kvjax evaluate --record` in a folder: dense of the tiny model answers nothing."""
    home = tmp_path_factory.mktemp("home")

    def run(folder, *more):
        sizes = ("--lengths", "256", "--distractors", "2", *RECORDED, "--max-batch", "4", *PAGES[4:], *POLICIES)
        given = ["--model", str(model_folder), "--text", str(text), *sizes, "--out", str(folder), *more]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Path, "home", lambda: home)
            patch.setattr(evidence, "MIN_WINDOWS", 2)
            patch.setattr(evidence, "MIN_STEPS", 24)
            patch.setattr(sys, "argv", ["kvjax", "evaluate", *given])
            with pytest.raises(SystemExit) as exit_:
                cli.main()
        return exit_.value.code or 0

    return run


def test_a_recorded_run_ends_where_dense_clearly_cannot(recorded, tmp_path, capsys):
    """Each cell after its first quarter of 32 trials; the report says so, and the evidence has no counts."""
    assert recorded(tmp_path / "run") == 0
    out, err = capsys.readouterr()
    assert "at most 32 trials of each task; they end where they have decided about every policy" in err
    header, done = records(tmp_path / "run")
    cells = [f"retrieval/256/needle/{each}/{rows}" for each in ("codes", "loop") for rows in ("0/4", "4/8")]
    assert list(done) == ["forced/256///0/2", *cells]
    assert header["sequential"] is True
    assert "ended early: needle in loop at 256 tokens, after 8 of 32 trials: dense cannot" in out
    assert "auto (fast), up to 256 tokens: dense, nothing qualifies" in out
    figures = json.loads((tmp_path / "run" / "evaluation.json").read_text())
    assert {(row["planned_trials"], row["invalid_trials"]) for row in figures["retrieval"]} == {(32, 8)}
    assert "early end" in figures["rules"]
    fifths = [cell["trials"] for cell in figures["retrieval"][0]["by_depth"]]
    assert sum(fifths) == 8
    assert min(fifths) >= 1, "the first trials are of all depths"


def test_a_recorded_run_that_was_interrupted_goes_on_and_ends_where_a_whole_one_does(recorded, tmp_path, capsys, monkeypatch):
    from kvjax.evaluation.run import EvaluationRun

    assert recorded(tmp_path / "whole") == 0
    measure, left = EvaluationRun.measure, iter(range(3))

    def some(self, unit, advance):
        if next(left, None) is None:
            raise KeyboardInterrupt
        return measure(self, unit, advance)

    with monkeypatch.context() as patch:
        patch.setattr(EvaluationRun, "measure", some)
        assert recorded(tmp_path / "run") == 130
    assert len(records(tmp_path / "run")[1]) == 3
    capsys.readouterr()
    assert recorded(tmp_path / "run") == 0
    assert "Left, at the pace so far: at most about" in capsys.readouterr().err
    assert records(tmp_path / "run") == records(tmp_path / "whole")
    monkeypatch.setattr(EvaluationRun, "measure", lambda *_: pytest.fail("measured again"))
    assert recorded(tmp_path / "run") == 0


@pytest.mark.parametrize(
    ("first", "record", "found"), [(None, True, True), (None, False, False), (True, False, True), (False, True, False)]
)
def test_a_run_goes_on_as_it_was_begun(tmp_path, first, record, found):
    """With --record or without; files of earlier versions are of plain runs."""
    path = tmp_path / "records.jsonl"
    if first is not None:
        evaluate.Records(path, {"seed": 0} | ({"sequential": True} if first else {})).close()
    assert evaluate._is_sequential(path, record) is found
    if first is False:
        evaluate.Records(path, {"seed": 0, "sequential": False}).close()
        with pytest.raises(ValueError, match="was begun with sequential False, and this run has True"):
            evaluate.Records(path, {"seed": 0, "sequential": True})


@pytest.mark.parametrize(("former", "now"), [("fidelity --lengths 8k", "kvjax evaluate"), ("echo --help", "kvjax recall")])
def test_former_names_say_what_they_are_now(kvjax, former, now):
    status, _, err = kvjax(*former.split())
    assert (status, f"it is {now} now" in " ".join(err.replace("│", " ").split())) == (2, True), err
    with pytest.raises(ImportError, match=r"kvjax.fidelity is kvjax.evaluation now: panel is run"):
        __import__("kvjax.fidelity.panel")
    with pytest.raises(AttributeError, match=r"kvjax.fidelity is kvjax.evaluation now"):
        _ = __import__("kvjax").fidelity
