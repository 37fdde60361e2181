"""Results of `kvjax bench decode` with times of a planted law."""

import json

from kvjax.cost_model import step_bytes
from kvjax.policies.decode import parse
from kvjax.serving.bench.decode import SHAPES

QWEN = SHAPES["qwen2.5-7b"]


def planted_runs(folder):
    """Results of two batches as `kvjax bench decode` writes them, with times of a planted law; one row is skipped."""
    files = []
    for batch in (1, 4):
        rows = [{"op": "decode", "shape": "qwen2.5-7b", "tokens": 2**22, "batch": batch, "policy": "dense", "skipped": "too large"}]
        for policy in ("dense", "top:8", "top:32"):
            for tokens in (8192, 32_768, 131_072):
                moved = step_bytes(QWEN, parse(policy), tokens, batch)
                seconds = moved.total / 4e12 + 1e-3 + (policy != "dense") * 2e-4
                row = {"op": "decode", "shape": "qwen2.5-7b", "layers": 28, "tokens": tokens, "batch": batch, "policy": policy}
                row |= {"dtype": "bfloat16", "median_s": seconds}
                rows.append(row | {"bytes": {"weights": moved.weights, "kv": moved.kv, "index": moved.index}})
        provenance = {"device": "Planted 9000", "date": f"2026-01-0{batch}"}
        files.append(folder / f"grid-b{batch}.json")
        files[-1].write_text(json.dumps({"provenance": provenance, "bench": "decode", "rows": rows}))
    return files


def in_launches(file, steps, **changed):
    """A copy of a result whose rows are of so many steps per launch."""
    run = json.loads(file.read_text())
    rows = [row | changed | {"steps_per_launch": steps} for row in run["rows"] if "median_s" in row]
    (copy := file.with_name(f"launches-{steps}.json")).write_text(json.dumps(run | {"rows": rows}))
    return copy
