"""`kvjax bench overlap` on the embedded model: table, JSON, picture, and rows that the benchmark of `top_k` times."""

from __future__ import annotations

import json

import pytest
import typer
from typer.testing import CliRunner

from kvjax.serving.cli import bench as bench_cli
from kvjax.serving.cli import overlap as overlap_cli
from pallas_kernels.bench import report
from pallas_kernels.bench.top_k import cases as top_k_cases

OPTIONS = {"kind": "relu", "files": (), "json_out": None, "plot": None, "save": None}


@pytest.mark.long
def test_measured_written_and_drawn(tmp_path):
    (tmp_path / "book.txt").write_text("It was a dark and stormy night; the rain fell in torrents. " * 40)
    arguments = ["overlap", "--length", "200", "--steps", "3", "--k", "16,32", "--text", str(tmp_path / "book.txt")]
    for option, name in (("--json", "overlap.json"), ("--plot", "overlap.png"), ("--save", "rows.npz")):
        arguments += [option, str(tmp_path / name)]
    done = CliRunner().invoke(bench_cli.bench_app, arguments)
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
        overlap_cli.measure_overlap(*arguments, **OPTIONS)


def test_a_mistake_is_one_line():
    done = CliRunner().invoke(bench_cli.bench_app, ["overlap", "--length", "1k,2k"])
    assert done.exit_code == 2
    assert "one length at a time" in done.output
    assert isinstance(done.exception, (SystemExit, typer.Exit))


def test_the_model_has_its_short_option():
    done = CliRunner().invoke(bench_cli.bench_app, ["overlap", "-m", "needle", "--length", "1k,2k"])
    assert "one length at a time" in done.output
