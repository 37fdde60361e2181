"""docs/formats.md: the errors of products that it names, and the times of a step."""

import json
from pathlib import Path

import jax
import numpy as np
import pytest

from kvjax.packing import scheme_of
from pallas_kernels.matrices import pack
from pallas_kernels.project_tokens import project_tokens

ROOT = Path(__file__).parents[1]
DOCUMENT = ROOT / "docs" / "formats.md"


@pytest.mark.parametrize("name", ["int8", "int4", "fp8", "fp8:tokens"])
def test_the_error_of_a_product_holds(name):
    x, w = (jax.random.normal(jax.random.key(seed), (count, 1024)) for seed, count in ((0, 64), (1, 512)))
    (found,) = project_tokens(x, (pack(w, scheme_of(name).layers),))
    exact = np.asarray(x, np.float64) @ np.asarray(w, np.float64).T
    error = np.linalg.norm(found - exact) / np.linalg.norm(exact)
    assert f"| `{name}` | {error:.1%} |" in DOCUMENT.read_text().splitlines()


def test_the_three_runs_of_a_sparse_step_are_what_their_files_say():
    text = " ".join(DOCUMENT.read_text(encoding="utf-8").split())

    def found(name):
        rows = json.loads((ROOT / f"benchmarks/results/h200/{name}.json").read_text())["rows"]
        same = {"policy": "top:32", "tokens": 2**17, "weights": "int8", "cache_format": None}
        (row,) = (row for row in rows if same.items() <= row.items() and row.get("steps_per_launch", 1) == 1)
        return f"{row['median_s'] * 1e3:.2f} ms", f"{row['profile']['median_s'] * 1e3:.2f}"

    assert "{}, {} on the device (`packed-steps-int8.json`)".format(*found("packed-steps-int8")) in text
    assert "beside it: {}, {} on the device.".format(*found("packed-steps-launches")) in text
    assert f"had {found('packed-steps')[0]} (`packed-steps.json`)" in text
