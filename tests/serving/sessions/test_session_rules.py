"""Rules of ADR 0008 that no other file tests, and docs/session-rules.md, which says where each rule is enforced and
tested."""

import io
import re
import tokenize
from pathlib import Path

import numpy as np
import pytest
from tiny_models import VOCAB, make_model

from kvjax import Engine, SessionRuntime
from kvjax.client.errors import ResourceExhausted

ROOT = Path(__file__).parents[3]
TEXT = np.random.default_rng(0).integers(0, VOCAB, 100).tolist()
PAGE = 16


@pytest.fixture(scope="module")
def engine():
    return Engine(make_model(), "dense", pages=48, page_size=PAGE, prefill_chunk=32, batch_buckets=(4,))


def said(session, count=6, **sampling):
    return list(session.generate(max_new_tokens=count, stop_token_ids=(), **sampling))


def test_sessions_share_no_page_but_with_their_forks(engine):
    with SessionRuntime(engine, slots=4) as runtime:
        first, second = (runtime.create(TEXT[:70]) for _ in range(2))
        assert said(first) == said(second)
        fork = first.fork()
        pages = {each: set(runtime._core.records[each.id].sequence.pages["full"]) for each in (first, second, fork)}
        assert not pages[first] & pages[second]
        assert len(pages[first] & pages[fork]) == 70 // PAGE
        used = engine.allocators["full"].total - engine.allocators["full"].free
        assert used == 5 + 5 + 1


def test_a_seed_belongs_to_a_generation(engine):
    with SessionRuntime(engine, slots=4) as runtime:
        session = runtime.create(TEXT[:40])
        told = [said(session.fork(), temperature=2.0, seed=seed) for seed in (1, 1, 2)]
    assert told[0] == told[1] != told[2]


def test_generations_wait_for_slots_and_sessions_for_capacity(engine):
    """More sessions than slots: generations wait. More sessions than capacity, none of them idle: an error."""
    with SessionRuntime(engine, slots=1, capacity=3) as runtime:
        sessions = [runtime.create(TEXT[:20]) for _ in range(3)]
        streams = [each.generate(max_new_tokens=300, stop_token_ids=()) for each in sessions]
        next(streams[0])
        assert {name: runtime.gauges()[name] for name in ("sessions", "generating", "waiting")} == {
            "sessions": 3,
            "generating": 1,
            "waiting": 2,
        }
        with pytest.raises(ResourceExhausted, match="all 3 sessions"):
            runtime.create()
        streams[0].cancel(keep=0)
        next(streams[1])
        for each in streams[1:]:
            each.cancel(keep=0)
        assert len(said(sessions[2], 2)) == 2


SHIM = ("app.py", "openai_form.py", "completion.py")
"""The deprecated shim, which alone applies templates (section 2.7)."""


def chat_words(source):
    """Names in a module that have to do with chats."""
    names = [token.string for token in tokenize.generate_tokens(io.StringIO(source).readline) if token.type == tokenize.NAME]
    return sorted({name for name in names if re.search(r"template|^roles?$|assistant|thinking|chat", name, re.IGNORECASE)})


def test_the_runtime_knows_no_chat():
    """No module of the runtime names a template or a role, and neither does the protocol."""
    folders = ROOT / "serving" / "sessions", ROOT / "serving" / "server"
    modules = [path for folder in folders for path in folder.glob("*.py") if path.name not in SHIM]
    assert len(modules) > 8
    assert {path.name: found for path in modules if (found := chat_words(path.read_text()))} == {}
    proto = (folders[1] / "proto" / "kvjax" / "v1" / "runtime.proto").read_text()
    declared = " ".join(line.partition("//")[0] for line in proto.splitlines())
    assert not re.search(r"template|role|assistant|thinking|chat|string (text|content|prompt)", declared)
    assert chat_words("ids = tokenizer.apply_chat_template(x)") == ["apply_chat_template"]
    assert chat_words((folders[1] / "openai_form.py").read_text())


def test_the_page_of_rules_names_what_is_there():
    text = (ROOT / "docs" / "session-rules.md").read_text(encoding="utf-8")
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("| ")]
    rules = [row for row in rows if len(row) == 4 and row[1] != "section" and not set(row[1]) <= set("-: ")]
    assert len(rules) >= 25
    folders = ("serving", "benchmarks")
    tests = "\n".join(path.read_text() for folder in folders for path in (ROOT / "tests" / folder).rglob("*.py"))
    for rule, section, code, tested in rules:
        assert re.fullmatch(r"[\d., a-zOQ-]+", section), rule
        for name in re.findall(r"`([^`]+)`", code):
            file, _, inside = name.partition(":")
            assert (ROOT / file).exists(), name
            assert not inside or re.search(rf"(def|class) {inside}\b|^{inside}\b", (ROOT / file).read_text(), re.MULTILINE), name
        names = re.findall(r"`(test_\w+)`", tested)
        assert names, f"no test of: {rule}"
        assert [name for name in names if not re.search(rf"^def {name}\(", tests, re.MULTILINE)] == []
