"""Writes the figures of the model card: the marked parts of models/needle/README.md, from the JSON files that hold
them.

    python -m train_needle.card ../benchmarks/results/h200/needle-*.json ../benchmarks/results/h200/long-needles-*.json

rewrites the card in place, run in tools/. The files are the engine's measurements, written by `kvjax needle`. The
training runs' measurements are in this folder: `training_curve.jsonl` and `evaluation.json`, and of the model for 128K
tokens `long_curve.jsonl` and `long_evaluation.json`, which are a run's `curve.jsonl` and `evaluation.json`.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from kvjax.models.loading import read_config
from kvjax.models.needle import path
from train_needle.curve import read_records
from train_needle.recipe import NEEDLE, NEEDLE_128K, Recipe

NOTHING = "*Not measured yet.*"
RECORDS = Path(__file__).parent
"""The folder of what the training runs measured."""


def rendered(card: str, engine_files: Iterable[Path]) -> str:
    """The card's text with every part between `<!-- figures: NAME -->` and `<!-- end -->` written anew.

    Raises ValueError if the card has a part with an unknown name, or not every part exactly once.
    """
    runs = [json.loads(file.read_text(encoding="utf-8")) for file in engine_files]
    own, long = ([run for run in runs if (run["model"] == "needle") == embedded] for embedded in (True, False))
    parts = {"model": _model(), "data": _data(), "engine": _engine(own), "long_engine": _engine(long)}
    parts |= {"training": _training(NEEDLE, "training_curve.jsonl", "evaluation.json"), "evaluation": _evaluation("evaluation.json")}
    parts |= {"long_training": NOTHING, "long_evaluation": NOTHING}
    if (RECORDS / "long_evaluation.json").exists():
        parts["long_training"] = _training(NEEDLE_128K, "long_curve.jsonl", "long_evaluation.json")
        parts["long_evaluation"] = _evaluation("long_evaluation.json")
    mark = re.compile(r"(<!-- figures: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
    named = [name for _, name, _ in mark.findall(card)]
    if sorted(named) != sorted(parts):
        raise ValueError(f"the card has the parts {named}; it must have each of {sorted(parts)} once")
    return mark.sub(lambda found: f"{found[1]}{parts[found[2]]}\n{found[3]}", card)


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [columns, ["---"] + ["---:"] * (len(columns) - 1), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _percent(share: float | None) -> str:
    return "none" if share is None else f"{round(100 * share, 1):g}%"


def _depths(shares: Sequence[float | None]) -> str:
    return " ".join(map(_percent, shares))


def _json(name: str) -> dict:
    return json.loads((RECORDS / name).read_text(encoding="utf-8"))


def _model() -> str:
    config = read_config(path())
    layer = config.layers[0]
    attention = layer.mixer
    rows = [
        ("parameters (embedding and head are one matrix)", f"{config.num_params:,}"),
        ("weights in bfloat16, bytes", f"{(path() / 'model.safetensors').stat().st_size:,}"),
        ("layers", f"{config.num_layers}"),
        ("width, MLP width", f"{config.hidden_size}, {layer.mlp.size:,}"),
        ("query heads, KV heads, head dim", f"{attention.num_heads}, {attention.num_kv_heads}, {attention.head_dim}"),
        ("vocabulary", f"{config.vocab_size:,}"),
        ("RoPE base", f"{attention.rope.theta:,.0f}"),
        ("positions", f"{config.max_positions:,}"),
    ]
    return _table(("Qwen2 decoder", ""), rows)


def _data() -> str:
    data = _json("data.json")
    rows = []
    for text in data["texts"]:
        translation = f" ({text['translation']})" if "translation" in text else ""
        source = f"[{text['source'].rpartition('/')[2]}]({text['source']}/tree/{text['commit']})"
        rows.append((f"{text['author']}, *{text['title']}*{translation}", text["split"], f"{text['bytes']:,}", source))
    python = data["python"]
    rows.append((f"Python {python['version']}, {python['files']} files of the standard library", "train", f"{python['bytes']:,}", "Python"))
    return _table(("text", "split", "bytes", "source"), rows)


def _training(recipe: Recipe, curve: str, evaluation: str) -> str:
    records = {record["step"]: record for record in read_records(RECORDS / curve)}
    rows, end, before = [], 0, 0.0
    for stage in recipe.stages:
        end += stage.steps
        at = records[end]
        kinds = ", ".join(f"{kind} {_percent(share)}" for kind, share in stage.mixture.items())
        shape = f"{stage.batch} x {stage.length:,}"
        figures = f"{at['seconds'] - before:.0f}", f"{at['loss']:.3f}", _percent(at["exact_match"]), f"{at['text_nats']:.2f}"
        rows.append((shape, f"{stage.steps:,}", kinds, *figures))
        before = at["seconds"]
    device = _json(evaluation)["provenance"]
    last = records[end]
    columns = ("sequences x tokens", "steps", "mixture", "seconds", "loss at its end", "needles found", "held-out text, nats a token")
    return (
        f"{last['step']:,} steps, {last['tokens']:,} tokens, {last['seconds']:.0f} seconds on {device['device_count']} {device['device']} "
        f"(jax {device['versions']['jax']}), compilation and the evaluations on the way included.\n\n{_table(columns, rows)}"
    )


def _evaluation(name: str) -> str:
    figures = _json(name)
    lengths = [key for key in figures if key.isdigit()]
    rows = [
        (f"{int(key):,}", _percent(figures[key]["exact_match"]), _percent(figures[key]["digits"]), _depths(figures[key]["by_depth"]))
        for key in lengths
    ]
    columns = ("tokens", f"found, of {figures['trials']}", "digits right", "found by tenth of depth, early to late")
    return _table(columns, rows)


def _engine(runs: Sequence[dict[str, Any]]) -> str:
    """A table with one row per length and policy, and below it the source of the figures: one line if all lengths have
    as many needles."""
    runs = sorted(runs, key=lambda run: run["length"])
    if not runs:
        return NOTHING
    rows, sources = [], []
    for run in runs:
        for result in run["results"]:
            reads = f"{result['blocks_per_step']:,.1f}", f"{result['keys_per_step']:,.0f}"
            found = _percent(result["exact_match"]), _depths(result["by_depth"])
            rows.append((f"{run['length']:,}", f"`{result['policy']}`", *reads, *found, f"{result['seconds']:.1f}"))
        made, text = run["provenance"], run["text"]
        where = "each length" if len({each["trials"] for each in runs}) == 1 else f"{run['length']:,} tokens"
        sources.append(
            f"{run['trials']} needles at {where}, {run['distractors']} distractors each, in "
            f"{text if isinstance(text, str) else ', '.join(text)}; {made['device']}, jax {made['versions']['jax']}, {made['date'][:10]}."
        )
    columns = ("tokens", "policy", "blocks a step", "keys a step", "found", "found by depth, early to late", "seconds")
    return _table(columns, rows) + "\n\n" + "\n".join(dict.fromkeys(sources))


if __name__ == "__main__":
    readme = path() / "README.md"
    readme.write_text(rendered(readme.read_text(encoding="utf-8"), map(Path, sys.argv[1:])), encoding="utf-8")
