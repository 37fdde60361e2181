"""`kvjax batch`: its options, its errors, a full disk, Ctrl-C, and a job that is really killed."""

from __future__ import annotations

import errno
import json
import os
import re
import signal
import subprocess
import sys
import time

import pytest

from kvjax.engine.engine import Engine
from kvjax.models.loading import load
from kvjax.serving import run_batch
from kvjax.serving.batch.records import Defaults

pytestmark = pytest.mark.bits

PAGES = ("--page-size", "16", "--prefill-chunk", "64")
START = [sys.executable, "-c", "from kvjax.serving.cli import main; main()"]
RECORDS = [
    {"id": f"r{n}", "prompt": "lantern marble " * (n % 7 + 1), "temperature": float(n % 2), "logprobs": n % 5 == 0} for n in range(40)
]
RECORDS[11] = {"id": "r11", "prompt": [1] * 500}
RECORDS[23] = {"id": "r23", "message": "x"}


def write(path, records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.long
def test_batch_hands_over_its_options(kvjax, model_folder, tmp_path):
    records = [{"id": "a", "prompt": "amber basil"}, {"custom_id": "b", "body": {"prompt": "coral delta", "logprobs": 0}}]
    source = write(tmp_path / "in.jsonl", records)
    sampling = ("--max-new-tokens", 7, "--temperature", 0.7, "--seed", 3, "--dtype", "bfloat16")
    pool = ("--pages", 20, "--max-batch", 2, *PAGES)
    arguments = ("batch", source, "--out", tmp_path / "out.jsonl", "--model", model_folder, "--policy", "window:4+8", *sampling, *pool)
    arguments += ("--prefill", "window:1+4")
    status, out, err = kvjax(*arguments)
    assert status == 0, err
    sizes = {"pages": 20, "page_size": 16, "prefill_chunk": 64, "batch_buckets": (2,)}
    engine = Engine(load(model_folder, dtype="bfloat16"), "window:4+8", prefill="window:1+4", **sizes)
    defaults = Defaults(max_new_tokens=7, temperature=0.7, seed=3)
    expected = {answer.get("id"): answer for answer in run_batch(records, engine, defaults=defaults)}
    plain, openai = lines(tmp_path / "out.jsonl")
    assert plain == expected["a"]
    assert openai["response"]["body"]["choices"] == expected[openai["id"]]["response"]["body"]["choices"]
    assert openai["response"]["body"]["model"] == str(model_folder)
    assert re.search(r"generated tokens +14\n", out)
    assert "window:1+4 prefill" in err
    assert "20 pages of 16 tokens" in err
    other = [answer["text"] for answer in run_batch(records[:1], engine, defaults=Defaults(max_new_tokens=7, temperature=0.7, seed=4))]
    assert other != [plain["text"]]
    assert kvjax(*arguments)[0] == 2
    assert kvjax(*arguments, "--overwrite")[0] == 0


@pytest.mark.long
def test_replicas_share_a_job_and_may_be_fewer_when_it_goes_on(kvjax, model_folder, tmp_path, monkeypatch):
    from kvjax.serving.batch import journal

    source = write(tmp_path / "in.jsonl", [*RECORDS[:9], RECORDS[23]])
    arguments = ("batch", source, "--model", model_folder, "--max-new-tokens", 4, "--max-batch", 2, "--pages", 20, *PAGES)
    assert kvjax(*arguments, "--out", tmp_path / "one.jsonl")[0] == 0
    expected = lines(tmp_path / "one.jsonl")
    status, out, err = kvjax(*arguments, "--out", tmp_path / "two.jsonl", "--data", 2)
    assert status == 0, err
    assert "20 pages of 16 tokens in each of 2 replicas" in err
    assert lines(tmp_path / "two.jsonl") == expected
    append, calls = journal.Journal._append, []

    def once(*arguments):
        calls.append(arguments)
        return append(*arguments) if len(calls) < 6 else 1 / 0

    with monkeypatch.context() as patched:
        patched.setattr(journal.Journal, "_append", once)
        assert kvjax(*arguments, "--out", tmp_path / "three.jsonl", "--data", 2)[0] == 1
    status, out, err = kvjax(*arguments, "--out", tmp_path / "three.jsonl")
    assert status == 0, err
    assert "from an earlier run" in out
    assert lines(tmp_path / "three.jsonl") == expected
    status, _, err = kvjax(*arguments, "--out", tmp_path / "four.jsonl", "--data", 5, "--tensor", 2)
    assert status == 2
    assert "data 5 x tensor 2 x context 1 needs 10 devices, and there are 8" in err


def test_a_misspelt_field_is_reported_with_the_one_that_was_meant(kvjax, model_folder, tmp_path):
    source = write(tmp_path / "in.jsonl", [{"id": 1, "promt": "amber"}])
    status, _, err = kvjax("batch", source, "--out", tmp_path / "out.jsonl", "--model", model_folder, *PAGES)
    assert status == 0
    assert "unknown or unsupported field 'promt'; did you mean 'prompt'?" in err


def test_batch_prints_the_first_errors_and_fails_on_request(kvjax, model_folder, tmp_path):
    records = [{"id": "good", "prompt": "amber", "max_new_tokens": 2, "store": True}, *({"id": n, "shape": n} for n in range(5))]
    source = write(tmp_path / "in.jsonl", records)
    arguments = ("batch", source, "--out", tmp_path / "out.jsonl", "--model", model_folder, *PAGES)
    status, out, err = kvjax(*arguments)
    assert status == 0
    assert "1 pages of 16 tokens" in err, "the pool is sized by the records"
    assert re.findall("^line (.*)$", err, re.MULTILINE) == [f"{line}: unknown or unsupported field 'shape'" for line in (2, 3, 4)]
    assert re.search(r"^and 2 more with an error; see .*out\.jsonl$", err, re.MULTILINE)
    assert re.search(r"ignored fields +store \(1 record\)", out)
    assert kvjax(*arguments, "--overwrite", "--fail-on-error")[0] == 1
    assert len(lines(tmp_path / "out.jsonl")) == 6
    write(source, records[:1])
    status, _, err = kvjax(*arguments, "--overwrite", "--fail-on-error")
    assert status == 0
    assert "line" not in err
    source.write_text("{\n", encoding="utf-8")
    _, _, err = kvjax(*arguments, "--overwrite")
    assert re.search("^input line 1: the line is not JSON", err, re.MULTILINE), "the line is named once"


@pytest.mark.long
@pytest.mark.quick_but("--reuse")
@pytest.mark.parametrize("way", ["--reuse", "--reuse-any"])
def test_batch_finds_what_records_share_and_says_so(kvjax, model_folder, tmp_path, monkeypatch, way):
    from kvjax.serving import progress

    monkeypatch.setattr(progress, "LOG_SECONDS", -1.0)
    records = [{"id": n, "prompt": "lantern marble " * 20 + f"question {n}", "max_new_tokens": 3} for n in range(4)]
    source = write(tmp_path / "in.jsonl", records)
    arguments = ("batch", source, "--model", model_folder, "--max-batch", 1, "--page-size", 16, "--prefill-chunk", 16)
    status, out, err = kvjax(*arguments, "--out", tmp_path / "out.jsonl", way, "--host-memory", "1MB", "--progress")
    assert status == 0, err
    assert re.search(r"prompt tokens .*\([0-9]+ of this run were found, not computed\)", out)
    assert re.search(r"with computed prompt tokens, [0-9.,]+ with all prompt tokens", out)
    assert re.search(r"^[1-4]/4 records, .* found.*\n.*fetching them took.*\ndevice: .*\nhost: .*pages kept", err, re.MULTILINE)
    assert kvjax(*arguments, "--out", tmp_path / "plain.jsonl")[0] == 0
    assert lines(tmp_path / "out.jsonl") == lines(tmp_path / "plain.jsonl")


@pytest.mark.long
def test_a_job_begun_with_other_pages_counting_is_not_continued(kvjax, model_folder, tmp_path, monkeypatch):
    from kvjax.serving.batch import journal

    source = write(tmp_path / "in.jsonl", RECORDS[:3])
    arguments = ("batch", source, "--out", tmp_path / "out.jsonl", "--model", model_folder, "--max-new-tokens", 2, *PAGES)
    with monkeypatch.context() as patched:
        patched.setattr(journal.Journal, "_append", lambda *_: 1 / 0)
        assert kvjax(*arguments)[0] == 1
    status, _, err = kvjax(*arguments, "--reuse-any")
    assert status == 2
    assert "was begun with no --reuse-any, and this run has --reuse-any" in err
    assert kvjax(*arguments, "--reuse")[0] == 0


def test_stores_are_shown_only_where_there_are_any(kvjax, model_folder, tmp_path):
    source = write(tmp_path / "in.jsonl", RECORDS[:1])
    status, _, err = kvjax("batch", source, "--out", tmp_path / "out.jsonl", "--model", model_folder, "--progress")
    assert status == 2
    assert "give --reuse, --host-memory or --disk, too" in " ".join(err.split())


@pytest.mark.parametrize("kept", [("--no-reuse",), ()])
def test_progress_shows_where_the_pages_of_the_pool_lie(kvjax, model_folder, tmp_path, monkeypatch, kept):
    from kvjax.serving import progress

    monkeypatch.setattr(progress, "LOG_SECONDS", -1.0)
    source = write(tmp_path / "in.jsonl", [{"id": n, "prompt": "lantern marble " * 40, "max_new_tokens": 3} for n in range(2)])
    sizes = ("--max-batch", 1, "--page-size", 16, "--prefill-chunk", 16, "--pages", 2, "--host-memory", "1MB")
    status, _, err = kvjax("batch", source, "--out", tmp_path / "out.jsonl", "--model", model_folder, *sizes, *kept, "--progress")
    assert status == 0, err
    above = "[0-2]/2 records, .*\n" if kept else "host: .*\n"
    shown = re.findall(rf"^{above}pool: 2 pages on the device, ([0-9]+) in host memory; [0-9.,]+ MB moved", err, re.MULTILINE)
    assert len(shown) > 3, "at every line of the log, not only at the end"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--host-memory", "1KB"), "--host-memory of 1,000 is less than one page of every layer group"),
        (("--disk", "{}/pages", "--disk-size", "1KB"), "--disk-size of 1,000 is less than one page"),
        (("--device-memory", "1KB"), "--device-memory of 1,000 holds no page"),
        (("--device-memory", "1MB", "--pages", "3"), "--pages 3 and --device-memory 1,000,000 both give the pool's size"),
        (("--prefill-chunk", "24"), "--prefill-chunk 24"),
        (("--host-memory", "100TB"), "--host-memory of 100,000,000,000,000 is more than this machine's memory"),
    ],
)
def test_errors_about_sizes_name_the_options(kvjax, model_folder, tmp_path, options, said):
    source = write(tmp_path / "in.jsonl", RECORDS[:1])
    named = [option.format(tmp_path) for option in options]
    status, _, err = kvjax("batch", source, "--out", tmp_path / "out.jsonl", "--model", model_folder, *PAGES, *named)
    assert status == 2
    assert said in err
    assert not re.search("host_bytes|disk_bytes|device_bytes|prefill_chunk|page_size", err)


def test_a_pool_too_small_for_every_record_fails(kvjax, model_folder, tmp_path):
    records = [{"id": n, "prompt": "lantern marble " * 30} for n in range(2)]
    source = write(tmp_path / "in.jsonl", records)
    arguments = ("batch", source, "--out", tmp_path / "out.jsonl", "--model", model_folder, "--pages", 1, *PAGES)
    status, _, err = kvjax(*arguments)
    assert status == 1
    assert "no record fits into the pool: give more --pages, --device-memory or --host-memory" in err
    write(source, [*records, {"id": "short", "prompt": "amber", "max_new_tokens": 2}])
    assert kvjax(*arguments, "--overwrite")[0] == 0


def test_batch_decodes_as_many_together_as_it_is_told(kvjax, model_folder, tmp_path, monkeypatch):
    from kvjax.serving.batch import job as batch
    from kvjax.serving.batch import results

    calls = []
    monkeypatch.setattr(batch, "run_records", lambda *args, **options: calls.append((args, options)) or results.Summary())
    source = write(tmp_path / "in.jsonl", RECORDS)
    arguments = ("batch", source, "--out", tmp_path / "out.jsonl", "--model", model_folder, "--max-batch", 12, "--pages", 4, *PAGES)
    assert kvjax(*arguments, "--steps-per-launch", 8)[0] == 0
    (((_, _, (engine,)), options),) = calls
    assert (engine.batch_buckets, options["slots"], options["steps_per_launch"]) == ((12,), 12, 8)


def test_a_batch_job_on_a_full_disk_is_one_line_and_goes_on_later(kvjax, model_folder, tmp_path, monkeypatch):
    from kvjax.serving.batch import journal

    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    source, out_path = write(tmp_path / "in.jsonl", RECORDS[:3]), tmp_path / "out.jsonl"
    arguments = ("batch", source, "--out", out_path, "--model", model_folder, "--max-new-tokens", 2, "--pages", 40, *PAGES)
    monkeypatch.setattr(journal.os, "fsync", full)
    status, _, err = kvjax(*arguments)
    assert status == 1
    assert err.splitlines()[1:] == [
        f"kvjax: no space is left on the disk (writing {out_path}.partial): free some, then run the same command again"
    ]
    monkeypatch.undo()
    assert kvjax(*arguments)[0] == 0
    assert len(lines(out_path)) == 3


@pytest.mark.long
def test_a_killed_job_ends_as_an_uninterrupted_one(kvjax, model_folder, tmp_path):
    source = write(tmp_path / "in.jsonl", RECORDS)
    options = ("--model", model_folder, "--policy", "window:4+8", "--max-batch", 2, "--max-new-tokens", 60, "--pages", 40, *PAGES)
    status, out, err = kvjax("batch", source, "--out", tmp_path / "whole.jsonl", *options)
    assert status == 0, err
    assert "40 (2 errors)" in out

    out_path, partial = tmp_path / "out.jsonl", tmp_path / "out.jsonl.partial"
    command = [*START, "batch", str(source), "--out", str(out_path), *map(str, options)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as job:
        deadline = time.monotonic() + 120
        # The header, the record that is wrong as it stands, and a few answers.
        while job.poll() is None and time.monotonic() < deadline and not (partial.exists() and partial.read_bytes().count(b"\n") >= 6):
            time.sleep(0.005)
        job.send_signal(signal.SIGKILL)
        _, err = job.communicate()
    assert job.returncode == -signal.SIGKILL, err
    assert not out_path.exists()
    done = partial.read_bytes()
    finished = done.count(b"\n") - 1
    assert 5 <= finished < len(RECORDS), "the job was not killed in the middle"
    partial.write_bytes(done[: done.rindex(b"\n") - 10])  # tear the last line, as a kill inside a write does

    again = subprocess.run(command, capture_output=True, text=True, env=os.environ, check=False)
    assert again.returncode == 0, again.stderr
    assert f"40 (2 errors, {finished - 1} from an earlier run)" in again.stdout
    assert out_path.read_text() == (tmp_path / "whole.jsonl").read_text()
    assert not partial.exists()
    assert [line["id"] for line in lines(out_path)] == [record["id"] for record in RECORDS]
    errors = {line["id"]: line["error"] for line in lines(out_path) if line["error"]}
    assert set(errors) == {"r11", "r23"}

    status, _, err = kvjax("batch", source, "--out", out_path, *options)
    assert status == 2
    assert "--overwrite" in err


def test_ctrl_c_says_how_to_go_on(kvjax, model_folder, tmp_path, monkeypatch):
    from kvjax.serving.batch import job as batch

    def interrupted(*_, **__):
        raise KeyboardInterrupt
        yield

    monkeypatch.setattr(batch, "run", interrupted)
    source = write(tmp_path / "in.jsonl", RECORDS)
    status, _, err = kvjax("batch", source, "--out", tmp_path / "out.jsonl", "--model", model_folder, *PAGES, "--pages", 40)
    assert status == 130
    assert "run the same command again" in err
    assert (tmp_path / "out.jsonl.partial").exists()
