"""The partial file: what survives, what is dropped, what is refused."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import fcntl
import gc
import io
import json
import math
import os
import sys

import pytest

from kvjax.serving.batch import journal
from kvjax.serving.batch import partial as partial_module
from kvjax.serving.batch.partial import Partial
from kvjax.serving.batch.results import Result
from kvjax.serving.cli.evaluate import Records

JOB = {"model": "m", "policy": "dense"}


def result(line, text="x", failed=False):
    return Result(line, {"id": line, "text": text}, failed, 10 * line, line, 1.5, 2.5)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "out.jsonl.partial"


def begin(path, *lines):
    partial = Partial(path, JOB)
    for line in lines:
        partial.append(result(line, "é\u2028"))
    partial.close()
    return path


def outputs(path, partial):
    out = path.with_name("out.jsonl")
    partial.finish(out)
    partial.close()
    return [json.loads(line) for line in out.read_bytes().split(b"\n")[:-1]]


def test_what_was_appended_is_there_again(path):
    begin(path, 3, 1)
    partial = Partial(path, JOB)
    assert sorted(partial.earlier) == [1, 3]
    earlier = partial.earlier[3]
    assert (earlier.failed, earlier.prompt_tokens, earlier.generated_tokens) == (False, 30, 3)
    assert (earlier.blocks_per_step, earlier.keys_per_step) == (1.5, 2.5)
    partial.append(result(2, "new"))
    assert outputs(path, partial) == [{"id": 1, "text": "é\u2028"}, {"id": 2, "text": "new"}, {"id": 3, "text": "é\u2028"}]
    assert sorted(os.listdir(path.parent)) == ["out.jsonl"]


def test_what_was_missed_is_there_again(path):
    partial = Partial(path, JOB)
    partial.append(dataclasses.replace(result(1), missed={"samples": 4, "mean": 0.25}))
    partial.append(result(2))
    partial.close()
    again = Partial(path, JOB)
    assert {line: each.missed for line, each in again.earlier.items()} == {1: {"samples": 4, "mean": 0.25}, 2: None}
    again.close()


def test_each_result_is_in_the_file_at_once(path):
    partial = Partial(path, JOB)
    for count in range(1, 4):
        partial.append(result(count))
        assert path.read_bytes().count(b"\n") == count + 1
    partial.close()


@pytest.mark.parametrize("cut", [1, 2, 20, "all"])
def test_a_torn_last_line_is_dropped(path, cut):
    begin(path, 1, 2)
    whole = path.read_bytes()
    last = whole.splitlines(keepends=True)[-1]
    path.write_bytes(whole[: -cut if cut != "all" else -len(last) + 1])
    partial = Partial(path, JOB)
    assert sorted(partial.earlier) == [1]
    partial.append(result(2, "again"))
    assert [output["text"] for output in outputs(path, partial)] == ["é\u2028", "again"]


def test_a_last_line_of_rubbish_is_dropped(path):
    """What a power cut may leave of a line whose blocks were not written yet."""
    begin(path, 1)
    path.write_bytes(path.read_bytes() + b"\x00" * 50 + b"\n")
    partial = Partial(path, JOB)
    assert sorted(partial.earlier) == [1]
    partial.close()
    assert b"\x00" not in path.read_bytes()


@pytest.mark.parametrize("left", [0, 1, 15])
def test_a_torn_header_starts_over(path, left):
    begin(path)
    path.write_bytes(path.read_bytes()[:left])
    partial = Partial(path, JOB)
    assert partial.earlier == {}
    partial.append(result(1))
    partial.close()
    assert sorted(Partial(path, JOB).earlier) == [1]


def test_damage_in_the_middle_is_refused(path):
    begin(path, 1, 2)
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(lines[0] + b"rubbish\n" + lines[2])
    with pytest.raises(ValueError, match="line 2, is damaged"):
        Partial(path, JOB)


@pytest.mark.parametrize("step", [7, pytest.param(1, marks=pytest.mark.long)])
def test_a_flipped_bit_gives_no_other_content(path, step):
    """The file is refused, or a damaged last line is dropped, and its record runs again."""
    begin(path, 1, 2)
    content, dropped = path.read_bytes(), 0
    last = content.rfind(b"\n", 0, -1) + 1
    for bit in range(0, 8 * len(content), step):
        damaged = bytearray(content)
        damaged[bit // 8] ^= 1 << bit % 8
        path.write_bytes(damaged)
        try:
            partial = Partial(path, JOB)
        except ValueError:
            continue
        found = {line: json.loads(content.splitlines()[line])["output"] for line in partial.earlier}
        assert bit // 8 >= last - 1
        assert list(partial._outputs()) == list(found.values())
        dropped += len(found) == 1
        partial.close()
    assert dropped > 20


@pytest.mark.parametrize("change", ["a letter", "no text", "cut", "other line"])
def test_a_file_that_changes_while_the_job_runs_gives_no_other_answers(path, change):
    partial = Partial(path, JOB)
    for line in (1, 2, 3):
        partial.append(result(line, f"answer {line}"))
    whole = path.read_bytes()
    lines = whole.splitlines(keepends=True)
    changed = {
        "a letter": whole.replace(b"answer 2", b"answer 7"),
        "no text": whole.replace(b"answer 2", b"answer \xff"),
        "cut": whole[:-20],
        "other line": b"".join([*lines[:2], lines[1], *lines[3:]]),
    }[change]
    path.write_bytes(changed)
    with pytest.raises(ValueError, match=r"out\.jsonl\.partial changed while the job ran: at byte [\d,]+ there is another line"):
        partial.finish(path.with_name("out.jsonl"))
    partial.close()
    assert path.read_bytes() == changed, "what is left of the answers is kept"
    assert not path.with_name("out.jsonl").exists()


def test_a_line_of_another_jobs_file_is_refused(path, tmp_path):
    lines = begin(path, 1, 2, 3).read_bytes().splitlines(keepends=True)
    other = tmp_path / "other.partial"
    partial = Partial(other, JOB | {"input bytes": "x"})
    partial.append(result(1, "of the other job"))
    partial.close()
    path.write_bytes(lines[0] + other.read_bytes().splitlines(keepends=True)[1] + b"".join(lines[2:]))
    with pytest.raises(ValueError, match="line 2, is damaged"):
        Partial(path, JOB)


@pytest.mark.parametrize("other", [{"model": "n"}, {"policy": "top:8"}])
def test_another_job_is_refused_and_nothing_is_lost(path, other):
    before = begin(path, 1).read_bytes()
    (name,) = other
    with pytest.raises(ValueError, match=f"was begun with --{name} {JOB[name]}, and this run has --{name} {other[name]}"):
        Partial(path, JOB | other)
    assert path.read_bytes() == before


def test_a_model_named_by_an_earlier_versions_fingerprint_is_refused(path):
    Partial(path, JOB | {"model": "0123456789abcdef"}).close()
    for now in ("0123456789abcdef", "sha256-" + "0" * 32):
        with pytest.raises(ValueError, match=r"partial was made by an earlier version of kvjax.*; delete the file to start over"):
            Partial(path, JOB | {"model": now})


@pytest.mark.parametrize("content", [b"notes of mine\n", b'{"a": 1}\n', b"notes\nof mine", b"notes"])
def test_another_file_is_refused_and_nothing_is_lost(path, content):
    path.write_bytes(content)
    with pytest.raises(ValueError, match="is not a partial result"):
        Partial(path, JOB)
    assert path.read_bytes() == content


def test_two_jobs_cannot_share_it(path):
    first = Partial(path, JOB)
    with pytest.raises(BlockingIOError, match="still running"):
        Partial(path, JOB)
    first.close()
    assert Partial.earlier_run(path).lines == set()
    Partial(path, JOB).close()


def test_a_look_at_the_file_stops_no_job_that_begins(path, monkeypatch):
    begin(path, 1)
    looking = open(path, "rb")  # noqa: SIM115 (closed below)
    fcntl.flock(looking, fcntl.LOCK_SH)
    monkeypatch.setattr(journal.time, "sleep", lambda _: looking.close())
    Partial(path, JOB).close()
    assert looking.closed


def test_the_output_is_replaced_whole(path, monkeypatch):
    """A crash while the output is written leaves the old one, and the results."""
    out = path.with_name("out.jsonl")
    out.write_text("old")
    begin(path, 1)
    partial = Partial(path, JOB)
    monkeypatch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(OSError("disk")))
    with pytest.raises(OSError, match="disk"):
        partial.finish(out, overwrite=True)
    partial.close()
    monkeypatch.undo()
    assert out.read_text() == "old"
    assert sorted(Partial(path, JOB).earlier) == [1]


@pytest.mark.parametrize("links", [True, False])
@pytest.mark.parametrize("through", ["itself", "a link", "a link that leads nowhere yet"])
def test_an_output_that_appears_while_the_job_runs_is_kept(path, monkeypatch, links, through):
    out, real = path.with_name("out.jsonl"), path.with_name("real.jsonl")
    if through != "itself":
        out.symlink_to(real.name)
    begin(path, 1)
    held, before = path.read_bytes(), sorted(os.listdir(path.parent))
    partial = Partial(path, JOB)
    if not links:
        monkeypatch.setattr(os, "link", lambda *_: (_ for _ in ()).throw(PermissionError(errno.EPERM, "no links here")))
    if through != "a link that leads nowhere yet":
        out.write_text("mine")
        with pytest.raises(ValueError, match=r"out\.jsonl has appeared while the job ran, and is kept; all answers are in .*partial: move"):
            partial.finish(out)
        assert (out.read_text(), path.read_bytes()) == ("mine", held)
        assert sorted(os.listdir(path.parent)) == sorted({*before, out.name, out.resolve().name})
        out.resolve().unlink()
    assert outputs(path, partial) == [{"id": 1, "text": "é\u2028"}]
    assert sorted(os.listdir(path.parent)) == sorted({out.name, out.resolve().name})


def test_a_job_that_waited_for_the_file_of_one_that_ends_does_not_go_on_in_it(path, monkeypatch):
    begin(path, 1)
    first = Partial(path, JOB)
    waits = []

    def end_first(_):
        waits.append(outputs(path, first))

    monkeypatch.setattr(journal.time, "sleep", end_first)
    with pytest.raises(BlockingIOError, match="was removed by another job, which has just ended"):
        Partial(path, JOB)
    assert len(waits) == 1
    assert os.listdir(path.parent) == ["out.jsonl"]


def test_no_file_beside_the_output_is_touched(path):
    names = [f"out.jsonl{end}" for end in (".tmp", "~", ".partial.tmp")]
    for name in names:
        (path.parent / name).write_text("mine")
    begin(path, 1)
    partial = Partial(path, JOB)
    outputs(path, partial)
    assert sorted(os.listdir(path.parent)) == sorted(["out.jsonl", *names])
    assert {(path.parent / name).read_text() for name in names} == {"mine"}
    (path.parent / "plain").write_text("")
    assert path.with_name("out.jsonl").stat().st_mode == (path.parent / "plain").stat().st_mode


def test_a_journal_holds_no_nan(tmp_path):
    """Measured figures may be anything; JSON has no word for NaN and infinity."""
    journal = Records(tmp_path / "records.jsonl", JOB)
    journal.append("unit", {"kl": [[0.25, float("nan")]], "seconds": float("inf")})
    assert journal.done == {"unit": {"kl": [[0.25, None]], "seconds": None}}
    journal.close()
    text = (tmp_path / "records.jsonl").read_text()
    assert "NaN" not in text
    assert "Infinity" not in text
    assert json.loads(text.splitlines()[1])["error"] == "not finite, so written as null: record.kl[0][1], record.seconds"
    again = Records(tmp_path / "records.jsonl", JOB)
    assert again.done == journal.done
    again.close()


# A full disk


class FullDisk(io.FileIO):
    """A file on a disk that takes no more than `room` bytes of it."""

    room = 0

    def write(self, data):
        left = max(self.room - os.fstat(self.fileno()).st_size, 0)
        if not left:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return super().write(memoryview(data)[:left])


@pytest.fixture
def full_disk(monkeypatch):
    """Journals and what is written in their place lie on a disk with room for so many bytes a file."""

    def opened(path, mode):
        raw = FullDisk(path, mode.replace("b", ""))
        return (io.BufferedRandom if "+" in mode else io.BufferedWriter)(raw)

    def limit(room):
        FullDisk.room = room
        for module in (journal, partial_module):
            monkeypatch.setattr(module, "open", opened, raising=False)

    return limit


@pytest.fixture
def unraisable(monkeypatch):
    """What Python would print as "Exception ignored in"."""
    seen = []
    monkeypatch.setattr(sys, "unraisablehook", seen.append)
    return seen


def test_a_disk_that_fills_up_keeps_what_was_there(path, full_disk, unraisable, monkeypatch):
    begin(path, 1)
    full_disk(path.stat().st_size + 30)
    partial = Partial(path, JOB)
    with pytest.raises(OSError, match="No space left") as caught:
        partial.append(result(2))
    with contextlib.suppress(OSError):
        partial.close()
    assert caught.value.filename == str(path)
    del partial, caught
    gc.collect()
    assert unraisable == []
    monkeypatch.undo()
    again = Partial(path, JOB)
    assert sorted(again.earlier) == [1]
    again.append(result(2))
    assert [line["id"] for line in outputs(path, again)] == [1, 2]


def test_a_full_disk_leaves_no_empty_file(path, full_disk, unraisable):
    full_disk(10)
    with pytest.raises(OSError, match="No space left"):
        Partial(path, JOB)
    gc.collect()
    assert (list(path.parent.iterdir()), unraisable) == ([], [])


def test_an_output_that_does_not_fit_leaves_the_results_alone(path, full_disk, unraisable):
    begin(path, 1, 2)
    held = path.read_bytes()
    partial = Partial(path, JOB)
    full_disk(20)
    with pytest.raises(OSError, match="No space left") as caught:
        partial.finish(path.with_name("out.jsonl"))
    partial.close()
    del partial
    gc.collect()
    assert (caught.value.filename, unraisable) == (str(path.with_name("out.jsonl")), [])
    assert (list(path.parent.iterdir()), path.read_bytes()) == ([path], held)


def test_a_job_that_is_no_json_leaves_no_file(path):
    with pytest.raises(ValueError, match="JSON"):
        Partial(path, JOB | {"--temperature": math.nan})
    assert list(path.parent.iterdir()) == []
