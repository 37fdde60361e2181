"""Asking an engine for needles: against one that is made to be right or wrong, and with the embedded model."""

import dataclasses
import math
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.evaluation import needle
from kvjax.evaluation.needle import NeedleTask
from kvjax.evaluation.retrieval import Answer, NeedleResult, ask, find_needles, needle_exact_match, speak
from kvjax.evaluation.statistics import paired
from kvjax.models import load
from kvjax.models.decoder import TransformerDecoder
from kvjax.models.needle import path

pytestmark = pytest.mark.bits

LAYERS, KV_HEADS = 3, 2


@pytest.fixture(scope="module")
def embedded():
    return load(path(), dtype=jnp.float32)


@pytest.fixture(scope="module")
def text():
    return needle.documentation_text()[:60_000]


@pytest.fixture(scope="module")
def trials(embedded, text):
    tokenizer = embedded.tokenizer
    task = NeedleTask(tokenizer, needle.encode_text(tokenizer, text), needle.vocabulary_words(tokenizer), distractors=2)
    return task.trials(200, 5)


@dataclasses.dataclass
class Fed:
    """A sequence of the made-up engine: which trial it holds, and what it was fed after the haystack."""

    trial: int
    tokens: list = dataclasses.field(default_factory=list)


class ScriptedEngine:
    """Answers every trial rightly under "right", and under "wrong" with a last digit that is one too high."""

    spec = SimpleNamespace(kv_heads=LAYERS * KV_HEADS)

    def __init__(self, trials, vocabulary, digits):
        self.trials, self.vocabulary, self.digits = trials, vocabulary, digits
        self.prefilled, self.batches, self.live, self.last_reads = [], [], 0, None

    def prefill(self, prompts, *, on_tokens=None):
        haystacks = [trial.haystack_ids for trial in self.trials]
        made = [Fed(haystacks.index(prompt)) for prompt in prompts]
        self.prefilled += [each.trial for each in made]
        self.live += len(made)
        for prompt in prompts:
            if on_tokens:
                on_tokens(len(prompt))
        return made

    def fork(self, sequence):
        self.live += 1
        return Fed(sequence.trial, list(sequence.tokens))

    def free(self, sequence):
        self.live -= 1

    def decode(self, sequences, tokens, policy=None):
        """Reads per sequence: 2 blocks under "right", 1 under "wrong", 10 keys a block, for every layer and KV head."""
        self.batches.append(len(sequences))
        logits = np.zeros((len(sequences), self.vocabulary), np.float32)
        for row, (sequence, token) in enumerate(zip(sequences, tokens, strict=True)):
            sequence.tokens.append(token)
            trial = self.trials[sequence.trial]
            said = len(sequence.tokens) - len(trial.question_ids)
            if 0 <= said < len(trial.answer_ids):
                answer = trial.answer_ids[said]
                if policy == "wrong" and said == len(trial.answer_ids) - 1:
                    answer = self.digits[(self.digits.index(answer) + 1) % 10]
                logits[row, answer] = 1
            elif policy == "longer":
                logits[row, self.digits[7]] = 1
        blocks = np.full(len(sequences), LAYERS * KV_HEADS * (1 if policy == "wrong" else 2))
        self.last_reads = SimpleNamespace(blocks=blocks, keys=10 * blocks)
        return logits


@pytest.fixture
def engine(trials, embedded):
    digits = [needle.encode(embedded.tokenizer, str(digit))[0] for digit in range(10)]
    return ScriptedEngine(trials, embedded.config.vocab_size, digits)


def test_ask_feeds_the_question_and_then_what_the_engine_says(engine, trials, embedded):
    assert len({len(trial.question_ids) for trial in trials}) > 1  # the batch keeps going until the longest is through
    sequences = engine.prefill([trial.haystack_ids for trial in trials])
    answers, blocks, keys = ask(engine, sequences, trials, embedded.tokenizer, policy="right")
    assert [answer.text.strip() for answer in answers] == [trial.answer + embedded.tokenizer.decode([0]) for trial in trials]
    assert [answer.depth for answer in answers] == [trial.depth for trial in trials]
    for sequence, trial in zip(sequences, trials, strict=True):
        right = [*trial.question_ids, *trial.answer_ids]
        assert sequence.tokens[: len(right)] == right
    # The token after an answer, which must be no digit, is said and need not be fed.
    steps = max(len(trial.question_ids) + len(trial.answer_ids) for trial in trials)
    assert blocks.tolist() == [2.0] * steps
    assert keys.tolist() == [20.0] * steps


def test_tokens_are_fed_in_place_of_what_the_engine_says(engine, trials):
    """The row whose tokens are given goes on with them, and what it would have said is returned; the other rows are as
    before."""
    scripts = [trial.turns for trial in trials[:2]]
    sequences = engine.prefill([trial.haystack_ids for trial in trials[:2]])
    own, *_ = speak(engine, sequences, scripts, policy="right")
    given = trials[1].answer_ids[::-1]
    sequences = engine.prefill([trial.haystack_ids for trial in trials[:2]])
    said, *_ = speak(engine, sequences, scripts, policy="right", fed=[(), given])
    assert said == own == [[[*trial.answer_ids, 0]] for trial in trials[:2]]
    asked = len(trials[1].question_ids)
    assert sequences[1].tokens[asked : asked + len(given)] == given != trials[1].answer_ids


def test_right_and_wrong_answers_are_told_apart(engine, trials, embedded):
    done = []
    right, wrong = needle_exact_match(engine, trials, ("right", "wrong"), embedded.tokenizer, batch=2, on_tokens=done.append)
    assert (right.policy, right.exact_match, right.blocks_per_step, right.keys_per_step) == ("right", 1.0, 2.0, 20.0)
    assert (wrong.policy, wrong.exact_match, wrong.blocks_per_step, wrong.keys_per_step) == ("wrong", 0.0, 1.0, 10.0)
    assert right.by_depth() == [1.0, 1.0, 1.0]
    assert all(answer.text.strip()[:4] == trial.answer[:4] for answer, trial in zip(wrong.answers, trials, strict=True))
    assert [answer.depth for answer in wrong.answers] == [trial.depth for trial in trials]
    # Every haystack is read once, whatever the number of policies; nothing is kept.
    assert engine.prefilled == list(range(5))
    assert sum(done) == sum(len(trial.haystack_ids) for trial in trials)
    # What is timed was compiled before: each batch and policy begins with one step of the same size, on forks.
    assert set(engine.batches) == {2, 1}
    assert engine.batches[0] == 2
    assert engine.live == 0


def test_an_answer_that_goes_on_with_a_digit_is_wrong(engine, trials, embedded):
    right, longer = needle_exact_match(engine, trials, ("right", "longer"), embedded.tokenizer, batch=2)
    assert (right.exact_match, longer.exact_match) == (1.0, 0.0)
    assert [answer.text.strip() for answer in longer.answers] == [f"{trial.answer}7" for trial in trials]


def test_figures_of_a_result():
    answers = [Answer(" 1", True, 0.1), Answer(" 2", False, 0.2), Answer(" 3", True, 0.9)]
    figures = NeedleResult("top:8", answers, 1.5, 13.0, 1630.0).figures()
    assert figures["describe"]
    del figures["describe"]
    assert figures == {
        "policy": "top:8",
        "exact_match": pytest.approx(2 / 3),
        "hits": 2,
        "by_depth": [0.5, None, 1.0],
        "blocks_per_step": 13.0,
        "keys_per_step": 1630.0,
        "seconds": 1.5,
    }


@pytest.mark.long
def test_embedded_model_finds_needles_unless_they_are_left_out(embedded, text, listed_pages):
    """By a window, or by a defect planted in a policy: the pages of the first needle, at a quarter of the text, are not
    in the list."""
    length, done = 640, []
    policies = ("dense", "window:64+1024", "window:64+128", listed_pages((1, 2)))
    dense, wide, narrow, dropped = find_needles(
        embedded, text, policies, length=length, trials=2, distractors=3, prefill_chunk=256, on_tokens=done.append
    )
    assert dense.exact_match == wide.exact_match == 1.0
    assert [a.text for a in wide.answers] == [a.text for a in dense.answers]
    assert [a.hit for a in dropped.answers] == [False, True]
    pairs = paired([a.hit for a in dense.answers], [a.hit for a in dropped.answers])
    assert (pairs.lost, pairs.gained) == (1, 0)
    # Both needles lie before the last 128 tokens.
    assert narrow.exact_match == 0.0
    assert [answer.depth for answer in narrow.answers] == [0.25, 0.75]
    assert narrow.keys_per_step == 64 + 128
    assert length - 128 < dense.keys_per_step < length
    assert dense.blocks_per_step == 5
    assert 2 * (length - 128) < sum(done) < 2 * length
    assert all(math.isfinite(result.seconds) and result.seconds > 0 for result in (dense, wide, narrow))


@pytest.mark.parametrize(("cache_format", "buckets"), [(None, (3,)), ("int8", (3, 6))])
def test_pages_are_packed_as_named(cache_format, buckets, embedded, text, monkeypatch):
    """Contexts and their forks have a row of open pages each."""
    made = {}
    monkeypatch.setattr("kvjax.evaluation.retrieval.Engine", lambda *_, **options: made.update(options))
    monkeypatch.setattr("kvjax.evaluation.retrieval.needle_exact_match", lambda *_, **__: [])
    find_needles(embedded, text, ["dense"], length=512, trials=3, cache_format=cache_format)
    assert (made["cache_format"], made["batch_buckets"]) == (cache_format, buckets)


@pytest.mark.long
def test_needles_are_found_in_packed_pages(embedded, text):
    exact, packed = (find_needles(embedded, text, ["dense", "top:2"], length=640, trials=2, cache_format=name) for name in (None, "int8"))
    assert [result.exact_match for result in packed] == [result.exact_match for result in exact] == [1.0, 1.0]


def test_prompts_start_as_the_tokenizer_starts_them(embedded, text, monkeypatch):
    """A model with a beginning-of-sequence token gets one."""
    seen = []
    monkeypatch.setattr("kvjax.evaluation.retrieval.Engine", lambda *_, **__: None)
    monkeypatch.setattr("kvjax.evaluation.retrieval.needle_exact_match", lambda engine, trials, *_, **__: seen.extend(trials))

    class WithBos:
        def encode(self, string, add_special_tokens=True):
            return [7] * add_special_tokens + embedded.tokenizer.encode(string, add_special_tokens=False)

        get_vocab = embedded.tokenizer.get_vocab

    for tokenizer in (embedded.tokenizer, WithBos()):
        find_needles(SimpleNamespace(tokenizer=tokenizer), text, ["dense"], length=512, trials=1)
    plain, with_bos = seen
    assert with_bos.haystack_ids[0] == 7
    assert with_bos.haystack_ids.count(7) == plain.haystack_ids.count(7) + 1
    assert plain.length == with_bos.length == 512 - 32


def test_contexts_that_cannot_be_are_refused(embedded, text):
    with pytest.raises(ValueError, match="pass a longer text"):
        find_needles(embedded, text, ["dense"], length=65_536, trials=1)
    short = dataclasses.replace(embedded, decoder=TransformerDecoder(dataclasses.replace(embedded.config, max_positions=512)))
    with pytest.raises(ValueError, match="longer than the model's 512 positions"):
        find_needles(short, text, ["dense"], length=1024, trials=1)
