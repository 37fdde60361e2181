"""What cannot be the input or the output of a job is said before a model is loaded, and nothing is left behind."""

from __future__ import annotations

import gzip
import json
import os
import socket
import tempfile
import time

import pytest

from kvjax.models import loading
from kvjax.serving.batch.file_jobs import FileJob, check_paths
from kvjax.serving.batch.files import check_form, numbered
from kvjax.serving.batch.job import run_batch, run_file, run_records
from kvjax.serving.batch.partial import Partial
from kvjax.serving.batch.records import Defaults

RECORD = json.dumps({"id": "a", "prompt": "amber", "max_new_tokens": 2}) + "\n"


@pytest.fixture
def source(tmp_path):
    (tmp_path / "in.jsonl").write_text(RECORD)
    return tmp_path / "in.jsonl"


def make_loop(path):
    path.symlink_to(path.name)
    return path


def make_socket(path):
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(str(path))
    return path


def made(path, make):
    make(path)
    return path


OUTPUTS = {
    "device": (lambda folder: "/dev/full", "/dev/full is a device, and answers are written to files only"),
    "null": (lambda folder: "/dev/null", "/dev/null is a device"),
    "pipe": (lambda folder: made(folder / "pipe", os.mkfifo), "pipe is a pipe"),
    "pipe as partial": (lambda folder: made(folder / "o.partial", os.mkfifo).with_name("o"), r"o\.partial is a pipe"),
    "folder as partial": (lambda folder: made(folder / "o.partial", os.mkdir).with_name("o"), r"o\.partial is a folder"),
    "socket": (lambda folder: make_socket(folder / "s"), "s is a socket"),
    "loop": (lambda folder: make_loop(folder / "loop"), "loop is a link that leads back to itself"),
    "loop as partial": (lambda folder: make_loop(folder / "o.partial").with_name("o"), r"o\.partial is a link that leads back to itself"),
    "dangling partial": (
        lambda folder: made(folder / "o.partial", lambda path: path.symlink_to("nowhere")).with_name("o"),
        r"o\.partial is a link, and a job keeps its answers in a file of its own there; move it away",
    ),
    "folder": (lambda folder: folder, "is a folder; name a file to write"),
    "no folder": (lambda folder: folder / "none" / "out", "there is no folder"),
    "file as folder": (lambda folder: folder / "in.jsonl" / "out", "there is no folder"),
    "read-only": (lambda folder: "/proc/out.jsonl", "the folder /proc cannot be written to"),
    "link to a read-only folder": (lambda folder: made(folder / "link", lambda path: path.symlink_to("/proc/out")), "folder /proc cannot"),
    "long name": (lambda folder: folder / ("x" * 250), "File name too long"),
    "no name": (lambda folder: "", "the output has no name; name a file to write, for example --out answers.jsonl"),
    "root": (lambda folder: "/", "the output / is a folder; name a file to write"),
    "input": (lambda folder: folder / "in.jsonl", "is the input"),
    "link to the input": (lambda folder: made(folder / "link", lambda path: path.symlink_to("in.jsonl")), "is the input"),
    "input as partial": (
        lambda folder: made(folder / "o.partial", lambda path: path.hardlink_to(folder / "in.jsonl")).with_name("o"),
        "is the",
    ),
    "foreign partial": (lambda folder: made(folder / "o.partial", lambda path: path.write_text("notes\n")).with_name("o"), "not a partial"),
}


@pytest.mark.parametrize("name", OUTPUTS)
def test_what_cannot_be_the_output(kvjax, source, tmp_path, monkeypatch, name):
    make, said = OUTPUTS[name]
    out = make(tmp_path)
    monkeypatch.setattr(loading, "load", lambda *_, **__: pytest.fail("the model was loaded"))
    before = sorted(os.listdir(tmp_path))
    status, _, err = kvjax("batch", source, "--out", out, "--model", "needle", "--overwrite")
    assert (status, len(err.splitlines())) == (2, 1), err
    assert said.replace("\\", "") in err
    assert sorted(os.listdir(tmp_path)) == before
    assert source.read_text() == RECORD


def test_a_folder_that_may_not_be_written_to(source, tmp_path, monkeypatch):
    def denied(**_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(tempfile, "TemporaryFile", denied)
    with pytest.raises(ValueError, match=r"cannot be written to \(Permission denied\); choose another output"):
        check_paths(source, tmp_path / "out.jsonl", False)


def test_a_job_that_runs_is_seen_before_the_model_is_loaded(source, tmp_path, engine):
    running = Partial(tmp_path / "out.jsonl.partial", {"model": "m"})
    with pytest.raises(BlockingIOError, match="still running"):
        check_paths(source, tmp_path / "out.jsonl", False)
    running.close()


def gzipped(content):
    """Compressed without the time: the bytes are part of the names of tests, and each worker makes them itself."""
    return gzip.compress(content, mtime=0)


@pytest.mark.parametrize(
    ("content", "name", "said"),
    [
        (b"\x28\xb5\x2f\xfd....", "in.jsonl", "is zstd"),
        (b"PK\x03\x04....", "in.jsonl", "is zip"),
        (b"BZh91AY", "in.jsonl", "is bzip2"),
        (b"PAR1....", "in.jsonl", r"is Parquet, whose name must end in \.parquet"),
        (RECORD.encode("utf-16"), "in.jsonl", "is UTF-16 text"),
        (RECORD.encode("utf-16-le"), "in.jsonl", "in.jsonl is UTF-16 text;"),
        (RECORD.encode("utf-16-be"), "in.jsonl", "is UTF-16 text"),
        (RECORD.encode("utf-32"), "in.jsonl", "is UTF-32 text"),
        (RECORD.encode("utf-32-le"), "in.jsonl", "is UTF-32 text"),
        (RECORD.encode("utf-32-be"), "in.jsonl", "is UTF-32 text"),
        (bytes(100) + RECORD.encode(), "in.jsonl", "is binary data, with NUL bytes"),
        (gzipped(RECORD.encode("utf-16")), "in.jsonl.gz", "is UTF-16 text inside gzip"),
        (gzipped(RECORD.encode("utf-16-le")), "in.jsonl", "is UTF-16 text inside gzip"),
        (gzipped(b"PK\x03\x04...."), "in.jsonl.gz", "is zip inside gzip"),
        (gzipped(b"\x28\xb5\x2f\xfd...."), "in.jsonl.gz", "is zstd inside gzip"),
        (gzipped(b"PAR1...."), "in.jsonl.gz", "is Parquet inside gzip"),
        (gzipped(gzipped(RECORD.encode())), "in.jsonl.gz", "is gzip inside gzip"),
        (gzipped(b"in.jsonl".ljust(257, b"\0") + b"ustar  \0"), "in.tar.gz", "is tar inside gzip"),
        (gzipped(RECORD.encode() * 99)[:15], "in.jsonl.gz", "is damaged: gzip cannot read it"),
        (RECORD.encode(), "in.jsonl.gz", r"is not compressed by gzip, though its name ends in \.gz"),
        (b"", "in.jsonl", "is empty"),
    ],
)
def test_an_input_that_holds_no_lines_is_named(tmp_path, content, name, said):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=said):
        check_paths(tmp_path / name, tmp_path / "out.jsonl", False)


@pytest.mark.parametrize("content", [b"\xef\xbb\xbf\n", b"\xef\xbb\xbf", b"\xef\xbb\xbf \r\n\n", gzipped(b"\xef\xbb\xbf\n")])
def test_a_byte_order_mark_is_no_record(tmp_path, content):
    (tmp_path / "in.jsonl").write_bytes(content)
    with pytest.raises(ValueError, match="holds no records"):
        list(FileJob(tmp_path / "in.jsonl", tmp_path / "out.jsonl", Defaults()).records())


@pytest.mark.parametrize(
    "content", [b'{"a":1}\x00\n', b"\x00 not JSON\n", RECORD.encode(), "\ufeff".encode() + RECORD.encode(), b"1\n", b""]
)
def test_lines_that_are_only_bad_are_no_other_form(tmp_path, content):
    for packed in (content, gzip.compress(content)):
        (tmp_path / "in.jsonl").write_bytes(packed)
        check_form(tmp_path / "in.jsonl")


def test_an_input_that_can_be_read_once_is_refused_and_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    began = time.monotonic()
    with pytest.raises(ValueError, match="is a pipe, and a job that goes on reads its input again"):
        check_paths(tmp_path / "pipe", tmp_path / "out.jsonl", False)
    with pytest.raises(ValueError, match="is a device"):
        check_paths(tmp_path.__class__("/dev/null"), tmp_path / "out.jsonl", False)
    with pytest.raises(ValueError, match="is a folder"):
        check_paths(tmp_path, tmp_path / "out.jsonl", False)
    assert time.monotonic() - began < 5


def test_gzip_is_read_and_written(engine, tmp_path):
    records = [{"id": n, "prompt": "amber", "max_new_tokens": n + 1} for n in range(4)]
    text = "".join(json.dumps(record) + "\n" for record in records)
    (tmp_path / "in.jsonl").write_text(text)
    (tmp_path / "in.jsonl.gz").write_bytes(gzip.compress(text.encode()))
    (tmp_path / "packed.jsonl").write_bytes(gzip.compress(text.encode()[:50]) + gzip.compress(text.encode()[50:]))  # by its beginning
    run_file(tmp_path / "in.jsonl", tmp_path / "out.jsonl", engine)
    expected = (tmp_path / "out.jsonl").read_bytes()
    for name in ("in.jsonl.gz", "packed.jsonl"):
        run_file(tmp_path / name, tmp_path / f"{name}.out.jsonl.gz", engine)
        assert gzip.decompress((tmp_path / f"{name}.out.jsonl.gz").read_bytes()) == expected
    assert (tmp_path / "in.jsonl.gz.out.jsonl.gz").read_bytes() == (tmp_path / "packed.jsonl.out.jsonl.gz").read_bytes()
    data = (tmp_path / "in.jsonl.gz").read_bytes()
    for damaged in (data[:-12], data[:20] + bytes(8) + data[28:], data[:-6] + bytes(6)):
        (tmp_path / "in.jsonl.gz").write_bytes(damaged)
        with pytest.raises(ValueError, match=r"in\.jsonl\.gz is damaged: gzip cannot read it to its end"):
            list(numbered(tmp_path / "in.jsonl.gz"))


def test_an_id_given_twice_is_one_answer_or_no_job(kvjax, model_folder, tmp_path, monkeypatch):
    line = json.dumps({"custom_id": "x", "method": "POST", "url": "/v1/completions", "body": {"prompt": "a", "max_tokens": 2}}) + "\n"
    (tmp_path / "in.jsonl").write_text(line * 2)
    words = ("batch", tmp_path / "in.jsonl", "--out", tmp_path / "out.jsonl", "--model", model_folder, "--page-size", 16)
    status, out, err = kvjax(*words, "--prefill-chunk", 64, "--pages", 20)
    assert status == 0, err
    (answer,) = map(json.loads, (tmp_path / "out.jsonl").read_text().splitlines())
    assert (answer["custom_id"], answer["error"]) == ("x", None)
    assert "records            1 (0 errors)" in out
    assert "repeated lines     1: equal to an earlier line, whose answer is theirs" in out
    (tmp_path / "out.jsonl").unlink()
    (tmp_path / "in.jsonl").write_text(line + line.replace('"a"', '"b"'))
    monkeypatch.setattr(loading, "load", lambda *_, **__: pytest.fail("the model was loaded"))
    status, _, err = kvjax(*words)
    assert (status, sorted(path.name for path in tmp_path.iterdir())) == (2, ["in.jsonl"])
    assert "the id 'x' is given on line 1 and, with other content, on line 2" in err


def test_an_output_that_appears_before_or_while_the_job_runs_is_kept(engine, source, tmp_path, monkeypatch):
    out, append = tmp_path / "out.jsonl", Partial.append
    job = FileJob(source, out, Defaults())
    out.write_text("mine")
    with pytest.raises(ValueError, match=r"out\.jsonl exists; pass --overwrite"):
        run_records(job, list(job.records()), [engine])
    assert sorted(os.listdir(tmp_path)) == ["in.jsonl", "out.jsonl"]
    out.unlink()

    def appended(self, result):
        append(self, result)
        out.write_text("theirs")

    with monkeypatch.context() as patch:
        patch.setattr(Partial, "append", appended)
        with pytest.raises(ValueError, match=r"out\.jsonl has appeared while the job ran"):
            run_file(source, out, engine)
    assert out.read_text() == "theirs"
    out.rename(tmp_path / "moved")
    assert run_file(source, out, engine).earlier == 1
    assert run_file(source, tmp_path / "moved", engine, overwrite=True).errors == 0
    assert (tmp_path / "moved").read_bytes() == out.read_bytes()
    assert sorted(os.listdir(tmp_path)) == ["in.jsonl", "moved", "out.jsonl"]


def test_ids_of_an_output_are_those_of_one_line_each(engine, tmp_path):
    rows = ['{"id": 2, "prompt": "a", "max_new_tokens": 1}', '{"prompt": "b", "max_new_tokens": 1}', "nonsense", '{"id": 3, "n": 0}']
    (tmp_path / "in.jsonl").write_text("\n".join(rows))
    run_file(tmp_path / "in.jsonl", tmp_path / "out.jsonl", engine)
    written = [json.loads(line)["id"] for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert written == [2, "line 2", "line 3", 3]
    assert {answer["id"] for answer in run_batch(rows, engine)} == set(written)


def test_an_answer_too_long_for_the_model_names_prompt_limit_and_room(engine):
    (answer,) = run_batch([{"prompt": "a", "max_tokens": 10**6}], engine)
    assert "the prompt has 1 tokens and 1,000,000 new ones are asked for" in answer["error"]
    assert "There is room for 512: ask for fewer, or for clip, which cuts the answer there" in answer["error"]
    (cut,) = run_batch([{"prompt": "a", "max_tokens": 10**6, "clip": True, "stop_token_ids": [0]}], engine)
    assert cut["error"] is None
