"""What objects show of themselves when their name is typed in a notebook: one short line, however much they hold."""

import numpy as np
import pytest

from kvjax.engine.engine import Engine
from kvjax.engine.sampling import Sampling
from kvjax.engine.sequence import CachedSequence
from kvjax.generation import generate
from kvjax.scheduler.request import Completion, Request
from kvjax.scheduler.scoring import Score, score


@pytest.fixture(scope="module")
def engine(model):
    return Engine(model, policy="top:8", policies=["dense"], pages=32)


def test_an_engine_shows_its_policies_and_its_pool(engine):
    idle = "Engine('qwen2': top:8, dense; prefill dense; 0 of 32 pages of 128 tokens in use, sequences=0)"
    assert repr(engine) == idle
    (sequence,) = engine.prefill([[1] * 200])
    assert repr(engine) == idle.replace("0 of 32", "2 of 32").replace("sequences=0", "sequences=1")
    assert repr(sequence) == "CachedSequence(length=200, pages=2)"
    engine.free(sequence)
    assert repr(engine) == idle
    assert repr(sequence) == "CachedSequence(length=200, pages=0)"


def test_a_completion_shows_its_text_and_how_it_ended(engine):
    found = generate(engine, [3, 4, 5], max_new_tokens=4, details=True)
    assert repr(found) == f"Completion('', finish_reason='length', tokens=4, keys_per_step={found.keys_per_step:.0f})"
    long = Completion(text="word " * 10_000, token_ids=tuple(range(10_000)), finish_reason="stop")
    assert repr(long).startswith("Completion('word word")
    assert repr(long).endswith("', finish_reason='stop', tokens=10000, keys_per_step=0)")
    assert len(repr(long)) < 150


def test_a_failed_completion_shows_its_error():
    assert repr(Completion(finish_reason="error", error=ValueError("too long"))) == "Completion(error=ValueError('too long'))"


@pytest.mark.parametrize(
    "held",
    [
        Request("word " * 10_000, Sampling()),
        Request(tuple(range(10_000)), Sampling(), id="x" * 10_000),
        Score(-1.0, (-0.1,) * 10_000, tuple(range(10_000)), True),
        CachedSequence(list(range(10_000)), 10_000, {"full": list(range(100))}, np.zeros(10_000)),
        Completion(error=ValueError("x" * 10_000)),
    ],
)
def test_what_is_long_is_cut(held):
    assert len(repr(held)) < 300
    assert "\n" not in repr(held)


def test_sampling_shows_what_was_chosen():
    assert repr(Sampling()) == "Sampling()"
    chosen = Sampling(temperature=0.7, stop="end", seed=3)
    assert repr(chosen) == "Sampling(temperature=0.7, seed=3, stop=('end',))"
    assert eval(repr(chosen)) == chosen


def test_a_memory_plan_shows_its_table(engine):
    assert "pages that fit" in repr(engine.memory_plan())


def test_a_score_shows_its_sum(engine):
    found = score(engine, [1, 2], [3, 4])
    assert repr(found) == f"Score(logprob={found.logprob:.6g}, tokens=2, is_greedy=False)"


@pytest.mark.parametrize(
    ("given", "message"),
    [("needle", r"kvjax\.Engine\(kvjax\.load\('needle'\), \.\.\.\)"), (object(), r"a model as kvjax\.load.* returns it, got object")],
)
def test_an_engine_says_how_to_load_a_model(given, message):
    with pytest.raises(ValueError, match=message):
        Engine(given)
