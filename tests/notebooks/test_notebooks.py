"""Every notebook runs from top to bottom and says what its text says."""

import json
from pathlib import Path

import pytest

NOTEBOOKS = sorted((Path(__file__).parent.parent.parent / "notebooks").glob("*.ipynb"))


def run(path):
    """The names that a notebook's code cells leave behind. Cells are plain Python, so no kernel is needed."""
    cells = [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]
    names = {}
    for number, cell in enumerate(cells):
        exec(compile("".join(cell["source"]), f"{path.name} cell {number}", "exec"), names)
    return names


def test_there_are_notebooks():
    assert NOTEBOOKS


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_it_runs(path):
    names = run(path)
    if path.stem == "first_steps":
        assert "48213" in names["answer"]
        assert "48213" in names["found"]["dense"]
        assert "48213" in names["found"]["top:8"]
        assert "48213" not in names["found"]["window:64+1000"]
