"""Cases of a test that `make test` runs, and those that only `make long` runs too: cases beside them show most of what
they show."""

from collections.abc import Iterable

import pytest


def rest_long(cases: Iterable, *quick: object) -> list:
    """The cases as parameters: all but the `quick` ones are marked `long`."""
    cases = list(cases)
    _check(quick, cases)
    return some_long(cases, *(case for case in cases if case not in quick))


def some_long(cases: Iterable, *long: object) -> list:
    """The cases as parameters: the `long` ones are marked so."""
    cases = list(cases)
    _check(long, cases)
    return [pytest.param(case, marks=[pytest.mark.long] if case in long else []) for case in cases]


def one_in(number: int, cases: Iterable) -> list:
    """The cases as parameters: the first of every `number` is quick, the others are marked `long`."""
    return [pytest.param(case, marks=[pytest.mark.long] if place % number else []) for place, case in enumerate(cases)]


def in_turn(first: Iterable, second: Iterable) -> list:
    """Pairs of the two as parameters, those of `first` in the outer loop. Each of the longer one meets one of the
    shorter, in turn; the other pairs are marked `long`."""
    first, second = list(first), list(second)
    short = min(len(first), len(second))

    def meets(i: int, j: int) -> bool:
        return i % short == j % short if len(first) == short else j == i % short

    rows = [(i, j, a, b) for i, a in enumerate(first) for j, b in enumerate(second)]
    return [pytest.param(a, b, marks=[] if meets(i, j) else [pytest.mark.long]) for i, j, a, b in rows]


def _check(named: tuple, cases: list) -> None:
    unknown = [name for name in named if name not in cases]
    assert not unknown, f"no cases: {unknown}"
