"""Needle trials: what is hidden where, what is asked, and what counts as found."""

import collections
import dataclasses
import itertools
import math
import re

import numpy as np
import pytest

from kvjax.evaluation import needle
from kvjax.evaluation.needle import NeedleTask, Template, Trial, encode, encode_text, exact_match_by_depth, insert, is_held_out
from kvjax.models import load
from kvjax.models.needle import path

FILL = 5_000


@pytest.fixture(scope="module")
def tokenizer():
    return load(path()).tokenizer


@pytest.fixture(scope="module")
def task(tokenizer):
    text = re.sub(r"\d", "", needle.documentation_text()[:100_000])
    ids = encode_text(tokenizer, text)[:FILL]
    return NeedleTask(tokenizer, ids, needle.vocabulary_words(tokenizer), distractors=5)


def facts(task, trial):
    """{key: [values]} of every needle of the trial's template in its haystack."""
    form = re.escape(task.templates[trial.template].needle)
    pattern = form.replace(re.escape("{key}"), "([a-z]+ [a-z]+)").replace(re.escape("{value}"), r"(\d+)")
    found = collections.defaultdict(list)
    for key, value in re.findall(pattern, task.tokenizer.decode(trial.haystack_ids)):
        found[key].append(value)
    return found


def places(haystack, piece):
    """Where a list of tokens stands in a longer one."""
    return [i for i in range(len(haystack) - len(piece) + 1) if haystack[i : i + len(piece)] == piece]


@pytest.mark.parametrize("length", [300, 301, 1024, 4096])
@pytest.mark.parametrize("template", range(len(needle.TEMPLATES)))
def test_a_trial_has_exactly_the_length_and_one_target_at_its_depth(task, length, template):
    for depth in (0.0, 0.31, 1.0):
        trial = task.trial(length, np.random.default_rng(length), depth=depth, template=template)
        assert len(trial.haystack_ids) + len(trial.question_ids) == trial.length == length
        form = task.templates[template]
        asked = task.tokenizer.decode(trial.question_ids)
        (key,) = re.fullmatch(re.escape(form.question).replace(re.escape("{key}"), "([a-z]+ [a-z]+)"), asked).groups()
        target = encode(task.tokenizer, form.needle.format(key=key, value=trial.answer))
        (at,) = places(trial.haystack_ids, target)
        told = facts(task, trial)
        assert told[key] == [trial.answer]
        # Distractors: as many as asked for, the same template, other keys.
        assert len(told) == 1 + task.distractors
        # Before the target stand round(depth * fill) tokens of text and some of the distractors.
        sizes = [len(encode(task.tokenizer, form.needle.format(key=k, value=v))) for k, (v,) in told.items()]
        before = round(depth * (len(trial.haystack_ids) - sum(sizes)))
        assert before <= at <= before + task.distractors * max(sizes)
        assert trial.depth == depth
        assert len(trial.answer) == task.digits
        assert task.tokenizer.decode(trial.answer_ids) == f" {trial.answer}"


def test_without_distractors_the_target_stands_exactly_at_its_depth(task, tokenizer):
    lone = NeedleTask(tokenizer, task.text_ids, task.words, distractors=0)
    for depth in (0.0, 0.25, 0.9, 1.0):
        trial = lone.trial(800, np.random.default_rng(1), depth=depth, template=1)
        ((key, (value,)),) = facts(lone, trial).items()
        target = encode(tokenizer, lone.templates[1].needle.format(key=key, value=value))
        assert places(trial.haystack_ids, target) == [round(depth * (len(trial.haystack_ids) - len(target)))]


def test_the_rest_of_a_haystack_is_the_text_unbroken(task, tokenizer):
    lone = NeedleTask(tokenizer, task.text_ids, task.words, distractors=0, prefix_ids=(0, 1))
    trial = lone.trial(500, np.random.default_rng(2), depth=0.5, template=2)
    assert trial.haystack_ids[:2] == [0, 1]
    assert trial.length == 500
    ((key, (value,)),) = facts(lone, trial).items()
    target = encode(tokenizer, lone.templates[2].needle.format(key=key, value=value))
    (at,) = places(trial.haystack_ids, target)
    text = trial.haystack_ids[2:at] + trial.haystack_ids[at + len(target) :]
    assert places(task.text_ids.tolist(), text)


def test_held_out_keys_and_training_keys_are_apart(task, tokenizer):
    trained = NeedleTask(tokenizer, task.text_ids, task.words, held_out=False, distractors=5)
    held_out_keys, trained_keys = (
        {key for trial in each.trials(600, 30, seed=4) for key in facts(each, trial)} for each in (task, trained)
    )
    assert len(held_out_keys) > 100
    assert len(trained_keys) > 100
    assert all(is_held_out(*key.split()) for key in held_out_keys)
    assert not any(is_held_out(*key.split()) for key in trained_keys)
    share = np.mean([is_held_out(a, b) for a, b in itertools.product(task.words[:60], repeat=2)])
    assert 0.08 < share < 0.17


def test_the_split_of_keys_never_changes():
    """A checkpoint was trained on one side of it."""
    assert needle.word_hash("house") == 1742027165
    held_out = {pair for pair in itertools.product(("house", "garden", "water", "letter"), repeat=2) if is_held_out(*pair)}
    assert held_out == set(itertools.product(("garden", "water", "letter"), repeat=2))


def test_trials_are_drawn_from_the_seed_alone(task):
    one, two = (task.trials(400, 6, seed=9) for _ in range(2))
    assert one == two
    assert one != task.trials(400, 6, seed=10)
    assert [trial.depth for trial in one] == pytest.approx([(i + 0.5) / 6 for i in range(6)])
    assert [trial.template for trial in one] == [0, 1, 2, 0, 1, 2]
    assert len({trial.answer for trial in one}) == 6
    rng = np.random.default_rng(0)
    free = [task.trial(400, rng) for _ in range(40)]
    assert {trial.template for trial in free} == {0, 1, 2}
    assert min(trial.depth for trial in free) < 0.2 < 0.8 < max(trial.depth for trial in free)


def test_near_values_differ_in_one_digit_first_and_then_in_two():
    digits = np.array([4, 8, 2, 1, 9])
    value, *others = needle.near_values(digits, 855, np.random.default_rng(3))
    assert value == "48219"
    assert len(set(others) | {value}) == 856
    changed = [sum(a != b for a, b in zip(value, other, strict=True)) for other in others]
    assert changed == [1] * 45 + [2] * 810
    # Fewer are the first of the same ones.
    for count in (0, 1, 45, 46, 64):
        assert needle.near_values(digits, count, np.random.default_rng(3)) == [value, *others[:count]]
    with pytest.raises(ValueError, match=r"5 digits have 855 near misses \(45 differ in one digit, 810 in two\), not 856: use fewer"):
        needle.near_values(digits, 856, np.random.default_rng(3))
    assert len(needle.near_values(digits[:1], 9, np.random.default_rng(3))) == 10


def test_the_embedded_models_words_give_every_key_224_near_ones(task):
    hashes = np.array([needle.word_hash(word) for word in task.words])
    held_out = needle.hashes_held_out(hashes[:, None], hashes)
    near = held_out.sum(1)[:, None] + held_out.sum(0) - 2
    assert near[held_out].min() == 224


def test_trials_with_up_to_45_near_misses_are_those_that_were_measured(task):
    """Committed runs name the seed and not the trials: what is drawn from it must not change."""
    near = dataclasses.replace(task, near_miss=True, distractors=16)
    rng = np.random.default_rng((0, 8))
    assert near.values(rng)[:4] == ["37971", "37471", "37977", "17971"]
    assert rng.integers(10**6) == 100336


@pytest.mark.quick_but("change7-call7-do not give 201 different keys")
@pytest.mark.parametrize(
    ("change", "call", "message"),
    [
        ({}, {"length": 60}, r"6 needles and the question take \d+ tokens, and a length of 60 is left for them"),
        ({}, {"length": 9000}, r"the text has 5000 tokens, a trial of length 9000 needs 8\d\d\d"),
        ({}, {"length": 400, "depth": 1.5}, r"depth must be in \[0, 1\], got 1.5"),
        ({"digits": 0}, {"length": 400}, "digits must be at least 1"),
        ({"distractors": -1}, {"length": 400}, "distractors at least 0"),
        ({"words": ("house",) * 3}, {"length": 400}, "at least 16 different words"),
        ({"words": ("house",) * 20}, {"length": 400}, "at least 16 different words"),
        ({"distractors": 200, "words": tuple(f"word{i}" for i in range(16))}, {"length": 5000}, "do not give 201 different keys"),
    ],
)
def test_impossible_trials_are_refused(task, change, call, message):
    fields = {"tokenizer": task.tokenizer, "text_ids": task.text_ids, "words": task.words, "distractors": 5} | change
    with pytest.raises(ValueError, match=message):
        NeedleTask(**fields).trial(rng=np.random.default_rng(0), **call)


@pytest.mark.parametrize("texts", [("{key} is {value}", " {key} is"), (" {key}: {value}", "{key}:"), (" {key}", " {key}")])
def test_a_template_without_its_places_is_refused(texts):
    with pytest.raises(ValueError, match="a template needs"):
        Template(*texts)


@pytest.mark.parametrize(
    ("text", "hit"),
    [
        (" 48213", True),
        ("48213.\n", True),
        (" 48213 and", True),
        (" 48214", False),
        (" 4821", False),
        (" 482130", False),
        (" is 48213", False),
        ("", False),
    ],
)
def test_is_hit(text, hit):
    assert Trial([1], [2], [3], "48213", 0.5, 0).is_hit(text) is hit


@pytest.mark.parametrize(("text", "hit"), [(" mint.\n", True), (" minty", False), (" mint2", False), ("mint and", True)])
def test_a_word_is_a_hit_where_it_ends(text, hit):
    assert Trial([1], [2], [3], "mint", 0.5, 0).is_hit(text) is hit


def test_insert_keeps_the_order_of_text_and_of_pieces():
    assert insert(np.arange(4), [2, 0, 2, 4], [[10], [20, 21], [30], [40]]) == [20, 21, 0, 1, 10, 30, 2, 3, 40]
    assert insert(np.arange(0), [0, 0], [[5], [6]]) == [5, 6]
    assert insert(np.arange(3), [], []) == [0, 1, 2]


def test_exact_match_by_depth():
    depths = [0.0, 0.32, 0.34, 0.5, 1.0]
    assert exact_match_by_depth([True, False, True, True, False], depths) == [0.5, 1.0, 0.0]
    assert exact_match_by_depth([True] * 5, depths, bins=1) == [1.0]
    early, none = exact_match_by_depth([True], [0.1], bins=2)
    assert early == 1.0
    assert math.isnan(none)


def test_encode_text_is_the_text_in_pieces_of_lines(tokenizer):
    text = "one line\nand two\n\nfour 44\n" * 50 + "no end"
    ids = encode_text(tokenizer, text, span=40)
    assert ids.dtype == np.int32
    assert tokenizer.decode(ids) == text
    assert encode_text(tokenizer, "").tolist() == []


def test_words_are_single_tokens_and_enough(tokenizer):
    words = needle.vocabulary_words(tokenizer)
    assert len(set(words)) == len(words) > 300
    assert list(words) == sorted(words)
    assert all(re.fullmatch("[a-z]{5,}", word) and len(encode(tokenizer, f" {word}")) == 1 for word in words)
    assert len(needle.vocabulary_words(tokenizer, limit=100)) <= 100
    assert set(words) < set(needle.vocabulary_words(tokenizer, letters=4))
    with pytest.raises(ValueError, match="whole words of 30 letters or more: pass a word list"):
        needle.vocabulary_words(tokenizer, letters=30)
