"""The model card and what lies beside the checkpoint: figures come from the committed files, and no file is too
large."""

import json
import math
from pathlib import Path

import pytest

from kvjax.models.needle import path
from train_needle import card, curve
from train_needle.recipe import NEEDLE, NEEDLE_128K

RESULTS = Path(__file__).parents[3] / "benchmarks" / "results" / "h200"
MEASURED = [file for names in ("needle-*.json", "long-needles-*.json") for file in sorted(RESULTS.glob(names))]
README = path() / "README.md"


def test_every_figure_on_the_card_is_in_the_files():
    """After new measurements: the command that `card.py` begins with."""
    text = README.read_text(encoding="utf-8")
    assert card.rendered(text, MEASURED) == text


def test_the_card_says_how_many_needles_the_panels_of_the_long_model_had():
    """They are more than in its own table."""
    found = []
    for length in ("64k", "128k"):
        rows = json.loads((RESULTS / f"long-fidelity-{length}.json").read_text(encoding="utf-8"))["retrieval"]
        found += [f"{row['hits']} of {row['trials']}" for row in rows if row["policy"] == "dense"]
    text = " ".join(README.read_text(encoding="utf-8").split())
    assert "dense found {} needles and {},".format(*found) in text
    assert "40 needles at 65,536 tokens" in text
    assert "20 needles at 131,072 tokens" in text


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
    run = {"provenance": provenance, "model": "needle", "trials": 200, "distractors": 16, "results": [result]}
    for name, length, text in (("a", 32768, ["x.txt", "y.txt"]), ("b", 8192, "pydoc_data.topics")):
        (tmp_path / name).write_text(json.dumps(run | {"length": length, "text": text}))
    text = card.rendered(README.read_text(encoding="utf-8"), [tmp_path / "a", tmp_path / "b"])
    part = text.split("<!-- figures: engine -->\n")[1].split("\n<!-- end -->")[0].splitlines()
    assert part[2:4] == [
        "| 8,192 | `top:8` | 13.0 | 1,630 | 98.5% | 97% none 100% | 2.3 |",
        "| 32,768 | `top:8` | 13.0 | 1,630 | 98.5% | 97% none 100% | 2.3 |",
    ]
    assert part[-1] == "200 needles at each length, 16 distractors each, in x.txt, y.txt; some device, jax 0.11.2, 2026-01-02."


@pytest.mark.parametrize(
    ("recipe", "curve_file", "evaluation_file"),
    [(NEEDLE, "training_curve.jsonl", "evaluation.json"), (NEEDLE_128K, "long_curve.jsonl", "long_evaluation.json")],
    ids=["needle", "needle-128k"],
)
def test_the_curve_is_that_of_the_recipe_and_evaluation(recipe, curve_file, evaluation_file):
    if recipe is NEEDLE_128K and not (card.RECORDS / curve_file).exists() and not (card.RECORDS / evaluation_file).exists():
        pytest.skip("no run of needle-128k is on record")
    records = curve.read_records(card.RECORDS / curve_file)
    steps = [record["step"] for record in records]
    assert steps == sorted(set(steps))
    assert steps[-1] == recipe.steps
    assert all(record["tokens"] == recipe.tokens(record["step"]) for record in records)
    assert all(math.isfinite(record["loss"]) for record in records)
    evaluation = json.loads((card.RECORDS / evaluation_file).read_text())
    assert (evaluation["recipe"], evaluation["steps"], evaluation["tokens"]) == (recipe.name, recipe.steps, records[-1]["tokens"])


def test_figures_of_the_model_for_128k_tokens_stand_apart(tmp_path, monkeypatch):
    """A run's own files, and the engine's measurements of another model than the embedded one."""
    for name in ("data.json", "training_curve.jsonl", "evaluation.json"):
        (tmp_path / name).symlink_to(card.RECORDS / name)
    ends = [60, 220, 244]
    rest = {"loss": 1.25, "exact_match": 0.96875, "text_nats": 3.6}
    records = [{"step": step, "tokens": NEEDLE_128K.tokens(step), "seconds": 60.0 * n, **rest} for n, step in enumerate(ends, 1)]
    (tmp_path / "long_curve.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    found = {"exact_match": 0.93, "digits": 0.99, "by_depth": [0.9] * 10}
    provenance = {"device": "some device", "device_count": 4, "versions": {"jax": "0.11.2"}, "date": "2026-01-02T03:04:05+00:00"}
    (tmp_path / "long_evaluation.json").write_text(json.dumps({"provenance": provenance, "trials": 200, "131072": found}))
    result = {"policy": "top:8", "exact_match": 0.9, "by_depth": [0.9] * 3, "blocks_per_step": 13.0, "keys_per_step": 1630, "seconds": 2}
    run = {"provenance": provenance, "model": "needle-128k", "length": 131072, "trials": 200, "distractors": 16, "text": "x.txt"}
    (tmp_path / "engine").write_text(json.dumps(run | {"results": [result]}))
    monkeypatch.setattr(card, "RECORDS", tmp_path)
    before = README.read_text(encoding="utf-8")
    text = card.rendered(before, [*MEASURED, tmp_path / "engine"])
    parts = {part.split(" -->")[0]: part.split("<!-- end -->")[0] for part in text.split("<!-- figures: ")[1:]}
    assert "| 4 x 131,072 | 160 | far 45%, needles 37%," in parts["long_training"]
    assert "180 seconds on 4 some device" in parts["long_training"]
    assert "| 131,072 | 93% | 99% | 90% 90%" in parts["long_evaluation"]
    assert "| 131,072 | `top:8` | 13.0 | 1,630 | 90% |" in parts["long_engine"]
    assert all(
        f"<!-- figures: {name} -->\n{parts[name].partition(' -->')[2].lstrip()}" in before for name in ("training", "evaluation", "engine")
    )


def test_nothing_is_too_large():
    sizes = {file.name: file.stat().st_size for folder in (path(), card.RECORDS) for file in folder.iterdir() if file.is_file()}
    assert sizes["model.safetensors"] < 25e6
    assert sizes["curve.png"] < 100_000
    assert sizes["training_curve.jsonl"] < 60_000


def test_the_picture_is_drawn_from_records(tmp_path):
    records = curve.read_records(card.RECORDS / "training_curve.jsonl")
    curve.plot(records, NEEDLE, tmp_path / "curve")
    assert (tmp_path / "curve").read_bytes().startswith(b"\x89PNG")
