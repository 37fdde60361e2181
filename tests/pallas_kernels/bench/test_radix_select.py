"""The radix baseline: exact sets, and a kernel that compiles without spilling."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.bench import radix_select


@pytest.mark.parametrize(
    ("scores", "k", "wrong"),
    [
        (jax.ShapeDtypeStruct((8,), jnp.float32), 1, "float32"),
        (jax.ShapeDtypeStruct((2, 8), jnp.bfloat16), 1, r"bfloat16\[2, 8\]"),
        (jax.ShapeDtypeStruct((2, 10), jnp.float32), 1, "multiple of 4"),
        (jax.ShapeDtypeStruct((2, 8), jnp.float32), 0, "1 to 8 .* got 0"),
        (jax.ShapeDtypeStruct((2, 8), jnp.float32), 9, "got 9"),
        (jax.ShapeDtypeStruct((2, 8192), jnp.float32), 4097, "at most 4096"),
    ],
)
def test_wrong_input_is_refused(scores, k, wrong):
    with pytest.raises(ValueError, match=wrong):
        radix_select.radix_top_k(scores, k)


def test_compiles_without_spilling(cuda, tmp_path):
    """One row over 16 CTAs, rows over 3 (which divides no power of two), a row a CTA."""
    cases = {
        name: (radix_select.radix_top_k, {"scores": ((batch, n), "float32")}, {"k": k})
        for name, batch, n, k in (("one", 1, 2**20, 2048), ("some", 37, 2**17, 512), ("many", 100, 8192, 32))
    }
    for name, kernels in cuda.compile(cases, tmp_path).items():
        assert len(kernels) == 1, name
        assert kernels[0]["spill_stores"] == kernels[0]["spill_loads"] == 0, (name, kernels)
