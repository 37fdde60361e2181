"""Cases of a test that `make test` runs, and those that only `make long` runs too: cases beside them show most of what they show."""

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


def _check(named: tuple, cases: list) -> None:
    unknown = [name for name in named if name not in cases]
    assert not unknown, f"no cases: {unknown}"
