"""The training mixture: samples in which earlier tokens have to be repeated later, and plain text.

Every batch depends only on (seed, step), so a resumed run sees the same batches. Uses only numpy, because worker
processes import this module, and they must not use an accelerator.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from kvjax.evaluation import needle

MAX_DIGITS = 5
RECORD = needle.Template("\n {key} = {value}", "\n {key} =")


@dataclasses.dataclass(frozen=True)
class Form:
    """The tokens of a needle or question around its key (two tokens) and its value: before the key, between them, after
    the value."""

    before: np.ndarray
    between: np.ndarray
    after: np.ndarray


@dataclasses.dataclass(frozen=True)
class Vocabulary:
    """The tokens that samples are made of. words, digits: int32 token ids. hashes: int64, of the words
    (`needle.word_hash`). needles, questions: forms, one per template and one more for records."""

    words: np.ndarray
    hashes: np.ndarray
    digits: np.ndarray
    space: int
    needles: tuple[Form, ...]
    questions: tuple[Form, ...]

    @classmethod
    def build(cls, tokenizer: Any, *, letters: int) -> Vocabulary:
        """From a tokenizer in which each digit, and the space before a number, is one token; ValueError for others. The
        last form is that of records."""
        words = needle.vocabulary_words(tokenizer, letters=letters)
        templates = (*needle.TEMPLATES, RECORD)
        after = [t.needle.split(" {value}")[1] for t in templates]
        return cls(
            words=np.array([needle.encode(tokenizer, " " + w)[0] for w in words], np.int32),
            hashes=np.array([needle.word_hash(w) for w in words], np.int64),
            digits=np.array([_single(tokenizer, str(i)) for i in range(10)], np.int32),
            space=_single(tokenizer, " "),
            needles=tuple(_form(tokenizer, t.needle, words) for t in templates),
            # The text after a needle's value follows the answer too, so that an answer ends as its needle does.
            questions=tuple(_form(tokenizer, f"{t.question} {{value}}{a}", words) for t, a in zip(templates, after, strict=True)),
        )


def _single(tokenizer: Any, text: str) -> int:
    ids = needle.encode(tokenizer, text)
    if len(ids) != 1:
        raise ValueError(f"the tokenizer writes {text!r} as {len(ids)} tokens; the training mixture needs it to be one")
    return ids[0]


def _form(tokenizer: Any, text: str, words: tuple[str, ...]) -> Form:
    """The three pieces around " {key}" and " {value}". ValueError if the tokenizer encodes the whole string
    differently."""
    pieces = [np.array(needle.encode(tokenizer, p) if p else [], np.int32) for p in re.split(r" \{key\}| \{value\}", text)]
    first, second = words[0], words[-1]
    whole = needle.encode(tokenizer, text.format(key=f"{first} {second}", value="70"))
    key, value = needle.encode(tokenizer, f" {first} {second}"), needle.encode(tokenizer, " 70")
    if whole != [*pieces[0], *key, *pieces[1], *value, *pieces[2]]:
        raise ValueError(f"the tokenizer joins tokens across the pieces of {text!r}; the training mixture needs them apart")
    return Form(*pieces)


@dataclasses.dataclass(frozen=True)
class Slots:
    """A form for values of one number of digits: tokens [n], with places for a key and a value, and the loss weights
    [n] of the tokens."""

    tokens: np.ndarray
    weights: np.ndarray
    key: slice
    value: slice

    @classmethod
    def build(cls, form: Form, space: int, digits: int, text_weight: float, value_weight: float) -> Slots:
        """Weights: text_weight for the form, 0 for the key (it cannot be predicted), value_weight for the value."""
        key = slice(len(form.before), len(form.before) + 2)
        start = key.stop + len(form.between) + 1
        value = slice(start, start + digits)
        blank = np.zeros(2, np.int32), np.zeros(digits, np.int32)
        tokens = np.concatenate([form.before, blank[0], form.between, np.array([space], np.int32), blank[1], form.after])
        weights = np.full(len(tokens), text_weight, np.float32)
        weights[key], weights[value] = 0, value_weight
        return cls(tokens, weights, key, value)

    def fill(self, keys: np.ndarray, values: np.ndarray) -> np.ndarray:
        """int32[n, tokens] for keys [n, 2] and values [n, digits]."""
        rows = np.tile(self.tokens, (len(keys), 1))
        rows[:, self.key], rows[:, self.value] = keys, values
        return rows


class Mixture:
    """Makes samples (tokens int32[length + 1], weights float32[length]). weights[i] is the loss weight of predicting
    tokens[i + 1].

    kinds: "needles", in running text, with questions about them; "far", in running text, with one question about each
    of them at its end; "records", lines of one form, then only questions about them; "text", running text; "recall",
    pairs of random tokens, then some of these pairs again; "repeats", a run of random tokens over and over.
    """

    def __init__(self, vocabulary: Vocabulary, text: np.ndarray, *, seed: int, text_weight: float, answer_weight: float):
        self.vocabulary, self.text, self.seed = vocabulary, text, seed
        self.text_weight, self.answer_weight = text_weight, answer_weight
        self.pool = np.concatenate([vocabulary.digits, vocabulary.words])
        self.kinds = {"needles": self.needles, "far": self.far, "records": self.records, "text": self.plain}
        self.kinds |= {"recall": self.recall, "repeats": self.repeats}
        self._needles = self._slots(vocabulary.needles, text_weight, 0.0)
        self._questions = self._slots(vocabulary.questions, text_weight, answer_weight)
        # Most tokens of records belong to the form. A small weight keeps them from dominating the loss.
        self._lines = self._slots(vocabulary.needles, 0.2 * text_weight, 0.0)
        self._asked_lines = self._slots(vocabulary.questions, 0.2 * text_weight, answer_weight)

    def _slots(self, forms: tuple[Form, ...], text_weight: float, value_weight: float) -> list[list[Slots]]:
        space = self.vocabulary.space
        return [[Slots.build(f, space, d, text_weight, value_weight) for d in range(1, MAX_DIGITS + 1)] for f in forms]

    def batch(self, step: int, length: int, batch: int, shares: Mapping[str, float]) -> tuple[np.ndarray, np.ndarray]:
        """The batch of step `step`: tokens int32[batch, length + 1], weights float32[batch, length]."""
        unknown = set(shares) - set(self.kinds)
        if unknown:
            raise ValueError(f"unknown kinds of samples {sorted(unknown)}; there are {sorted(self.kinds)}")
        rng = np.random.default_rng((self.seed, step))
        kinds = rng.choice(list(shares), size=batch, p=list(shares.values()))
        tokens, weights = zip(*(self.kinds[kind](rng, length) for kind in kinds), strict=True)
        return np.stack(tokens), np.stack(weights)

    def keys(self, rng: np.random.Generator, count: int) -> np.ndarray:
        """int32[count, 2]: different training keys as word tokens. Fewer if the vocabulary is too small for `count`."""
        size = len(self.vocabulary.words)
        pairs = rng.integers(0, size, (2 * count + 16, 2))
        hashes = self.vocabulary.hashes
        pairs = pairs[~needle.hashes_held_out(hashes[pairs[:, 0]], hashes[pairs[:, 1]])]
        _, first = np.unique(pairs[:, 0] * size + pairs[:, 1], return_index=True)
        return self.vocabulary.words[pairs[np.sort(first)[:count]]]

    def values(self, rng: np.random.Generator, count: int, digits: int) -> np.ndarray:
        """int32[count, digits]: random digit tokens."""
        return self.vocabulary.digits[rng.integers(0, 10, (count, digits))]

    def span(self, rng: np.random.Generator, length: int) -> np.ndarray:
        """int32[length]: running text from a random position."""
        start = int(rng.integers(0, len(self.text) - length))
        return self.text[start : start + length].astype(np.int32)

    def plain(self, rng: np.random.Generator, length: int) -> tuple[np.ndarray, np.ndarray]:
        """Running text."""
        return self.span(rng, length + 1), np.full(length, self.text_weight, np.float32)

    def needles(self, rng: np.random.Generator, length: int) -> tuple[np.ndarray, np.ndarray]:
        """Needles and questions in running text. The first of them is a needle, the last a question.

        In half of the samples they are mixed in random order. In the other half, as in a trial, all needles come first;
        then half of these samples ask at the end, the others in the last tenth. Values have 1 to 5 digits. A sample has
        mixed templates, or one template for all; then all other needles are distractors of a question.
        """
        most = max(2, min(length // 48, 48), length // 128)
        count = int(np.exp(rng.uniform(0, np.log(most + 1))))
        asked = int(rng.integers(1, most + 1))
        digits = int(rng.integers(1, MAX_DIGITS + 1))
        forms = rng.integers(0, len(needle.TEMPLATES), count) if rng.random() < 0.5 else np.full(count, rng.integers(len(needle.TEMPLATES)))
        asks_last = rng.random() < 0.5
        keys, values = self.keys(rng, count), self.values(rng, count, digits)
        while True:
            order = self._order(rng, len(keys[:count]), asked, asks_last)
            events = [self._event(rng, o, forms, keys, values) for o in order]
            free = length + 1 - sum(len(tokens) for tokens, _ in events)
            if free >= 0:
                return self._in_text(rng, events, self._places(rng, order, free, asks_last), free)
            if count == asked == 1:
                raise ValueError(f"a sample of {length} tokens is too short for a needle and its question: pass a longer length")
            count, asked = max(1, count // 2), max(1, asked // 2)

    def far(self, rng: np.random.Generator, length: int) -> tuple[np.ndarray, np.ndarray]:
        """Needles in running text, then one question about each of them, in random order, up to the end.

        In `needles`, a needle may be asked for several times. Then later answers can be copied from the first one, a
        short way back. Here every answer has to come from the needle, and most needles are far from the questions: 71%
        of them are in the text's first half.
        """
        most = max(1, length // 128)
        count = int(rng.integers(1, most + 1))
        digits = int(rng.integers(1, MAX_DIGITS + 1))
        forms = np.full(count, rng.integers(len(needle.TEMPLATES)))
        keys, values = self.keys(rng, count), self.values(rng, count, digits)
        while True:
            count = len(keys)
            order = [(False, i) for i in range(count)] + [(True, int(i)) for i in rng.permutation(count)]
            events = [self._event(rng, o, forms, keys, values) for o in order]
            free = length + 1 - sum(len(tokens) for tokens, _ in events)
            if free >= 0:
                places = np.sort((rng.random(count) ** 2 * free).astype(int))
                return self._in_text(rng, events, np.concatenate([places, np.full(count, free)]), free)
            if count == 1:
                raise ValueError(f"a sample of {length} tokens is too short for a needle and its question: pass a longer length")
            keys, values = keys[: count // 2], values[: count // 2]

    def _order(self, rng: np.random.Generator, count: int, asked: int, asks_last: bool) -> list[tuple[bool, int]]:
        """(is a question, needle number) in order of appearance. A question is about a random needle before it."""
        between = [False] * (count - 1) + [True] * (asked - 1)
        if not asks_last:
            between = [between[i] for i in rng.permutation(len(between))]
        order, seen = [], 0
        for is_question in [False, *between, True]:
            order.append((is_question, int(rng.integers(seen)) if is_question else seen))
            seen += not is_question
        return order

    def _event(
        self, rng, order: tuple[bool, int], forms: np.ndarray, keys: np.ndarray, values: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        is_question, number = order
        slots = (self._questions if is_question else self._needles)[forms[number]][values.shape[1] - 1]
        return slots.fill(keys[number : number + 1], values[number : number + 1])[0], slots.weights

    def _places(self, rng: np.random.Generator, order: list[tuple[bool, int]], free: int, asks_last: bool) -> np.ndarray:
        """The position of each event in `free` tokens of text, ascending."""
        count = sum(not is_question for is_question, _ in order)
        if asks_last:
            tail = free - int(rng.uniform(0, 0.1) * free) if rng.random() < 0.5 else free
            needles = np.sort(rng.integers(0, tail + 1, count))
            places = np.concatenate([needles, np.sort(rng.integers(tail, free + 1, len(order) - count))])
        else:
            places = np.sort(rng.integers(0, free + 1, len(order)))
        if asks_last or rng.random() < 0.5:
            places[-1] = free
        return places

    def _in_text(self, rng, events: list[tuple[np.ndarray, np.ndarray]], places: np.ndarray, free: int) -> tuple[np.ndarray, np.ndarray]:
        text, done = self.span(rng, free), 0
        plain = np.full(free, self.text_weight, np.float32)
        tokens, weights = [], []
        for (event, event_weights), place in zip(events, places, strict=True):
            tokens += [text[done:place], event]
            weights += [plain[done:place], event_weights]
            done = place
        return np.concatenate([*tokens, text[done:]]), np.concatenate([*weights, plain[done:]])[1:]

    def records(self, rng: np.random.Generator, length: int) -> tuple[np.ndarray, np.ndarray]:
        """Up to 64 records of one form, then questions about random ones of them to the end. So a sample has many
        answers."""
        form = len(needle.TEMPLATES) if rng.random() < 0.6 else int(rng.integers(len(needle.TEMPLATES)))
        digits = int(rng.integers(1, MAX_DIGITS + 1))
        line, asked = self._lines[form][digits - 1], self._asked_lines[form][digits - 1]
        size = len(line.tokens)
        keys = self.keys(rng, min(64, int(rng.integers(1, max(2, length // size // 2) + 1))))
        values = self.values(rng, len(keys), digits)
        left = max(0, length + 1 - size * len(keys))
        about = rng.integers(0, len(keys), left // len(asked.tokens) + 1)
        tokens = np.concatenate([line.fill(keys, values).reshape(-1), asked.fill(keys[about], values[about]).reshape(-1)])
        weights = np.concatenate([np.tile(line.weights, len(keys)), np.tile(asked.weights, len(about))])
        return tokens[: length + 1], weights[1 : length + 1]

    def recall(self, rng: np.random.Generator, length: int) -> tuple[np.ndarray, np.ndarray]:
        """Associative recall: pairs of random tokens, then random ones of these pairs again."""
        count = min(int(rng.integers(2, max(3, min(length // 8, 96)))), len(self.pool))
        keys = rng.permutation(self.pool)[:count]
        values = self.pool[rng.integers(0, len(self.pool), count)]
        about = np.concatenate([np.arange(count), rng.integers(0, count, (length + 1) // 2 + 1)])
        tokens = np.stack([keys[about], values[about]], 1).reshape(-1)[: length + 1]
        weights = np.zeros(length + 1, np.float32)
        weights[2 * count + 1 :: 2] = min(self.answer_weight, 1.0)
        return tokens, weights[1:]

    def repeats(self, rng: np.random.Generator, length: int) -> tuple[np.ndarray, np.ndarray]:
        """Induction: a short run of random tokens, repeated over and over."""
        size = int(rng.integers(4, max(5, min(length // 3, 64))))
        tokens = np.resize(self.pool[rng.integers(0, len(self.pool), size)], length + 1)
        weights = np.ones(length + 1, np.float32)
        weights[: size + 1] = 0
        return tokens, weights[1:]
