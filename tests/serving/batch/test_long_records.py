"""Records with very long texts: those that cannot fit are refused at once, and others do not wait while one is
tokenized."""

from __future__ import annotations

import gzip
import hashlib
import json
import threading
import time
import tracemalloc
from types import SimpleNamespace

import pytest

import kvjax
from kvjax.client.errors import SessionError
from kvjax.serving.batch import files
from kvjax.serving.batch import job as batch
from kvjax.serving.batch.files import Reading, numbered
from kvjax.serving.batch.job import prepared, run_batch, run_file
from kvjax.serving.batch.records import Defaults, parse, read
from kvjax.serving.batch.setup import pages_of_job
from kvjax.serving.bodies import prompt_ids
from kvjax.serving.server.openai_form import asked
from kvjax.serving.server.options import ServerOptions
from kvjax.text.token_bounds import longest_token

LONG = "amber basil coral " * 100_000  # 1.8 million characters
GOOD = b'{"id": "good", "prompt": "amber", "max_new_tokens": 2}\n'


@pytest.fixture
def tokenized(engine, monkeypatch):
    """Lengths of the texts that the tokenizer got."""
    seen, kind = [], type(engine.model.tokenizer)
    call = kind.__call__

    def counted(self, text, *arguments, **options):
        seen.append(len(text))
        return call(self, text, *arguments, **options)

    monkeypatch.setattr(kind, "__call__", counted)
    return seen


def test_a_record_far_over_the_limit_is_refused_before_it_is_tokenized(engine, tokenized):
    messages = [{"role": "user", "content": LONG}]
    records = [
        {"id": "text", "prompt": LONG},
        {"id": "chat", "messages": messages},
        {"custom_id": "openai", "body": {"messages": messages}},
        {"id": "good", "prompt": "amber", "max_new_tokens": 2},
    ]
    found = list(run_batch(records, engine, slots=3))
    most = longest_token(engine.model.tokenizer).bytes
    assert most > 1
    errors = [answer["error"] if isinstance(answer["error"], str) else (answer["error"] or {}).get("message") for answer in found]
    assert sum(error is None for error in errors) == 1
    for error in filter(None, errors):
        assert f"because a token of this tokenizer has at most {most}: more than the model's 512 positions" in error
        assert "the prompt has 1,80" in error
    assert max(tokenized) < 100
    assert pages_of_job(read(records[::3], Defaults()), engine.model, 3, 16) == 1
    assert max(tokenized) < 100


def test_http_refuses_it_in_the_same_words(engine, tokenized):
    runtime = SimpleNamespace(engine=engine)
    with pytest.raises(SessionError, match=r"bytes, which are at least .* more than the model's 512 positions") as caught:
        asked({"model": "kvjax", "prompt": LONG}, False, runtime, ServerOptions())
    assert (caught.value.field, tokenized) == ("prompt", [])
    with pytest.raises(ValueError, match="more than the model's 512 positions") as batched:
        prompt_ids(LONG, None, {}, engine.model.tokenizer, 512)
    assert str(batched.value) == str(caught.value)


def test_others_run_while_a_long_text_is_tokenized():
    """The long one comes first in the order, takes until it is let go, and nobody waits for it."""
    records = [parse({"id": name, "prompt": text}, line) for line, (name, text) in enumerate([("long", LONG), ("a", "x"), ("b", "y")], 1)]
    let_go, threads, running = threading.Event(), {}, [True]

    def prepare(record):
        threads[record.id] = threading.current_thread().name
        if record.id == "long":
            assert let_go.wait(60)
        if record.id == "b":
            raise ValueError("wrong")
        return record.id

    source = prepared(records, prepare, lambda: running[0])
    assert next(source)[1] == "a"
    assert str(next(source)[1]) == "wrong"
    assert next(source) == (None, None), "something runs: ask again"
    let_go.set()
    running[0] = False
    assert [found for _, found in source] == ["long"]
    assert threads["long"].startswith("kvjax tokenizer")
    assert threads["a"] == threads["b"] != threads["long"]


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_long_record_is_answered_with_the_others(engine, model, monkeypatch, replicas):
    """With a limit that makes long texts of short ones: answers are the same, and a slow one ends last."""
    records = [{"id": n, "prompt": "amber basil " * (n + 1), "max_new_tokens": 6} for n in range(6)]
    expected = {answer["id"]: answer for answer in run_batch(records, engine, slots=3)}
    prepare = batch.request_of

    def slow(record, *arguments):
        time.sleep(0.05 if record.size > 40 else 0)
        return prepare(record, *arguments)

    monkeypatch.setattr(batch, "request_of", slow)
    monkeypatch.setattr(batch, "LONG", 40)
    sizes = {"pages": 60, "page_size": 16, "prefill_chunk": 64, "batch_buckets": (1, 3)}
    engines = engine if replicas == 1 else kvjax.replicas(model, "window:8+24", policies=["dense"], data=replicas, **sizes)
    found = [*run_batch(records, engines, slots=3)]
    assert {answer["id"]: answer for answer in found} == expected
    assert found[0]["id"] in (0, 1, 2), "short ones do not wait"


@pytest.mark.parametrize("packed", [False, True])
def test_of_a_line_that_is_too_long_little_is_in_memory(tmp_path, monkeypatch, packed):
    """A few kilobytes of gzip can hold gigabytes in one line."""
    monkeypatch.setattr(files, "MAX_LINE_BYTES", 1 << 20)
    path, size = tmp_path / "in.jsonl.gz", 64 << 20
    with gzip.open(path, "wb", 1) if packed else open(path, "wb") as file:
        file.write(GOOD)
        for _ in range(64):
            file.write(b"a" * (1 << 20))
        file.write(b"\n" + GOOD)
    tracemalloc.start()
    found = list(numbered(path))
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert [number for number, _, _ in found] == [1, 2, 3]
    assert [offset for _, offset, _ in found] == [0, len(GOOD), len(GOOD) + size + 1]
    assert (found[0][2], found[2][2]) == (GOOD, GOOD)
    assert most < 16 << 20
    assert list(numbered(path, 3, found[2][1])) == found[2:]


@pytest.mark.parametrize("over", [-1, 0, 1, 300])
@pytest.mark.parametrize("end", [b"", b"\n", b"\n" + GOOD])
def test_a_line_that_is_too_long_is_an_error_of_its_own(engine, tmp_path, monkeypatch, over, end):
    monkeypatch.setattr(files, "MAX_LINE_BYTES", 200)
    monkeypatch.setattr(files, "PIECE", 7)
    begin = b'{"id": "long", "max_new_tokens": 2, "prompt": "'
    line = begin + b"x" * (200 + over - len(begin) - 2 - len(end[:1])) + b'"}' + end[:1]
    content = GOOD.replace(b"good", b"first") + line + end[1:]
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_bytes(content)
    reading = Reading(source)
    list(reading.records(Defaults()))
    assert reading.described()["input with SHA-256"] == hashlib.sha256(content).hexdigest()
    assert reading.described()["input bytes"] == len(content)
    run_file(source, out, engine)
    first, second, *others = map(json.loads, out.read_text().splitlines())
    assert (first["id"], first["error"]) == ("first", None)
    if over > 0:
        assert (second["id"], second["error"]) == (2, f"the line has {200 + over} bytes, and at most 200 are read")
    else:
        assert second["id"] == "long"
        assert "bytes, and at most" not in str(second["error"])
    assert [(each["id"], each["error"]) for each in others] == ([("good", None)] if len(end) > 1 else [])
