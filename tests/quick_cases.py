"""Cases of a test that `make test` runs, and those that only `make long` runs too."""

from collections.abc import Iterable

import pytest


def rest_long(cases: Iterable, *quick: object) -> list:
    """The cases as parameters: all but the `quick` ones are marked `long`."""
    cases = list(cases)
    assert set(quick) <= set(cases), f"unknown: {set(quick) - set(cases)}"
    return [pytest.param(case, marks=[] if case in quick else [pytest.mark.long]) for case in cases]
