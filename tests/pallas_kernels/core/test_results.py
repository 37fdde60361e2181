"""Results are JSON, whatever was measured: NaN and infinity, which JSON does not have, become null, and the file says
so."""

import json
import math
import os

import numpy as np
import pytest

from pallas_kernels.core.files import finite
from pallas_kernels.core.results import write_result


def read(path):
    return json.loads(path.read_text(), parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))


def test_figures_that_are_not_finite_are_null_and_named(tmp_path):
    rows = [{"kl": 0.5}, {"kl": math.nan, "by_depth": (1.0, math.inf)}, {"kl": np.float64("-inf")}, {"kl": math.nan}]
    write_result(tmp_path / "out.json", {"rows": rows, "count": 4})
    written = read(tmp_path / "out.json")
    assert written["rows"] == [{"kl": 0.5}, {"kl": None, "by_depth": [1.0, None]}, {"kl": None}, {"kl": None}]
    assert written["error"] == "not finite, so written as null: rows[1].kl, rows[1].by_depth[1], rows[2].kl and 1 more"
    assert written["count"] == 4


def test_finite_figures_are_left_alone(tmp_path):
    figures = {"rows": [{"kl": 0.5, "name": "nan", "none": None, "large": 1e308}]}
    assert finite(figures) is figures
    write_result(tmp_path / "out.json", figures)
    assert "error" not in read(tmp_path / "out.json")


def test_only_files_are_replaced(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ValueError, match="pipe exists and is not a file; name another"):
        write_result(tmp_path / "pipe", {"count": 4})
    assert [file.name for file in tmp_path.iterdir()] == ["pipe"]


def test_a_link_is_followed(tmp_path):
    (tmp_path / "link.json").symlink_to(tmp_path / "out.json")
    write_result(tmp_path / "link.json", {"count": 4})
    assert (tmp_path / "link.json").is_symlink()
    assert read(tmp_path / "out.json")["count"] == 4
