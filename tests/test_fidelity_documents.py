"""docs/fidelity.md is what the committed panels make."""

from pathlib import Path

import pytest

from kvjax.fidelity.documents import load, rendered

ROOT = Path(__file__).parent.parent
PANELS = load(list((ROOT / "benchmarks/results/h200").glob("fidelity-*.json")))


def test_the_page_is_what_the_panels_make():
    """After new measurements: the command that stands in the page."""
    text = (ROOT / "docs/fidelity.md").read_text(encoding="utf-8")
    assert rendered(text, PANELS) == text
    assert rendered(text.replace("200/200", "199/200").replace("197/200", "200/200"), PANELS) == text


def test_a_page_without_the_marks_is_refused():
    with pytest.raises(ValueError, match="there is no part between"):
        rendered("nothing", PANELS)


def test_every_cell_has_at_least_200_paired_trials_and_five_windows():
    for panel in PANELS:
        assert panel["settings"]["windows"] >= 5
        assert all(row["trials"] + row["invalid_trials"] >= 200 for row in panel["retrieval"])
        assert not any(row["invalid_trials"] for row in panel["retrieval"])
