"""benchmarks/overlap.py on the embedded model: table, JSON, picture, and rows that the benchmark of `top_k` times."""

from __future__ import annotations

import json
import sys

import pytest
import typer
from typer.testing import CliRunner

from benchmarks import overlap as script
from benchmarks import report
from benchmarks.run import main
from benchmarks.top_k import cases as top_k_cases

APP = typer.Typer()
APP.command()(script.overlap_command)
OPTIONS = {"kind": "relu", "files": (), "json_out": None, "plot": None, "save": None}


@pytest.mark.long
def test_measured_written_and_drawn(tmp_path):
    (tmp_path / "book.txt").write_text("It was a dark and stormy night; the rain fell in torrents. " * 40)
    arguments = ["--length", "200", "--steps", "3", "--k", "16,32", "--text", str(tmp_path / "book.txt")]
    for option, name in (("--json", "overlap.json"), ("--plot", "overlap.png"), ("--save", "rows.npz")):
        arguments += [option, str(tmp_path / name)]
    done = CliRunner().invoke(APP, arguments)
    assert done.exit_code == 0, done.output
    assert "| k | layer | raw, 1 step apart (p10 to p90) | 2 | shifted | chance |" in done.output
    found = json.loads((tmp_path / "overlap.json").read_text())
    assert (found["bench"], found["tokens"], found["steps"], found["kind"], found["text"]) == ("overlap", 200, 3, "relu", ["book.txt"])
    assert len(found["rows"]) == 6 * 2 * 2
    assert (tmp_path / "overlap.png").read_bytes().startswith(b"\x89PNG")
    rows = top_k_cases.load_captured(tmp_path / "rows.npz")
    assert rows.scores.shape == (6, 200)
    assert "| 32 | 5 |" in report.parts([found])["top-k-overlap"]()


@pytest.mark.parametrize(
    ("arguments", "wrong"),
    [
        (("needle", "1k,2k", 2, "16"), "one length"),
        (("needle", "1k", 1, "16"), "at least 2"),
        (("needle", "10m", 2, "16"), "give more with --text"),
        (("needle", "64", 2, "64"), "from 1 to 63"),
    ],
)
def test_what_cannot_be_measured_is_refused(arguments, wrong):
    with pytest.raises(ValueError, match=wrong):
        script.measure_overlap(*arguments, **OPTIONS)


def test_a_mistake_is_one_line(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["overlap", "-m", "needle", "--length", "1k,2k"])
    with pytest.raises(SystemExit) as ended:
        main(script.overlap_command)
    assert ended.value.code == 2
    assert capsys.readouterr().err == "kvjax: one length at a time, got '1k,2k'\n"
