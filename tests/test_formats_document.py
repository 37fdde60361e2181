"""Packed weights: the errors of products that docs/formats.md names, and the times and targets of
docs/measured/formats.md."""

import json
from pathlib import Path

import jax
import numpy as np
import pytest

from kvjax.model.weight_formats import scheme_of
from pallas_kernels.core.matrices import pack
from pallas_kernels.matmul.project_tokens import project_tokens

ROOT = Path(__file__).parents[1]
DOCUMENT = ROOT / "docs" / "formats.md"
MEASURED = ROOT / "docs" / "measured" / "formats.md"
RESULTS = ROOT / "benchmarks" / "results" / "h200"


@pytest.mark.parametrize("name", ["int8", "int4", "fp8", "fp8:tokens"])
def test_the_error_of_a_product_holds(name):
    x, w = (jax.random.normal(jax.random.key(seed), (count, 1024)) for seed, count in ((0, 64), (1, 512)))
    (found,) = project_tokens(x, (pack(w, scheme_of(name).layers),))
    exact = np.asarray(x, np.float64) @ np.asarray(w, np.float64).T
    error = np.linalg.norm(found - exact) / np.linalg.norm(exact)
    assert f"| `{name}` | {error:.1%} |" in DOCUMENT.read_text().splitlines()


def rows_of(name: str) -> list[dict]:
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))["rows"]


def _packed_steps(name: str, launches: int = 1) -> dict:
    """Of steps in launches of so many, by (tokens, weights, pages, policy)."""
    rows = json.loads((RESULTS / f"{name}.json").read_text())["rows"]
    rows = [row for row in rows if row.get("steps_per_launch", 1) == launches]
    return {(row["tokens"], row["weights"], row["cache_format"], row["policy"]): row for row in rows}


def _on_device(row: dict) -> float:
    """Seconds of a step's kernels, without the pauses between them."""
    return row["profile"]["median_s"] - row["profile"]["idle_s"]


SHORT, LONG = 2**17, 2**20


def test_the_cost_model_quotes_packed_steps_as_the_results_have_them():
    eight = _packed_steps("packed-steps", 8)
    page = " ".join((ROOT / "docs" / "cost-model.md").read_text(encoding="utf-8").split())
    assert f"where {eight[SHORT, 'int8', None, 'top:32']['median_s'] * 1e3:.2f} ms were measured, in launches of eight" in page


def test_how_many_times_faster_packed_steps_are_is_what_the_results_say():
    lines = MEASURED.read_text(encoding="utf-8").splitlines()
    for name, tokens, length in (("", SHORT, "128K"), ("", LONG, "1M"), ("-b4", SHORT, "128K"), ("-b8", SHORT, "128K")):
        alone, eight = (_packed_steps(f"packed-steps{name}", launches) for launches in (1, 8))
        for pages, label in ((None, "16 bits"), ("int8", "`int8`")):
            places = [(tokens, "int8", pages, policy) for policy in ("dense", "top:32")]
            by_clock = [min(steps[place]["median_s"] for steps in (alone, eight) if place in steps) for place in places]
            pairs = by_clock, [_on_device(eight[place]) for place in places]
            shown = [f"{a * 1e3:.2f} | {b * 1e3:.2f} | {a / b:.2f}" for a, b in pairs]
            start = f"| {label} | {length} | {eight[places[0]]['batch']} | {' | '.join(shown)} | "
            assert any(line.startswith(start) for line in lines), start


def test_targets_of_products_and_prompts_are_met_as_the_page_says():
    shares = {row["case"].rpartition("/")[2]: row["fraction_of_read"] for row in rows_of("packed-matrices") if "fraction_of_read" in row}
    assert all(share >= (0.6 if "int4" in name else 0.85) for name, share in shares.items() if name.startswith("gate-up:"))
    assert {name for name, share in shares.items() if name.startswith("down:") and round(share, 2) >= 0.85} == {"down:int8", "down:fp8"}
    seconds = {row["weights"]: row["median_s"] for row in rows_of("packed-prompts")}
    assert seconds["fp8"] / seconds[None] < 1.05
    assert round(seconds["int8"] / seconds[None], 2) == 1.05, "at its edge"
