"""Drafts that are looked up: against a search in plain Python, and in answers that repeat themselves."""

import jax.numpy as jnp
import numpy as np
import pytest
from launch_histories import answers, engine_of
from scheduling import asked
from tiny_models import make_family, shallow

from kvjax import Engine
from kvjax.engine.lookup import LEAST, LONGEST, look_up, with_tokens
from kvjax.scheduler.batch import Batch
from kvjax.scheduler.drafting import Drafting


def searched(tokens, count):
    """What follows the latest of the longest earlier runs that end as `tokens` do; it may run into itself."""
    best, found = 0, None
    for start in range(1, len(tokens)):
        alike = 0
        while alike < LONGEST and alike < start and tokens[start - 1 - alike] == tokens[-1 - alike]:
            alike += 1
        if alike >= max(best, LEAST):
            best, found = alike, start
    if found is None:
        return [-1] * count
    more = list(tokens)
    for number in range(count):
        more.append(more[found + number])
    return more[len(tokens) :]


@pytest.mark.parametrize("vocabulary", [2, 3, 12])
def test_it_finds_what_a_search_finds(vocabulary):
    draw = np.random.default_rng(vocabulary)
    for _ in range(60):
        lengths = draw.integers(1, 50, 4)
        history = draw.integers(0, vocabulary, (4, 64)).astype(np.int32)  # behind the last token: whatever
        found = np.asarray(look_up(jnp.asarray(history), jnp.asarray(lengths - 1, jnp.int32), 7))
        for row, length, drafts in zip(history, lengths, found, strict=True):
            assert drafts.tolist() == searched(row[:length].tolist(), 7)


def test_a_repetition_goes_on_from_its_own_start():
    history = np.zeros((1, 32), np.int32)
    history[0, :8] = [9, 1, 2, 3, 1, 2, 3, 1]
    assert look_up(jnp.asarray(history), jnp.array([7]), 7).tolist() == [[2, 3, 1, 2, 3, 1, 2]]


def test_tokens_that_stay_are_added_and_those_past_the_end_dropped():
    history = jnp.zeros((3, 8), jnp.int32)
    tokens = jnp.arange(1, 10, dtype=jnp.int32).reshape(3, 3)
    found = with_tokens(history, jnp.array([1, 4, 6]), tokens, jnp.array([3, 0, 2]))
    assert found.tolist() == [[0, 0, 1, 2, 3, 0, 0, 0], [0] * 8, [0] * 7 + [7]]


def test_an_answer_that_repeats_itself_takes_fewer_rounds(monkeypatch):
    """A greedy answer of a random model soon comes back to the same words."""
    monkeypatch.setattr(Drafting, "next", lambda self, ready: self._launches[1])
    monkeypatch.setattr(Engine, "has_program", lambda self, group: True)
    engine = engine_of(shallow(make_family("llama")), ("dense",))
    request = [asked([5, 6, 7], 120)]
    (expected,), (found,) = answers(engine, request), answers(engine, request, draft="lookup")
    assert found.token_ids == expected.token_ids
    assert found.rounds.tokens / found.rounds.count > 1.4
    assert found.keys_per_step < 1.3 * expected.keys_per_step, "drafts read nothing, but what is dropped at the end counts"


def test_no_history_is_made_while_the_program_is_compiled(monkeypatch):
    """A step would wait for it, and a long one takes milliseconds."""
    monkeypatch.setattr(Drafting, "next", lambda self, ready: self._launches[1] if ready(self._launches[1]) else None)
    monkeypatch.setattr(Engine, "has_program", lambda self, group: False)
    monkeypatch.setattr(Batch, "with_history", lambda self, group: 1 / 0)
    engine = engine_of(shallow(make_family("llama")), ("dense",))
    (found,) = answers(engine, [asked([5, 6, 7], 9)], draft="lookup")
    assert (len(found.token_ids), found.rounds.count) == (9, 0)
