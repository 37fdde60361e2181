"""The tables of all documents are what the committed results make."""

import re

import pytest
import typer

from benchmarks import update_docs
from benchmarks.evidence import rendered


def test_the_tables_are_what_the_results_make():
    """After new results: `python -m benchmarks.update_docs`."""
    update_docs.update_command(check=True)


def test_every_document_with_tables_is_made():
    texts = {
        str(file.relative_to(update_docs.DOCS).with_suffix("")): file.read_text(encoding="utf-8") for file in update_docs.DOCS.rglob("*.md")
    }
    marked = {name for name, text in texts.items() if re.search(r"<!-- (bench|cost|evaluation):", text)}
    assert marked - set(update_docs.PAGES) == set()


def test_a_wrong_figure_is_noticed_and_mended(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(update_docs, "DOCS", tmp_path)
    monkeypatch.setattr(update_docs, "PAGES", {"measured/top-k": update_docs.PAGES["measured/top-k"]})
    text = (update_docs.ROOT / "docs" / "measured" / "top-k.md").read_text(encoding="utf-8")
    wrong = text.replace("| 2,048 | 4 |", "| 2,048 | 5 |").replace("| 2,048 | sample |", "| 2,048 | hint |")
    assert wrong != text
    page = tmp_path / "measured" / "top-k.md"
    page.parent.mkdir()
    page.write_text(wrong, encoding="utf-8")
    with pytest.raises(typer.Exit):
        update_docs.update_command(check=True)
    assert "docs/measured/top-k.md is not what its results make" in capsys.readouterr().out
    assert page.read_text(encoding="utf-8") == wrong
    update_docs.update_command()
    assert page.read_text(encoding="utf-8") == text


def test_a_page_without_a_part_and_results_that_are_not_there_are_refused():
    with pytest.raises(ValueError, match="there is no part between <!-- evaluation:other -->"):
        rendered("<!-- evaluation:one -->", [], "other")
    with pytest.raises(ValueError, match="no file of benchmarks/results is called h200/none"):
        update_docs.Tables(["h200/none*.json"]).files  # noqa: B018
