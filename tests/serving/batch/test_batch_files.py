"""Files of batch jobs: JSONL and Parquet, in and out."""

from __future__ import annotations

import hashlib
import io
import json

import numpy as np
import pyarrow
import pytest
from pyarrow import parquet

from kvjax.serving.batch import files
from kvjax.serving.batch.files import COLUMNS, Reading, numbered, write_outputs
from kvjax.serving.batch.job import run_file
from kvjax.serving.batch.records import Defaults, read

ROWS = [{"id": f"r{number}", "prompt": "amber", "max_new_tokens": number + 1} for number in range(10)]


def lines(path):
    return (line for _, _, line in numbered(path))


def write_parquet(path, rows, **options):
    """Every field of any row is a column; pyarrow would take the fields of the first row."""
    names = dict.fromkeys(name for row in rows for name in row)
    parquet.write_table(pyarrow.table({name: [row.get(name) for row in rows] for name in names}), path, **options)
    return path


def test_lines_are_numbered_from_any_place(tmp_path):
    path = tmp_path / "in.jsonl"
    path.write_bytes(b"ab\n\n\xc3\xa9\nlast")
    everything = list(numbered(path))
    assert everything == [(1, 0, b"ab\n"), (2, 3, b"\n"), (3, 4, b"\xc3\xa9\n"), (4, 7, b"last")]
    for place, (number, offset, _) in enumerate(everything):
        assert list(numbered(path, number, offset)) == everything[place:]


@pytest.mark.parametrize("at_once", [2, 1024])
def test_rows_are_numbered_from_any_place(tmp_path, monkeypatch, at_once):
    monkeypatch.setattr(files, "ROWS", at_once)
    path = write_parquet(tmp_path / "in.parquet", ROWS, row_group_size=3)
    for first in (1, 2, 3, 4, 7, 9, 10):
        assert [(number, row["id"]) for number, _, row in numbered(path, first)] == [(n, f"r{n - 1}") for n in range(first, 11)]


def test_earlier_row_groups_are_not_read(tmp_path):
    path = write_parquet(tmp_path / "in.parquet", ROWS, row_group_size=5)
    data = bytearray(path.read_bytes())
    group = parquet.ParquetFile(path).metadata.row_group(0).column(0)
    data[group.data_page_offset : group.data_page_offset + 8] = bytes(8)
    path.write_bytes(data)
    assert [row["id"] for _, _, row in numbered(path, 6)] == ["r5", "r6", "r7", "r8", "r9"]
    with pytest.raises(ValueError, match=r"in\.parquet is damaged"):
        list(numbered(path))


def test_nulls_are_fields_that_are_left_out_at_every_depth(tmp_path):
    rows = [
        {"id": "a", "prompt": "amber", "top_k": 5, "messages": None},
        {"id": None, "prompt": None, "top_k": None, "messages": [{"role": "user", "content": "basil"}]},
        {"custom_id": "c", "body": {"prompt": "coral", "max_tokens": None}},
    ]
    found = list(lines(write_parquet(tmp_path / "in.parquet", rows)))
    assert found == [
        {"id": "a", "prompt": "amber", "top_k": 5},
        {"messages": [{"role": "user", "content": "basil"}]},
        {"custom_id": "c", "body": {"prompt": "coral"}},
    ]
    assert [record.error for record in read(found)] == [None] * 3
    assert [record.id for record in read(found)] == ["a", 2, "c"]


def test_a_parquet_output_has_the_fields_of_the_lines(tmp_path):
    counts = {"prompt_tokens": 3, "generated_tokens": 2, "blocks_per_step": 1.0, "keys_per_step": 3.5}
    outputs = [
        {"id": 7, "text": "é", "finish_reason": "stop", **counts, "error": None},
        {"id": None, "error": "input line 2: no"},
        {"id": "batch_req_1", "custom_id": "o", "response": {"body": {}}, "error": {"code": "c", "message": "wrong"}},
        {"id": "n", "choices": [{"text": "a"}, {"text": "b"}], **counts, "error": None},
    ]
    written = io.BytesIO()
    write_outputs(written, iter(outputs), tmp_path / "out.parquet")
    table = parquet.read_table(io.BytesIO(written.getvalue()))
    assert table.column_names == list(COLUMNS)
    columns = table.to_pydict()
    assert columns["id"] == ["7", None, "o", "n"]
    assert columns["text"] == ["é", None, None, None]
    assert columns["keys_per_step"] == [3.5, None, None, 3.5]
    assert columns["error"] == [None, "input line 2: no", "wrong", None]
    assert list(map(json.loads, columns["answer"])) == outputs


def test_a_job_does_not_depend_on_the_form_of_its_files(engine, tmp_path):
    rows = [*ROWS[:4], {"id": "bad", "prompt": "amber", "top_k": -2}]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    write_parquet(tmp_path / "in.parquet", rows)
    for form, other in (("jsonl", "parquet"), ("parquet", "jsonl")):
        summary = run_file(tmp_path / f"in.{form}", tmp_path / f"out.{other}", engine)
        assert (summary.records, summary.errors) == (5, 1)
    answers = parquet.read_table(tmp_path / "out.parquet").to_pydict()["answer"]
    assert answers == (tmp_path / "out.jsonl").read_text().splitlines()


def test_a_value_that_python_cannot_hold_damages_its_row_alone(engine, tmp_path):
    """Text that is not UTF-8, which other writers do not check, and a time beyond Python's years."""
    texts = pyarrow.Array.from_buffers(
        pyarrow.string(), 3, [None, pyarrow.py_buffer(np.array([0, 3, 6, 9], np.int32)), pyarrow.py_buffer(b"abc\xff\xfe\xfdxyz")]
    )
    times = pyarrow.array([None, None, 2**60], pyarrow.timestamp("ms"))
    table = pyarrow.table({"id": ["a", "b", "c"], "prompt": texts, "max_new_tokens": [1, 1, 1], "user": times})
    parquet.write_table(table, tmp_path / "in.parquet")
    assert run_file(tmp_path / "in.parquet", tmp_path / "out.jsonl", engine).errors == 2
    found = {each["id"]: each for each in map(json.loads, (tmp_path / "out.jsonl").read_text().splitlines())}
    assert found["a"]["error"] is None
    assert "column 'prompt' cannot be read: 'utf-8' codec can't decode byte 0xff" in found["b"]["error"]
    assert "column 'user' cannot be read" in found["c"]["error"]


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_what_a_header_says_of_an_input_is_of_the_rows_that_were_read(tmp_path, suffix):
    """Another file gets the name of the input while it is read, and one more before a job asks for its description."""
    source, old = tmp_path / f"in.{suffix}", [row | {"prompt": "basil"} for row in ROWS]

    def write(rows):
        (tmp_path / "new.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        write_parquet(tmp_path / "new.parquet", rows)
        (tmp_path / f"new.{suffix}").rename(source)
        return hashlib.sha256(source.read_bytes()).hexdigest()

    digest = write(old)
    reading = Reading(source)
    records = reading.records(Defaults())
    found = [next(records)]
    write(ROWS)
    found += records
    assert {record.prompt for record in found} == {"basil"}
    write(ROWS[:3])
    assert reading.described()["input with SHA-256"] == digest


def test_a_parquet_file_that_is_written_while_it_is_read_is_refused(tmp_path):
    source = write_parquet(tmp_path / "in.parquet", ROWS)
    records = Reading(source).records(Defaults())
    next(records)
    with open(source, "ab") as file:
        file.write(b"more")
    with pytest.raises(ValueError, match=r"in\.parquet has changed while it was read: run again when it is complete"):
        list(records)


@pytest.mark.parametrize("name", ["prompt", "id"])
def test_two_columns_of_one_name_are_refused(tmp_path, name):
    columns = [pyarrow.array(["a"]), pyarrow.array(["b"]), pyarrow.array(["c"])]
    names = ["prompt", name, "id" if name == "prompt" else name]
    parquet.write_table(pyarrow.Table.from_arrays(columns, names), tmp_path / "in.parquet")
    with pytest.raises(ValueError, match=rf"in\.parquet has 2 columns named '{name}': leave one of them"):
        list(lines(tmp_path / "in.parquet"))


def test_a_file_that_is_not_parquet_is_named_so(engine, tmp_path):
    (tmp_path / "in.parquet").write_text("{}\n")
    with pytest.raises(ValueError, match=r"in\.parquet is not a Parquet file"):
        run_file(tmp_path / "in.parquet", tmp_path / "out.jsonl", engine)


@pytest.mark.parametrize("checked", [False, True])
def test_a_damaged_parquet_file_is_named(checked, tmp_path):
    rows = [{"id": str(number), "prompt": f"prompt {number}"} for number in range(40)]
    path = write_parquet(tmp_path / "in.parquet", rows, compression="none", use_dictionary=False, write_page_checksum=checked)
    whole, said = path.read_bytes(), []
    for place in range(4, len(whole), 7):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 0x55]) + whole[place + 1 :])
        try:
            found = list(lines(path))
        except ValueError as error:
            said.append(str(error))
        else:
            # Without checksums a letter of a prompt may be another one. The footer, at the end, has none.
            assert not checked or found == rows or place > whole.index(b"prompt 39") + 9
    assert len(said) > 20
    assert all("in.parquet is " in each for each in said)


def test_a_parquet_file_whose_column_has_no_name_of_text_is_named(tmp_path):
    """pyarrow reads such a name, and then cannot make text of it."""
    path = write_parquet(tmp_path / "in.parquet", [{"prompt": "amber", "zzzzzz": 1}], store_schema=False)
    assert b"zzzzzz" in path.read_bytes()
    path.write_bytes(path.read_bytes().replace(b"zzzzzz", b"zzz\xedzz"))
    with pytest.raises(ValueError, match=r"in\.parquet is damaged, or of a kind that pyarrow cannot read: .*utf-8"):
        list(lines(path))


def test_an_error_of_the_disk_beside_a_parquet_file_is_not_its_own(tmp_path):
    with pytest.raises(FileNotFoundError):
        next(lines(tmp_path / "in.parquet"))
