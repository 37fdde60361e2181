"""Patterns that come with checkpoints and adapters: those that are none, or too large, are refused in little time and
memory."""

from __future__ import annotations

import pytest

from kvjax.models.patterns import MAX_CHARACTERS, MAX_DEPTH, compiled
from kvjax.models.quantization.rules import _matches

LARGE = {
    "repeats in repeats": "(?:" * 50 + "x{1,1000}" + "){1,1000}" * 50,
    "alternatives in repeats": "(?:" * 20 + "x|y" + ")+" * 20,
    "parentheses in sets": r"(?:x[)]" * 20 + ")+" * 20,
    "parentheses in a comment": "(?:x(?#()" * 20 + ")+" * 20,
    "parentheses in a comment of a line": "(?x)" + "(?:x#)\n" * 20 + ")+" * 20,
    "long": "a" * (MAX_CHARACTERS + 1),
}


@pytest.mark.parametrize("pattern", LARGE.values(), ids=LARGE)
def test_a_large_pattern_is_refused_before_it_is_compiled(monkeypatch, pattern):
    monkeypatch.setattr("regex.compile", None)
    with pytest.raises(ValueError, match=r"is too large for a regular expression of a checkpoint: at most 2,000 characters and groups"):
        compiled(pattern)
    with pytest.raises(ValueError, match=r"config.json: quantization_config: .* is too large"):
        _matches(pattern, "model.layers.0")


@pytest.mark.parametrize("pattern", ["(", "(?R)", "*a", "a{2,1}"])
def test_what_is_no_pattern_is_said(pattern):
    with pytest.raises(ValueError, match="is no regular expression"):
        compiled(pattern)


def test_deep_and_escaped_groups_are_read():
    deep = "(?:" * MAX_DEPTH + "x" + ")+" * MAX_DEPTH
    assert compiled(deep).match("xx")
    assert compiled(r"\(" * 20).match("(" * 20)
    assert compiled("[(]" * 20 + r"[]()\]]").match("(" * 21)
    assert compiled("q_proj", r"(.*\.)?({})$").match("model.q_proj")
