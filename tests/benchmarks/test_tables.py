"""How tables and intervals are written, everywhere: one function each."""

from __future__ import annotations

import io
import re
from pathlib import Path

import pytest
from rich.console import Console

from benchmarks import report
from benchmarks.top_k import report as top_k_report
from kvjax.cost_model import regimes
from kvjax.evaluation import recall_report
from kvjax.evaluation import report as evaluation_report
from kvjax.serving.cli import demo
from pallas_kernels.core import tables

ROOT = Path(__file__).parents[2]


def test_an_interval_says_to():
    assert tables.span(-0.0312, 0.11) == "-0.031 to 0.110"
    assert tables.estimate({"value": 0.01, "low": -0.0312, "high": 0.11}) == "+0.010 [-0.031 to +0.110]"


def test_a_table_keeps_its_columns_apart():
    text = io.StringIO()
    made = tables.table(("policy", "ms"), [("top:8", "1.5")], title="steps")
    Console(file=text, width=60).print(made)
    assert re.search(r"┃ policy ┃  ms ┃", text.getvalue())
    assert re.search(r"│ top:8  │ 1.5 │", text.getvalue())
    with pytest.raises(ValueError, match="every column of a table needs a name"):
        tables.table(("policy", ""), [])


def test_no_two_columns_of_a_table_have_one_name():
    columns = [evaluation_report.COLUMNS, recall_report.COLUMNS, report.COLUMNS, report.STEP_COLUMNS, top_k_report.ROW_COLUMNS]
    for names in (*columns, demo.COLUMNS, regimes.CROSSINGS):
        assert all(names)
        assert len(set(names)) == len(names), names


def test_tables_and_intervals_are_written_nowhere_else():
    """A dash between two figures reads as a minus, and a table built by hand has columns without a name."""
    folders = ("pallas_kernels", "kvjax", "models", "serving")
    sources = {str(file.relative_to(ROOT)): file.read_text() for folder in folders for file in (ROOT / folder).rglob("*.py")}
    assert [name for name, text in sources.items() if re.search(r"\}-\{[^}]*:[^}]*[efg]\}", text)] == []
    assert [name for name, text in sources.items() if re.search(r"\bTable\(", text)] == ["pallas_kernels/core/tables.py"]


def test_a_log_has_a_line_for_each_stage(capsys):
    with tables.stages("weights") as say:
        say("2,048 tokens: [cache]")
    printed = capsys.readouterr()
    assert re.fullmatch(r" +0\.\d s  weights\n +0\.\d s  2,048 tokens: \[cache\]\n", printed.err)
    assert not printed.out
