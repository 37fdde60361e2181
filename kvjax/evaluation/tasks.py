"""Retrieval tasks as in RULER (Hsieh et al., COLM 2024, section 3), and their haystacks.

    needle         one fact, one question (`kvjax.evaluation.needle`)
    multi-needle   one key with several values: all of them are asked for at once (RULER: multi-value)
    multi-query    several keys with a value each, asked for one after the other (RULER: multi-query)
    tracking       a chain of assignments `VAR b = VAR a`: every name that holds the value is asked for (RULER: variable
                   tracking)
    wordings       one fact, one question, in many wordings; the answer is a number or a word
                   (`kvjax.evaluation.wordings`)
    passage        a passage of the text is begun again, and the model goes on (`kvjax.evaluation.passages`)
    repeat         a passage of the text is fed again, and each of its tokens is to be predicted

Haystacks, from easy to hard: `loop` is one paragraph repeated. `prose` is a running text. `codes` is that text with
facts of the same form under other keys. `near-miss` is the same, but each of these keys shares a word with the target's
key, and each value differs from its value in one digit; beyond 9 facts for each digit, in two. Works with any
tokenizer. Uses only numpy and strings.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from kvjax.evaluation.needle import NeedleTask, Trial, encode, encode_text, insert
from kvjax.evaluation.passages import PassageTrial, passage, repeat
from kvjax.evaluation.wordings import WORDINGS

TASKS = ("needle", "multi-needle", "multi-query", "tracking", "wordings", "passage", "repeat")
HAYSTACKS = ("loop", "prose", "codes", "near-miss")
PIECES = 4
"""Values of multi-needle, questions of multi-query, names of a tracking chain."""

LOOP = (
    "The kettle stood on the stove and the window was open. A cart went by in the lane, and after it another. "
    "Nobody spoke for a while. Then the rain began, and the lane was empty again.\n"
)

VALUES_NEEDLE = "\nOne of the pass keys for {key} is {value}.\n"
VALUES_QUESTION = "\nQuestion: what are all the pass keys for {key}? Answer: The pass keys for {key} are"
TRACKING_FACT = "\nVAR {name} = {value}\n"
TRACKING_QUESTION = (
    "\nQuestion: which variables hold the value {value}, directly or through another one? Answer: The variables that hold {value} are VAR"
)


@dataclasses.dataclass(frozen=True)
class ManyTrial:
    """One haystack with several things to find.

    turns: for each turn, token ids to feed, and how many to decode after them. expected: for each turn, the strings
    that its text must contain, in any order. depth: the place of the first fact, from 0 (first) to 1 (last).
    """

    haystack_ids: list[int]
    turns: tuple[tuple[list[int], int], ...]
    expected: tuple[tuple[str, ...], ...]
    depth: float

    fed = ()
    """Tokens that are fed in place of answers: none, the model's own go on."""

    @property
    def length(self) -> int:
        """Tokens of haystack, questions and answers, without the answer to the last question."""
        return len(self.haystack_ids) + sum(len(ids) for ids, _ in self.turns) + sum(count for _, count in self.turns[:-1])

    def judge(self, texts: Sequence[str]) -> float:
        """Share of the expected strings that are in their turn's text as whole words (RULER: string match, all)."""
        right = [value in _words(text) for text, values in zip(texts, self.expected, strict=True) for value in values]
        return sum(right) / len(right)


def make_trials(
    tokenizer: Any,
    text_ids: np.ndarray,
    words: tuple[str, ...],
    *,
    task: str,
    haystack: str,
    length: int,
    count: int,
    seed: int = 0,
    distractors: int = 16,
    prefix_ids: tuple[int, ...] = (),
    shuffled: bool = False,
) -> list[Trial] | list[ManyTrial] | list[PassageTrial]:
    """`count` trials of `length` tokens, the last answer not counted. Depths are evenly spread over [0, 1], the rest is
    drawn from `seed`.

    shuffled: whether depths come in an order of which every first part is spread over [0, 1]; otherwise they rise.

    text_ids: int[...], the running text. words: for keys and names. distractors: additional facts, in the haystacks
    `codes` and `near-miss`. ValueError for a task or haystack that is not in TASKS or HAYSTACKS, and as in
    `NeedleTask`.
    """
    for kind, value, known in (("task", task, TASKS), ("haystack", haystack, HAYSTACKS)):
        if value not in known:
            raise ValueError(f"{kind} {value!r} is not known; there are {', '.join(known)}")
    order = _spread(count) if shuffled else range(count)
    if haystack == "loop":
        text_ids = np.resize(encode_text(tokenizer, LOOP), length)
    source = NeedleTask(
        tokenizer,
        text_ids,
        words,
        distractors=distractors if haystack in ("codes", "near-miss") else 0,
        prefix_ids=prefix_ids,
        near_miss=haystack == "near-miss",
    )
    if task in ("needle", "wordings"):
        forms = WORDINGS if task == "wordings" else source.templates
        return dataclasses.replace(source, templates=forms).trials(length, count, seed=seed, order=order)
    rng = np.random.default_rng((seed, length, TASKS.index(task)))
    make = {"multi-needle": _multi_needle, "multi-query": _multi_query, "tracking": _tracking, "passage": passage, "repeat": repeat}[task]
    return [make(source, length, rng, (place + 0.5) / count) for place in order]


def _spread(count: int) -> list[int]:
    """0 to count - 1, each once, in the order of the multiples of the golden ratio modulo 1: so the first few, however
    many, leave no wide gap."""
    return np.argsort(np.argsort(np.arange(count) * (5**0.5 - 1) / 2 % 1)).tolist()


def answers_of(task: str) -> int:
    """How many answers a task's trial has at most. Room for each is reserved at the end of the context; a repeated
    passage takes that of two."""
    return PIECES if task in ("multi-query", "multi-needle", "tracking") else 2 if task == "repeat" else 1


def _multi_needle(task: NeedleTask, length: int, rng: np.random.Generator, depth: float) -> ManyTrial:
    """One key with PIECES values."""
    key, *others = task.keys(rng)
    values = _more(task, PIECES - 1).values(rng)
    facts = [VALUES_NEEDLE.format(key=k, value=v) for k, v in zip((*[key] * PIECES, *others), values, strict=True)]
    question = VALUES_QUESTION.format(key=key)
    listed = f" {', '.join(values[: PIECES - 1])} and {values[PIECES - 1]}"
    return _planted(task, length, rng, depth, facts, PIECES, [(question, listed)], [values[:PIECES]])


def _multi_query(task: NeedleTask, length: int, rng: np.random.Generator, depth: float) -> ManyTrial:
    """PIECES keys of one template, asked for in the order in which they are drawn. The model's answers stay in the
    context."""
    form = task.templates[int(rng.integers(len(task.templates)))]
    wider = _more(task, PIECES - 1)
    keys, values = wider.keys(rng), wider.values(rng)
    facts = [form.needle.format(key=k, value=v) for k, v in zip(keys, values, strict=True)]
    turns = [(form.question.format(key=key), f" {value}") for key, value in zip(keys[:PIECES], values, strict=False)]
    return _planted(task, length, rng, depth, facts, PIECES, turns, [[value] for value in values[:PIECES]])


def _tracking(task: NeedleTask, length: int, rng: np.random.Generator, depth: float) -> ManyTrial:
    """A chain of PIECES names, each assigned from the one before. Distractors are other chains; the last of these may
    be cut short."""
    count = PIECES * (1 + -(-task.distractors // PIECES))
    names = [word.upper() for word in rng.permutation(task.words)[:count]]
    if len(names) < count:
        raise ValueError(f"{len(task.words)} words do not name {count} variables: pass more `words`, or fewer distractors")
    chains = [names[start : start + PIECES] for start in range(0, count, PIECES)]
    values = dataclasses.replace(task, distractors=len(chains) - 1).values(rng)
    facts = []
    for chain, value in zip(chains, values, strict=True):
        facts += [TRACKING_FACT.format(name=name, value=v) for name, v in zip(chain, (value, *(f"VAR {n}" for n in chain)), strict=False)]
    facts = facts[: PIECES + task.distractors]
    listed = " " + ", VAR ".join(chains[0])
    question = TRACKING_QUESTION.format(value=values[0])
    return _planted(task, length, rng, depth, facts, PIECES, [(question, listed)], [chains[0]], in_order=True)


def _more(task: NeedleTask, facts: int) -> NeedleTask:
    """The task with `facts` more distractors, so that it draws as many more keys and values."""
    return dataclasses.replace(task, distractors=task.distractors + facts)


def _planted(
    task: NeedleTask,
    length: int,
    rng: np.random.Generator,
    depth: float,
    facts: Sequence[str],
    targets: int,
    turns: Sequence[tuple[str, str]],
    expected: Sequence[Sequence[str]],
    *,
    in_order: bool = False,
) -> ManyTrial:
    """A trial whose first `targets` facts are spread evenly from `depth` on. Past the end they go on at the beginning;
    if they must stay in order, they are spread up to the end. The other facts have random places. turns: question, and
    an answer as long as the right one."""
    pieces = [encode(task.tokenizer, fact) for fact in facts]
    # A model may list things in other words, so a single answer may have half as many tokens more than the shortest
    # right one.
    room = [len(encode(task.tokenizer, answer)) for _, answer in turns]
    scripted = tuple(
        (encode(task.tokenizer, question), size if len(turns) > 1 else size * 3 // 2)
        for (question, _), size in zip(turns, room, strict=True)
    )
    asked = sum(len(ids) for ids, _ in scripted) + sum(size for _, size in scripted[:-1])
    fill = length - len(task.prefix_ids) - asked - sum(map(len, pieces))
    start = task.start_of_text(fill, length, rng, f"{len(pieces)} facts and the questions")
    spread = [depth + (1 - depth) * i / targets if in_order else (depth + i / targets) % 1 for i in range(targets)]
    places = [*(round(share * fill) for share in spread), *rng.integers(0, fill + 1, len(pieces) - targets)]
    haystack = [*task.prefix_ids, *insert(task.text_ids[start : start + fill], places, pieces)]
    return ManyTrial(haystack, scripted, tuple(map(tuple, expected)), depth)


def _words(text: str) -> list[str]:
    return "".join(letter if letter.isalnum() else " " for letter in text).split()
