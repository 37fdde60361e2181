"""docs/formats.md: the errors of products that it names."""

from pathlib import Path

import jax
import numpy as np
import pytest

from kvjax.packing import scheme_of
from pallas_kernels.matrices import pack
from pallas_kernels.project_tokens import project_tokens

DOCUMENT = Path(__file__).parents[1] / "docs" / "formats.md"


@pytest.mark.parametrize("name", ["int8", "int4", "fp8", "fp8:tokens"])
def test_the_error_of_a_product_holds(name):
    x, w = (jax.random.normal(jax.random.key(seed), (count, 1024)) for seed, count in ((0, 64), (1, 512)))
    (found,) = project_tokens(x, (pack(w, scheme_of(name).layers),))
    exact = np.asarray(x, np.float64) @ np.asarray(w, np.float64).T
    error = np.linalg.norm(found - exact) / np.linalg.norm(exact)
    assert f"| `{name}` | {error:.1%} |" in DOCUMENT.read_text().splitlines()
