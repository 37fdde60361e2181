"""What the benchmark of `top_k` measures: rows, sizes, hints, implementations, and the arrays of each.

A name is `rows/scores/batch/k/hint/implementation`, as in `normal/128k/b1/k2048/stale-40/top_k`:

rows            a distribution of `score_rows`, yarn, or FILE.LAYER of captured rows (`--rows`)
hint            none, random, stale-20, -40, -80 (a step old, with that share of the answer), step (a step old, whatever
                it shares), static
implementation  top_k (the op; top_k:start=hint with that field of its `Config`), radix (`radix_select`, a row over as
                many CTAs as let all rows run at once), radix-one-cta (the same, one CTA a row), lax.top_k,
                approx_max_k, torch (torch.topk, sorted=False), torch-sorted
"""

from __future__ import annotations

import dataclasses
import fnmatch
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.top_k import score_rows

LENGTHS = tuple(n * 1024 for n in (8, 32, 64, 128, 256, 512, 1024))
BATCHES = (1, 8, 64)
KS = (32, 512, 2048)
STALE = (20, 40, 80)
HINTS = ("none", "random", *(f"stale-{share}" for share in STALE))
YARN_HINTS = ("random", "static", "step")
RADIX = {"radix": None, "radix-one-cta": 1}
"""CTAs per row of the radix selection, by implementation; None: as many as let all rows run at once."""

BASELINES = (*RADIX, "lax.top_k", "torch")
LIBRARY_LENGTHS = tuple(n * 1024 for n in (8, 64, 128, 1024))
"""Lengths at which selections of libraries are measured, because they take long to compile and to run."""

COUNTED_LENGTHS = (131072, 1048576)
"""Lengths at which the op's passes are counted, with the largest k. Captured rows are always counted."""

FROM_HINT = "top_k:start=hint"
"""The op, started from the mean of the hinted scores. Its default reads no hint, so only this form distinguishes
hints."""

FEWER_SCORES, MIN_SCORES = 2**22, 2**24
"""Above these numbers of scores per input, a place has two inputs, and one."""


@dataclasses.dataclass(frozen=True)
class Place:
    """The rows to rank. Cases of one place are compared."""

    rows: str
    n: int
    batch: int
    k: int

    @property
    def name(self) -> str:
        """A readable name."""
        return f"{self.rows}/{self.n // 1024}k/b{self.batch}/k{self.k}"

    @property
    def captured(self) -> bool:
        """Whether the rows come from a file."""
        return "." in self.rows


@dataclasses.dataclass(frozen=True)
class Case:
    """One thing to measure."""

    place: Place
    hint: str
    implementation: str

    @property
    def name(self) -> str:
        """A unique name, as `--list` prints it."""
        return f"{self.place.name}/{self.hint}/{self.implementation}"

    @property
    def ours(self) -> bool:
        """Whether it is our op."""
        return self.implementation.partition(":")[0] == "top_k"

    @property
    def config(self) -> dict[str, Any]:
        """Fields of the op's `Config` that the name sets."""
        pairs = (pair.partition("=") for pair in self.implementation.partition(":")[2].split(",") if pair)
        return {name: int(value) if value.isdigit() else value for name, _, value in pairs}

    @property
    def counted(self) -> bool:
        """Whether a separate program counts passes and cycles, beside the timed one."""
        place = self.place
        return self.ours and (place.captured or (place.k == KS[-1] and place.n in COUNTED_LENGTHS))

    def fields(self) -> dict[str, Any]:
        """For JSON."""
        place = dataclasses.asdict(self.place)
        return {"case": self.name, "op": "top_k", **place, "hint": self.hint, "implementation": self.implementation}


def all_cases() -> list[Case]:
    """Every case except those of captured rows. Cases of one place come together."""
    return list(dict.fromkeys(_cases()))


def _cases() -> Iterator[Case]:
    for place in (Place("normal", 1024, 2, 32), Place("yarn", 2048, 1, 64)):
        yield from (Case(place, hint, "top_k") for hint in ("none", "stale-40" if place.rows == "normal" else "static"))
        yield from (Case(place, "none", name) for name in ("radix", "lax.top_k", "approx_max_k", "torch"))
    places = [Place("normal", n, batch, 2048) for n in LENGTHS for batch in BATCHES]
    places += [Place("normal", n, 1, k) for n in (8192, 131072, 1048576) for k in KS[:-1]]
    places += [Place("normal", 131072, batch, k) for batch in BATCHES[1:] for k in KS[:-1]]
    for place in places:
        compared = (place.batch, place.k) == (1, 2048) and place.n in COUNTED_LENGTHS
        all_hints = compared and place.n == COUNTED_LENGTHS[0]
        yield from (Case(place, hint, "top_k") for hint in (HINTS if all_hints else ("none", "stale-40")))
        yield from (Case(place, hint, FROM_HINT) for hint in HINTS[1:] if compared)
        yield from (Case(place, "none", name) for name in RADIX)
        if place.n in LIBRARY_LENGTHS:
            yield from (Case(place, "none", name) for name in BASELINES if name not in RADIX)
            if (place.batch, place.k) == (1, 2048):
                yield from (Case(place, "none", name) for name in ("torch-sorted", "approx_max_k"))
    for n in (8192, 131072, 1048576):
        yield from _of_kind(Place("yarn", n, 1, 2048), YARN_HINTS if n == 131072 else YARN_HINTS[-1:])
    for rows in list(score_rows.DISTRIBUTIONS)[1:]:
        yield from _of_kind(Place(rows, 131072, 1, 2048), ("stale-40",))


def _of_kind(place: Place, hints: Sequence[str]) -> Iterator[Case]:
    """The cases of rows that are not normal: the op without a hint and with the last of `hints`; the op started from
    each hint, if it has to search for a threshold; the radix selections."""
    yield from (Case(place, hint, "top_k") for hint in ("none", hints[-1]))
    if place.n > 8192:
        yield from (Case(place, hint, FROM_HINT) for hint in hints)
    yield from (Case(place, "none", name) for name in RADIX)


def in_order(cases: Sequence[Case]) -> list[Case]:
    """The cases in the order in which they are measured, the most important first, because a run may be cut: normal
    rows with the largest k, captured ones, YaRN, other distributions, other k. Cases of one place stay together."""

    def rank(case: Case) -> int:
        place = case.place
        if place.rows == "normal":
            return 0 if place.k == KS[-1] else 4
        return 1 if place.captured else 2 if place.rows == "yarn" else 3

    return sorted(cases, key=rank)


def share_of(hint: str) -> float:
    """0.4 of "stale-40"."""
    return int(hint.partition("-")[2]) / 100


def captured_cases(files: dict[str, Captured]) -> list[Case]:
    """The cases of captured rows, by the names of their files: without a hint, with that of the step before, started
    from it, and radix."""
    places = [
        Place(f"{name}.{i}", rows.scores.shape[1], 1, k) for name, rows in files.items() for i in range(len(rows.scores)) for k in KS[1:]
    ]
    return [case for place in places if place.k <= place.n // 2 for case in _of_kind(place, ("step",))]


def matching(cases: Sequence[Case], patterns: Sequence[str]) -> list[Case]:
    """The cases whose name matches any of the globs; without patterns, all but the tiny ones. ValueError for a pattern
    without a case."""
    if not patterns:
        return [case for case in cases if case.place.n > 2048]
    for pattern in patterns:
        if not fnmatch.filter([case.name for case in cases], pattern):
            raise ValueError(f"no case matches {pattern!r}; --list prints them all")
    return [case for case in cases if any(fnmatch.fnmatch(case.name, pattern) for pattern in patterns)]


# Arrays


@dataclasses.dataclass(frozen=True)
class Captured:
    """Rows of a model, and those of one step before, -inf where there was no key yet."""

    scores: np.ndarray
    before: np.ndarray


def load_captured(file: Path) -> Captured:
    """Rows as `python -m benchmarks.overlap --save` writes them. ValueError for another file."""
    with np.load(file) as arrays:
        if not {"scores", "before"} <= set(arrays.files):
            raise ValueError(f"{file.name} has no arrays `scores` and `before` [L, N]; python -m benchmarks.overlap --save writes them")
        found = Captured(arrays["scores"].astype(np.float32), arrays["before"].astype(np.float32))
    if found.scores.ndim != 2 or found.scores.shape != found.before.shape or found.scores.shape[1] % 4:
        raise ValueError(f"rows must be [L, N], N a multiple of 4, got {found.scores.shape} and {found.before.shape} in {file.name}")
    return found


def copies_of(place: Place) -> int:
    """How many inputs a place has: fewer if they are large, and only one if its rows are captured."""
    scores = place.batch * place.n
    return 1 if place.captured or scores > MIN_SCORES else 2 if scores > FEWER_SCORES else 4


def make_inputs(place: Place, hints: Sequence[str], files: dict[str, Captured]) -> list[tuple[np.ndarray, dict[str, np.ndarray | None]]]:
    """For each input: scores `[B, N]` float32, and `[B, k]` int32 of each hint, None for "none"."""
    made = []
    for copy in range(copies_of(place)):
        scores, hint = _scores(place, copy, files)
        made.append((scores, {name: None if name == "none" else hint(name) for name in hints}))
    return made


def _scores(place: Place, copy: int, files: dict[str, Captured]):
    """Scores, and the function that makes their hints."""
    if place.rows in score_rows.DISTRIBUTIONS:
        drawn = score_rows.drawn_rows(place.rows, place.batch, place.n, seed=1000 + copy)
        scores, before = drawn.scores, None
    elif place.rows == "yarn":
        pairs = [score_rows.yarn_rows(place.n, 2, seed=place.batch * copy + row) for row in range(place.batch)]
        before, scores = (np.stack(x) for x in zip(*pairs, strict=True))
    else:
        name, _, layer = place.rows.rpartition(".")
        scores, before = (x[int(layer)][None] for x in (files[name].scores, files[name].before))

    def hint(name: str) -> np.ndarray:
        if name == "random":
            return score_rows.random_hint(place.batch, place.n, place.k, seed=copy)
        if name == "static":
            return np.stack([score_rows.static_hint(place.n, place.k, position=place.n - 1)] * place.batch)
        if name == "step":
            return score_rows.by_row(lambda row: score_rows.top_indices(before[row], place.k), place.batch)
        return score_rows.stale_hint(drawn, place.k, share_of(name), seed=copy)

    return scores, hint
