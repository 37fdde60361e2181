"""Needles in a haystack: facts hidden in running text, and a question about one of them at the end.

A trial hides one target needle at a chosen depth, and `distractors` more needles of the same template with other keys.
Haystack and question are separate: a haystack is prefilled once, and the question is fed through the decode policy
under test. So what is measured is sparse decoding from the question on. Works with any tokenizer and any text. Uses
only numpy and strings.
"""

from __future__ import annotations

import dataclasses
import itertools
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np

MIN_WORDS = 16


@dataclasses.dataclass(frozen=True)
class Template:
    """How a fact is written and asked for. Both contain ` {key}`. The needle also contains ` {value}`, the answer to
    the question: one of `words`, or a number if there are none."""

    needle: str
    question: str
    words: tuple[str, ...] = ()

    def __post_init__(self):
        if " {key}" not in self.needle or " {value}" not in self.needle or " {key}" not in self.question:
            raise ValueError(f"a template needs ' {{key}}' in needle and question and ' {{value}}' in the needle, got {self}")


TEMPLATES = (
    Template("\nThe pass key for {key} is {value}.\n", "\nQuestion: what was the pass key? Answer: The pass key for {key} is"),
    Template(" Remember that the number of the {key} house was {value}.", " And the number of the {key} house was"),
    Template('\nREGISTRY[" {key}"] = {value}\n', '\nassert REGISTRY[" {key}"] =='),
)


@dataclasses.dataclass(frozen=True)
class Trial:
    """One haystack and its question. haystack_ids + question_ids is the whole prompt. answer_ids: the tokens of " " +
    answer.

    depth: the target's place in the haystack's text, from 0 (first) to 1 (last). template: its number in the task.
    """

    haystack_ids: list[int]
    question_ids: list[int]
    answer_ids: list[int]
    answer: str
    depth: float
    template: int

    @property
    def length(self) -> int:
        """Tokens of haystack and question."""
        return len(self.haystack_ids) + len(self.question_ids)

    @property
    def turns(self) -> tuple[tuple[list[int], int], ...]:
        """Tokens to feed, and how many to decode after them: the question, and one token more than the answer. The
        additional token must not begin with a digit."""
        return ((self.question_ids, len(self.answer_ids) + 1),)

    fed = ()
    """Tokens that are fed in place of the answer: none, the model's own go on."""

    def judge(self, texts: Sequence[str]) -> float:
        """1.0 if the answer to the one question is a hit, else 0.0."""
        return float(self.is_hit(texts[0]))

    def is_hit(self, text: str) -> bool:
        """Whether generated text begins with exactly the answer: every digit is right, and no digit follows; no letter
        follows a word."""
        text = text.strip()
        after = text[len(self.answer) :][:1]
        return text.startswith(self.answer) and not after.isdigit() and not (self.answer.isalpha() and after.isalpha())


@dataclasses.dataclass(frozen=True)
class NeedleTask:
    """Makes trials from one tokenizer and one text.

    tokenizer: a `transformers` tokenizer or a `tokenizers.Tokenizer`. text_ids: int[...], tokens of the text in which
    needles are hidden (`encode_text`). words: words of which keys are made, two for each key (`vocabulary_words`).
    held_out: draw keys from the eighth of all keys that training never uses; if False, from the others. digits: of each
    value. distractors: in each trial. prefix_ids: tokens that every prompt starts with (a BOS token). near_miss: the
    distractors' keys share a word with the target's key, and their values differ from its value in one digit, or, where
    there are more than 9 for each digit, in two (`near_values`).
    """

    tokenizer: Any
    text_ids: np.ndarray
    words: tuple[str, ...]
    templates: tuple[Template, ...] = TEMPLATES
    held_out: bool = True
    digits: int = 5
    distractors: int = 16
    prefix_ids: tuple[int, ...] = ()
    near_miss: bool = False

    def __post_init__(self):
        if len(set(self.words)) < MIN_WORDS:
            raise ValueError(f"keys need at least {MIN_WORDS} different words, got {len(set(self.words))}: pass more `words`")
        if self.digits < 1 or self.distractors < 0:
            raise ValueError(f"digits must be at least 1 and distractors at least 0, got {self.digits} and {self.distractors}")

    def trial(self, length: int, rng: np.random.Generator, *, depth: float | None = None, template: int | None = None) -> Trial:
        """One trial of exactly `length` tokens, question included. Depth (in [0, 1]) and template are drawn if they are
        not given.

        ValueError if needles and question alone are longer than `length`, or the text is too short.
        """
        depth = float(rng.random()) if depth is None else depth
        if not 0 <= depth <= 1:
            raise ValueError(f"depth must be in [0, 1], got {depth}")
        number = int(rng.integers(len(self.templates))) if template is None else template
        form, (key, *others) = self.templates[number], self.keys(rng)
        values = self.words_of(form, rng) if form.words else self.values(rng)
        needles = [self._ids(form.needle.format(key=k, value=v)) for k, v in zip((key, *others), values, strict=True)]
        question = self._ids(form.question.format(key=key))
        fill = length - len(self.prefix_ids) - len(question) - sum(map(len, needles))
        start = self.start_of_text(fill, length, rng, f"{len(needles)} needles and the question")
        places = [round(depth * fill), *rng.integers(0, fill + 1, self.distractors)]
        haystack = [*self.prefix_ids, *insert(self.text_ids[start : start + fill], places, needles)]
        return Trial(haystack, question, self._ids(" " + values[0]), values[0], depth, number)

    def trials(self, length: int, count: int, *, seed: int = 0, order: Sequence[int] | None = None) -> list[Trial]:
        """`count` trials of `length` tokens. Depths are evenly spread over [0, 1], templates take turns, the rest is
        drawn from `seed`. order: the depths come in this order of 0 to count - 1; None: they rise."""
        rng = np.random.default_rng((seed, length))
        places = range(count) if order is None else order
        return [self.trial(length, rng, depth=(place + 0.5) / count, template=i % len(self.templates)) for i, place in enumerate(places)]

    def start_of_text(self, fill: int, length: int, rng: np.random.Generator, rest: str) -> int:
        """A random position at which `fill` tokens of the text begin. ValueError if `rest`, a description of the other
        tokens, leaves no room for text, or if the text is too short."""
        if fill < 0:
            raise ValueError(
                f"{rest} take {length - fill} tokens, and a length of {length} is left for them: use a greater length or fewer distractors"
            )
        if fill > len(self.text_ids):
            raise ValueError(f"the text has {len(self.text_ids)} tokens, a trial of length {length} needs {fill}: pass a longer text")
        return int(rng.integers(0, len(self.text_ids) - fill + 1))

    def keys(self, rng: np.random.Generator) -> list[str]:
        """Different keys for the target and the distractors, the target's first."""
        found: dict[str, None] = {}
        for _ in range(1000 * (1 + self.distractors)):
            first, second = (self.words[i] for i in rng.integers(0, len(self.words), 2))
            if is_held_out(first, second) == self.held_out:
                found[f"{first} {second}"] = None
            if found and self.near_miss:
                return self._near_keys(*found, rng)
            if len(found) > self.distractors:
                return list(found)
        raise ValueError(f"{len(self.words)} words do not give {1 + self.distractors} different keys: pass more `words`")

    def values(self, rng: np.random.Generator) -> list[str]:
        """A number for each key, as a string of digits, the target's first."""
        if not self.near_miss:
            return ["".join(map(str, rng.integers(0, 10, self.digits))) for _ in range(1 + self.distractors)]
        return near_values(rng.integers(0, 10, self.digits), self.distractors, rng)

    def words_of(self, form: Template, rng: np.random.Generator) -> list[str]:
        """A word for each key, the target's first. No other key has the target's word; beyond the number of words,
        others share one."""
        target, *others = rng.permutation(form.words).tolist()
        return [target, *np.resize(others, self.distractors).tolist()]

    def _near_keys(self, key: str, rng: np.random.Generator) -> list[str]:
        """The key, and other keys that share its first or its second word. All are held out, or all are training
        keys."""
        first, second = key.split()
        pairs = {(first, word) for word in self.words} | {(word, second) for word in self.words}
        near = sorted(" ".join(pair) for pair in pairs - {(first, second)} if is_held_out(*pair) == self.held_out)
        if len(near) < self.distractors:
            raise ValueError(f"{len(self.words)} words give {key!r} {len(near)} near misses, not {self.distractors}: pass more `words`")
        return [key, *(near[i] for i in rng.permutation(len(near))[: self.distractors])]

    def _ids(self, text: str) -> list[int]:
        return encode(self.tokenizer, text)


def near_values(digits: np.ndarray, count: int, rng: np.random.Generator) -> list[str]:
    """A value, and `count` other values near it, all different, as strings of digits.

    digits: int[n], of the value. The 9 n values that differ from it in one digit come first, in random order, then the
    81 n (n - 1) / 2 that differ in two: 45 and 810 for five digits. A smaller count gives the first of the same values.
    ValueError for a count above both together.
    """
    tiers = [list(itertools.combinations(range(len(digits)), changed)) for changed in (1, 2)]
    sizes = [len(places) * 9**changed for changed, places in enumerate(tiers, 1)]
    if count > sum(sizes):
        raise ValueError(
            f"{len(digits)} digits have {sum(sizes)} near misses ({sizes[0]} differ in one digit, {sizes[1]} in two), not {count}: "
            "use fewer distractors"
        )
    found = ["".join(map(str, digits))]
    for changed, (places, size) in enumerate(zip(tiers, sizes, strict=True), 1):
        for change in rng.permutation(size)[: 1 + count - len(found)]:
            which, shifts = divmod(int(change), 9**changed)
            other = digits.copy()
            for place in places[which]:
                shifts, shift = divmod(shifts, 9)
                other[place] = (other[place] + 1 + shift) % 10
            found.append("".join(map(str, other)))
        if len(found) > count:
            break
    return found


def insert(text_ids: np.ndarray, places: Sequence[int], pieces: Sequence[Sequence[int]]) -> list[int]:
    """text_ids with pieces[i] inserted before its token number places[i]. Pieces at one place keep their order."""
    out: list[int] = []
    done = 0
    for i in np.argsort(places, kind="stable"):
        out += [*np.asarray(text_ids[done : places[i]]).tolist(), *pieces[i]]
        done = places[i]
    return out + np.asarray(text_ids[done:]).tolist()


def word_hash(word: str) -> int:
    """A word's number (CRC-32). It is the same with every tokenizer, and decides which keys are held out."""
    return zlib.crc32(word.encode())


def is_held_out(first: str, second: str) -> bool:
    """Whether the key `first second` belongs to the eighth of all keys that is kept for evaluation."""
    return bool(hashes_held_out(word_hash(first), word_hash(second)))


def hashes_held_out(first: Any, second: Any) -> Any:
    """`is_held_out` by the words' hashes, for two numbers, or for each pair of numbers in two arrays."""
    return (first + 3 * second) % 8 == 0


def encode(tokenizer: Any, text: str) -> list[int]:
    """Tokens of a string, without special tokens. tokenizer: of `transformers` or of `tokenizers`."""
    ids = tokenizer.encode(text, add_special_tokens=False)
    return list(getattr(ids, "ids", ids))


def encode_text(tokenizer: Any, text: str, *, span: int = 20_000) -> np.ndarray:
    """Tokens of a long text, int32[...], encoded in pieces of whole lines of about `span` characters."""
    pieces, piece, size = [], [], 0
    for line in text.splitlines(keepends=True):
        piece.append(line)
        size += len(line)
        if size >= span:
            pieces.append("".join(piece))
            piece, size = [], 0
    pieces.append("".join(piece))
    return np.fromiter(itertools.chain.from_iterable(encode(tokenizer, p) for p in pieces if p), np.int32)


def vocabulary_words(tokenizer: Any, *, letters: int = 5, limit: int = 4096) -> tuple[str, ...]:
    """Lower-case ASCII words of at least `letters` letters that are one token after a space.

    They are sorted. If there are more than `limit`, evenly spaced ones are taken. ValueError if there are fewer than
    MIN_WORDS: then pass your own word list.
    """
    marks = ("\u0120", "\u2581")  # how byte-level and SentencePiece vocabularies write a leading space
    found = {t[1:] for t in tokenizer.get_vocab() if t.startswith(marks)}
    words = sorted(w for w in found if len(w) >= letters and w.isascii() and w.isalpha() and w.islower())
    words = words[:: max(1, -(-len(words) // limit))]
    words = [w for w in words if len(encode(tokenizer, " " + w)) == 1]
    if len(words) < MIN_WORDS:
        raise ValueError(f"the vocabulary has only {len(words)} whole words of {letters} letters or more: pass a word list instead")
    return tuple(words)


def documentation_text() -> str:
    """The language reference's topics, a text of about 700 KB that ships inside every Python."""
    from pydoc_data.topics import topics

    return "\n\n".join(topics[name] for name in sorted(topics))


def exact_match_by_depth(hits: Sequence[bool], depths: Sequence[float], bins: int = 3) -> list[float]:
    """Share of hits among the trials in each of `bins` equal ranges of depth; NaN for a range without a trial."""
    where = np.minimum((np.asarray(depths) * bins).astype(int), bins - 1)
    hits = np.asarray(hits, float)
    return [float(hits[where == b].mean()) if (where == b).any() else float("nan") for b in range(bins)]
