"""The examples of the documents run, and print what stands beside them."""

import doctest
import re
from pathlib import Path

import pytest

import kvjax

ROOT = Path(__file__).parent.parent
EXAMPLE = re.compile(r"<!-- example -->\n```python\n(.*?)```\n\n((?:    [^\n]*\n)+)", re.DOTALL)
"""A marked block of Python in a document, and the indented lines after it."""


@pytest.mark.long
def test_the_example_of_the_readme_prints_what_the_readme_says(capsys):
    (found,) = EXAMPLE.findall((ROOT / "README.md").read_text(encoding="utf-8"))
    code, printed = found
    assert len(code.splitlines()) <= 12
    exec(compile(code, "README.md", "exec"), {})
    ran, said = ([re.split(r"(\d+)%", line.strip()) for line in text.splitlines()] for text in (capsys.readouterr().out, printed))
    assert len(ran) == len(said) == 3
    assert ["48213" in line[0] for line in said] == [True, True, False]
    for (before, share, after), (said_before, said_share, said_after) in zip(ran, said, strict=True):
        found = "48213" in said_before
        assert (before, after) == (said_before, said_after) if found else "48213" not in before  # a wrong answer may be any
        assert abs(int(share) - int(said_share)) <= 2  # Python's documentation differs a little from release to release


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 150


EXAMPLES = (ROOT / "docs" / "examples.md").read_text(encoding="utf-8")


def test_every_public_name_has_an_example():
    assert sorted(re.findall(r"^## (\w+)$", EXAMPLES, re.MULTILINE)) == sorted({"kvjax", *kvjax.__all__} - {"__version__"})
    for section in EXAMPLES.split("\n## ")[1:]:
        name, code = section.split("\n", 1)
        assert ">>> " in code, name


DEAREST = ("Engine", "CachedSequence", "OutOfPages", "replicas", "Cascade", "Window", "HeavyPages", "dispatch")
"""Sections of engines of other sizes, whose programs take most of the time. None of the others needs what they
define."""


@pytest.mark.quick("all but the dearest")
@pytest.mark.parametrize("left_out", [(), DEAREST], ids=["all", "all but the dearest"])
def test_the_examples_of_public_names_print_what_stands_below_them(left_out, capsys):
    sections = [section for section in EXAMPLES.split("\n## ") if section.split("\n")[0] not in left_out]
    examples = doctest.DocTestParser().get_doctest("\n## ".join(sections), {}, "examples", "docs/examples.md", 0)
    ran = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.IGNORE_EXCEPTION_DETAIL).run(examples)
    assert (ran.failed, ran.attempted > 40) == (0, True), capsys.readouterr().out


def test_a_wrong_output_is_noticed():
    wrong = EXAMPLES[: EXAMPLES.index("## load")] + ">>> model.name\n'another'\n"
    examples = doctest.DocTestParser().get_doctest(wrong, {}, "examples", "docs/examples.md", 0)
    assert doctest.DocTestRunner().run(examples, out=lambda text: None).failed == 1
