"""Values in messages: one line, and no longer than they may be."""

import numpy as np
import pytest

from pallas_kernels.core.messages import shown


@pytest.mark.parametrize(
    "value", [np.ma.masked_array(np.arange(12).reshape(3, 4), np.eye(3, 4)), np.arange(600), "a\nb" * 90, list(range(90)), None]
)
def test_a_value_is_shown_in_one_line(value):
    text = shown(value, 40)
    assert "\n" not in text
    assert 0 < len(text) <= 40
    assert repr(value).startswith(text.split()[0])


def test_a_short_value_is_its_repr():
    assert shown("a  b") == "'a  b'"
    assert shown([1, 2]) == "[1, 2]"
