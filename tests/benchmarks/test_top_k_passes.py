"""The count of passes by kind of row: what is counted is what the replay of single rows says, and the tables say so."""

from __future__ import annotations

import functools
import json

import numpy as np
import pytest
import typer
from typer.testing import CliRunner

from benchmarks.top_k import cases as top_k_cases
from benchmarks.top_k import passes as top_k_passes
from benchmarks.top_k import replay, score_rows
from benchmarks.top_k import report as top_k_report
from pallas_kernels.selection.top_k import plan

N, K = 16384, 512


@pytest.mark.parametrize("start", plan.STARTS)
def test_every_row_is_counted_as_the_replay_says(start):
    rows = top_k_passes.drawn("normal", 3, n=N, k=K)
    found = top_k_passes.counted(rows, start)
    shape = plan.shape_of(1, N, K, plan.Config(start=start), has_lengths=False, counted=True)
    each = [replay.replay_row(shape, row, hint) for row, hint in zip(rows.scores, rows.hints, strict=True)]
    assert found["passes"] == [one.passes for one in each]
    assert found["candidates"] == [one.candidates for one in each]
    assert all(K <= candidates <= found["capacity"] for candidates in found["candidates"])
    assert found["overlap"] == pytest.approx(0.4, abs=1e-3)


def test_a_hint_of_another_row_counts_otherwise():
    """The hint that is replayed is the row's own."""
    rows = top_k_passes.drawn("normal", 4, n=N, k=K)
    good = top_k_passes.Rows("normal", K, rows.scores, np.stack([score_rows.top_indices(row, K) for row in rows.scores]))
    other = top_k_passes.Rows("normal", K, rows.scores, np.roll(good.hints, 1, axis=0))
    by_good, by_other = (top_k_passes.counted(each, "hint") for each in (good, other))
    assert (by_good["overlap"], by_other["overlap"]) == (1.0, pytest.approx(K / N, abs=0.03))
    assert by_good["candidates"] != by_other["candidates"]


def test_yarn_rows_carry_the_step_before():
    rows = top_k_passes.yarn(2, n=N, k=K)
    assert rows.scores.shape == (2, N)
    assert not np.array_equal(*rows.scores)
    assert np.isfinite(rows.scores[:, -1]).all(), "the last step sees the last key"
    assert 0.2 < top_k_passes.counted(rows, "sample")["overlap"] < 1


def test_on_the_command_line(tmp_path, monkeypatch):
    """Small rows, and a model of two layers that does not change from step to step."""
    scores = np.random.default_rng(0).standard_normal((2, 8192)).astype(np.float32)
    np.savez(tmp_path / "some-model.npz", scores=scores, before=scores)
    monkeypatch.setattr(score_rows, "DISTRIBUTIONS", {"normal": score_rows.DISTRIBUTIONS["normal"]})
    for name in ("drawn", "yarn"):
        monkeypatch.setattr(top_k_passes, name, functools.partial(getattr(top_k_passes, name), n=N, k=K))
    app = typer.Typer()
    app.command()(top_k_passes.count_passes)
    file = tmp_path / "passes.json"
    done = CliRunner().invoke(app, ["--rows", str(tmp_path / "some-model.npz"), "--json", str(file), "--count", "2"])
    assert done.exit_code == 0, done.stdout
    run = json.loads(file.read_text())
    assert [(row["rows"], row["k"], row["start"]) for row in run["rows"]] == [
        (kind, k, start) for kind, k in (("normal", 512), ("yarn", 512), ("some-model", 512), ("some-model", 2048)) for start in plan.STARTS
    ]
    assert [row["overlap"] for row in run["rows"][4:]] == [1.0] * 4
    table = top_k_report.parts([run])["top-k-passes"][1]()
    assert table == done.stdout.strip()
    assert "| some-model, 8K | 2,048 | hint | 1.00 |" in table
    np.savez(tmp_path / "other.npz", x=scores)
    assert "no arrays" in " ".join(CliRunner().invoke(app, ["--rows", str(tmp_path / "other.npz")]).output.split())


def test_the_table_sums_up_rows():
    row = {"rows": "captured", "n": 16384, "k": 512, "start": "hint", "count": 4, "overlap": 0.5, "capacity": 4096}
    text = top_k_report.passes_table([row | {"passes": [1, 2, 1, 4], "candidates": [600, 700, 800, 900]}])
    assert "| captured, 16K | 512 | hint | 0.50 | 2 of 4 | 2.00 | 4 | 750 | 900 of 4,096 |" in text
    assert "| sample |  | 2 of 4 |" in top_k_report.passes_table([row | {"start": "sample", "passes": [1, 1, 2, 2], "candidates": [1] * 4}])


def test_a_kind_for_every_distribution_and_k_that_fits():
    rows = top_k_cases.Captured(*np.zeros((2, 3, 2048), np.float32))
    assert len(list(top_k_passes.kinds({"model": rows}, 1))) == len(score_rows.DISTRIBUTIONS) + 2, "k 2,048 is more than half of the row"
