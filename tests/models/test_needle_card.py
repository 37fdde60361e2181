"""The model card and what lies beside the checkpoint: figures come from the committed files, and nothing is too large."""

import json
import math
from pathlib import Path

import pytest

from kvjax.models.needle import card, curve, path
from kvjax.models.needle.recipe import NEEDLE

MEASURED = sorted((Path(__file__).parents[2] / "benchmarks" / "results" / "h200").glob("needle-*.json"))
README = path() / "README.md"


def test_every_figure_on_the_card_is_in_the_files():
    """After new measurements: `python -m kvjax.models.needle.card benchmarks/results/h200/needle-*.json`."""
    text = README.read_text(encoding="utf-8")
    assert card.rendered(text, MEASURED) == text


def test_a_wrong_figure_or_a_lost_part_is_noticed():
    text = README.read_text(encoding="utf-8")
    assert "11,609,472" in text
    assert card.rendered(text.replace("11,609,472", "12,000,000"), MEASURED) == text
    with pytest.raises(ValueError, match="it must have each of"):
        card.rendered(text.replace("figures: data", "figures: dates"), MEASURED)
    with pytest.raises(ValueError, match="it must have each of"):
        card.rendered("nothing here", MEASURED)


def test_engine_figures_are_sorted_by_length(tmp_path):
    result = {"policy": "top:8", "exact_match": 0.985, "by_depth": [0.97, None, 1.0], "blocks_per_step": 13.0}
    result |= {"keys_per_step": 1630.2, "seconds": 2.345, "hits": 197, "describe": "eight pages"}
    provenance = {"device": "some device", "device_count": 1, "versions": {"jax": "0.11.2"}, "date": "2026-01-02T03:04:05+00:00"}
    run = {"provenance": provenance, "trials": 200, "distractors": 16, "results": [result]}
    for name, length, text in (("a", 32768, ["x.txt", "y.txt"]), ("b", 8192, "pydoc_data.topics")):
        (tmp_path / name).write_text(json.dumps(run | {"length": length, "text": text}))
    text = card.rendered(README.read_text(encoding="utf-8"), [tmp_path / "a", tmp_path / "b"])
    part = text.split("<!-- figures: engine -->\n")[1].split("\n<!-- end -->")[0].splitlines()
    assert part[2:4] == [
        "| 8,192 | `top:8` | 13.0 | 1,630 | 98.5% | 97% none 100% | 2.3 |",
        "| 32,768 | `top:8` | 13.0 | 1,630 | 98.5% | 97% none 100% | 2.3 |",
    ]
    assert part[-1] == "200 needles at each length, 16 distractors each, in x.txt, y.txt; some device, jax 0.11.2, 2026-01-02."


def test_the_curve_is_that_of_the_recipe_and_evaluation():
    records = curve.read_records(path() / "training_curve.jsonl")
    steps = [record["step"] for record in records]
    assert steps == sorted(set(steps))
    assert steps[-1] == NEEDLE.steps
    assert all(record["tokens"] == NEEDLE.tokens(record["step"]) for record in records)
    assert all(math.isfinite(record["loss"]) for record in records)
    evaluation = json.loads((path() / "evaluation.json").read_text())
    assert (evaluation["recipe"], evaluation["steps"], evaluation["tokens"]) == ("needle", NEEDLE.steps, records[-1]["tokens"])


def test_nothing_is_too_large():
    sizes = {file.name: file.stat().st_size for file in path().iterdir() if file.is_file()}
    assert sizes["model.safetensors"] < 25e6
    assert sizes["curve.png"] < 100_000
    assert sizes["training_curve.jsonl"] < 60_000


def test_the_picture_is_drawn_from_records(tmp_path):
    records = curve.read_records(path() / "training_curve.jsonl")
    curve.plot(records, NEEDLE, tmp_path / "curve")
    assert (tmp_path / "curve").read_bytes().startswith(b"\x89PNG")
