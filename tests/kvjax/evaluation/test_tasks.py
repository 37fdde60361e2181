"""Tasks and haystacks: what is hidden, what is asked, what counts."""

import collections
import itertools
import re

import numpy as np
import pytest

from kvjax.evaluation import needle
from kvjax.evaluation.needle import is_held_out
from kvjax.evaluation.passages import PassageTrial
from kvjax.evaluation.tasks import HAYSTACKS, LOOP, PIECES, TASKS, ManyTrial, make_trials
from kvjax.evaluation.wordings import WORDINGS
from kvjax.models import load
from kvjax.models.needle import path

LENGTH = 1200


@pytest.fixture(scope="module")
def tokenizer():
    return load(path()).tokenizer


@pytest.fixture(scope="module")
def draw(tokenizer):
    """make_trials on a text without digits."""
    text = needle.encode_text(tokenizer, re.sub(r"\d", "", needle.documentation_text()[:100_000]))[:5_000]
    words = needle.vocabulary_words(tokenizer)

    def drawn(task, haystack="codes", length=LENGTH, count=6, **options):
        return make_trials(tokenizer, text, words, task=task, haystack=haystack, length=length, count=count, **options)

    return drawn


def told(tokenizer, trial):
    """{key: [values]} of every fact of the single-needle forms in a haystack."""
    found = collections.defaultdict(list)
    text = tokenizer.decode(trial.haystack_ids)
    for form in needle.TEMPLATES:
        pattern = re.escape(form.needle).replace(re.escape("{key}"), "([a-z]+ [a-z]+)").replace(re.escape("{value}"), r"(\d+)")
        for key, value in re.findall(pattern, text):
            found[key].append(value)
    return found


@pytest.mark.parametrize(
    ("task", "haystack"), [pair for pair in itertools.product(TASKS, HAYSTACKS) if pair not in (("passage", "loop"), ("repeat", "loop"))]
)
def test_every_trial_has_its_length_and_is_drawn_from_its_seed(draw, task, haystack):
    trials = draw(task, haystack)
    assert [trial.length for trial in trials] == [LENGTH] * 6
    moved = 0.2 if task in ("passage", "repeat") else 1e-6  # to a place where a passage is unique
    assert [trial.depth for trial in trials] == pytest.approx([(i + 0.5) / 6 for i in range(6)], abs=moved)
    assert trials == draw(task, haystack)
    assert trials != draw(task, haystack, seed=1)
    assert all(trial.haystack_ids[:2] == [5, 6] for trial in draw(task, haystack, prefix_ids=(5, 6)))


@pytest.mark.parametrize("task", ["needle", "wordings", "tracking"])
def test_of_shuffled_trials_the_first_few_are_of_all_depths(draw, task):
    trials = draw(task, "loop", count=40, shuffled=True)
    depths = [trial.depth for trial in trials]
    assert sorted(depths) == [(i + 0.5) / 40 for i in range(40)]
    assert trials == draw(task, "loop", count=40, shuffled=True)
    for first in (10, 20, 30):
        fifths = np.histogram(depths[:first], 5, (0, 1))[0]
        assert fifths.min() >= first // 5 - 1
        assert fifths.max() <= first // 5 + 1
    rising = [trial.depth for trial in draw(task, "loop", count=40)]
    assert np.histogram(rising[:10], 5, (0, 1))[0].min() == 0, "the control: in order, the first few are of few depths"
    if task != "tracking":
        assert [trial.template for trial in trials[:3]] == [0, 1, 2]


def test_a_loop_is_one_paragraph_with_one_fact(draw, tokenizer):
    trial = draw("needle", "loop")[1]
    assert len(told(tokenizer, trial)) == 1
    assert tokenizer.decode(trial.haystack_ids).count(LOOP) > 10
    assert len(told(tokenizer, draw("needle", "prose")[1])) == 1
    assert len(told(tokenizer, draw("needle", "codes", distractors=7)[1])) == 8


@pytest.mark.parametrize(("distractors", "in_two"), [(9, 0), (64, 19)])
def test_near_misses_share_a_word_and_all_digits_but_one_or_two(draw, tokenizer, distractors, in_two):
    for trial in draw("needle", "near-miss", distractors=distractors, length=2400):
        facts = told(tokenizer, trial)
        (key,) = (key for key, values in facts.items() if values == [trial.answer])
        others = set(facts) - {key}
        assert len(others) == distractors
        assert len({value for values in facts.values() for value in values}) == 1 + distractors
        changed = []
        for other in others:
            (value,) = facts[other]
            assert sum(a == b for a, b in zip(key.split(), other.split(), strict=True)) == 1
            changed.append(sum(a != b for a, b in zip(trial.answer, value, strict=True)))
            assert is_held_out(*other.split())
        assert sorted(changed) == [1] * (distractors - in_two) + [2] * in_two


def test_multi_needle_asks_for_all_values_of_one_key(draw, tokenizer):
    for trial in draw("multi-needle", distractors=3):
        ((question, _),) = trial.turns
        key = re.search(r"pass keys for (\w+ \w+)\?", tokenizer.decode(question))[1]
        facts = re.findall(r"One of the pass keys for (\w+ \w+) is (\d+)\.", tokenizer.decode(trial.haystack_ids))
        assert len(facts) == PIECES + 3
        assert {value for k, value in facts if k == key} == set(trial.expected[0])
        assert len(trial.expected[0]) == PIECES


def test_multi_query_asks_for_one_key_after_the_other(draw, tokenizer):
    for trial in draw("multi-query", distractors=3):
        facts = told(tokenizer, trial)
        assert len(facts) == PIECES + 3
        assert len(trial.turns) == PIECES
        for (question, count), (value,) in zip(trial.turns, trial.expected, strict=True):
            (key,) = (key for key in facts if f" {key}" in tokenizer.decode(question))
            assert facts[key] == [value]
            assert count == len(needle.encode(tokenizer, f" {value}"))


def test_wordings_are_at_least_eight_and_ask_for_what_was_told(draw, tokenizer):
    trials = draw("wordings", distractors=3, count=len(WORDINGS))
    assert [trial.template for trial in trials] == list(range(len(WORDINGS)))
    assert len({form.needle for form in WORDINGS}) == len(WORDINGS) >= 8
    for trial, form in zip(trials, WORDINGS, strict=True):
        question, text = tokenizer.decode(trial.question_ids), tokenizer.decode(trial.haystack_ids)
        pattern = re.escape(form.question).replace(re.escape("{key}"), "([a-z]+ [a-z]+)")
        (key,) = re.findall(pattern, question)
        assert text.count(form.needle.format(key=key, value=trial.answer)) == 1
        assert (trial.answer in form.words) if form.words else trial.answer.isdigit()
        told = re.findall(
            re.escape(form.needle).replace(re.escape("{key}"), "([a-z]+ [a-z]+)").replace(re.escape("{value}"), r"(\w+)"), text
        )
        assert len(dict(told)) == 4
        assert [value for _, value in told].count(trial.answer) == 1


def test_more_facts_than_words_share_words_but_not_the_answer(draw, tokenizer):
    trial = draw("wordings", distractors=30, count=1)[0]
    found = re.findall(r"The secret ingredient of the [a-z]+ [a-z]+ soup is (\w+)\.", tokenizer.decode(trial.haystack_ids))
    assert (len(found), found.count(trial.answer)) == (31, 1)
    assert set(found) == set(WORDINGS[0].words)


@pytest.mark.parametrize("task", ["passage", "repeat"])
@pytest.mark.parametrize("haystack", ["prose", "codes"])
def test_a_passage_stands_once_and_whole_at_its_depth(draw, tokenizer, task, haystack):
    for trial in draw(task, haystack, length=2400):
        start = len(needle.encode(tokenizer, "\n\n"))
        passage = np.array([*trial.question_ids[start:], *trial.true_ids])
        runs = np.lib.stride_tricks.sliding_window_view(trial.haystack_ids, len(passage))
        (place,) = np.flatnonzero((runs == passage).all(axis=1))
        assert place / len(trial.haystack_ids) == pytest.approx(trial.depth, abs=0.05 if haystack == "prose" else 0.25)
        told_before = tuple(trial.question_ids[-12:])
        short = np.lib.stride_tricks.sliding_window_view(trial.haystack_ids, 12)
        assert (short == told_before).all(axis=1).sum() == 1
        assert trial.turns == ((trial.question_ids, len(trial.true_ids)),)
        assert trial.fed == (trial.true_ids if task == "repeat" else [])


def test_a_passage_is_judged_by_its_tokens():
    asked, said = [1, 2], [[3, 4, 5, 6]]
    assert PassageTrial([1, 2, 3, 4, 5, 6], asked, [3, 4, 5, 6], False, 0.0).judge_ids(said) == 1.0
    assert PassageTrial([1, 2, 3, 4, 5, 7], asked, [3, 4, 5, 7], False, 0.0).judge_ids(said) == 0.0
    assert PassageTrial([1, 2, 3, 4, 5, 7], asked, [3, 4, 5, 7], True, 0.0).judge_ids(said) == 1.0
    assert PassageTrial([1, 2, 3, 4, 7, 7], asked, [3, 4, 7, 7], True, 0.0).judge_ids(said) == 0.0


def test_tracking_asks_for_a_chain_told_in_order(draw, tokenizer):
    for trial in draw("tracking", distractors=6):
        facts = dict(re.findall(r"VAR ([A-Z]+) = (?:VAR )?(\w+)\n", tokenizer.decode(trial.haystack_ids)))
        value = re.search(r"the value (\d+)", tokenizer.decode(trial.turns[0][0]))[1]
        chain, holds = [], value
        while holds is not None:
            holds = next((name for name, what in facts.items() if what == holds), None)
            chain += [holds] if holds else []
        assert tuple(chain) == trial.expected[0]
        assert len(facts) == PIECES + 6
        order = [list(facts).index(name) for name in chain]
        assert order == sorted(order)


def test_facts_stand_at_their_depths(draw, tokenizer):
    first, *_, last = draw("multi-needle", "prose", count=20)
    values = [value for trial in (first, last) for value in trial.expected[0]]
    text = tokenizer.decode(first.haystack_ids)
    shares = [text.index(value) / len(text) for value in first.expected[0]]
    assert shares == pytest.approx([0.025, 0.275, 0.525, 0.775], abs=0.06)
    text = tokenizer.decode(last.haystack_ids)
    assert text.index(values[PIECES]) > 0.9 * len(text)
    assert text.index(values[PIECES + 1]) < 0.35 * len(text)


def test_every_value_counts_once_and_only_whole(draw):
    trial = ManyTrial([1], (([2], 3), ([4], 5)), (("12", "34"), ("56",)), 0.5)
    assert trial.judge([" 34, 12 and 99", " 56."]) == 1.0
    assert trial.judge([" 34 and 34", " 56"]) == pytest.approx(2 / 3)
    assert trial.judge([" 56", " 12 34"]) == 0.0
    assert trial.judge([" 123, 341", "567"]) == 0.0
    single = draw("needle")[0]
    assert (single.judge([f" {single.answer}."]), single.judge([f" {single.answer}1"])) == (1.0, 0.0)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ({"task": "haiku"}, "task 'haiku' is not known; there are needle, multi-needle"),
        ({"task": "needle", "haystack": "hay"}, "haystack 'hay' is not known; there are loop"),
        ({"task": "passage", "haystack": "loop"}, "the text repeats itself, so no passage of it stands once: use haystack 'prose'"),
        ({"task": "repeat", "haystack": "prose", "length": 60}, "leaves 43 tokens of text, too few for a passage of 48"),
        ({"task": "multi-query", "length": 90}, r"20 facts and the questions take \d+ tokens, and a length of 90 is left for them"),
        ({"task": "needle", "haystack": "near-miss", "distractors": 400, "length": 9000}, "near misses, not 400: pass more `words`"),
    ],
)
def test_impossible_tasks_are_refused(draw, call, message):
    with pytest.raises(ValueError, match=message):
        draw(**call)


def test_a_loop_needs_no_text(tokenizer):
    words = needle.vocabulary_words(tokenizer)
    (trial,) = make_trials(tokenizer, np.zeros(0, np.int32), words, task="needle", haystack="loop", length=3000, count=1)
    assert trial.length == 3000
