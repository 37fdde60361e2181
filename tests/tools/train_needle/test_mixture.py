"""The training mixture: whole and repeatable batches, right answers, and loss weight on nothing but what can be
known."""

import re

import numpy as np
import pytest

from kvjax.evaluation import needle
from kvjax.models import load
from kvjax.models.needle import path
from train_needle.mixture import RECORD, Mixture, Vocabulary
from train_needle.recipe import FAR_MIXTURE, LONG_MIXTURE, MIXTURE, NEEDLE, WARM_UP

TEXT_WEIGHT, ANSWER_WEIGHT = 0.3, 4.0
KINDS = ("needles", "far", "records", "text", "recall", "repeats")


@pytest.fixture(scope="module")
def tokenizer():
    return load(path()).tokenizer


@pytest.fixture(scope="module")
def mixture(tokenizer):
    text = needle.documentation_text().encode("ascii", "ignore").decode()[:150_000]
    # No digits in the text: then every number of a sample was put there.
    ids = needle.encode_text(tokenizer, re.sub(r"\d", "", text))
    vocabulary = Vocabulary.build(tokenizer, letters=NEEDLE.key_letters)
    return Mixture(vocabulary, ids.astype(np.uint16), seed=3, text_weight=TEXT_WEIGHT, answer_weight=ANSWER_WEIGHT)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("length", [64, 257, 1024])
def test_samples_have_exactly_the_length(mixture, kind, length):
    tokens, weights = mixture.batch(0, length, 8, {kind: 1.0})
    assert (tokens.shape, tokens.dtype) == ((8, length + 1), np.int32)
    assert (weights.shape, weights.dtype) == ((8, length), np.float32)
    assert tokens.min() >= 0
    assert tokens.max() < NEEDLE.vocab_size
    assert weights.min() >= 0
    assert (weights.sum(1) > 0).all()


@pytest.mark.parametrize("shares", [WARM_UP, MIXTURE, LONG_MIXTURE, FAR_MIXTURE], ids=["warm-up", "mixture", "long", "far"])
def test_a_batch_depends_on_seed_and_step_alone(mixture, shares):
    again = Mixture(mixture.vocabulary, mixture.text, seed=3, text_weight=TEXT_WEIGHT, answer_weight=ANSWER_WEIGHT)
    again.batch(6, 200, 4, shares)
    for one, two in zip(mixture.batch(7, 200, 4, shares), again.batch(7, 200, 4, shares), strict=True):
        np.testing.assert_array_equal(one, two)
    other = Mixture(mixture.vocabulary, mixture.text, seed=4, text_weight=TEXT_WEIGHT, answer_weight=ANSWER_WEIGHT)
    assert not np.array_equal(mixture.batch(7, 200, 4, shares)[0], mixture.batch(8, 200, 4, shares)[0])
    assert not np.array_equal(mixture.batch(7, 200, 4, shares)[0], other.batch(7, 200, 4, shares)[0])


def facts(text, template):
    """(key, value, where the value starts in `text`) of every needle or answered question of a template."""
    both = []
    for form in (template.needle.split(" {value}")[0], template.question):
        pattern = re.escape(form).replace(re.escape("{key}"), r"([a-z]+ [a-z]+)") + r" (\d+)"
        both += [(found.group(1), found.group(2), found.start(2)) for found in re.finditer(pattern, text)]
    return sorted(set(both), key=lambda fact: fact[2])


def digit_weights(tokenizer, tokens, weights):
    """The sample as text, and the loss weight of every digit by its place in the text."""
    pieces = [tokenizer.decode([token]) for token in tokens]
    starts = np.cumsum([0, *map(len, pieces)])
    return "".join(pieces), {starts[i]: weights[i - 1] for i in range(1, len(pieces)) if pieces[i].isdigit()}


@pytest.mark.parametrize("kind", ["needles", "far", "records"])
def test_answers_are_right_and_they_alone_carry_the_answer_weight(mixture, tokenizer, kind):
    asked = 0
    for tokens, weights in zip(*mixture.batch(1, 512, 40, {kind: 1.0}), strict=True):
        text, of_digit = digit_weights(tokenizer, tokens, weights)
        found = {at: (template.needle, key, value) for template in (*needle.TEMPLATES, RECORD) for key, value, at in facts(text, template)}
        told, accounted = {}, set()
        for at in sorted(found):
            form, key, value = found[at]
            places = range(at, at + len(value))
            if key in told:  # a question
                # Only the sample's end may cut an answer short.
                assert told[key] == (form, value) or (at + len(value) == len(text) and told[key][1].startswith(value))
                assert all(of_digit[place] == ANSWER_WEIGHT for place in places)
                asked += 1
            else:
                told[key] = (form, value)
                assert not needle.is_held_out(*key.split())
                assert all(of_digit.get(place, 0) == 0 for place in places)
            accounted.update(places)
        assert {place for place, weight in of_digit.items() if weight} <= accounted
        assert np.sum(weights == ANSWER_WEIGHT) == sum(weight == ANSWER_WEIGHT for weight in of_digit.values())
    assert asked > 70


def test_keys_are_not_foreseen(mixture, tokenizer):
    """Weight 0 on both words of a key, the text's weight on the words before them."""
    words = set(mixture.vocabulary.words.tolist())
    before = needle.encode(tokenizer, needle.TEMPLATES[0].needle.split(" {key}")[0])
    met = 0
    for tokens, weights in zip(*mixture.batch(3, 512, 10, {"needles": 1.0}), strict=True):
        for start in range(1, len(tokens) - len(before) - 2):
            if tokens[start : start + len(before)].tolist() == before:
                key = slice(start + len(before), start + len(before) + 2)
                assert set(tokens[key].tolist()) <= words
                assert not weights[key.start - 1 : key.stop - 1].any()
                np.testing.assert_allclose(weights[start - 1 : key.start - 1], TEXT_WEIGHT)
                met += 1
    assert met > 10


def test_far_samples_ask_once_for_each_needle_at_the_end(mixture, tokenizer):
    depths = []
    for tokens, _ in zip(*mixture.batch(4, 4096, 20, {"far": 1.0}), strict=True):
        text = tokenizer.decode(tokens)
        found = [facts(text, template) for template in needle.TEMPLATES]
        (of_one,) = filter(None, found)
        keys = [key for key, _, _ in of_one]
        count = len(keys) // 2
        assert set(keys[:count]) == set(keys[count:])
        assert len(set(keys)) == count
        last_needle, question = of_one[count - 1][2], of_one[count][2]
        depths += [at / question for _, _, at in of_one[:count]]
        assert last_needle < question
    assert len(depths) > 150
    assert 0.6 < np.mean(np.array(depths) < 0.5) < 0.8


def test_recall_weighs_the_second_of_known_pairs(mixture):
    for tokens, weights in zip(*mixture.batch(2, 300, 10, {"recall": 1.0}), strict=True):
        seen = {}
        for i in range(0, len(tokens) - 1, 2):
            key, value = tokens[i], tokens[i + 1]
            assert weights[i] == (1.0 if key in seen else 0.0)
            assert seen.setdefault(key, value) == value
            if i:
                assert weights[i - 1] == 0  # nobody knows which key comes next


def test_repeats_weigh_what_was_there_one_period_ago(mixture):
    for tokens, weights in zip(*mixture.batch(2, 300, 10, {"repeats": 1.0}), strict=True):
        weighed = np.flatnonzero(weights) + 1
        period = weighed[0] - 1
        assert period >= 4
        np.testing.assert_array_equal(weighed, np.arange(period + 1, len(tokens)))
        np.testing.assert_array_equal(tokens[weighed], tokens[weighed - period])


def test_text_is_running_text(mixture):
    (tokens,), (weights,) = mixture.batch(0, 100, 1, {"text": 1.0})
    starts = np.flatnonzero(mixture.text[:-100] == tokens[0])
    assert any(np.array_equal(mixture.text[s : s + 101], tokens) for s in starts)
    assert (weights == np.float32(TEXT_WEIGHT)).all()


def test_wrong_input_is_refused(mixture):
    with pytest.raises(ValueError, match="unknown kinds of samples \\['poems'\\]"):
        mixture.batch(0, 100, 1, {"poems": 1.0})
    with pytest.raises(ValueError, match="too short for a needle"):
        mixture.batch(0, 16, 8, {"needles": 1.0})
