"""Patterns that come with checkpoints and adapters: those that are none, or too large, are refused in little time and
memory."""

from __future__ import annotations

import pytest

from kvjax.models.patterns import MAX_CHARACTERS, MAX_DEPTH, compiled
from kvjax.models.quantization import rules
from kvjax.models.quantization.rules import Published, Rule, _matches

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
    with pytest.raises(ValueError, match=r"is too large for a regular expression of a checkpoint: at most 1,000 characters and groups"):
        compiled(pattern)
    with pytest.raises(ValueError, match=r"config.json: quantization_config: .* is too large"):
        _matches(pattern, "model.layers.0")


@pytest.mark.parametrize("pattern", ["(", "(?R)", "*a", "a{2,1}"])
def test_what_is_no_pattern_is_said(pattern):
    with pytest.raises(ValueError, match="is no regular expression"):
        compiled(pattern)


@pytest.mark.parametrize("pattern", ["(?:a{e<=3}b{e<=3}c{e<=3}){1,30}", "(abc){e}", "[ab]{1<=e<=3}", "(a|b){2i+2d+1s<=4}"])
def test_approximate_matching_is_refused(pattern):
    """`regex` looks for it long after the timeout, and peft and transformers take the braces for themselves."""
    with pytest.raises(ValueError, match="has a brace that begins no count of repetitions"):
        compiled(pattern)


def test_counts_and_escaped_braces_are_read():
    assert compiled(r"a{2}b{1,}c{,3}d{1,2}\{e\}[{]").match("aabccd{e}{")


def test_entries_of_rules_take_a_bounded_time_together(monkeypatch):
    """Each of them ends, and there may be thousands."""
    monkeypatch.setattr(rules, "MATCHING_SECONDS", 0.5)
    entries = tuple(f"re:(?:.*.*.*.*.*.*.*){'.' * number}\\d{{7}}" for number in range(500))
    published = Published("compressed-tensors", (Rule("int8", None),), ignore=entries)
    names = [f"model.layers.{number}.self_attn.q_proj.weight" for number in range(1000)]
    with pytest.raises(ValueError, match=r"config.json: quantization_config: its regular expressions take too long"):
        [published.format_of(name, "q", (8, 8)) for name in names]


def test_deep_and_escaped_groups_are_read():
    deep = "(?:" * MAX_DEPTH + "x" + ")+" * MAX_DEPTH
    assert compiled(deep).match("xx")
    assert compiled(r"\(" * 20).match("(" * 20)
    assert compiled("[(]" * 20 + r"[]()\]]").match("(" * 21)
    assert compiled("q_proj", r"(.*\.)?({})$").match("model.q_proj")
