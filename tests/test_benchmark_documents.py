"""Every measured figure in README.md, docs/benchmarks.md and docs/prefill.md is in the committed JSON."""

import json
from pathlib import Path

import pytest

from pallas_kernels.bench import report

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "h200"
RUNS = report.load(file for pattern in ("ops*.json", "decode*.json") for file in RESULTS.glob(pattern))


@pytest.mark.parametrize("name", ["README.md", "docs/benchmarks.md"])
def test_tables_are_what_the_results_make(name):
    """After new measurements: the command at the top of docs/benchmarks.md."""
    text = (ROOT / name).read_text(encoding="utf-8")
    assert "<!-- bench:decode-op -->" in text
    assert "<!-- bench:decode-step" in text
    assert report.rendered(text, RUNS) == text


def test_tables_of_prefill_are_what_the_results_make():
    """After new measurements: the command at the top of docs/prefill.md."""
    runs = report.load(RESULTS.parent.glob("*/prefill*.json"))
    text = (ROOT / "docs" / "prefill.md").read_text(encoding="utf-8")
    assert "<!-- bench:prefill-steps -->" in text
    assert report.rendered(text, runs) == text
    assert report.rendered(text.replace("| 128K |", "| 129K |"), runs) == text


def test_tables_of_top_k_are_what_the_results_make():
    """After new measurements: the command at the top of docs/top-k.md."""
    runs = report.load(RESULTS.parent.glob("*/top-k*.json"))
    text = (ROOT / "docs" / "top-k.md").read_text(encoding="utf-8")
    for name in ("top-k", "top-k-targets", "top-k-hints", "top-k-plot", "top-k-distributions", "top-k-captured", "top-k-passes"):
        assert f"<!-- bench:{name} -->" in text
    assert report.rendered(text, runs) == text
    assert "<!-- bench:top-k-overlap -->" in text
    assert report.rendered(text.replace("| 2,048 | 4 |", "| 2,048 | 5 |"), runs) == text
    assert report.rendered(text.replace("| 2,048 | sample |", "| 2,048 | hint |"), runs) == text
    drawn = {"top-k": "top-k.png", "overlap": "top-k-overlap.png"}
    for name in {drawn[run["bench"]] for run in runs if run["bench"] != "top-k-passes"}:
        assert f"]({name})" in text
        assert (ROOT / "docs" / name).exists()


def test_what_is_said_about_consecutive_steps_is_what_was_measured():
    text = " ".join((ROOT / "docs" / "top-k.md").read_text(encoding="utf-8").split())
    rows = json.loads((RESULTS.parent / "cpu" / "top-k-overlap.json").read_text())["rows"]
    near, far = ([row for row in rows if row["age"] == age] for age in (1, 32))
    assert f"share {min(r['raw'] for r in near):.0%} to {max(r['raw'] for r in near):.0%} of".replace("% to", " to") in text
    assert "five of the six layers still share more than half" in text
    assert [row["layer"] for row in far if row["raw"] <= 0.5] == [0, 0]
    assert "the one layer in which the shifted sets agree better" in text
    assert [row["layer"] for row in near if row["shifted"] > row["raw"]] == [0, 0]
    shifted = [row["shifted"] for row in rows if row["layer"] == 0]
    assert f"by {min(shifted):.2f} to {max(shifted):.2f} at every age" in text


@pytest.mark.parametrize("length", [16384, 32768])
def test_needles_after_a_sparse_prefill_are_what_the_results_say(length):
    text = (ROOT / "docs" / "prefill.md").read_text(encoding="utf-8")
    found = json.loads((RESULTS / f"sparse-prefill-needles-{length}.json").read_text())
    (pair,), (dense,), (other,) = found["pairs"], found["results"], found["other_prefills"]
    hits = f"{dense['hits']}/400 | {other['results'][0]['hits']}/400 | -{pair['lost']}/+{pair['gained']}"
    spread = "{value:+.3f} [{low:+.3f}, {high:+.3f}]".format(**pair["difference"])
    assert f"| {length:,} | {other['prefill']} | {hits} | {spread} |" in text
    assert pair["difference"]["low"] > -0.03


def test_designs_of_the_union_are_what_the_results_say():
    text = (ROOT / "docs" / "prefill.md").read_text(encoding="utf-8")
    designs = json.loads((RESULTS / "designs-prefill.json").read_text())["union, seconds"]
    for seconds in designs.values():
        assert "| " + " | ".join(f"{second * 1e3:.2f}" for second in seconds.values()) + " |\n" in text
    assert len(designs) == 4


def test_designs_of_top_k_are_what_the_results_say():
    text = (ROOT / "docs" / "top-k.md").read_text(encoding="utf-8")
    designs = json.loads((RESULTS / "designs-top-k.json").read_text())["designs"]
    for name, found in designs.items():
        cells = [f"{found[place] * 1e6:.2f}" if place in found else "" for place in ("1x128K", "8x128K", "64x128K", "1x1M")]
        (line,) = [line for line in text.splitlines() if line.startswith((f"| {name}: ", f"| {name} |"))]
        assert [cell.strip() for cell in line.split("|")[2:-1]] == cells
    assert len(designs) == 11


@pytest.mark.skipif(not RUNS, reason="nothing is measured yet")
def test_a_wrong_figure_is_noticed():
    text = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    start = text.index("| 1 | 8K |")
    assert report.rendered(text[:start] + "| 1 | 9K |" + text[start + 10 :], RUNS) == text
