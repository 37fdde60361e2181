"""Which jobs go on where an earlier run stopped, and what is said of the others before a model is loaded."""

from __future__ import annotations

import gzip
import json

import pyarrow
import pytest
from pyarrow import parquet

from kvjax.models import loading
from kvjax.serving.batch import file_jobs
from kvjax.serving.batch import job as batch
from kvjax.serving.batch.job import run_file
from kvjax.serving.batch.journal import checked
from kvjax.serving.batch.partial import Partial
from kvjax.serving.batch.records import Defaults
from kvjax.serving.batch.setup import Setup

RECORDS = [{"id": f"r{n}", "prompt": "amber basil " * (n + 1), "max_new_tokens": 3 + n} for n in range(4)]
DRAWN = {"id": "drawn", "prompt": "coral", "max_new_tokens": 3, "temperature": 1.0}
DEFAULTS = Defaults(max_new_tokens=4)


def write(path, records, end="\n"):
    path.write_text("\n".join(map(json.dumps, records)) + end)
    return path


def job(folder, engine, **options):
    return run_file(folder / "in.jsonl", folder / "out.jsonl", engine, **({"slots": 3, "defaults": DEFAULTS} | options))


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def interrupt(monkeypatch, run, after=2):
    """Stop a job when so many answers are in its file."""
    append, left = Partial.append, [after]

    def counted(self, result):
        if not left[0]:
            raise KeyboardInterrupt
        left[0] -= 1
        append(self, result)

    with monkeypatch.context() as patch:
        patch.setattr(Partial, "append", counted)
        with pytest.raises(KeyboardInterrupt):
            run()


def edit_header(folder, **changes):
    """Change a partial file's header, with checksums that are right."""
    path = folder / "out.jsonl.partial"
    header, *rest = (json.loads(line) for line in path.read_bytes().splitlines())
    for line in (header, *rest):
        del line["crc"]
    first = checked({name: value for name, value in (header | changes).items() if value is not ...})
    path.write_bytes(first + b"".join(checked(line, first) for line in rest))


@pytest.mark.parametrize("end", ["\n", "", "\r\n"])
def test_lines_may_be_added_at_the_end(engine, tmp_path, monkeypatch, end):
    write(tmp_path / "in.jsonl", RECORDS[:3], end)
    interrupt(monkeypatch, lambda: job(tmp_path, engine))
    with open(tmp_path / "in.jsonl", "a") as file:
        file.write(("" if end else "\n") + json.dumps(RECORDS[3]) + "\n")
    interrupt(monkeypatch, lambda: job(tmp_path, engine), after=1)
    longer = (tmp_path / "in.jsonl").read_bytes()
    write(tmp_path / "in.jsonl", RECORDS[:3], end)
    with pytest.raises(ValueError, match="lines have changed since"):  # what was added counts as read now
        job(tmp_path, engine)
    (tmp_path / "in.jsonl").write_bytes(longer)
    summary = job(tmp_path, engine)
    assert (summary.records, summary.earlier, summary.errors) == (4, 3, 0)
    found = lines(tmp_path / "out.jsonl")
    (tmp_path / "out.jsonl").unlink()
    job(tmp_path, engine)
    assert found == lines(tmp_path / "out.jsonl")


def test_the_file_of_another_job_that_took_its_place_stays(engine, tmp_path, monkeypatch):
    """Its own was moved away meanwhile, and another job began one of the same name."""
    write(tmp_path / "in.jsonl", RECORDS)
    append, partial = Partial.append, tmp_path / "out.jsonl.partial"

    def moved(self, result):
        append(self, result)
        if not (tmp_path / "moved").exists():
            partial.rename(tmp_path / "moved")
            partial.write_text("answers of another job\n")

    monkeypatch.setattr(Partial, "append", moved)
    job(tmp_path, engine)
    assert [answer["id"] for answer in lines(tmp_path / "out.jsonl")] == ["r0", "r1", "r2", "r3"]
    assert partial.read_text() == "answers of another job\n"


def test_other_lines_are_refused(engine, tmp_path, monkeypatch):
    source = write(tmp_path / "in.jsonl", RECORDS, "")
    interrupt(monkeypatch, lambda: job(tmp_path, engine))
    kept = (tmp_path / "out.jsonl.partial").read_bytes()
    text = source.read_text()
    for other in (text.replace("basil", "coral"), text[:-40], text + " 1", text + json.dumps(DRAWN), "\n" + text):
        source.write_text(other)
        with pytest.raises(ValueError, match="was begun with an input whose lines have changed since"):
            job(tmp_path, engine)
        assert (tmp_path / "out.jsonl.partial").read_bytes() == kept
    source.unlink()
    source.write_bytes(gzip.compress(text.encode()))  # the same lines
    assert job(tmp_path, engine).records == 4


def test_a_parquet_input_that_is_replaced_before_its_job_begins_does_not_go_on(engine, tmp_path, monkeypatch):
    """It was read, and another file gets its name while the model loads. The answers are those of the rows that were
    read, so a later run of the new rows may not go on with them."""
    source, describe = tmp_path / "in.parquet", batch.describe_job

    def put(records):
        parquet.write_table(pyarrow.Table.from_pylist(records), tmp_path / "new.parquet")
        (tmp_path / "new.parquet").rename(source)

    def replaced(*given):
        put([record | {"prompt": "coral"} for record in RECORDS])
        return describe(*given)

    put(RECORDS)
    with monkeypatch.context() as patch:
        patch.setattr(batch, "describe_job", replaced)
        interrupt(monkeypatch, lambda: run_file(source, tmp_path / "out.jsonl", engine, slots=3, defaults=DEFAULTS))
    with pytest.raises(ValueError, match=r"lines have changed since \(none may be new in this job\)"):
        run_file(source, tmp_path / "out.jsonl", engine, slots=3, defaults=DEFAULTS)
    put(RECORDS)
    assert run_file(source, tmp_path / "out.jsonl", engine, slots=3, defaults=DEFAULTS).earlier == 2


def test_another_max_batch_goes_on_only_when_told_and_the_summary_says_so(engine, tmp_path, monkeypatch):
    write(tmp_path / "in.jsonl", RECORDS)
    interrupt(monkeypatch, lambda: job(tmp_path, engine))
    with pytest.raises(ValueError, match=r"with --max-batch 3, and this run has --max-batch 2: .*; --continue-anyway goes on"):
        job(tmp_path, engine, slots=2)
    interrupt(monkeypatch, lambda: job(tmp_path, engine, slots=2, continue_anyway=True), after=1)
    with pytest.raises(ValueError, match="with --max-batch 2, and this run has --max-batch 3"):
        job(tmp_path, engine)
    summary = job(tmp_path, engine, slots=2)  # as the latest run
    assert summary.slots == [3, 2]
    assert "continued anyway   --max-batch 3, then 2: the last bits of answers may differ from those of one run" in str(summary)
    assert (summary.records, summary.earlier) == (4, 3)
    (tmp_path / "out.jsonl").unlink()
    assert "continued anyway" not in str(job(tmp_path, engine, continue_anyway=True)), "one run, one number of slots"


@pytest.mark.parametrize("noise", [..., 1])
@pytest.mark.parametrize("record", [DRAWN, RECORDS[3] | {"id": "several", "prompt": "coral", "n": 2}], ids=lambda record: record["id"])
def test_an_earlier_versions_job_goes_on_unless_what_is_left_draws(engine, tmp_path, monkeypatch, noise, record):
    write(tmp_path / "in.jsonl", [*RECORDS, record])
    interrupt(monkeypatch, lambda: job(tmp_path, engine))
    edit_header(tmp_path, noise=noise, said=..., **{"input bytes": ..., "--cache-format": ..., "checkpoint": ...})
    answered = {json.loads(line)["line"] for line in (tmp_path / "out.jsonl.partial").read_text().splitlines()[1:]}
    assert 5 not in answered
    with pytest.raises(ValueError, match=r"begun by another version of kvjax, which drew other .* and 1 of the records .* on line 5"):
        job(tmp_path, engine)
    (tmp_path / "out.jsonl.partial").unlink()
    write(tmp_path / "in.jsonl", RECORDS)
    interrupt(monkeypatch, lambda: job(tmp_path, engine))
    edit_header(tmp_path, noise=noise, said=..., **{"input bytes": ..., "--cache-format": ..., "checkpoint": ...})
    text = (tmp_path / "in.jsonl").read_text()
    write(tmp_path / "in.jsonl", [*RECORDS, {"id": "new", "prompt": "amber"}])
    with pytest.raises(ValueError, match=r"lines have changed since \(none may be new in this job\)"):
        job(tmp_path, engine)
    (tmp_path / "in.jsonl").write_text(text)
    assert job(tmp_path, engine).earlier == 2


def test_an_earlier_versions_answers_to_repeated_lines_are_dropped(engine, tmp_path, monkeypatch):
    write(tmp_path / "in.jsonl", [*RECORDS, RECORDS[0]])
    interrupt(monkeypatch, lambda: job(tmp_path, engine))
    with open(tmp_path / "out.jsonl.partial", "a") as file:
        error = {"id": "r0", "error": "id 'r0' is already used on line 1"}
        file.write(json.dumps({"line": 5, "counts": [True, 0, 0, 0.0, 0.0, 1], "output": error}) + "\n")
    summary = job(tmp_path, engine)
    assert (summary.records, summary.errors, summary.repeated, summary.earlier) == (4, 0, 1, 2)
    assert [line["id"] for line in lines(tmp_path / "out.jsonl")] == ["r0", "r1", "r2", "r3"]
    assert "repeated lines     1: equal to an earlier line" in str(summary)


@pytest.fixture
def begun(kvjax, model_folder, tmp_path, monkeypatch):
    """A job of the command line that was interrupted; its words. Loading a model is an error from here on."""
    write(tmp_path / "in.jsonl", RECORDS)
    words = ["batch", tmp_path / "in.jsonl", "--out", tmp_path / "out.jsonl", "--model", model_folder, "--policy", "window:8+24"]
    words += ["--max-batch", 3, "--page-size", 16, "--prefill-chunk", 64, "--pages", 60, "--max-new-tokens", 4]
    append, left = Partial.append, [2]

    def counted(self, result):
        if not left[0]:
            raise KeyboardInterrupt
        left[0] -= 1
        append(self, result)

    with monkeypatch.context() as patch:
        patch.setattr(Partial, "append", counted)
        assert kvjax(*words)[0] == 130
    return words


REFUSALS = [
    (("--policy", "top:8"), "was begun with --policy window:8+24, and this run has --policy top:8: run it as it was begun, or delete"),
    (("--prefill", "window:1+4"), "with no --prefill, and this run has --prefill window:1+4"),
    (("--page-size", 32), "with --page-size 16, and this run has --page-size 32"),
    (("--prefill-chunk", 32), "with --prefill-chunk 64, and this run has --prefill-chunk 32"),
    (("--dtype", "bfloat16"), "with no --dtype, and this run has --dtype bfloat16"),
    (("--weights", "int8"), "with no --weights, and this run has --weights int8"),
    (("--cache-format", "int8"), "with no --cache-format, and this run has --cache-format int8"),
    (("--reuse-any",), "with no --reuse-any, and this run has --reuse-any"),
    (("--max-new-tokens", 5), "with --max-new-tokens 4, and this run has --max-new-tokens 5"),
    (("--temperature", 0.5), "with no --temperature, and this run has --temperature 0.5"),
    (("--seed", -7), "with no --seed (0), and this run has --seed -7"),
    (
        ("--max-batch", 2),
        "with --max-batch 3, and this run has --max-batch 2: run it as it was begun, or delete the file to start over; --cont",
    ),
    (("--model", "{other}"), "and this run has --model"),
]


def test_refusals_come_before_the_model_and_in_the_words_that_were_typed(kvjax, begun, model, model_folder, tmp_path, monkeypatch):
    kept = (tmp_path / "out.jsonl.partial").read_bytes()
    model.save(tmp_path / "other")
    config = json.loads((tmp_path / "other" / "config.json").read_text())
    (tmp_path / "other" / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 0.125}))

    def loaded(*_, **__):
        raise AssertionError("the model was loaded")

    monkeypatch.setattr(loading, "load", loaded)
    for options, said in REFUSALS:
        given = [str(option).format(other=tmp_path / "other") for option in options]
        status, _, err = kvjax(*begun, *given)
        assert (status, len(err.splitlines())) == (2, 1), err
        assert said in err, err
        assert "Window(" not in err
        assert (tmp_path / "out.jsonl.partial").read_bytes() == kept
    without = [word for word in begun if word not in ("--policy", "window:8+24")]
    assert "was begun with --policy window:8+24, and this run has no --policy" in kvjax(*without)[2]
    without = [word for word in begun if word not in ("--max-batch", 3)]
    assert "was begun with --max-batch 3, and this run has no --max-batch (8): run it as it was begun" in kvjax(*without)[2]
    monkeypatch.undo()
    model.save(tmp_path / "moved")
    status, out, err = kvjax(*begun, "--model", tmp_path / "moved", "--dtype", "float32", "--max-batch", 2, "--continue-anyway")
    assert status == 0, err
    assert "continued anyway   --max-batch 3, then 2" in out


def test_a_header_that_says_nonsense_is_compared_and_not_run(engine, tmp_path, monkeypatch):
    """What a partial file names is never parsed: names of policies may be files of Python."""
    write(tmp_path / "in.jsonl", RECORDS)
    interrupt(monkeypatch, lambda: job(tmp_path, engine))
    (tmp_path / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    for said in ({"--policy": f"{tmp_path}/own.py:Own"}, [1], 5, {"--policy": [1]}):
        edit_header(tmp_path, said=said, policy=f"{tmp_path}/own.py:Own", **{"input bytes": "x"})
        setup = Setup("needle", policy="window:8+24", slots=3, page_size=16, prefill_chunk=64)
        with pytest.raises(ValueError, match="was begun with"):
            file_jobs.FileJob(tmp_path / "in.jsonl", tmp_path / "out.jsonl", DEFAULTS, setup=setup)
        with pytest.raises(ValueError, match=r"was begun with|changed since"):
            job(tmp_path, engine)
    assert not (tmp_path / "ran").exists()
