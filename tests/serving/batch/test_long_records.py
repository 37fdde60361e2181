"""Records with very long texts: those that cannot fit are refused at once, and others do not wait while one is
tokenized."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace

import pytest

import kvjax
from kvjax.client.errors import SessionError
from kvjax.serving.batch import job as batch
from kvjax.serving.batch.job import prepared, run_batch
from kvjax.serving.batch.records import Defaults, parse, read
from kvjax.serving.batch.setup import pages_of_job
from kvjax.serving.bodies import prompt_ids
from kvjax.serving.server.openai_form import asked
from kvjax.serving.server.options import ServerOptions
from kvjax.text.token_bounds import longest_token

LONG = "amber basil coral " * 100_000  # 1.8 million characters


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
