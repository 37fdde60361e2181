"""The examples of the documents run, and print what stands beside them."""

import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.optimized

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


def test_the_readme_is_short_and_its_links_lead_somewhere():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 150
    documents = {ROOT / "README.md": text} | {path: path.read_text(encoding="utf-8") for path in (ROOT / "docs").glob("*.md")}
    for path, page in documents.items():
        for target in re.findall(r"\]\(([^)#:]+)(?:#[\w-]*)?\)", page):
            assert (path.parent / target).exists(), f"{path.name}: {target}"
