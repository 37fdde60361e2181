"""Passages of a haystack's own text, begun again at its end: does the model go on as the text did?

Nothing is planted, so any model that copies can do it, and any text will do. The passage stands once in the haystack,
at the trial's depth.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from kvjax.evaluation.needle import NeedleTask, encode, insert

ASKED_TOKENS, NEXT_TOKENS = 32, 4
"""Of a passage that the model continues: tokens that are fed, and tokens that it has to write."""

RUN_IN, REPEATED_TOKENS = 16, 32
"""Of a passage that is fed whole: tokens that do not count, and tokens that are to be predicted."""

ENOUGH = 0.75
"""Share of the tokens to be predicted that makes a hit. Released models of 135M and 270M predict 0.8 to 1.0 of them
where they see the passage, and 0.2 to 0.45 where they do not."""

UNIQUE_TOKENS = 12
"""The last tokens before the first judged one stand nowhere else in the haystack, so that only this passage says how
they go on."""


@dataclasses.dataclass(frozen=True)
class PassageTrial:
    """A haystack, the beginning of one of its passages, and the tokens that follow there.

    forced: the true tokens are fed whatever the model says, and it has to predict the share ENOUGH of them. Otherwise
    its own tokens are fed, and all must be right. depth: the passage's place in the haystack's text, from 0 (first) to
    1 (last).
    """

    haystack_ids: list[int]
    question_ids: list[int]
    true_ids: list[int]
    forced: bool
    depth: float

    @property
    def length(self) -> int:
        """Tokens of haystack and question."""
        return len(self.haystack_ids) + len(self.question_ids)

    @property
    def turns(self) -> tuple[tuple[list[int], int], ...]:
        """Tokens to feed, and how many to decode after them."""
        return ((self.question_ids, len(self.true_ids)),)

    @property
    def fed(self) -> list[int]:
        """Tokens that are fed in place of those that the model writes."""
        return self.true_ids if self.forced else []

    def judge_ids(self, turns: Sequence[Sequence[int]]) -> float:
        """1.0 if the model wrote enough of the true tokens in their places, else 0.0."""
        return float(np.mean(np.equal(turns[0], self.true_ids)) >= (ENOUGH if self.forced else 1.0))


def passage(task: NeedleTask, length: int, rng: np.random.Generator, depth: float) -> PassageTrial:
    """A passage to continue for NEXT_TOKENS tokens."""
    return _drawn(task, length, rng, depth, ASKED_TOKENS, NEXT_TOKENS, forced=False)


def repeat(task: NeedleTask, length: int, rng: np.random.Generator, depth: float) -> PassageTrial:
    """A passage that is fed again, and whose REPEATED_TOKENS are to be predicted, as `prompt_recall` asks of
    prefill."""
    return _drawn(task, length, rng, depth, RUN_IN, REPEATED_TOKENS, forced=True)


def _drawn(task: NeedleTask, length: int, rng: np.random.Generator, depth: float, asked: int, count: int, *, forced: bool) -> PassageTrial:
    """A trial of `length` tokens. The passage stands at `depth`, or at the next place where it is unique; its depth is
    the one it has.

    The task's distractors are facts of one template, as in other tasks, none inside the passage. ValueError if the text
    is too short, or if no passage of it is unique.
    """
    form = task.templates[int(rng.integers(len(task.templates)))]
    others = zip(task.keys(rng)[1:], task.values(rng)[1:], strict=True)
    facts = [encode(task.tokenizer, form.needle.format(key=key, value=value)) for key, value in others]
    blank = encode(task.tokenizer, "\n\n")
    fill = length - len(task.prefix_ids) - len(blank) - asked - sum(map(len, facts))
    start = task.start_of_text(fill, length, rng, f"{len(facts)} facts and the beginning of a passage")
    text = np.asarray(task.text_ids[start : start + fill])
    room = fill - asked - count
    if room < 1:
        raise ValueError(
            f"a length of {length} leaves {fill} tokens of text, too few for a passage of {asked + count}: use a greater length"
        )
    place = _unique(text, round(depth * room), room, asked)
    places = rng.integers(0, fill + 1, len(facts))
    places = np.where((places > place) & (places < place + asked + count), place, places)
    again = text[place : place + asked + count].tolist()
    haystack = [*task.prefix_ids, *insert(text, places, facts)]
    return PassageTrial(haystack, [*blank, *again[:asked]], again[asked:], forced, place / room)


def _unique(text: np.ndarray, first: int, room: int, asked: int) -> int:
    """The first place from `first` on, and then from 0 on, whose UNIQUE_TOKENS tokens before the judged ones stand once
    in the text."""
    runs = np.lib.stride_tricks.sliding_window_view(text, UNIQUE_TOKENS)
    for place in (*range(first, room + 1), *range(first)):
        begin = place + asked - UNIQUE_TOKENS
        same = np.flatnonzero(text[: len(runs)] == text[begin])
        if (runs[same] == runs[begin]).all(axis=1).sum() == 1:
            return place
    raise ValueError("the text repeats itself, so no passage of it stands once: use haystack 'prose' or 'codes', or another text")
