"""Drafts, counted and timed on tiny models: rows say what ran, and a replayed share of right drafts comes out."""

from types import SimpleNamespace

import pytest

import kvjax
from benchmarks import drafts
from benchmarks.tables import acceptance_cells, draft_round_cells
from kvjax.engine import drafts as rounds
from kvjax.engine.sampling import accept, sample
from kvjax.scheduler.drafting import BY_LOOKUP, Drafting
from kvjax.serving.bench.decode import config_of


def rows_of(draft, answer=268, **given):
    sizes = {"lengths": (244 + answer,), "policy": "dense", "draft": draft, "weights": None, "draft_weights": None, "cache_format": None}
    return drafts.draft_rows("tiny", config_of("tiny", 1, "float32"), **sizes, slots=1, answer=answer, rounds=1, **given)


@pytest.fixture
def answered(monkeypatch):
    """What drafted, and the completion, of every request that is run. All launches that may be of rounds are."""
    found, real = [], drafts.run_requests

    def run(engine, requests, **options):
        for request, completion in real(engine, requests, **options):
            found.append((options["draft"], completion))
            yield request, completion

    monkeypatch.setattr(drafts, "run_requests", run)
    monkeypatch.setattr(Drafting, "next", lambda self, ready: self._launches[1])
    return found


def test_answers_with_drafts_take_turns_with_others(answered):
    (row,) = rows_of("window:8+56", acceptance=0.9, repeats=None)
    assert [(draft, len(done.token_ids)) for draft, done in answered] == 3 * [(None, 268), ("window:8+56", 268)]
    assert answered[-1][1].rounds
    assert not any(done.rounds for draft, done in answered if draft is None)
    assert row["times"] == row["plain_s"] / row["drafted_s"]
    assert 1 <= row["tokens_per_round"] <= drafts.TOKENS
    assert draft_round_cells(row)[5:8] == ("`dense`", "`window:8+56`", "0.9")
    assert rounds.accept is accept, "only rounds that are compiled inside are replayed"


def test_a_text_that_repeats_is_looked_up(answered):
    (row,) = rows_of("lookup", answer=268, acceptance=None, repeats=(64, 16))
    vocab_size = config_of("tiny", 1, "float32").vocab_size
    text = drafts.repeating_text(vocab_size, 244, 268, 64, 16)
    assert [done.token_ids for _, done in answered] == 6 * [tuple(text[244:])]
    assert (row["round"], 2 < row["tokens_per_round"] < 16) == (BY_LOOKUP[0], True)
    assert rounds.sample is sample


def test_a_repeating_text_copies_its_prompt():
    text = drafts.repeating_text(1000, 200, 170, 64, 16)
    assert len(text) == 370
    for start in (200, 280):
        copied = text[start : start + 64]
        assert any(text[at : at + 64] == copied for at in range(200 - 64))


def test_tokens_that_come_together_with_the_first_timed_one_do_not_count(monkeypatch):
    """Launches of 50 tokens take 5 s each; the first one that is timed begins after token 149. Nor do tokens of the
    launch in which the first request ends, nor what comes later."""
    now, engine = [0.0], SimpleNamespace(dispatch_s=[])
    monkeypatch.setattr(drafts.time, "perf_counter", lambda: now[0])

    def run(engine, requests, *, on_token, **_):
        for token in range(300):
            if token % 50 == 0:
                engine.dispatch_s.append(0.1)
                now[0] += 5.0 if token < 250 else 100.0
            on_token(requests[0], 0, "")
        for other in requests[1:]:
            on_token(other, 0, "")
        yield requests[0], SimpleNamespace(error=None)

    monkeypatch.setattr(drafts, "run_requests", run)
    for slots in (1, 2):
        monkeypatch.setattr(drafts, "SKIPPED", 128 // slots)
        seconds, _ = drafts._seconds_per_token(engine, [1], 300, slots, "lookup")
        assert seconds == pytest.approx(0.1 * slots)
    monkeypatch.setattr(drafts, "SKIPPED", 270)
    with pytest.raises(ValueError, match="an answer of 300 tokens ends with the launch"):
        drafts._seconds_per_token(engine, [1], 300, 1, "lookup")


@pytest.mark.parametrize("share", [0.0, 0.5, 0.97, 1.0])
def test_acceptance_is_that_of_the_tokens_of_a_round(share):
    assert drafts.acceptance_of(sum(share**place for place in range(drafts.TOKENS))) == pytest.approx(share, abs=1e-6)


def test_every_token_of_drafts_is_compared_with_dense():
    sizes = {"lengths": [160], "policies": ["dense"], "draft_weights": None, "prompts": 2, "answer": 10}
    (row,) = drafts.acceptance_rows(kvjax.load("needle"), "A tale of two cities. " * 90, **sizes, say=lambda what: None)
    assert (row["acceptance"], row["equal"], row["of"]) == (1.0, 20, 20), "dense agrees with itself"
    assert acceptance_cells(row)[3:] == ("2 of 10", "8.0 of 8", "1.000", "20 of 20")
