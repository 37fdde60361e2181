"""Views of stored tensors."""

import numpy as np
import pytest
from safetensors.numpy import save_file

from kvjax.models.checkpoint import file_tensors
from kvjax.models.tensors import RowsOf, Stored

MATRIX = np.arange(60, dtype=np.float32).reshape(12, 5)


@pytest.fixture
def stored(tmp_path):
    save_file({"m": MATRIX}, tmp_path / "m.safetensors")
    return file_tensors(tmp_path / "m.safetensors")["m"]


@pytest.mark.parametrize("rows", [range(12), range(3, 9), range(11, 2, -3), (7, 0, 0, 11), ()])
def test_rows_are_those_that_are_named_in_their_order(stored, rows):
    view, wanted = RowsOf(stored, rows), MATRIX[list(rows)]
    assert (view.name, view.shape, view.dtype) == ("m", wanted.shape, "F32")
    for start in range(len(rows) + 1):
        for stop in range(start, len(rows) + 1):
            np.testing.assert_array_equal(view.read(start, stop), wanted[start:stop])


@pytest.mark.parametrize(("rows", "row"), [(range(5, 13), 12), ((-1, 2), -1)])
def test_rows_that_are_not_there_are_refused(stored, rows, row):
    with pytest.raises(ValueError, match=f"m has 12 rows, and row {row} is needed"):
        RowsOf(stored, rows).read(0, len(rows))


@pytest.mark.parametrize(
    "read", [lambda found: found.read(0, 1), lambda found: found.read_columns(0, 1), Stored.read_whole], ids=["rows", "columns", "whole"]
)
def test_a_file_that_cannot_be_read_any_more_is_named(stored, read):
    stored.file.unlink()
    stored.file.mkdir()
    with pytest.raises(ValueError, match=r"m\.safetensors cannot be read"):
        read(stored)
